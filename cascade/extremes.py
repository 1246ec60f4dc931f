"""The largest scores of a row, found by the maxima of blocks on a CPU; plain searches stand beside the fast ones.

Shapes: ``*batch`` any leading axes, ``N`` row, ``V`` token.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["find_argmax", "find_largest", "plain_second_largest", "second_largest"]

_BLOCK = 256  # tokens that a first look takes together
_SMALL_BLOCK = 64  # the same where several of the best blocks are looked into


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


def find_largest(scores: Float[Tensor, "N V"], count: int) -> tuple[Float[Tensor, "N count"], Int[Tensor, "N count"]]:
    """Return the `count` largest scores in falling order and their positions.

    The first is the argmax, the lowest of its equals; which other equals are there, and in what order, is left open.
    """
    values, places = _search_largest(scores, min(max(count, 2), scores.shape[-1]))
    tied = (values[:, :1] == values[:, 1:2]).any(dim=-1)
    if bool(tied.any()):
        best, rows = find_argmax(scores[tied]), places[tied]
        own = (rows == best.unsqueeze(1)).long().argmax(dim=1, keepdim=True)  # 0, the place of an equal, where it lacks
        rows.scatter_(1, own, rows[:, :1].clone())
        rows[:, 0] = best
        places[tied] = rows
    return values[:, :count], places[:, :count]


def _search_largest(
    scores: Float[Tensor, "N V"], count: int
) -> tuple[Float[Tensor, "N count"], Int[Tensor, "N count"]]:
    """The largest scores; on a CPU only the blocks with the largest maxima are searched, as no other can hold one."""
    blocks = scores.shape[-1] // _SMALL_BLOCK
    if not _worth_blocks(scores) or blocks < 4 * count:
        found = scores.topk(count, dim=-1)
        return found.values, found.indices
    peaks = _block_maxima(scores, _SMALL_BLOCK)
    chosen = peaks.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    index = (chosen.unsqueeze(-1) * _SMALL_BLOCK + torch.arange(_SMALL_BLOCK)).flatten(1)
    inside = scores.gather(1, index.clamp_max(scores.shape[-1] - 1))
    values, places = inside.masked_fill_(index >= scores.shape[-1], -torch.inf).topk(count, dim=-1)
    return values, index.gather(1, places)


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
    peaks = _block_maxima(flat, _BLOCK)
    best = peaks.argmax(dim=-1, keepdim=True)
    index = best * _BLOCK + torch.arange(_BLOCK)
    inside = flat.gather(1, index.clamp_max(flat.shape[-1] - 1)).masked_fill(index >= flat.shape[-1], -torch.inf)
    return peaks, best, inside


def _block_maxima(scores: Float[Tensor, "N V"], size: int) -> Float[Tensor, "N blocks"]:
    """The largest score of every block of so many tokens; the last block may be shorter."""
    whole = scores.shape[-1] // size * size
    peaks: Tensor = scores[:, :whole].unflatten(1, (-1, size)).amax(dim=-1)
    if whole < scores.shape[-1]:
        peaks = torch.cat([peaks, scores[:, whole:].amax(dim=-1, keepdim=True)], dim=1)
    return peaks
