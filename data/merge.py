"""Several trace sets of one pair made into one, prompt by prompt, so that a router can learn from all of them.

What stands in two sets is kept once. Each shard of the merged set comes from one shard of one input, so that one shard
is in memory at a time and the manifest can say which shards came from where. The bytes depend on the inputs and their
order alone: a merge that was killed and started again ends with the same files as an unbroken one.

Knows nothing of models. Shapes: ``N`` position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .. import __version__
from .folders import sole_writer, write_text
from .manifest import MANIFEST, Manifest, Origin, TracePlan, record_shards
from .plan import adopt_plan, flatten
from .progress import Progress, announce
from .prompts import document_of
from .shards import check_shard, read_rows, shard_name, write_shard
from .summary import describe
from .traces import Traces, find_finished

__all__ = ["merge"]

ALIKE = (
    "drafter_digest",
    "verifier_digest",
    "vocabulary_fingerprint",
    "vocab_size",
    "dtype",
    "temperature",
    "top_k",
    "source",
    "hidden",
    "cascade",
    "splits",
)
"""Keys of the plan that all sets must share, beside the schema version, which a manifest is refused for when read."""


@dataclass(frozen=True)
class _Piece:
    """One shard of an input and what of it is kept.

    Args:
        path: the shard.
        rows: its positions, before anything is left out.
        origin: the set that it came from, as its folder's manifest has it.
        names: id in the merged set of every prompt that is kept.
    """

    path: Path
    rows: int
    origin: Origin
    names: dict[str, str]


def merge(folders: Sequence[str | Path], out: str | Path) -> Manifest:
    """Write one trace set that holds the prompts of all given ones; finished shards of an earlier try are kept.

    A prompt (its id without '-N') with the labels and positions of an earlier one is left out, even if its instruction
    was worded differently; a known id with another reference goes under the next free '-N', which stays in the split of
    the prompt.

    Args:
        folders: finished trace folders of one pair, logged under the same settings; their prompts may differ.
        out: folder of the merged set, outside of the others.

    Raises:
        ValueError: fewer than two folders, one given twice, `out` in one of them, a damaged shard, sets that differ in
            pair or settings (the key and both folders are named), or an `out` that holds something else.
        FileNotFoundError: a folder holds no traces, or unfinished ones.
        OSError: `out` cannot be written to, or another run is writing to it.
    """
    sources, target = [Path(folder) for folder in folders], Path(out)
    _check_folders(sources, target)
    sets = [Traces.open(source) for source in sources]
    for other in sets[1:]:
        _check_alike(sets[0], other)
    pieces = [piece for piece in _choose_prompts(sets) if piece.names]
    plan = _merge_plans([traces.manifest for traces in sets], pieces)
    with sole_writer(target):
        adopt_plan(target, plan)
        finished = find_finished(target)
        if finished is not None:
            announce(f"Traces in {target} are complete: {finished.rows:,} positions")
            return finished
        parts = [part for traces in sets for part in traces.manifest.parts]
        manifest = _write_pieces(pieces, parts, plan, target)
    announce(describe(Traces.open(target, check=False)))
    repeated = sum(traces.manifest.rows for traces in sets) - manifest.rows
    if repeated:
        announce(f"  {repeated:,} positions stood in more than one set and are kept once")
    return manifest


def _check_folders(folders: Sequence[Path], out: Path) -> None:
    if len(folders) < 2:
        raise ValueError(f"merge: expected at least two trace folders, got {', '.join(map(str, folders)) or 'none'}")
    resolved = [folder.resolve() for folder in folders]
    for number, folder in enumerate(folders):
        if resolved[number] in resolved[:number]:
            raise ValueError(f"merge: expected different folders, got {folder} twice")
        if resolved[number] in (out.resolve(), *out.resolve().parents):
            raise ValueError(f"out: expected a folder outside of what is merged, got {out}, which is in {folder}")


def _check_alike(first: Traces, other: Traces) -> None:
    one, two = (flatten({key: getattr(t.manifest.plan, key) for key in ALIKE}) for t in (first, other))
    for key in [*one, *two]:
        if one.get(key) != two.get(key):
            raise ValueError(
                f"merge: {first.folder} has {key} = {one.get(key)!r}, {other.folder} has {two.get(key)!r}; "
                "only sets of one pair under the same settings can be merged"
            )
    orders = [list(traces.manifest.plan.splits) for traces in (first, other)]
    if orders[0] != orders[1]:
        raise ValueError(
            f"merge: {first.folder} has its splits in the order {orders[0]}, {other.folder} in {orders[1]}; "
            "the order decides which prompt falls into which"
        )


class _Prompts:
    """What was seen so far: tells repeated prompts from new ones, and gives the new ones an id of their own."""

    def __init__(self) -> None:
        self._contents: set[tuple[str, bytes]] = set()
        self._taken: set[str] = set()

    def admit(self, prompt_id: str, content: bytes) -> str | None:
        """Return the id that a prompt goes by, or None where the same content is there already."""
        base = document_of(prompt_id)
        if (base, content) in self._contents:
            return None
        self._contents.add((base, content))
        name, number = prompt_id, 0
        while name in self._taken:
            number += 1
            name = f"{base}-{number}"
        self._taken.add(name)
        return name


def _choose_prompts(sets: Sequence[Traces]) -> Iterator[_Piece]:
    """Go through the ids, labels and positions of all shards, and decide for each prompt whether it stays."""
    prompts = _Prompts()
    for traces in sets:
        origin_of = {file: origin for origin in traces.manifest.parts for file in origin.shards}
        seen: set[str] = set()
        for shard in traces.manifest.shards:
            contents = _read_contents(traces.folder / shard.file)
            if not seen.isdisjoint(contents):
                repeated = next(name for name in contents if name in seen)
                raise ValueError(f"merge: {traces.folder / shard.file} repeats prompt {repeated} of an earlier shard")
            seen.update(contents)
            admitted = {name: prompts.admit(name, content) for name, content in contents.items()}
            names = {name: new for name, new in admitted.items() if new is not None}
            yield _Piece(traces.folder / shard.file, shard.rows, origin_of[shard.file], names)


def _read_contents(path: Path) -> dict[str, bytes]:
    """Digest of the positions and labels of each prompt of a shard, in the order of first appearance."""
    table = read_rows([path], columns=["prompt_id", "position", "label"])
    ids = table["prompt_id"].combine_chunks()
    codes, first = np.unique(ids.indices.to_numpy(), return_index=True)
    names = ids.dictionary.to_pylist()
    content = np.stack([table[name].to_numpy() for name in ("position", "label")], axis=1)
    order = np.argsort(ids.indices.to_numpy(), kind="stable")
    parts = np.split(content[order], np.searchsorted(ids.indices.to_numpy()[order], codes)[1:])
    by_code = dict(zip(codes.tolist(), parts, strict=True))
    return {
        names[code]: hashlib.sha256(by_code[code].astype("<i8").tobytes()).digest()
        for code in codes[np.argsort(first)].tolist()
    }


def _merge_plans(manifests: Sequence[Manifest], pieces: Sequence[_Piece]) -> TracePlan:
    plans = [manifest.plan for manifest in manifests]
    digests = [manifest.digest for manifest in manifests]
    sources = ", ".join(dict.fromkeys(part.source for manifest in manifests for part in manifest.parts))
    return replace(
        plans[0],
        code_version=__version__,
        device=", ".join(dict.fromkeys(plan.device for plan in plans)),
        collected=[name for name in plans[0].splits if any(name in plan.collected for plan in plans)],
        prompts={"source": f"merged: {sources}", "merged": digests},
        merged_shards=len(pieces),
        max_tokens=None if None in (cuts := [plan.max_tokens for plan in plans]) else max(filter(None, cuts)),
        batch_tokens=max(plan.batch_tokens for plan in plans),
        shard_prompts=max(plan.shard_prompts for plan in plans),
        examples=sum(len(piece.names) for piece in pieces),
        examples_digest=hashlib.sha256("".join(digests).encode()).hexdigest(),
    )


def _write_pieces(pieces: Sequence[_Piece], parts: Sequence[Origin], plan: TracePlan, out: Path) -> Manifest:
    """Write what is missing, shard by shard, and the manifest last."""
    paths = [out / shard_name(index) for index in range(len(pieces))]
    with Progress("Merging", sum(piece.rows for piece in pieces)) as progress:
        for index, (piece, path) in enumerate(zip(pieces, paths, strict=True)):
            if path.is_file():
                check_shard(path, index, plan.digest)
                progress.skip(piece.rows)
                continue
            table = _kept_rows(piece)
            write_shard(path, _columns(table), index, plan.digest)
            assert pq.read_schema(path).names == table.column_names, f"{path} lacks columns of {piece.path}"
            progress.advance(piece.rows)
    manifest = record_shards(plan, paths)
    manifest = replace(manifest, origins=_count_origins(pieces, parts, manifest))
    write_text(out / MANIFEST, manifest.to_json())
    return manifest


def _kept_rows(piece: _Piece) -> pa.Table:
    """Rows of the prompts that stay, under their new ids."""
    table = read_rows([piece.path])
    ids = table["prompt_id"].to_pylist()
    renamed = pa.array([piece.names[name] for name in ids if name in piece.names]).dictionary_encode()
    kept = table.filter(pa.array([name in piece.names for name in ids]))
    return kept.set_column(kept.column_names.index("prompt_id"), "prompt_id", renamed)


def _columns(table: pa.Table) -> dict[str, Any]:
    """The columns as `write_shard` takes them: texts as a list, hidden states as an array ``[N, H]``."""
    columns: dict[str, Any] = {name: table[name].combine_chunks() for name in table.column_names}
    for name, column in columns.items():
        if pa.types.is_dictionary(column.type):
            columns[name] = column.to_pylist()
        elif pa.types.is_fixed_size_list(column.type):
            columns[name] = column.flatten().to_numpy().reshape(-1, column.type.list_size)
    return columns


def _count_origins(pieces: Sequence[_Piece], parts: Sequence[Origin], manifest: Manifest) -> tuple[Origin, ...]:
    """Say which shards of the merged set came from which set; one that came in twice counts once."""
    found = {part.digest: replace(part, rows=0, shards=()) for part in parts}
    for piece, shard in zip(pieces, manifest.shards, strict=True):
        base = found[piece.origin.digest]
        found[base.digest] = replace(base, rows=base.rows + shard.rows, shards=(*base.shards, shard.file))
    return tuple(found.values())
