"""Recalibration after training: a rising map of the gap, kept where it helps on documents that it was not fitted on.

Only the scale of a gap changes: of two positions of equal distance none overtakes the other. The map is fitted on
documents that no bound is measured on.

Shapes: ``N`` position.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..data.resampling import documents
from ..router.checks import check_choice
from .calibrate import LOSS_OF_REGIME
from .estimates import estimate
from .isotonic import fit_isotonic
from .splits import TraceTensors

__all__ = ["RECALIBRATIONS", "Recalibration", "check_recalibration", "cross_validated_error", "recalibrate"]

RECALIBRATIONS = ("none", "isotonic", "auto")

_FOLDS = 5
_POINTS = 32


@dataclass(frozen=True)
class Recalibration:
    """What was found for one loss.

    Args:
        kept: whether the head now has the map.
        before: mean squared error of the gap.
        after: the same through maps fitted on other documents.
    """

    kept: bool
    before: float
    after: float


def check_recalibration(head: Any, how: str) -> None:
    """Refuse a map for a head that has none.

    Raises:
        ValueError: an unknown name, or a map asked for a head that is fed α or pools a belief.
    """
    check_choice("recalibrate", how, RECALIBRATIONS)
    if how == "isotonic" and not _has_map(head):
        raise ValueError(f"recalibrate: expected none or auto for estimator {head.estimator!r}, got {how!r}")


def recalibrate(head: Any, split: TraceTensors, how: str) -> dict[str, Recalibration]:
    """Fit a map for each loss that the calibration reads, 0-1 and sampled, where the head has a gap for it.

    Args:
        head: estimates gaps.
        split: positions of documents that neither trained the head nor will bound its loss.
        how: ``isotonic`` keeps the map; ``auto`` keeps it where it lowers the squared error in cross-validation by
            documents; ``none`` fits none.

    Raises:
        ValueError: as `check_recalibration`.
    """
    check_recalibration(head, how)
    if how == "none" or not _has_map(head):
        return {}
    gaps, seen, found = estimate(head, split), split.counted, {}
    document = documents(seen.prompt_ids, seen.prompt_index.numpy())
    for row, loss in enumerate(LOSS_OF_REGIME.values()):
        # Where both argmaxes agree the 0-1 gap is known to be 0, and the head says so.
        open_ = seen.agree < 0.5 if loss == "zero_one" else torch.ones(len(seen), dtype=torch.bool)
        if loss not in head.gap_losses or not open_.any():
            continue
        gap = gaps[open_, head.gap_losses.index(loss)]
        label = seen.correctness[open_, row, 1] - seen.correctness[open_, row, 0]
        before, after = cross_validated_error(gap, label, torch.from_numpy(document)[open_])
        found[loss] = Recalibration(how == "isotonic" or after < before, before, after)
        if found[loss].kept:
            head.set_calibration(loss, *fit_isotonic(gap, label, torch.ones_like(gap), _POINTS))
    return found


def _has_map(head: Any) -> bool:
    return head.estimator in ("gap", "two_confidence")


def cross_validated_error(gap: Float[Tensor, "N"], label: Float[Tensor, "N"], document: Tensor) -> tuple[float, float]:
    """Mean squared error of the gap, and of the gap through a map that was fitted on the documents of other folds.

    With fewer than two documents nothing can be told: the second is infinite.
    """
    before = float((gap - label).double().square().mean())
    _, own = document.unique(return_inverse=True)
    folds = min(_FOLDS, int(own.max()) + 1)
    if folds < 2:
        return before, float("inf")
    total = 0.0
    for fold in range(folds):
        tested = own % folds == fold
        knots, values = fit_isotonic(gap[~tested], label[~tested], torch.ones_like(gap[~tested]), _POINTS)
        mapped = np.interp(gap[tested].double().numpy(), knots.double().numpy(), values.double().numpy())
        total += float(np.square(mapped - label[tested].double().numpy()).sum())
    return before, total / len(gap)
