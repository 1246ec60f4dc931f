"""A trace folder in numbers: how good the two models are, where they differ, how far their confidence can be trusted.

Rows are read in batches and added up, so memory does not grow with their number; a folder whose collection is
unfinished is summarised as far as it is readable. Loads no model, draws nothing: see `data.plots`.

Shapes: ``N`` position, ``B`` bin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from .calibration import BINS, calibration_sums, error_of_sums
from .manifest import MANIFEST, PLAN, TracePlan, read_plan
from .shards import check_shard
from .traces import Traces

__all__ = ["HISTOGRAMS", "SplitTotals", "TraceSummary", "describe", "plain_lines", "summarise", "tabulate"]

BATCH_ROWS = 1 << 14

HISTOGRAM_BINS = 40

HISTOGRAMS: dict[str, tuple[float, float]] = {
    "tv": (0.0, 1.0),
    "draft_max": (0.0, 1.0),
    "verifier_max": (0.0, 1.0),
    "gap": (-1.0, 1.0),
    "draft_loss": (0.0, 10.0),
    "verifier_loss": (0.0, 10.0),
}
"""What is counted in bins, and between which ends; what lies beyond an end counts in the bin beside it. ``gap`` is
max p° - max q°; a loss is -ln of the label's probability, in nats."""

_STATS = ("tv", "draft_max", "verifier_max", "argmax_agree", "q_label", "p_label")
_NEEDED = ("prompt_id", "split", "label", "topk_ids", "topk_q", "topk_p", *_STATS)
_OPTIONAL = ("draft_index", "accepted", "deferred", "answer_changed")

TABLE = (
    ("prompts", "prompts", ",.0f"),
    ("positions", "positions", ",.0f"),
    ("acc q", "draft_accuracy", ".3f"),
    ("acc p", "verifier_accuracy", ".3f"),
    ("differ", "disagreement", ".3f"),
    ("q only", "draft_only_right", ".3f"),
    ("p only", "verifier_only_right", ".3f"),
    ("TV", "mean_tv", ".3f"),
    ("ECE q", "draft_calibration_error", ".3f"),
    ("ECE p", "verifier_calibration_error", ".3f"),
    ("accept", "acceptance", ".3f"),
    ("defer", "deferral", ".3f"),
    ("kept", "kept_block_length", ".2f"),
    ("tried", "counterfactuals", ",.0f"),
    ("changed", "answers_changed", ".3f"),
)
"""Columns of the table: title, key of `SplitTotals.numbers`, format. A column that no split has is left out."""

Array = NDArray[Any]


