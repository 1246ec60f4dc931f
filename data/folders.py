"""What every writer of a trace folder keeps to: one at a time, one plan a folder, files that appear whole.

Knows nothing of models and prompts, nor where the rows come from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from .pairs import file_digest
from .shards import read_rows
from .traces import PLAN, Manifest, Origin, Shard, TracePlan, read_plan

__all__ = ["adopt_plan", "flatten", "record_shards", "sole_writer", "write_text"]


@contextmanager
def sole_writer(out: Path) -> Iterator[None]:
    """Make the folder and hold its lock, which the system lets go of when a process dies, however it dies.

    Raises:
        OSError: another run holds the lock, or the folder cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".lock", timeout=0)
        lock.acquire()
    except Timeout as error:
        raise OSError(f"out: another run is writing to {out}") from error
    except OSError as error:
        raise OSError(f"out: cannot write to {out}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


def adopt_plan(out: Path, plan: TracePlan) -> None:
    """Begin the folder with this plan, or make sure that it was begun with the same one.

    Raises:
        ValueError: it was begun under another plan (the first key that differs is named), or holds foreign files.
    """
    earlier = read_plan(out)
    if earlier is None:
        foreign = sorted(path.name for path in out.glob("*.parquet"))
        if foreign:
            raise ValueError(
                f"out: {out / foreign[0]} is foreign: {out} holds Parquet files but no plan; use another folder"
            )
        write_text(out / PLAN, json.dumps(asdict(plan), indent=2) + "\n")
        return
    old, new = flatten(asdict(earlier)), flatten(asdict(plan))
    for key in [*new, *old]:
        if old.get(key) != new.get(key):
            raise ValueError(
                f"out: {out} was begun with {key} = {old.get(key)!r}, this run has {new.get(key)!r}; "
                "use the same settings or another folder"
            )
    if earlier.digest != plan.digest:
        raise ValueError(
            f"out: {out} was begun with its splits in another order; use the same settings or another folder"
        )


def record_shards(plan: TracePlan, paths: Sequence[Path], origins: tuple[Origin, ...] = ()) -> Manifest:
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
    return Manifest(plan, tuple(shards), sum(shard.rows for shard in shards), rows_of, prompts_of, origins)


def write_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name, then rename."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def flatten(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested dictionaries into one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
