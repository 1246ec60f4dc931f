"""What a trace folder holds and how it was made: the plan, which is written first, and the manifest, written last.

Knows nothing of models and reads no position.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..router.checks import unknown_name
from .pairs import PairIdentity, file_digest
from .shards import SCHEMA_VERSION, read_rows

__all__ = ["MANIFEST", "PLAN", "Manifest", "Origin", "Shard", "TracePlan", "read_plan", "record_shards"]

MANIFEST = "manifest.json"
PLAN = "plan.json"


@dataclass(frozen=True)
class TracePlan:
    """Everything that decides the bytes of a trace; two runs with one plan may share a folder.

    ``top_k`` is how many tokens of each model are logged; ``examples_digest`` covers the token ids of all examples.
    """

    schema_version: int
    code_version: str
    source: str
    drafter: str
    verifier: str
    drafter_digest: str
    verifier_digest: str
    vocabulary_fingerprint: str
    vocab_size: int
    dtype: str
    device: str
    temperature: float
    top_k: int
    splits: dict[str, float]
    collected: list[str]
    prompts: dict[str, Any]
    max_tokens: int | None
    batch_tokens: int
    shard_prompts: int
    examples: int
    examples_digest: str
    hidden: bool = False
    cascade: dict[str, Any] | None = None
    merged_shards: int | None = None

    @property
    def shard_count(self) -> int:
        """How many shards the plan comes to; a merged set states it, since its shards are those of others."""
        return self.merged_shards or -(-self.examples // self.shard_prompts)

    @property
    def digest(self) -> str:
        """SHA-256 of the plan; the order of splits counts, since it decides who falls into which."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


@dataclass(frozen=True)
class Shard:
    """A shard as the manifest records it."""

    file: str
    rows: int
    sha256: str


@dataclass(frozen=True)
class Origin:
    """A trace set that became part of a merged one.

    Args:
        digest: the set's own digest.
        source: where its prompts came from.
        code_version: the release that collected it.
        rows: how many of its positions are here.
        shards: names of the shards here that hold them, and nothing else.
    """

    digest: str
    source: str
    code_version: str
    rows: int
    shards: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """What a trace folder holds and how it was made; written last. Only a merged set has `origins`."""

    plan: TracePlan
    shards: tuple[Shard, ...]
    rows: int
    split_rows: dict[str, int]
    split_prompts: dict[str, int]
    origins: tuple[Origin, ...] = ()

    @property
    def identity(self) -> PairIdentity:
        """The pair that the trace is about."""
        return PairIdentity(**{f.name: getattr(self.plan, f.name) for f in fields(PairIdentity)})

    @property
    def digest(self) -> str:
        """SHA-256 over the digests of all shards: names the trace as a whole."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()

    @property
    def parts(self) -> tuple[Origin, ...]:
        """The sets that the rows came from: `origins`, or of a set that was not merged, itself."""
        files, source = tuple(shard.file for shard in self.shards), str(self.plan.prompts.get("source", ""))
        return self.origins or (Origin(self.digest, source, self.plan.code_version, self.rows, files),)

    def shards_of(self, origin: str) -> tuple[Shard, ...]:
        """The shards whose rows came from one set, named by its prompts' source or its digest.

        Raises:
            ValueError: no such origin; the nearest is named, and all are listed.
        """
        chosen = [one for one in self.parts if origin in (one.source, one.digest)]
        if not chosen:
            raise ValueError(unknown_name("origin", origin, dict.fromkeys(one.source for one in self.parts)))
        files = {file for one in chosen for file in one.shards}
        return tuple(shard for shard in self.shards if shard.file in files)

    def to_json(self) -> str:
        """One flat object: the plan's keys, then counts, origins if it was merged, and shards."""
        record = {**asdict(self.plan), "rows": self.rows, "split_rows": self.split_rows}
        record |= {"split_prompts": self.split_prompts, "digest": self.digest}
        if self.origins:
            record["origins"] = [asdict(origin) for origin in self.origins]
        return json.dumps({**record, "shards": [asdict(shard) for shard in self.shards]}, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a folder's manifest.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged or of another schema version.
        """
        path = folder / MANIFEST
        if not path.is_file():
            begun = "; its collection is unfinished: run collect again" if (folder / PLAN).is_file() else ""
            raise FileNotFoundError(f"traces: no {MANIFEST} in {folder}{begun}")
        record = _read_object(path)
        version = record.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(f"traces: {path} has schema version {version!r}, this release reads {SCHEMA_VERSION}")
        try:
            plan = plan_from(record)
            shards = tuple(Shard(**shard) for shard in record["shards"])
            parts = tuple(Origin(**{**part, "shards": tuple(part["shards"])}) for part in record.get("origins", ()))
            manifest = cls(plan, shards, record["rows"], record["split_rows"], record["split_prompts"], parts)
            added = {sum(shard.rows for shard in shards), sum(part.rows for part in manifest.parts)}
            added.add(sum(manifest.split_rows.values()))
            digest = manifest.digest
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"traces: {path} is damaged: {error}") from error
        if record.get("digest") != digest or added != {manifest.rows}:
            raise ValueError(f"traces: {path} is damaged: its shards do not add up to its digest and rows")
        return manifest


def record_shards(plan: TracePlan, paths: Sequence[Path]) -> Manifest:
    """Count and digest finished shards, in order, for the manifest that vouches for them."""
    shards, rows_of, prompts_of = [], dict.fromkeys(plan.collected, 0), dict.fromkeys(plan.collected, 0)
    for path in paths:
        table = read_rows([path], columns=["prompt_id", "split"])
        shards.append(Shard(path.name, table.num_rows, file_digest(path)))
        splits = np.array(table["split"].to_pylist())
        ids = np.array(table["prompt_id"].to_pylist())
        for split in plan.collected:
            rows_of[split] += int((splits == split).sum())
            prompts_of[split] += len(set(ids[splits == split]))
    return Manifest(plan, tuple(shards), sum(shard.rows for shard in shards), rows_of, prompts_of)


_PLAN_KINDS: dict[str, Any] = {
    "temperature": (int, float),
    "splits": dict,
    "collected": list,
    "prompts": dict,
    "shard_prompts": int,
    "examples": int,
}


def plan_from(record: Mapping[str, Any]) -> TracePlan:
    """Take a plan out of a JSON object that may hold more; a missing key is a KeyError, unless it has a default.

    Raises:
        TypeError: a value that no plan has.
    """
    needed = [f.name for f in fields(TracePlan) if f.name in record or f.default is MISSING]
    for name, kind in _PLAN_KINDS.items():
        if not isinstance(record[name], kind) or (kind is int and record[name] < 1):
            raise TypeError(f"{name} cannot be {record[name]!r}")
    return TracePlan(**{name: record[name] for name in needed})


def read_plan(folder: Path) -> TracePlan | None:
    """The plan that a folder was begun with, or None where none was.

    Raises:
        ValueError: the plan is damaged.
    """
    path = folder / PLAN
    if not path.is_file():
        return None
    try:
        return plan_from(_read_object(path))
    except (KeyError, TypeError) as error:
        missing = "no " if isinstance(error, KeyError) else ""
        raise ValueError(f"out: {path} is of another version or damaged: {missing}{error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"traces: {path} is damaged: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"traces: {path} is damaged: expected an object")
    return record
