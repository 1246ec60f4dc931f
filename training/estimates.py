"""What a trained head says of a split, whatever its kind: its estimates, its loss, whom it lets decide at a price α.

A head that reads order is given each prompt by itself, in the order of the split. Answers are those at the positions
that count, as `TraceTensors.counted` has them.

Shapes: ``N`` position, ``G`` loss of the head.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..router.examples import Examples
from .splits import TraceTensors

__all__ = ["Decide", "decider", "estimate", "loss_column", "mean_loss"]

Decide = Callable[[float], Bool[Tensor, "N"]]
"""α to where the verifier decides."""


def estimate(head: Any, split: TraceTensors, alpha: float | None = None) -> Float[Tensor, "N G"]:
    """Estimate the gap at every position that counts; a head that is fed α answers with a margin."""
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
        for rows, prompt in _prompts(split):
            answer[rows] = head(prompt.features, *_prices(alpha, prompt.features))[0]
        return answer if split.weight is None else answer[split.weight > 0]


def mean_loss(head: Any, split: TraceTensors) -> float:
    """Average the head's own loss over the positions that count."""
    head.eval()
    with torch.inference_mode():
        if not head.context:
            return float(head.loss(split.examples))
        total = size = 0.0
        for rows, prompt in _prompts(split):
            own = float(len(rows) if prompt.weight is None else prompt.weight.sum())
            if own:
                total, size = total + own * float(head.loss(prompt)), size + own
        return total / size


def _prompts(split: TraceTensors) -> Iterator[tuple[Tensor, Examples]]:
    """Each prompt's positions: where they stand in the split, and what is known of them, ``[1, L]``."""
    counts = torch.bincount(split.prompt_index)
    for rows in split.prompt_index.argsort(stable=True).split(counts.tolist()):
        if len(rows):
            columns = (None if values is None else values[rows].unsqueeze(0) for values in split.examples)
            yield rows, Examples(*columns)  # type: ignore[arg-type]  # features, correctness and tv exist


def decider(head: Any, split: TraceTensors, loss: str, tv: Float[Tensor, "N"]) -> Decide:
    """Return the decision as a function of α: gap > α · ``tv``, or for a head that is fed α, margin > 0.

    ``tv`` is that of the positions that count.
    """
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
