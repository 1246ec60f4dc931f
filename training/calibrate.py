"""The calibration table of a router: what each α gives on held-out documents, with intervals and bounds.

Two regimes: ``greedy`` (temperature 0: the 0-1 gap decides and a deferred position is rejected where the argmaxes
differ) and ``sampled`` (the sampled gap decides, rejection is D_TV at the temperature of the traces; Lemma 3). The grid
of α is adaptive: budgets of rejection are covered evenly, whatever the scale of the gap.

Rates and quality are means over positions, with intervals of a bootstrap over documents. The bound of the *quality
drop* is about the mean over documents, each the mean over its positions of what the verifier gets right beyond the
model that decides, in [−1, 1] (`bounds.mean_upper_bound`). It is valid if neither the head nor the grid of α has seen
these documents.

Shapes: ``N`` position, ``M`` setting, ``D`` document, ``R`` resample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ..data.resampling import bootstrap_weights, documents, interval, resampled_means, sum_by_prompt
from ..router.config import CalibrationRow
from .bounds import mean_upper_bound
from .estimates import Decide, decider, estimate, loss_column
from .splits import TraceTensors

__all__ = [
    "CONFIDENCES",
    "LOSS_OF_REGIME",
    "CalibrationConfig",
    "Regime",
    "alpha_grid",
    "calibrate",
    "calibrate_regime",
    "choose_alpha",
    "make_grid",
    "make_regime",
    "searched_grid",
    "sums_by_document",
]

CONFIDENCES = (0.9, 0.95, 0.99)
"""Each bound is stored at these."""

_SEARCHED = 257
"""Values of α that are tried where a head is fed α and no ratio says which ones matter."""


@dataclass(frozen=True)
class CalibrationConfig:
    """How fine the table is.

    Args:
        points: settings of α a regime, spread evenly over rejection from none to lossless.
        resamples: bootstrap resamples of the documents behind the intervals.
        seed: of the resampling.
    """

    points: int = 33
    resamples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.points < 2:
            raise ValueError(f"points: expected at least 2, got {self.points}")
        if self.resamples < 1:
            raise ValueError(f"resamples: expected at least 1, got {self.resamples}")
        if self.seed < 0:
            raise ValueError(f"seed: expected at least 0, got {self.seed}")


@dataclass(frozen=True)
class Regime:
    """Held-out positions as one way of decoding sees them.

    Args:
        decide: α to where the verifier decides.
        tv: chance that deferring rejects the draft.
        correctness: how right each model is.
        document: number of each position's document, 0 to D - 1.
    """

    decide: Decide
    tv: Float[Tensor, "N"]
    correctness: Float[Tensor, "N 2"]
    document: NDArray[np.int64]


def calibrate(
    head: Any, held_out: TraceTensors, config: CalibrationConfig | None = None, grid_from: TraceTensors | None = None
) -> dict[str, tuple[CalibrationRow, ...]]:
    """Measure both regimes on held-out positions.

    Args:
        head: a trained head.
        held_out: what to measure on.
        config: how fine.
        grid_from: other positions that the grid of α is made from, so that bounds hold exactly; by default the same.

    Raises:
        ValueError: the two models never differ there.
    """
    config = config or CalibrationConfig()
    table = {}
    for name in LOSS_OF_REGIME:
        alphas = make_grid(head, held_out if grid_from is None else grid_from, name, config.points)
        table[name] = calibrate_regime(make_regime(head, held_out, name), alphas, config)
    return table


def make_regime(head: Any, split: TraceTensors, name: str) -> Regime:
    """See a split as ``greedy`` or ``sampled`` decoding does."""
    seen, loss = split.counted, LOSS_OF_REGIME[name]
    tv, document = _distance(seen, name), documents(seen.prompt_ids, seen.prompt_index.numpy())
    return Regime(decider(head, split, loss, tv), tv, seen.correctness[:, _ROW[loss]], document)


def calibrate_regime(regime: Regime, alphas: Sequence[float], config: CalibrationConfig) -> tuple[CalibrationRow, ...]:
    """Count deferral, rejection, quality and quality drop at every α; rows in order of rising α."""
    size = int(regime.document.max()) + 1
    counts = np.bincount(regime.document, minlength=size).astype(np.float64)
    weights = bootstrap_weights(size, config.resamples, config.seed)
    rows = []
    for alpha in sorted(alphas):
        sums = sums_by_document(alpha, regime, size)
        means = sums.sum(axis=0) / counts.sum()
        samples = resampled_means(sums[:, :3], counts, weights)
        deferral, rejection, quality = (interval(means[k], samples[:, k]) for k in range(3))
        drops = sums[:, 3] / counts
        rows.append(
            CalibrationRow(
                alpha=float(alpha),
                deferral=deferral.value,
                rejection=rejection.value,
                quality=quality.value,
                deferral_low=deferral.low,
                deferral_high=deferral.high,
                rejection_low=rejection.low,
                rejection_high=rejection.high,
                quality_low=quality.low,
                quality_high=quality.high,
                drop_upper={f"{level:g}": mean_upper_bound(drops, level, -1.0, 1.0) for level in CONFIDENCES},
            )
        )
    return tuple(rows)


def alpha_grid(gap: Float[Tensor, "N"], tv: Float[Tensor, "N"], points: int) -> list[float]:
    """Rising values of α whose rejection rates cover none to lossless evenly, and 0, the α that ignores the cost.

    Raises:
        ValueError: the two models never differ.
    """
    differs = _differing(tv)
    ratio, order = (gap[differs].double() / tv[differs].double()).sort(descending=True)
    spent = tv[differs].double()[order].cumsum(dim=0)
    places = torch.searchsorted(spent, torch.linspace(0, 1, points, dtype=torch.double)[1:-1] * spent[-1])
    # Between two neighbours, so that rounding decides nothing.
    following = ratio[(places + 1).clamp_max(len(ratio) - 1)]
    margin = 1e-3 * (1 + ratio.abs().max())
    inner = ((ratio[places.clamp_max(len(ratio) - 1)] + following) / 2).tolist()
    return sorted({float(ratio[0] + margin), *inner, 0.0, float(ratio[-1] - margin)})


def searched_grid(decide: Decide, tv: Float[Tensor, "N"], points: int) -> list[float]:
    """The same for a head that is fed α, by search: of many α over the whole line those that come nearest.

    Raises:
        ValueError: the two models never differ.
    """
    _differing(tv)
    dials = torch.linspace(-1, 1, _SEARCHED + 2, dtype=torch.double)[1:-1]
    tried = dials / (1 - dials.abs())
    spent = torch.stack([torch.where(decide(alpha), tv, 0.0).double().sum() for alpha in tried.tolist()])
    wanted = torch.linspace(0, 1, points, dtype=torch.double) * spent.max()
    nearest = (spent[None] - wanted[:, None]).abs().argmin(dim=1)
    return sorted({0.0, *tried[nearest].tolist()})


def choose_alpha(rows: tuple[CalibrationRow, ...]) -> float:
    """The α that keeps the verifier's quality for the fewest rejections; the best quality where none keeps it.

    The verifier's quality is that of the row with the most rejections: the one that defers wherever the models differ.
    """
    lossless = max(rows, key=lambda row: row.rejection)
    as_good = [row for row in rows if row.quality >= lossless.quality]
    return min(as_good, key=lambda row: row.rejection).alpha


def make_grid(head: Any, split: TraceTensors, regime: str, points: int) -> list[float]:
    """Values of α for a regime, from the positions of a split: by ratios of gap and distance, or by search."""
    loss, tv = LOSS_OF_REGIME[regime], _distance(split.counted, regime)
    if head.estimator == "cost_sensitive":
        return searched_grid(decider(head, split, loss, tv), tv, points)
    return alpha_grid(estimate(head, split)[:, loss_column(head, loss)], tv, points)


def _distance(split: TraceTensors, regime: str) -> Float[Tensor, "N"]:
    return 1 - split.agree if regime == "greedy" else split.tv


def _differing(tv: Tensor) -> Tensor:
    differs = tv > 0
    if not differs.any():
        raise ValueError("traces: expected positions where the two models differ, got none; there is nothing to route")
    return differs


def sums_by_document(alpha: float, regime: Regime, size: int) -> NDArray[np.float64]:
    """Deferral, rejection, quality and quality drop at one α, summed by document: ``[D, 4]``."""
    defer = regime.decide(alpha)
    draft, verifier = regime.correctness.double().unbind(dim=1)
    quality = torch.where(defer, verifier, draft)
    values = torch.stack([defer.double(), torch.where(defer, regime.tv, 0.0).double(), quality, verifier - quality])
    return sum_by_prompt(values.numpy(), regime.document, size)


_ROW = {"zero_one": 0, "sampled": 1}
"""Where ``correctness`` holds a loss."""

LOSS_OF_REGIME = {"greedy": "zero_one", "sampled": "sampled"}
