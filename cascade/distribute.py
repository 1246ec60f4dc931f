"""From logits to the cheapest form of the distribution that is sampled from, and forms of successive positions joined.

Shapes: ``*batch`` any leading axes, ``B`` row, ``V`` token.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from .distributions import Sampling, check_finite, logits_to_probs
from .extremes import find_argmax
from .forms import Certain, Distribution, FromLogits, Whole

__all__ = ["distribute", "join"]


def distribute(logits: Float[Tensor, "*batch V"], sampling: Sampling, source: str) -> Distribution:
    """Turn logits into the distribution that is sampled from, in its cheapest form.

    Raises:
        ValueError: logits that are not finite; the message names ``source`` and the row.
    """
    if sampling.is_greedy:
        tokens = find_argmax(logits)
        check_finite(logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), source)
        return Certain(tokens, logits.shape[-1])
    return Whole(logits_to_probs(logits, sampling, source), logits if sampling.is_plain else None)


def join(parts: Sequence[Distribution]) -> Distribution:
    """Put successive positions ``[B, t]`` of one form together."""
    if len(parts) == 1:
        return parts[0]
    certain = [part for part in parts if isinstance(part, Certain)]
    if len(certain) == len(parts):
        return Certain(torch.cat([part.argmax for part in certain], dim=1), certain[0].vocab_size)
    logits = [part.logits for part in parts if isinstance(part, Whole | FromLogits) and part.logits is not None]
    joined = torch.cat(logits, dim=1) if len(logits) == len(parts) else None
    if joined is not None and all(isinstance(part, FromLogits) for part in parts):
        return FromLogits(joined)
    return Whole(torch.cat([part.dense for part in parts], dim=1), joined)
