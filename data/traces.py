"""A trace folder: Parquet shards and the manifest that vouches for them, opened only when every shard is as recorded.

`Traces.open(folder).split("train")` gives tensors; the statistics come back as the same `Stats` that the engine uses
live. Knows nothing of models: who made the rows, and how, is in the manifest.

Shapes: ``N`` position, ``K`` slot of the top-k union (padded: id -1, probability 0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn import functional

from ..cascade.leading import Leading, order_ties
from ..cascade.statistics import STAT_FIELDS, Stats
from ..router.checks import unknown_name
from .manifest import MANIFEST, Manifest
from .pairs import file_digest
from .shards import CASCADE_COLUMNS, EXPECTED_GAIN, HIDDEN_COLUMNS, OUTCOME_COLUMNS, SCHEMA, read_rows

__all__ = ["TraceSplit", "Traces", "find_finished"]


@dataclass(frozen=True)
class TraceSplit:
    """All positions of one split, in the order of collection.

    Args:
        prompt_ids: one id a prompt.
        prompt_index: ``[N]`` long, index into `prompt_ids`: the unit of every bootstrap and split.
        position: ``[N]`` long, index of the label in its whole sequence.
        label: ``[N]`` long, the true next token; in speculative runs the verifier's choice.
        token: ``[N]`` long, what the drafter proposes (teacher-forced: argmax of q°).
        stats: every `Stats` field, ``[N]`` float32; its `leading` comes from the top-k columns, where these hold raw
            confidences, and its `hidden` (float16) was read only if asked for.
        q_label: q(label) ``[N]``, processed as sampled from.
        p_label: p(label) ``[N]``.
        topk_ids: ``[N, K]`` long, ascending, padded with -1: the union of both models' most probable tokens.
        topk_q: q at those ids ``[N, K]``, padded with 0; what is missing to 1 is the tail.
        topk_p: p at those ids.
        temperature: what q and p were processed with; None where it is not known.
        top_k: how many tokens of each model the union holds; None where it is not known.
        block: ``[N]`` long, the round that drafted the token. This and what follows up to ``p_token_raw`` is None
            unless the positions come from speculative runs (source 'cascade').
        draft_index: ``[N]`` long, its place in the drafted block.
        accepted: ``[N]`` bool, whether it was kept.
        deferred: ``[N]`` bool, what the rule of that run decided.
        q_token: q at ``token`` ``[N]``.
        p_token: p there.
        q_token_raw: q° there.
        p_token_raw: p° there.
        outcomes: ``[N, 2]``, score of the answer that the verifier ends after the drafter's choice and after its own,
            NaN where none was tried; None unless counterfactuals were collected.
        answer_changed: ``[N]`` bool, whether the two scores differ; False where none was tried.
    """

    prompt_ids: tuple[str, ...]
    prompt_index: Tensor
    position: Tensor
    label: Tensor
    token: Tensor
    stats: Stats
    q_label: Tensor
    p_label: Tensor
    topk_ids: Tensor
    topk_q: Tensor
    topk_p: Tensor
    temperature: float | None = None
    top_k: int | None = None
    block: Tensor | None = None
    draft_index: Tensor | None = None
    accepted: Tensor | None = None
    deferred: Tensor | None = None
    q_token: Tensor | None = None
    p_token: Tensor | None = None
    q_token_raw: Tensor | None = None
    p_token_raw: Tensor | None = None
    outcomes: Tensor | None = None
    answer_changed: Tensor | None = None

    def __len__(self) -> int:
        return len(self.label)

    @cached_property
    def draft_argmax(self) -> Tensor:
        """Argmax of q ``[N]`` long; among equals the lowest id."""
        return self._argmax(self.topk_q)

    @cached_property
    def verifier_argmax(self) -> Tensor:
        """Argmax of p ``[N]`` long; among equals the lowest id."""
        return self._argmax(self.topk_p)

    @cached_property
    def correctness(self) -> Tensor:
        """How good each model is at each position ``[N, 2, 2]`` (loss, model).

        Loss 'zero_one': 1 where the label is the model's argmax. Loss 'sampled': the label's probability. Model: q, p.
        """
        right_q, right_p = self.label == self.draft_argmax, self.label == self.verifier_argmax
        zero_one = torch.stack([right_q.float(), right_p.float()], dim=-1)
        return torch.stack([zero_one, torch.stack([self.q_label, self.p_label], dim=-1)], dim=1)

    def sequences(self) -> Tensor:
        """Index ``[P, L]`` long into the positions: a row an answer, its columns one after the other in the text.

        -1 where nothing was logged: behind an answer's end, and at bonus tokens, which no draft stood for. A prompt
        that was answered twice (in a merged set) has two rows.
        """
        begins = torch.ones(len(self), dtype=torch.bool)
        begins[1:] = (self.prompt_index.diff() != 0) | (self.position.diff() <= 0)
        row = begins.long().cumsum(0) - 1
        column = self.position - self.position[begins][row]
        index = torch.full((int(row[-1]) + 1, int(column.amax()) + 1), -1)
        index[row, column] = torch.arange(len(self))
        return index

    def _argmax(self, probs: Tensor) -> Tensor:
        # Padding holds 0 and stands last, so it never precedes a real maximum.
        return self.topk_ids.gather(1, probs.argmax(dim=1, keepdim=True)).squeeze(1)


class Traces:
    """An opened trace folder: ``Traces.open("runs/demo/traces").split("train").stats.tv``."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: str | Path, check: bool = True) -> Traces:
        """Open a folder; with `check`, read every shard and compare its digest.

        Raises:
            FileNotFoundError: no manifest, or a shard is missing.
            ValueError: a shard is damaged or foreign, or the schema version is another; the message names it.
        """
        folder = Path(folder)
        manifest = Manifest.read(folder)
        known = {shard.file for shard in manifest.shards}
        foreign = sorted(path.name for path in folder.glob("*.parquet") if path.name not in known)
        if foreign:
            raise ValueError(f"traces: {folder / foreign[0]} is foreign: not in {MANIFEST}; move it away")
        for shard in manifest.shards:
            path = folder / shard.file
            if not path.is_file():
                raise FileNotFoundError(f"traces: {path} is missing; run collect again to restore it")
            if check and file_digest(path) != shard.sha256:
                raise ValueError(f"traces: {path} is damaged or foreign: its digest is not the one in {MANIFEST}")
        return cls(folder, manifest)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that hold rows."""
        return tuple(name for name, rows in self.manifest.split_rows.items() if rows)

    @property
    def hidden_sizes(self) -> tuple[int, int]:
        """How long the drafter's and the verifier's hidden states are.

        Raises:
            ValueError: the traces hold none.
        """
        path = self.folder / self.manifest.shards[0].file
        _columns_of(path, hidden=True)
        draft, verifier = (pq.read_schema(path).field(name).type.list_size for name in HIDDEN_COLUMNS)
        return draft, verifier

    def split(self, name: str, origin: str | None = None, hidden: bool = False) -> TraceSplit:
        """Load one split as tensors.

        Args:
            name: the split.
            origin: of a merged set, take only the rows of this one.
            hidden: whether to read both models' hidden states into ``stats.hidden`` too: 2·H bytes a position.

        Raises:
            ValueError: no such split, or an empty one; no such origin, or one without rows in the split; hidden states
                that were not collected.
        """
        self._check_split(name)
        shards = self.manifest.shards if origin is None else self.manifest.shards_of(origin)
        files = [self.folder / shard.file for shard in shards]
        if not files:
            raise ValueError(f"origin: expected one with rows in split {name!r}, got {origin!r}, which has none")
        table = read_rows(files, split=name, columns=_columns_of(files[0], hidden))
        if not table.num_rows:
            raise ValueError(f"origin: expected one with rows in split {name!r}, got {origin!r}, which has none")
        return self._tensors(table, hidden)

    def scan(
        self, name: str, rows: int = 1 << 16, order: Sequence[int] | None = None, hidden: bool = False
    ) -> Iterator[TraceSplit]:
        """Load one split in pieces, so that memory stays bounded whatever its size; together they are `split(name)`.

        Args:
            name: the split.
            rows: rows that are read at a time; a piece holds those of them that are the split's.
            order: the shards to read, by their place in the manifest; all of them in order by default.
            hidden: as in `split`.

        Raises:
            ValueError: no such split, or an empty one; hidden states that were not collected.
        """
        self._check_split(name)
        shards = self.manifest.shards
        for index in range(len(shards)) if order is None else order:
            path = self.folder / shards[index].file
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(rows, columns=_columns_of(path, hidden)):
                    table = pa.Table.from_batches([batch]).filter(pc.field("split") == name)
                    if table.num_rows:
                        yield self._tensors(table, hidden)

    def _check_split(self, name: str) -> None:
        if name not in self.splits:
            raise ValueError(
                unknown_name("split", name, self.splits)
                + f" (in {self.folder}; prompts.splits decides when they are collected)"
            )

    def _tensors(self, table: pa.Table, hidden: bool) -> TraceSplit:
        ids, order = np.unique(table["prompt_id"].combine_chunks().indices.to_numpy(), return_inverse=True)
        names = table["prompt_id"].combine_chunks().dictionary.take(pa.array(ids)).to_pylist()
        width = max(int(pc.max(pc.list_value_length(table["topk_ids"])).as_py()), 1)
        tops = [_padded(table, "topk_ids", width, -1).long(), *(_padded(table, n, width, 0.0) for n in _TOP_PROBS)]
        plan = self.manifest.plan
        logged = _LoggedTops(tops[0], tops[1], tops[2], plan.temperature, plan.top_k)
        return TraceSplit(
            prompt_ids=tuple(names),
            prompt_index=torch.from_numpy(order.astype(np.int64)),
            position=_column(table, "position").long(),
            label=_column(table, "label").long(),
            token=_column(table, "token").long(),
            stats=Stats.from_columns(
                {name: _column(table, name) for name in STAT_FIELDS},
                logged.leading,
                (_vectors(table, HIDDEN_COLUMNS[0]), _vectors(table, HIDDEN_COLUMNS[1])) if hidden else None,
                _gain_of(table, logged),
            ),
            q_label=_column(table, "q_label"),
            p_label=_column(table, "p_label"),
            topk_ids=tops[0],
            topk_q=tops[1],
            topk_p=tops[2],
            temperature=plan.temperature,
            top_k=plan.top_k,
            **_optional_columns(table),
        )


_TOP_PROBS = ("topk_q", "topk_p")


@dataclass(frozen=True)
class _LoggedTops:
    """What `Stats` knows of likely tokens, from the top-k columns ``[N, K]``, worked out when asked for.

    The union of both models' ``top_k`` tokens holds each one's k most probable for any k up to ``top_k``. The columns
    hold q and p, which are the raw confidences only where the trace was made at temperature 1.
    """

    ids: Tensor
    q: Tensor
    p: Tensor
    temperature: float | None
    top_k: int | None

    def expected_gain(self) -> Tensor:
        """`Stats.expected_gain` ``[N]`` over the logged tokens, for traces that lack it."""
        self._check_raw("expected_gain")
        return (self.p * (self.p - self.q)).sum(dim=-1)

    def leading(self, count: int) -> Leading:
        """`Stats.leading`, each ``[N, count]``."""
        self._check_raw("leading")
        if self.top_k is None or count > self.top_k:
            raise ValueError(f"leading: expected at most the logged top_k of {self.top_k} tokens, got {count}")
        sides = [*self._order(self.q, self.p, count), *self._order(self.p, self.q, count)]
        short = max(0, count - self.ids.shape[1])
        return Leading(*(functional.pad(values, (0, short)) for values in sides))

    def _check_raw(self, wanted: str) -> None:
        if self.temperature != 1:
            raise ValueError(
                f"{wanted}: expected a trace of temperature 1, whose top-k columns are raw confidences, "
                f"got temperature {self.temperature}"
            )

    def _order(self, own: Tensor, other: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """One model's largest probabilities, and the other's at those tokens; padding holds 0 in both, and is last."""
        slots = torch.arange(self.ids.shape[1]).expand_as(self.ids)  # their ids ascend
        values, chosen = order_ties(own, slots, count)
        return values, other.gather(-1, chosen)


def find_finished(folder: Path) -> Manifest | None:
    """The manifest, if it vouches for files that are all there; every one of them is checked.

    Raises:
        ValueError: as `Traces.open`.
    """
    if (folder / MANIFEST).is_file() and all((folder / shard.file).is_file() for shard in Manifest.read(folder).shards):
        return Traces.open(folder).manifest
    return None


def _columns_of(path: Path, hidden: bool) -> list[str]:
    """What to read of a shard and its like; hidden states only where asked for."""
    held = set(pq.read_schema(path).names)
    if hidden and not held.issuperset(HIDDEN_COLUMNS):
        raise ValueError(f"hidden: expected traces collected with hidden=true, {path.parent} holds none")
    optional = (EXPECTED_GAIN.name, *CASCADE_COLUMNS.names, *OUTCOME_COLUMNS.names)
    return [*SCHEMA.names, *(name for name in optional if name in held), *(HIDDEN_COLUMNS if hidden else ())]


def _column(table: pa.Table, name: str) -> Tensor:
    return torch.from_numpy(np.array(table[name].combine_chunks().to_numpy(zero_copy_only=False)))


def _gain_of(table: pa.Table, logged: _LoggedTops) -> Callable[[], Tensor]:
    """`Stats.expected_gain` as it was logged, or from the top-k columns."""
    if EXPECTED_GAIN.name in table.column_names:
        return lambda: _column(table, EXPECTED_GAIN.name)
    return logged.expected_gain


def _optional_columns(table: pa.Table) -> dict[str, Tensor]:
    """What only some traces hold, by the names of `TraceSplit`."""
    columns: dict[str, Tensor] = {}
    if set(CASCADE_COLUMNS.names) <= set(table.column_names):
        columns |= {name: _column(table, name) for name in CASCADE_COLUMNS.names}
        columns |= {name: _column(table, name).long() for name in ("block", "draft_index")}
    if set(OUTCOME_COLUMNS.names) <= set(table.column_names):
        columns["outcomes"] = torch.stack([_column(table, name) for name in ("outcome_q", "outcome_p")], dim=-1)
        changed = pc.fill_null(table["answer_changed"], False).combine_chunks()
        columns["answer_changed"] = torch.from_numpy(np.array(changed.to_numpy(zero_copy_only=False)))
    return columns


def _padded(table: pa.Table, name: str, width: int, fill: float) -> Tensor:
    lists = table[name].combine_chunks()
    lengths = np.diff(lists.offsets.to_numpy())
    values = lists.flatten().to_numpy(zero_copy_only=False)
    out = np.full((len(lengths), width), fill, dtype=values.dtype)
    out[np.arange(width) < lengths[:, None]] = values
    return torch.from_numpy(out)


def _vectors(table: pa.Table, name: str) -> Tensor:
    """A column of vectors ``[N, H]``, as they were stored."""
    lists = table[name].combine_chunks()
    values = np.array(lists.flatten().to_numpy(zero_copy_only=False))
    return torch.from_numpy(values.reshape(len(lists), lists.type.list_size))
