"""Batches of `Examples`: slices of a permutation, blocks of a scan, or whole prompts in order of their positions.

Rows are never collated one by one: a slice of a permutation is a batch, which is several hundred thousand rows a second
where row-wise loaders give a few ten thousand. With several processes each takes every n-th batch; all take equally
many, no position is served twice, and none is left out.

Shapes: ``N`` position of a split, ``B`` prompt of a batch, ``L`` position in the longest of them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

from ..router.examples import Examples
from .splits import ScannedSplit, TraceTensors, concatenate

__all__ = ["Scan", "Sequences", "Slices"]

BLOCK = 1 << 18
"""Positions of a scan that are held and permuted at a time."""


class _Batches(IterableDataset[Examples]):
    """The order of batches: another each epoch, from the seed, if `shuffle`."""

    def __init__(self, shuffle: bool, seed: int, epoch: int) -> None:
        self.shuffle, self.seed, self.epoch = shuffle, seed, epoch

    def next_generator(self) -> torch.Generator:
        """The randomness of the coming epoch."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        self.epoch += 1
        return generator

    def order(self, count: int, generator: torch.Generator) -> Tensor:
        """A permutation of `count` things, or their own order."""
        return torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)


class Slices(_Batches):
    """Batches of a split in memory, of at most `batch_size` positions and all of nearly the same size.

    Raises:
        ValueError: there are fewer positions than processes.
    """

    def __init__(self, tensors: TraceTensors, batch_size: int, shuffle: bool, seed: int = 0, epoch: int = 0) -> None:
        super().__init__(shuffle, seed, epoch)
        self.tensors, self.batch_size = tensors, batch_size

    def __len__(self) -> int:
        return _steps(len(self.tensors), self.batch_size)

    def __iter__(self) -> Iterator[Examples]:
        examples = self.tensors.examples
        order = self.order(len(self.tensors), self.next_generator())
        for rows in order.tensor_split(len(self) * _world_size())[_rank() :: _world_size()]:
            yield _pick(examples, rows)


class Scan(_Batches):
    """Batches of a split on disk: shards in another order each epoch, positions permuted within a block.

    Every process reads all shards and keeps its own batches.

    Raises:
        ValueError: there are fewer positions than processes.
    """

    def __init__(
        self,
        split: ScannedSplit,
        batch_size: int,
        shuffle: bool,
        seed: int = 0,
        epoch: int = 0,
        block: int = BLOCK,
    ) -> None:
        super().__init__(shuffle, seed, epoch)
        self.split, self.batch_size, self.block = split, batch_size, block

    def __len__(self) -> int:
        return _steps(len(self.split), self.batch_size)

    def __iter__(self) -> Iterator[Examples]:
        blocks, total = self._blocks(), len(self) * _world_size()
        held = next(blocks)
        for number in range(total):
            size = len(self.split) // total + (number < len(self.split) % total)
            while len(held.tv) < size:
                held = concatenate([held, next(blocks)])
            if number % _world_size() == _rank():
                yield _pick(held, slice(0, size))
            held = _pick(held, slice(size, None))

    def _blocks(self) -> Iterator[Examples]:
        generator = self.next_generator()
        held: list[Examples] = []
        for piece in self.split.pieces(self.order(self.split.shards, generator).tolist()):
            held.append(piece)
            if sum(len(one.tv) for one in held) >= self.block:
                yield self._permuted(held, generator)
                held = []
        if held:
            yield self._permuted(held, generator)

    def _permuted(self, pieces: Sequence[Examples], generator: torch.Generator) -> Examples:
        block = concatenate(pieces)
        return _pick(block, self.order(len(block.tv), generator)) if self.shuffle else block


class Sequences(_Batches):
    """Whole prompts ``[B, L]``, their positions in order; padding has weight 0 and NaN features.

    Prompts of like length stand together, so that B · L is about `batch_size` and little of it padding. Their order
    among equals, and that of the batches, is drawn anew each epoch if `shuffle`. Prompts without weight are left out.

    Raises:
        ValueError: there are fewer prompts than processes.
    """

    def __init__(self, tensors: TraceTensors, batch_size: int, shuffle: bool, seed: int = 0, epoch: int = 0) -> None:
        super().__init__(shuffle, seed, epoch)
        weight = torch.ones(len(tensors)) if tensors.weight is None else tensors.weight
        self.examples = tensors.examples._replace(weight=weight)
        counts = torch.bincount(tensors.prompt_index, minlength=len(tensors.prompt_ids))
        rows = tensors.prompt_index.argsort(stable=True).split(counts.tolist())
        self.prompts = [own for own in rows if weight[own].sum() > 0]
        self.lengths = torch.tensor([len(own) for own in self.prompts])
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self._sizes()) // _world_size()

    def __iter__(self) -> Iterator[Examples]:
        generator = self.next_generator()
        order = self.order(len(self.prompts), generator)
        batches = order[self.lengths[order].argsort(stable=True)].split(self._sizes())
        for turn in self.order(len(batches), generator)[_rank() :: _world_size()].tolist():
            yield self._padded([self.prompts[prompt] for prompt in batches[turn].tolist()])

    def _sizes(self) -> list[int]:
        """Prompts a batch, the shortest prompts first; as many batches for every process."""
        sizes = [0]
        for length in self.lengths.sort().values.tolist():
            if sizes[-1] and (sizes[-1] + 1) * length > self.batch_size:
                sizes.append(0)
            sizes[-1] += 1
        _check_processes(len(self.prompts), "prompts")
        rounds = min(-(-len(sizes) // _world_size()), len(self.prompts) // _world_size())
        while len(sizes) > rounds * _world_size():  # prompts stand alone, and cannot be shared evenly
            sizes[:2] = [sizes[0] + sizes[1]]
        while len(sizes) < rounds * _world_size():
            largest = max(range(len(sizes)), key=sizes.__getitem__)
            half = sizes[largest] // 2
            sizes[largest : largest + 1] = [sizes[largest] - half, half]
        return sizes

    def _padded(self, prompts: list[Tensor]) -> Examples:
        def pad(values: Tensor | None, padding: float = 0.0) -> Tensor | None:
            return None if values is None else pad_sequence([values[own] for own in prompts], True, padding)

        features, *rest = self.examples
        padded = pad(features, float("nan"))
        assert padded is not None
        return Examples(padded, *(pad(values) for values in rest))  # type: ignore[arg-type]  # correctness and tv exist


def _pick(examples: Examples, rows: Tensor | slice) -> Examples:
    return Examples(*(None if values is None else values[rows] for values in examples))  # type: ignore[arg-type]


def _steps(positions: int, batch_size: int) -> int:
    """Batches of each process; none of them is empty, if it takes one position more than `batch_size`."""
    _check_processes(positions, "positions")
    return min(-(-positions // (batch_size * _world_size())), positions // _world_size())


def _check_processes(count: int, what: str) -> None:
    if count < _world_size():
        raise ValueError(f"trainer.devices: expected at most as many as there are {what}, {count}; got {_world_size()}")


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
