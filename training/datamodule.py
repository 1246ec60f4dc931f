"""Traces to batches: features and correctness in memory once, served as permuted slices.

A batch is `Examples`. Rows are never collated one by one: a slice of a
permutation is a batch, which is several hundred thousand rows a second where row-wise loaders give a few ten thousand.
Splits are those of the traces, made by prompt; a prompt that stands in two of them is refused.

Shapes: ``N`` position, ``F`` feature; axes of length two are the losses (zero_one, sampled) and the models (q, p).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytorch_lightning as pl
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..data.traces import Traces
from ..router.examples import Examples
from ..router.features import build_features
from .holdout import divide

__all__ = ["Slices", "TraceDataModule", "TraceTensors", "load_split"]


@dataclass(frozen=True)
class TraceTensors:
    """One split of the traces, ready for a head.

    `tv` is D_TV(p, q) at the temperature of the traces, `agree` 1 where both models prefer the same token,
    `prompt_index` counts within the split.
    """

    features: Float[Tensor, "N F"]
    correctness: Float[Tensor, "N 2 2"]
    tv: Float[Tensor, "N"]
    agree: Float[Tensor, "N"]
    prompt_index: Int[Tensor, "N"]
    prompt_ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tv)

    def take(self, rows: Tensor) -> "TraceTensors":
        """Positions by index or by mask; prompts keep their numbers."""
        tensors = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    @property
    def examples(self) -> Examples:
        """All positions, as heads learn from them."""
        return Examples(self.features, self.correctness, self.tv)


def load_split(traces: Traces, split: str, feature_set: str) -> TraceTensors:
    """Read a split of the traces and build its features.

    Raises:
        ValueError: the split is unknown or empty.
    """
    part = traces.split(split)
    return TraceTensors(
        features=build_features(part.stats, feature_set),
        correctness=part.correctness.float(),
        tv=part.stats.tv.float(),
        agree=part.stats.argmax_agree.float(),
        prompt_index=part.prompt_index,
        prompt_ids=part.prompt_ids,
    )


class Slices(IterableDataset[Examples]):
    """Batches of one split; shuffled anew each epoch, from the seed, if `shuffle`.

    With several processes each takes every n-th batch, and all take equally many.
    """

    def __init__(self, tensors: TraceTensors, batch_size: int, shuffle: bool, seed: int = 0) -> None:
        self.tensors, self.batch_size, self.shuffle, self.seed = tensors, batch_size, shuffle, seed
        self.epoch = 0

    def __len__(self) -> int:
        batches = -(-len(self.tensors) // self.batch_size)
        return max(batches // _world_size(), 1)

    def __iter__(self) -> Iterator[Examples]:
        data = self.tensors
        order = torch.arange(len(data))
        if self.shuffle:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(self.seed + self.epoch))
            self.epoch += 1
        chunks = order.split(self.batch_size)
        for turn in range(len(self)):
            rows = chunks[(turn * _world_size() + _rank()) % len(chunks)]
            yield Examples(data.features[rows], data.correctness[rows], data.tv[rows])


class TraceDataModule(pl.LightningDataModule):
    """Reads traces once and serves their train and validation splits.

    Args:
        traces: folder that `speccascade collect` wrote.
        batch_size: positions a step.
        feature_set: which features to build; the head's own.
        train_split: split to learn from.
        validation_split: split for early stopping, the choice of the checkpoint and the calibration.
        calibration_share: share of its documents that serve the calibration alone: what early stopping has not seen can
            bound a loss of quality. 0 calibrates on all of it, and bounds are then approximate.
        seed: of the order of positions.
    """

    def __init__(
        self,
        traces: str = "runs/demo/traces",
        batch_size: int = 4096,
        feature_set: str = "verified",
        train_split: str = "train",
        validation_split: str = "validation",
        calibration_share: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        self.save_hyperparameters()
        self.traces_dir, self.batch_size, self.feature_set = Path(traces), batch_size, feature_set
        self.train_split, self.validation_split, self.seed = train_split, validation_split, seed
        self.calibration_share = calibration_share
        self.train: TraceTensors | None = None
        self.validation: TraceTensors | None = None

    def setup(self, stage: str | None = None) -> None:
        """Load both splits, once.

        Raises:
            FileNotFoundError: there are no traces.
            ValueError: they are damaged, a split is empty, or a prompt stands in both splits.
        """
        if self.train is not None:
            return
        traces = Traces.open(self.traces_dir)
        self.train = load_split(traces, self.train_split, self.feature_set)
        self.validation = load_split(traces, self.validation_split, self.feature_set)
        shared = set(self.train.prompt_ids) & set(self.validation.prompt_ids)
        if shared:
            raise ValueError(
                f"traces: {len(shared)} prompts stand both in {self.train_split!r} and in {self.validation_split!r}; "
                "a router must be judged on prompts that it never saw"
            )
        self.validation, _ = divide(self.validation, self.calibration_share)

    def normalisation(self) -> tuple[Float[Tensor, "F"], Float[Tensor, "F"]]:
        """Mean and deviation of every training feature, missing values (NaN) left out."""
        assert self.train is not None, "setup comes first"
        features = self.train.features.double()
        known = ~features.isnan()
        counts = known.sum(dim=0).clamp_min(1)
        mean = features.nan_to_num(0.0).sum(dim=0) / counts
        spread = torch.where(known, features - mean, 0.0).square().sum(dim=0) / counts
        return mean.float(), spread.sqrt().float()

    def train_dataloader(self) -> DataLoader[Examples]:
        """Shuffled training batches."""
        assert self.train is not None, "setup comes first"
        return DataLoader(Slices(self.train, self.batch_size, shuffle=True, seed=self.seed), batch_size=None)

    def val_dataloader(self) -> DataLoader[Examples]:
        """Validation batches in order."""
        assert self.validation is not None, "setup comes first"
        return DataLoader(Slices(self.validation, 1 << 16, shuffle=False), batch_size=None)


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
