"""What a trained head says at every position of a split, whatever its kind, and whom it lets decide at a price α.

Shapes: ``N`` position, ``G`` loss of the head.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .splits import TraceTensors

__all__ = ["Decide", "decider", "estimate", "loss_column"]

Decide = Callable[[float], Bool[Tensor, "N"]]
"""α to where the verifier decides."""


def estimate(head: Any, split: TraceTensors, alpha: float | None = None) -> Float[Tensor, "N G"]:
    """Estimate the gap at every position; a head that is fed α answers with a margin.

    A head that reads order is given each prompt by itself, in the order of the split.
    """
    head.eval()
    with torch.inference_mode():
        if not head.context:
            answer: Tensor
            if alpha is None:
                answer = head.estimate(split.examples)
            else:
                answer = head(split.features, *_prices(alpha, split.features))
            return answer
        answer = torch.empty(len(split), len(head.losses))
        counts = torch.bincount(split.prompt_index)
        for rows in split.prompt_index.argsort(stable=True).split(counts.tolist()):
            if len(rows):
                features = split.features[rows].unsqueeze(0)
                answer[rows] = head(features, *_prices(alpha, features))[0]
        return answer


def decider(head: Any, split: TraceTensors, loss: str, tv: Float[Tensor, "N"]) -> Decide:
    """Return the decision as a function of α: gap > α · ``tv``, or for a head that is fed α, margin > 0."""
    column = loss_column(head, loss)
    if head.estimator == "cost_sensitive":
        return lambda alpha: estimate(head, split, alpha)[:, column] > 0
    gap = estimate(head, split)[:, column]
    return lambda alpha: gap > alpha * tv


def loss_column(head: Any, loss: str) -> int:
    """Which column of the head's answer decides under a loss: its own, or the first where it has not learned it."""
    return head.gap_losses.index(loss) if loss in head.gap_losses else 0


def _prices(alpha: float | None, features: Tensor) -> tuple[Tensor, ...]:
    return () if alpha is None else (torch.full(features.shape[:-1], alpha),)
