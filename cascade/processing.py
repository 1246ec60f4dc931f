"""Penalties and bans that depend on what a row already holds, applied once at each position of a block.

The same function serves drafter and verifier. The history of a position is the row's tokens before it: kept ones and,
inside a block, the drafted ones before it. Nothing is remembered between calls, so a rejected draft leaves no trace.
Each setting does what the transformers processor of the same name does.

Shapes: ``B`` row, ``T`` position in the block, ``V`` token.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .distributions import Sampling

__all__ = ["process_logits"]


def process_logits(
    logits: Float[Tensor, "B T V"], histories: Sequence[Sequence[int]], sampling: Sampling
) -> Float[Tensor, "B T V"]:
    """Apply repetition penalty, bad words and suppressed tokens at every position.

    Args:
        logits: one model's logits at T successive positions of each row.
        histories: each row's tokens up to the last of these positions; the position t steps before the last one sees
            all but the last t of them.
        sampling: the settings.
    """
    if not sampling.reads_history:
        return logits
    logits = logits.float()
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
        logits = torch.where(_seen(logits, histories), penalised, logits)
    banned = _banned(logits, histories, sampling)
    return logits.masked_fill(banned, -math.inf)


def _prefixes(histories: Sequence[Sequence[int]], length: int) -> list[list[Sequence[int]]]:
    """Each row's history at each of ``length`` positions."""
    return [[history[: len(history) - back] for back in reversed(range(length))] for history in histories]


def _seen(logits: Float[Tensor, "B T V"], histories: Sequence[Sequence[int]]) -> Bool[Tensor, "B T V"]:
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, prefixes in enumerate(_prefixes(histories, logits.shape[1])):
        for place, prefix in enumerate(prefixes):
            seen[row, place, list(set(prefix))] = True
    return seen


def _banned(
    logits: Float[Tensor, "B T V"], histories: Sequence[Sequence[int]], sampling: Sampling
) -> Bool[Tensor, "B T V"]:
    banned = torch.zeros_like(logits, dtype=torch.bool)
    banned[..., list(sampling.suppress_tokens)] = True
    for *start, last in sampling.bad_words:
        for row, prefixes in enumerate(_prefixes(histories, logits.shape[1])):
            for place, prefix in enumerate(prefixes):
                if list(prefix[len(prefix) - len(start) :]) == start:
                    banned[row, place, last] = True
    return banned
