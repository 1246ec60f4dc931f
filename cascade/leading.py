"""The most probable tokens of a position: how probable each model's favourites are to itself and to the other model.

Probabilities without the tokens themselves: what a rule reads of the two heads of the distributions, as raw confidences
q° and p°. Knows no rule and no trace.

Shapes: ``*batch`` any leading axes, ``K`` place, ``V`` token.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from .extremes import find_largest
from .forms import Certain, Distribution, FromLogits

__all__ = ["Leading", "find_leading", "order_ties", "values_at"]


class Leading(NamedTuple):
    """Both models' ``K`` most probable tokens, each ``[*batch, K]`` float32, the most probable first.

    Among equals the lower id stands first. Where the vocabulary has fewer than K tokens, the places left hold 0.

    Args:
        draft_top: q° at its own favourites.
        verifier_at_draft_top: p° at those tokens.
        verifier_top: p° at its own favourites.
        draft_at_verifier_top: q° at those tokens.
    """

    draft_top: Float[Tensor, "*batch K"]
    verifier_at_draft_top: Float[Tensor, "*batch K"]
    verifier_top: Float[Tensor, "*batch K"]
    draft_at_verifier_top: Float[Tensor, "*batch K"]


def find_leading(draft: Distribution, verifier: Distribution, count: int) -> Leading:
    """Search q° and p° for their ``count`` most probable tokens."""
    draft_top, draft_tokens = _search(draft, count)
    verifier_top, verifier_tokens = _search(verifier, count)
    found = (draft_top, values_at(verifier, draft_tokens), verifier_top, values_at(draft, verifier_tokens))
    return Leading(*(functional.pad(values, (0, count - values.shape[-1])) for values in found))


def order_ties(
    values: Float[Tensor, "*batch M"], tokens: Int[Tensor, "*batch M"], count: int
) -> tuple[Float[Tensor, "*batch count"], Int[Tensor, "*batch count"]]:
    """Return the ``count`` largest values in falling order and their tokens, among equals the lower token first."""
    by_token = tokens.argsort(dim=-1)
    values, tokens = values.gather(-1, by_token), tokens.gather(-1, by_token)
    falling = values.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return values.gather(-1, falling), tokens.gather(-1, falling)


def _search(
    distribution: Distribution, count: int
) -> tuple[Float[Tensor, "*batch count"], Int[Tensor, "*batch count"]]:
    count = min(count, distribution.vocab_size)
    if isinstance(distribution, Certain):
        certain = distribution.argmax.unsqueeze(-1)
        others = torch.arange(count - 1, device=certain.device)
        tokens = torch.cat([certain, others + (others >= certain)], dim=-1)
        return values_at(distribution, tokens), tokens
    # Logits are ordered as their probabilities are, and need no second table.
    scores = distribution.logits if isinstance(distribution, FromLogits) else distribution.dense
    # As many again: equals at the last place are then told apart by their ids, as they are in a trace.
    wanted = min(2 * count, distribution.vocab_size)
    tokens = find_largest(scores.reshape(-1, scores.shape[-1]), wanted)[1].view(*distribution.shape, wanted)
    return order_ties(values_at(distribution, tokens), tokens, count)


def values_at(distribution: Distribution, tokens: Int[Tensor, "*batch K"]) -> Float[Tensor, "*batch K"]:
    """Return the probabilities of several tokens a position, without a table of all where there is none yet."""
    if isinstance(distribution, Certain):
        return (tokens == distribution.argmax.unsqueeze(-1)).float()
    if isinstance(distribution, FromLogits) and "dense" not in vars(distribution):
        logits = distribution.logits
        behind_best = logits.gather(-1, tokens).float() - logits.amax(dim=-1, keepdim=True).float()
        return behind_best.exp() * distribution.maximum.unsqueeze(-1)
    return distribution.dense.gather(-1, tokens)