class SplitTotals:
    """What is counted of one split: sums, histograms and calibration bins, fed in any pieces.

    `counts` holds sums over positions; `histograms` counts ``[B]`` by the names of `HISTOGRAMS`; `calibration` the sums
    ``[3, B]`` of `data.calibration`, by model.
    """

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}
        self.histograms = {name: np.zeros(HISTOGRAM_BINS, dtype=np.int64) for name in HISTOGRAMS}
        self.calibration = {name: torch.zeros(3, BINS, dtype=torch.float64) for name in ("draft", "verifier")}
        self._closed_prompts = 0
        self._prompts: set[str] = set()

    @property
    def positions(self) -> int:
        """Rows counted so far."""
        return int(self.counts.get("positions", 0))

    @property
    def has_truth(self) -> bool:
        """Whether labels are the truth; in a cascade they are the verifier's own choice."""
        return not self.counts.get("drafted")

    @property
    def prompts(self) -> int:
        """Prompts counted so far."""
        return self._closed_prompts + len(self._prompts)

    def update(self, batch: pa.RecordBatch) -> None:
        """Count the rows of one batch of trace columns, all of this split; those of a cascade where they are there."""
        self._prompts.update(batch.column("prompt_id").unique().to_pylist())
        floats = {name: _numbers(batch, name).astype(np.float64) for name in _STATS}
        label, ids = _numbers(batch, "label"), batch.column("topk_ids")
        right_q, right_p = (label == _argmax(ids, batch.column(name)) for name in ("topk_q", "topk_p"))
        differ = floats["argmax_agree"] == 0
        self._count("positions", len(label))
        self._count("draft_right", right_q.sum())
        self._count("verifier_right", right_p.sum())
        self._count("differ", differ.sum())
        self._count("draft_only_right", (right_q & differ).sum())
        self._count("verifier_only_right", (right_p & differ).sum())
        self._count("tv", floats["tv"].sum())
        for model, right in (("draft", right_q), ("verifier", right_p)):
            confidence = torch.from_numpy(floats[f"{model}_max"])
            self.calibration[model] += calibration_sums(confidence, torch.from_numpy(right))
        self._fill_histograms(floats)
        self._count_cascade(batch)

    def close_shard(self) -> None:
        """End a shard: since no prompt stands in two, its ids need not be remembered any longer."""
        self._closed_prompts += len(self._prompts)
        self._prompts = set()

    def add(self, other: SplitTotals) -> None:
        """Count everything that another split counted."""
        for name, amount in other.counts.items():
            self._count(name, amount)
        for name in self.histograms:
            self.histograms[name] += other.histograms[name]
        for name in self.calibration:
            self.calibration[name] += other.calibration[name]
        self._closed_prompts += other.prompts

    def numbers(self) -> dict[str, float]:
        """Counts, accuracies of the argmax, disagreement, mean TV, calibration errors; of a cascade what it did.

        ``acceptance`` and ``deferral`` are shares of the drafted tokens that are rows here, ``kept_block_length`` the
        accepted tokens a drafted block (the verifier's own token left out), ``answers_changed`` a share of the
        ``counterfactuals`` tried. There labels are the verifier's own choice, so accuracies would say nothing.
        """
        counts, positions = self.counts, max(self.positions, 1)
        numbers = {
            "prompts": float(self.prompts),
            "positions": float(self.positions),
            "disagreement": counts.get("differ", 0) / positions,
            "mean_tv": counts.get("tv", 0) / positions,
        }
        if self.has_truth:
            numbers |= {
                "draft_accuracy": counts.get("draft_right", 0) / positions,
                "verifier_accuracy": counts.get("verifier_right", 0) / positions,
                "draft_only_right": counts.get("draft_only_right", 0) / positions,
                "verifier_only_right": counts.get("verifier_only_right", 0) / positions,
                "draft_calibration_error": float(error_of_sums(self.calibration["draft"])),
                "verifier_calibration_error": float(error_of_sums(self.calibration["verifier"])),
            }
        else:
            numbers["acceptance"] = counts["accepted"] / counts["drafted"]
            numbers["deferral"] = counts["deferred"] / counts["drafted"]
            numbers["kept_block_length"] = counts["accepted"] / max(counts["blocks"], 1)
        if "tried" in counts:
            numbers["counterfactuals"] = float(counts["tried"])
            if counts["tried"]:
                numbers["answers_changed"] = counts["changed"] / counts["tried"]
        return numbers

    def _count(self, name: str, amount: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + float(amount)

    def _fill_histograms(self, floats: dict[str, Array]) -> None:
        tiny = np.finfo(np.float64).tiny
        values = {
            **{name: floats[name] for name in ("tv", "draft_max", "verifier_max")},
            "gap": floats["verifier_max"] - floats["draft_max"],
            "draft_loss": -np.log(np.maximum(floats["q_label"], tiny)),
            "verifier_loss": -np.log(np.maximum(floats["p_label"], tiny)),
        }
        for name, (low, high) in HISTOGRAMS.items():
            place = np.floor((values[name] - low) / (high - low) * HISTOGRAM_BINS).astype(np.int64)
            place = place.clip(0, HISTOGRAM_BINS - 1)
            self.histograms[name] += np.bincount(place, minlength=HISTOGRAM_BINS)

    def _count_cascade(self, batch: pa.RecordBatch) -> None:
        if "accepted" in batch.schema.names:
            place = _numbers(batch, "draft_index")
            self._count("drafted", (place >= 0).sum())
            self._count("blocks", (place == 0).sum())
            for name in ("accepted", "deferred"):
                flags = batch.column(name).fill_null(False).to_numpy(zero_copy_only=False)
                self._count(name, (flags & (place >= 0)).sum())
        if "answer_changed" in batch.schema.names:
            changed = batch.column("answer_changed")
            self._count("tried", len(changed) - changed.null_count)
            self._count("changed", changed.fill_null(False).to_numpy(zero_copy_only=False).sum())


@dataclass(frozen=True)
class TraceSummary:
    """What a trace folder holds, finished or not.

    Args:
        folder: where it lies.
        plan: how it was made.
        finished: whether its manifest is there.
        shards: how many shards were read.
        planned_shards: how many there are to be.
        size: bytes of the shards read.
        splits: what was counted, by split; those without rows are left out.
        unreadable: one sentence for each shard of an unfinished folder that could not be read.
    """

    folder: Path
    plan: TracePlan
    finished: bool
    shards: int
    planned_shards: int
    size: int
    splits: dict[str, SplitTotals]
    unreadable: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Positions of all splits."""
        return sum(totals.positions for totals in self.splits.values())

    @property
    def bytes_per_position(self) -> float:
        """Bytes on disk a position; NaN where there is none."""
        return self.size / self.rows if self.rows else float("nan")

    def to_record(self) -> dict[str, Any]:
        """Everything as one object that JSON can hold; numbers by split."""
        names = ("drafter", "verifier", "dtype", "temperature", "top_k", "source")
        return {
            "folder": str(self.folder),
            "finished": self.finished,
            **{name: getattr(self.plan, name) for name in names},
            "prompts": self.plan.prompts.get("source"),
            "rows": self.rows,
            "shards": self.shards,
            "planned_shards": self.planned_shards,
            "bytes_per_position": self.bytes_per_position if self.rows else None,
            "splits": {name: totals.numbers() for name, totals in self.splits.items()},
            "unreadable": list(self.unreadable),
        }

    def head(self) -> list[str]:
        """Say in a few lines what the folder is, its state first."""
        plan = self.plan
        lines = [f"Traces in {self.folder}: {self.rows:,} positions, {self.shards:,} shards"]
        if self.rows:
            lines[0] += f", {self.bytes_per_position:,.0f} bytes a position"
        if not self.finished:
            lines.append(
                f"  unfinished: {MANIFEST} is missing, {self.shards:,} of {self.planned_shards:,} shards are there"
            )
        lines += [f"  left out: {reason}" for reason in self.unreadable]
        lines.append(f"  drafter {plan.drafter}, verifier {plan.verifier}, {plan.dtype}")
        lines.append(
            f"  source {plan.source}, prompts {plan.prompts.get('source')}, temperature {plan.temperature:g}, "
            f"top_k {plan.top_k}"
        )
        return lines


def summarise(folder: str | Path) -> TraceSummary:
    """Read a trace folder through and count, whether its collection is finished or not.

    Raises:
        FileNotFoundError: the folder holds no traces, or a shard of a finished one is missing.
        ValueError: a shard of a finished folder is damaged or foreign, or its manifest is; the message names it.
    """
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        return _summarise_finished(Traces.open(folder))
    plan = read_plan(folder)
    if plan is None:
        raise FileNotFoundError(f"traces: neither {MANIFEST} nor {PLAN} in {folder}: no traces there")
    readable, unreadable = [], []
    for path in sorted(folder.glob("*.parquet")):
        index = re.fullmatch(r"part-(\d{5,})", path.stem)
        try:
            check_shard(path, int(index[1]) if index else -1, plan.digest)
            readable.append(path)
        except ValueError as error:
            unreadable.append(str(error))
    planned = plan.shard_count
    return _summarise_paths(folder, plan, readable, False, planned, tuple(unreadable))


def describe(traces: Traces) -> str:
    """Say what a trace folder holds, as lines of text for a batch log."""
    return "\n".join(plain_lines(_summarise_finished(traces)))


def plain_lines(summary: TraceSummary) -> list[str]:
    """Head and table as lines of fixed width."""
    titles, rows = tabulate(summary)
    lines = summary.head()
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for cells in (titles, *rows) if rows else ():
        padded = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join([cells[0].ljust(widths[0]), *padded]))
    return lines


def tabulate(summary: TraceSummary) -> tuple[list[str], list[list[str]]]:
    """Titles and one row of texts a split; columns that no split has are left out."""
    numbers = {name: totals.numbers() for name, totals in summary.splits.items()}
    shown = [column for column in TABLE if any(column[1] in row for row in numbers.values())]
    rows = [
        [name, *(format(row[key], form) if key in row else "-" for _, key, form in shown)]
        for name, row in numbers.items()
    ]
    return ["split", *(title for title, _, _ in shown)], rows


def _summarise_finished(traces: Traces) -> TraceSummary:
    shards = traces.manifest.shards
    paths = [traces.folder / shard.file for shard in shards]
    return _summarise_paths(traces.folder, traces.manifest.plan, paths, True, len(shards))


def _summarise_paths(
    folder: Path, plan: TracePlan, paths: list[Path], finished: bool, planned: int, unreadable: tuple[str, ...] = ()
) -> TraceSummary:
    splits = {name: SplitTotals() for name in plan.collected}
    for path in paths:
        for name, batch in _by_split(_read_batches(path)):
            splits[name].update(batch)
        for totals in splits.values():
            totals.close_shard()
    size = sum(path.stat().st_size for path in paths)
    filled = {name: totals for name, totals in splits.items() if totals.positions}
    return TraceSummary(folder, plan, finished, len(paths), planned, size, filled, unreadable)


def _read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the needed columns of a shard, so many rows at once."""
    with pq.ParquetFile(path) as file:
        there = set(file.schema_arrow.names)
        yield from file.iter_batches(BATCH_ROWS, columns=[*_NEEDED, *(name for name in _OPTIONAL if name in there)])


def _by_split(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, pa.RecordBatch]]:
    for batch in batches:
        codes = batch.column("split").indices.to_numpy()
        names = batch.column("split").dictionary.to_pylist()
        for code in np.unique(codes):
            yield names[code], batch.filter(pa.array(codes == code))


def _numbers(batch: pa.RecordBatch, name: str) -> Array:
    return np.asarray(batch.column(name).to_numpy(zero_copy_only=False))


def _argmax(ids: pa.ListArray, probs: pa.ListArray) -> Array:
    """Id ``[N]`` of the largest probability of each row; ids ascend, so among equals it is the lowest."""
    lengths = np.diff(ids.offsets.to_numpy())
    values, flat_ids = probs.flatten().to_numpy(), ids.flatten().to_numpy()
    starts = np.concatenate([[0], lengths.cumsum()[:-1]])
    row = np.arange(len(lengths)).repeat(lengths)
    largest = np.flatnonzero(values == np.maximum.reduceat(values, starts)[row])
    first = largest[np.unique(row[largest], return_index=True)[1]]
    return np.asarray(flat_ids[first])
