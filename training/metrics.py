"""Validation metrics of a router head, as torchmetrics: how well gaps rank and how good a frontier they give.

Knows no Lightning and no file. Shapes: ``N`` position.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from ..data.calibration import BINS, calibration_sums, error_of_sums

__all__ = ["CalibrationError", "FrontierArea", "frontier_area"]


def frontier_area(
    gap: Float[Tensor, "N"], tv: Float[Tensor, "N"], draft_loss: Float[Tensor, "N"], verifier_loss: Float[Tensor, "N"]
) -> float:
    """Mean loss over all rejection budgets from none to lossless, positions deferred in order of gap over D_TV.

    The curve of every α at once, without its hull: positions that cost nothing come first where their gap is positive
    and never otherwise. Lower is better; NaN where the models never differ.
    """
    cost = tv.double()
    limit = cost.sum()
    if limit <= 0:
        return float("nan")
    ratio = torch.where(cost > 0, gap.double() / cost.clamp_min(1e-12), torch.sign(gap.double()) * torch.inf)
    order = ratio.argsort(descending=True, stable=True)
    gain = (draft_loss - verifier_loss).double()[order]
    spent = cost[order].cumsum(dim=0) / limit
    loss = draft_loss.double().mean() - gain.cumsum(dim=0) / len(gap)
    # Nobody must spend a budget: the curve never rises.
    best = loss.cummin(dim=0).values
    width = torch.diff(spent, prepend=spent.new_zeros(1))
    before = torch.cat([draft_loss.double().mean()[None], best[:-1]])
    return float((width * (best + before)).sum() / 2)


class FrontierArea(Metric):
    """`frontier_area` over all validation batches."""

    full_state_update = False
    higher_is_better = False

    gap: list[Tensor]
    tv: list[Tensor]
    draft_loss: list[Tensor]
    verifier_loss: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("gap", "tv", "draft_loss", "verifier_loss"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(
        self,
        gap: Float[Tensor, "N"],
        tv: Float[Tensor, "N"],
        draft_loss: Float[Tensor, "N"],
        verifier_loss: Float[Tensor, "N"],
    ) -> None:
        """Add positions."""
        for name, values in (("gap", gap), ("tv", tv), ("draft_loss", draft_loss), ("verifier_loss", verifier_loss)):
            getattr(self, name).append(values.detach())

    def compute(self) -> Tensor:
        """Mean loss over budgets."""
        parts = [dim_zero_cat(getattr(self, name)) for name in ("gap", "tv", "draft_loss", "verifier_loss")]
        return torch.tensor(frontier_area(*parts))


class CalibrationError(Metric):
    """Expected calibration error over all validation batches, as `data.calibration` defines it."""

    full_state_update = False
    higher_is_better = False

    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", default=torch.zeros(3, BINS), dist_reduce_fx="sum")

    def update(self, confidence: Float[Tensor, "N"], correct: Float[Tensor, "N"]) -> None:
        """Add positions."""
        self.sums = self.sums + calibration_sums(confidence.detach(), correct).to(self.sums)

    def compute(self) -> Tensor:
        """Error over the positions so far."""
        return error_of_sums(self.sums)
