"""Which metrics a head is measured by each epoch, by what it estimates: gaps, decisions or a belief over tokens.

Knows no Lightning and no file. Shapes: ``*batch`` is ``[N]``, or ``[B, L]`` with weight 0 on padding; ``N`` position
that counts, ``C`` loss of the head, ``A`` price, ``K`` candidate token.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ..router.examples import Examples
from ..router.pooled import TAIL_FLOOR
from ..router.position_head import CORRECTNESS_ROW
from .metrics import BrierScore, CalibrationError, FrontierArea, RankingScore, RegretToOracle, spread_prices

__all__ = ["BeliefMetrics", "GapMetrics", "HeadMetrics", "losses_of", "metrics_for"]

MODELS = ("draft", "verifier")

LARGEST_LOG_LOSS = 20.0
"""Nats that a label costs at most, however impossible a model thought it."""


class HeadMetrics(nn.Module):
    """The validation loss of any head; `update` with batches, then `compute` and `reset`."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict({"val_loss": MeanMetric()})

    def update(self, head: Any, examples: Examples) -> None:
        """Add a batch."""
        weight = torch.ones_like(examples.tv) if examples.weight is None else examples.weight
        self.metrics["val_loss"].update(head.loss(examples), weight.sum())  # type: ignore[operator]
        self.measure(head, examples, weight > 0)

    def measure(self, head: Any, examples: Examples, counts: Bool[Tensor, "*batch"]) -> None:
        """Add what a kind of head is measured by beside its loss."""

    def compute(self) -> dict[str, Tensor]:
        """Every figure by the name that it is logged under."""
        return {name: metric.compute().float() for name, metric in self.metrics.items()}  # type: ignore[operator]

    def reset(self) -> None:
        """Forget all batches."""
        for metric in self.metrics.values():
            metric.reset()  # type: ignore[operator]

    def _add(self, name: str, *values: Tensor) -> None:
        self.metrics[name].update(*values)  # type: ignore[operator]


class GapMetrics(HeadMetrics):
    """Frontier area, AUROC and regret of every loss; Brier score and ECE where the head states confidences.

    A cost-sensitive head decides for a given α and has no gap: of it the regret alone is measured.

    Args:
        head: estimates gaps, or decides.
        prices: ``[C, A]``, the values of α that regret is averaged over, for each loss of the head.
    """

    def __init__(self, head: Any, prices: Float[Tensor, "C A"]) -> None:
        super().__init__()
        self.losses: tuple[str, ...] = head.gap_losses
        for loss, own in zip(self.losses, prices, strict=True):
            self.metrics[f"val_regret_{loss}"] = RegretToOracle(own)
            if head.estimator != "cost_sensitive":
                self.metrics[f"val_area_{loss}"] = FrontierArea()
                self.metrics[f"val_auroc_{loss}"] = RankingScore()
        if head.estimator == "two_confidence":
            for model in MODELS:
                self.metrics[f"val_brier_{model}"] = BrierScore()
                self.metrics[f"val_ece_{model}"] = CalibrationError()

    def measure(self, head: Any, examples: Examples, counts: Bool[Tensor, "*batch"]) -> None:
        """Add the positions that count."""
        features, tv, correctness = examples.features, examples.tv[counts], examples.correctness[counts]
        gap = None if head.estimator == "cost_sensitive" else head.estimate(examples)[counts]
        for column, loss in enumerate(self.losses):
            costs = losses_of(correctness, loss)
            prices: Tensor = self.metrics[f"val_regret_{loss}"].prices  # type: ignore[assignment]  # a metric's state
            if gap is None:
                margins = [head(features, price.expand(counts.shape))[counts][..., column] for price in prices]
                self._add(f"val_regret_{loss}", torch.stack(margins, dim=-1) > 0, tv, *costs)
                continue
            own = gap[:, column]
            self._add(f"val_regret_{loss}", own[:, None] > prices * tv[:, None], tv, *costs)
            self._add(f"val_area_{loss}", own, tv, *costs)
            differ = costs[0] != costs[1]
            self._add(f"val_auroc_{loss}", own[differ], (costs[0] > costs[1])[differ])
        if head.estimator == "two_confidence":
            confidences = head.confidences(features)[counts][:, 0]
            row = CORRECTNESS_ROW[self.losses[0]]
            for model, name in enumerate(MODELS):
                self._add(f"val_brier_{name}", confidences[:, model], correctness[:, row, model])
                self._add(f"val_ece_{name}", confidences[:, model], correctness[:, row, model])


class BeliefMetrics(GapMetrics):
    """What follows from a belief as a gap, and the log loss of q° and p° beside the belief's own, which is its loss.

    The events are the candidates, and "none of them" for all that is left.
    """

    def __init__(self, head: Any, prices: Float[Tensor, "C A"]) -> None:
        super().__init__(head, prices)
        for model in MODELS:
            self.metrics[f"val_log_loss_{model}"] = MeanMetric()

    def measure(self, head: Any, examples: Examples, counts: Bool[Tensor, "*batch"]) -> None:
        """Add the positions that count."""
        super().measure(head, examples, counts)
        assert examples.candidates is not None and examples.truth is not None, "the data module gives them"
        probs, truth = examples.candidates[counts], examples.truth[counts]
        events = torch.cat([probs, (1 - probs.sum(dim=1, keepdim=True)).clamp_min(TAIL_FLOOR)], dim=1)
        hit = events.gather(1, truth[:, None, None].expand(-1, 1, 2))[:, 0]
        for model, name in enumerate(MODELS):
            self._add(f"val_log_loss_{name}", _log_loss(hit[:, model]))


def metrics_for(head: Any, seen: Examples, prices: Sequence[float] | None = None) -> HeadMetrics:
    """The metrics of a head.

    Args:
        head: any head.
        seen: held-out positions; prices are spread over their range, for each loss, unless given.
        prices: the values of α that regret is averaged over.
    """
    kind = BeliefMetrics if head.kind == "pooled" else GapMetrics
    if prices is not None:
        return kind(head, torch.tensor([list(prices)] * len(head.gap_losses)))
    counts = torch.ones_like(seen.tv, dtype=torch.bool) if seen.weight is None else seen.weight > 0
    tv, correctness = seen.tv[counts], seen.correctness[counts]
    return kind(head, torch.stack([spread_prices(*losses_of(correctness, loss), tv) for loss in head.gap_losses]))


def losses_of(correctness: Float[Tensor, "N 2 2"], loss: str) -> tuple[Tensor, Tensor]:
    """What the drafter and the verifier lose at each position; ``log`` in nats, from the label's probabilities."""
    right = correctness[:, CORRECTNESS_ROW[loss]]
    draft, verifier = (_log_loss(right) if loss == "log" else 1 - right).unbind(dim=-1)
    return draft, verifier


def _log_loss(probability: Tensor) -> Tensor:
    return probability.clamp_min(math.exp(-LARGEST_LOG_LOSS)).log().neg()
