"""What is measured of a router head on held-out positions, as torchmetrics: batches and processes add up exactly.

How well gaps rank (`RankingScore`), how good a frontier they give (`FrontierArea`), what they cost against a rule that
knows the label (`RegretToOracle`), and whether confidences are kept (`CalibrationError`, `BrierScore`).

Knows no head, no Lightning and no file. Shapes: ``N`` position, ``A`` price.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from ..data.calibration import BINS, calibration_sums, error_of_sums

__all__ = [
    "BrierScore",
    "CalibrationError",
    "FrontierArea",
    "RankingScore",
    "RegretToOracle",
    "auroc",
    "frontier_area",
    "spread_prices",
]


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


def auroc(score: Float[Tensor, "N"], positive: Bool[Tensor, "N"]) -> float:
    """How often a positive scores above a negative, ties counted half; NaN where there are not both.

    The ranks decide, not the values, so scores need no particular range.

    >>> auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
    0.75
    """
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return float("nan")
    _, place, counts = score.unique(return_inverse=True, return_counts=True)
    middle = counts.double().cumsum(dim=0) - (counts.double() - 1) / 2  # mean rank, from 1, among equals
    above = middle[place[positive]].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def spread_prices(
    draft_loss: Float[Tensor, "N"], verifier_loss: Float[Tensor, "N"], tv: Float[Tensor, "N"], count: int = 8
) -> Float[Tensor, "A"]:
    """Evenly spaced prices α from 0 to the α at which rejecting everywhere costs what the best rule could gain.

    That is α · E[D_TV] = E[(ℓ(v, q) − ℓ(v, p))₊]. NaN where the models never differ: no price means anything there.
    """
    highest = (draft_loss - verifier_loss).clamp_min(0).double().mean() / tv.double().mean()
    return torch.linspace(0, 1, count) * highest.float()


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
        parts = [dim_zero_cat(getattr(self, name)).cpu() for name in ("gap", "tv", "draft_loss", "verifier_loss")]
        return torch.tensor(frontier_area(*parts))


class RankingScore(Metric):
    """`auroc` over all validation batches."""

    full_state_update = False
    higher_is_better = True

    score: list[Tensor]
    positive: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("score", "positive"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, score: Float[Tensor, "N"], positive: Bool[Tensor, "N"]) -> None:
        """Add positions."""
        self.score.append(score.detach())
        self.positive.append(positive.to(torch.uint8))  # not every backend gathers booleans

    def compute(self) -> Tensor:
        """The area under the ROC curve of the positions so far."""
        return torch.tensor(auroc(dim_zero_cat(self.score).cpu(), dim_zero_cat(self.positive).cpu().bool()))


class RegretToOracle(Metric):
    """What decisions cost above those of a rule that knows the label, averaged over positions and prices.

    A rule r pays (1 − r) ℓ(v, q) + r (ℓ(v, p) + α D_TV) at a position (equation 8); the oracle pays the lesser of the
    two. Both are averaged over the positions, their difference over the prices α.

    Args:
        prices: ``[A]``, the values of α.
    """

    full_state_update = False
    higher_is_better = False

    prices: Tensor
    regret: Tensor
    count: Tensor

    def __init__(self, prices: Float[Tensor, "A"]) -> None:
        super().__init__()
        self.register_buffer("prices", prices.detach().clone(), persistent=False)
        self.add_state("regret", default=torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(
        self,
        defer: Bool[Tensor, "N A"],
        tv: Float[Tensor, "N"],
        draft_loss: Float[Tensor, "N"],
        verifier_loss: Float[Tensor, "N"],
    ) -> None:
        """Add what was decided at every price."""
        kept, deferred = draft_loss[:, None], verifier_loss[:, None] + self.prices * tv[:, None]
        paid = torch.where(defer, deferred, kept)
        self.regret = self.regret + (paid - torch.minimum(kept, deferred)).mean(dim=1).sum()
        self.count = self.count + len(tv)

    def compute(self) -> Tensor:
        """Mean regret; NaN before any position."""
        return self.regret / self.count


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


class BrierScore(Metric):
    """Mean squared distance between a stated chance and what came."""

    full_state_update = False
    higher_is_better = False

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", default=torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, confidence: Float[Tensor, "N"], correct: Float[Tensor, "N"]) -> None:
        """Add positions."""
        self.total = self.total + (confidence.detach() - correct).square().sum()
        self.count = self.count + len(correct)

    def compute(self) -> Tensor:
        """Score over the positions so far; NaN before any."""
        return self.total / self.count
