"""The largest scores of a row, found by the maxima of blocks on a CPU; plain searches stand beside the fast ones.

Shapes: ``*batch`` any leading axes, ``N`` row, ``V`` token.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["find_argmax", "plain_second_largest", "second_largest"]

_BLOCK = 256  # tokens that a first look takes together


def find_argmax(scores: Float[Tensor, "*batch V"]) -> Int[Tensor, "*batch"]:
    """Return the position of the largest score, the lowest among equals; on a CPU faster than a plain search."""
    if not _worth_blocks(scores):
        return scores.argmax(dim=-1)
    _, best, inside = _look_into_best_block(scores)
    return (best.squeeze(1) * _BLOCK + inside.argmax(dim=-1)).view(scores.shape[:-1])


def second_largest(scores: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """Return the second largest score, which equals the largest where that occurs twice."""
    if not _worth_blocks(scores):
        return plain_second_largest(scores)
    peaks, best, inside = _look_into_best_block(scores)
    elsewhere = peaks.scatter(1, best, -torch.inf).amax(dim=-1)
    return torch.maximum(plain_second_largest(inside), elsewhere).view(scores.shape[:-1])


def plain_second_largest(scores: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """Return the second largest score by a search of all."""
    return scores.topk(2, dim=-1).values[..., 1]


def _worth_blocks(scores: Tensor) -> bool:
    return scores.device.type == "cpu" and scores.shape[-1] >= 4 * _BLOCK


def _look_into_best_block(
    scores: Float[Tensor, "*batch V"],
) -> tuple[Float[Tensor, "N blocks"], Int[Tensor, "N 1"], Float[Tensor, "N block"]]:
    """The largest score of every block, the first block that holds the largest of all, and the scores in it."""
    flat = scores.reshape(-1, scores.shape[-1])
    count = flat.shape[-1] // _BLOCK
    peaks = flat[:, : count * _BLOCK].unflatten(1, (count, _BLOCK)).amax(dim=-1)
    if count * _BLOCK < flat.shape[-1]:
        peaks = torch.cat([peaks, flat[:, count * _BLOCK :].amax(dim=-1, keepdim=True)], dim=1)
    best = peaks.argmax(dim=-1, keepdim=True)
    index = best * _BLOCK + torch.arange(_BLOCK)
    inside = flat.gather(1, index.clamp_max(flat.shape[-1] - 1)).masked_fill(index >= flat.shape[-1], -torch.inf)
    return peaks, best, inside
