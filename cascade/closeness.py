"""How near two next-token distributions are, whatever forms they have. Knows no rule and no model.

Shapes: ``*batch`` any leading axes, ``V`` token.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from .forms import Certain, Distribution, chunks

__all__ = ["distance", "overlap"]


def distance(p: Distribution, q: Distribution) -> Float[Tensor, "*batch"]:
    """D_TV(p, q) = Σ max(0, p − q), in [0, 1]."""
    if isinstance(p, Certain):
        return 1 - q.at(p.argmax)
    if isinstance(q, Certain):
        return 1 - p.at(q.argmax)
    pairs = zip(chunks(p), chunks(q), strict=True)
    found = [(verifier - draft).clamp_min_(0).sum(dim=-1) for (verifier, _), (draft, _) in pairs]
    return torch.cat(found).clamp_max(1).view(p.shape)


def overlap(p: Distribution, q: Distribution) -> Float[Tensor, "*batch"]:
    """Σ p·q: the chance that a token of either is the one drawn from the other."""
    if isinstance(p, Certain):
        return q.at(p.argmax)
    if isinstance(q, Certain):
        return p.at(q.argmax)
    pairs = zip(chunks(p), chunks(q), strict=True)
    return torch.cat([(one * other).sum(dim=-1) for (one, _), (other, _) in pairs]).view(p.shape)
