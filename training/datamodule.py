"""Traces to batches of `Examples`: which split, which labels, which weights, in memory or from disk.

Splits are those of the traces, made by prompt; a text that stands in two of them is refused.
"""

from pathlib import Path

import pytorch_lightning as pl
import torch
from jaxtyping import Float
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data.progress import announce, describe_bytes
from ..data.prompts import document_of
from ..data.traces import Traces
from ..router.checks import check_choice, check_range
from ..router.examples import Examples
from ..router.features import needs_hidden
from .batches import Scan, Sequences, Slices
from .holdout import divide
from .memory import free_memory
from .splits import (
    WEIGHTS,
    Reading,
    ScannedSplit,
    TraceTensors,
    bytes_a_position,
    read_pieces,
    read_split,
    some_positions,
)

__all__ = ["MEMORIES", "Slices", "TraceDataModule", "TraceTensors"]

MEMORIES = ("auto", "whole", "scan")

VALIDATION_BATCH = 1 << 16


class TraceDataModule(pl.LightningDataModule):
    """Reads traces once, or once an epoch, and serves their train and validation splits.

    Args:
        traces: folder that `speccascade collect` wrote.
        batch_size: positions a step, at most; for a head that reads order, about as many, padding included.
        feature_set: which features to build; the head's own.
        train_split: split to learn from.
        validation_split: split for early stopping, the choice of the checkpoint and the calibration.
        memory: `whole` keeps all features in memory; `scan` reads the shards anew each epoch and holds a block of
            262,144 positions, within which they are shuffled; `auto` is `whole` where both splits fit into a quarter
            of the free memory.
        weight: how much a training position counts: `position`, all alike; `prompt`, prompts alike whatever their
            length; `bootstrap`, as often as its prompt is drawn, with replacement, from the seed: one member of an
            ensemble, or one resample of an honest interval. Windows of one text count as one prompt. Validation counts
            positions alike.
        labels: `gold` judges each model by the reference's token; `outcome` by the score of the answer that its token
            led to, at the positions where counterfactuals were collected.
        calibration_share: share of the validation documents that serve the calibration alone: what early stopping has
            not seen can bound a loss of quality. 0 calibrates on all of them, and bounds are then approximate.
        seed: of the order of positions, and of the bootstrap.
        needs_candidates: give the likely tokens of both models, for heads that read them; decided by the head.
        sequences: give whole prompts in order, for heads that read order; decided by the head.

    Raises:
        ValueError: an unknown name, a size below 1, a share outside [0, 1], or a head that reads order beside `scan`.
    """

    def __init__(
        self,
        traces: str = "runs/demo/traces",
        batch_size: int = 4096,
        feature_set: str = "verified",
        train_split: str = "train",
        validation_split: str = "validation",
        memory: str = "auto",
        weight: str = "position",
        labels: str = "gold",
        calibration_share: float = 0.5,
        seed: int = 0,
        needs_candidates: bool = False,
        sequences: bool = False,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        check_range("calibration_share", calibration_share, 0, 1)
        check_choice("memory", memory, MEMORIES)
        check_choice("weight", weight, WEIGHTS)
        if sequences and memory == "scan":
            raise ValueError("memory: expected 'whole' or 'auto' for a head that reads order, got 'scan'")
        self.save_hyperparameters()
        self.traces_dir, self.batch_size, self.feature_set = Path(traces), batch_size, feature_set
        self.train_split, self.validation_split, self.seed = train_split, validation_split, seed
        self.memory, self.weight, self.sequences = memory, weight, sequences
        self.reading = Reading(feature_set, labels, needs_candidates, whole_prompts=sequences)
        self.calibration_share = calibration_share
        self.train: TraceTensors | ScannedSplit | None = None
        self.validation: TraceTensors | None = None
        self._training: Dataset[Examples] | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read both splits, once.

        Raises:
            FileNotFoundError: there are no traces.
            ValueError: they are damaged, lack what is asked for, a split is empty, or a text stands in both splits.
        """
        if self.train is not None:
            return
        traces = Traces.open(self.traces_dir)
        read = self._scan if self._reads_by_scan(traces) else self._load
        train, validation = read(traces, self.train_split), self._load(traces, self.validation_split)
        shared = _shared_documents(train.prompt_ids, validation.prompt_ids)
        if shared:
            raise ValueError(
                f"traces: {shared} prompts stand both in {self.train_split!r} and in {self.validation_split!r}; "
                "a router must be judged on prompts that it never saw"
            )
        self.train, (self.validation, _) = train, divide(validation, self.calibration_share)

    def normalisation(self) -> tuple[Float[Tensor, "F"], Float[Tensor, "F"]]:
        """Mean and deviation of every training feature, missing values (NaN) left out."""
        assert self.train is not None, "setup comes first"
        return self.train.normalisation()

    def preview(self, split: str = "validation", count: int = 1 << 16) -> Examples:
        """Some positions of ``train`` or ``validation``, the same in every process."""
        known = {"train": self.train, "validation": self.validation}[split]
        assert known is not None, "setup comes first"
        return some_positions(known, count)

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """Of both models' hidden states; empty for features that read none.

        Raises:
            FileNotFoundError: there are no traces.
            ValueError: they hold no hidden states.
        """
        if not needs_hidden(self.feature_set):
            return ()
        return Traces.open(self.traces_dir, check=False).hidden_sizes

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the pair shares."""
        return Traces.open(self.traces_dir, check=False).manifest.plan.vocab_size

    def frequent_tokens(self, least: int) -> Tensor:
        """Ids of the tokens that are a label or a model's choice at as many training positions, ascending."""
        assert self.train is not None, "setup comes first"
        counts = torch.zeros(self.vocab_size, dtype=torch.long)
        for piece in [self.train.examples] if isinstance(self.train, TraceTensors) else self.train.pieces():
            assert piece.candidates is not None and piece.tokens is not None and piece.truth is not None
            best = piece.candidates.argmax(dim=-2)
            named = torch.zeros(*piece.tokens.shape[:1], piece.tokens.shape[1] + 1, dtype=torch.bool)
            named.scatter_(1, torch.cat([best, piece.truth[:, None]], dim=1), True)  # each once; none: the last column
            counts += torch.bincount(piece.tokens[named[:, :-1]].long(), minlength=len(counts))
        return (counts >= least).nonzero()[:, 0]

    @property
    def top_k(self) -> int:
        """How many tokens of each model are candidates; 0 for heads that read none.

        Raises:
            FileNotFoundError: there are no traces.
        """
        return Traces.open(self.traces_dir, check=False).manifest.plan.top_k if self.reading.candidates else 0

    def train_dataloader(self) -> DataLoader[Examples]:
        """Shuffled training batches, in another order each epoch."""
        loader = self._loader(self.train, self.batch_size, shuffle=True)
        self._training = loader.dataset
        return loader

    def start_epoch(self, epoch: int) -> None:
        """Take the order of this epoch next: a resumed run asks for its batches before it knows where it stopped."""
        assert isinstance(self._training, Scan | Sequences | Slices), "train_dataloader comes first"
        self._training.epoch = epoch

    def val_dataloader(self) -> DataLoader[Examples]:
        """Validation batches in order."""
        return self._loader(self.validation, VALIDATION_BATCH, shuffle=False)

    def _loader(self, split: TraceTensors | ScannedSplit | None, size: int, shuffle: bool) -> DataLoader[Examples]:
        assert split is not None, "setup comes first"
        if isinstance(split, ScannedSplit):
            return DataLoader(Scan(split, size, shuffle, self.seed), batch_size=None)
        kind = Sequences if self.sequences else Slices
        return DataLoader(kind(split, size, shuffle, self.seed), batch_size=None)

    def _load(self, traces: Traces, split: str) -> TraceTensors:
        loaded = read_split(traces, split, self.reading)
        return loaded.weighted(self.weight, self.seed) if split == self.train_split else loaded

    def _scan(self, traces: Traces, split: str) -> ScannedSplit:
        weight = self.weight if split == self.train_split else "position"
        return ScannedSplit(traces, split, self.reading, weight, self.seed)

    def _reads_by_scan(self, traces: Traces) -> bool:
        """Whether to leave the splits on disk; `auto` is announced."""
        if self.memory != "auto" or self.sequences:
            return self.memory == "scan"
        rows = sum(traces.manifest.split_rows.get(name, 0) for name in {self.train_split, self.validation_split})
        if not rows:
            return False  # reading answers with the splits that there are
        size = rows * bytes_a_position(next(read_pieces(traces, self.train_split, self.reading, rows=1024)))
        free = free_memory()
        scans = free is not None and size > free / 4
        how = "read from disk each epoch, more than a quarter of what is free" if scans else "in memory"
        rank_zero_only(announce)(f"Traces: {rows:,} positions, {describe_bytes(size)} of features, {how}")
        return scans


def _shared_documents(train: tuple[str, ...], validation: tuple[str, ...]) -> int:
    return len(set(map(document_of, train)) & set(map(document_of, validation)))
