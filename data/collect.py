"""Collect traces: run a pair over prompts and log every position, so that a killed run loses one shard at most.

The order of work is the data set's, cut into shards of whole prompts. The bytes of a shard depend on the plan and on
nothing else: a run that was killed and started again, or shared by any number of processes, ends with the same files
as an unbroken one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from .config import CollectConfig
from .estimate import Estimate, confirm
from .folders import folder_lock, sole_writer, write_text
from .job import Advance, prepare
from .manifest import MANIFEST, Manifest, TracePlan, record_shards
from .pairs import Pair
from .plan import adopt_plan
from .progress import Progress, announce
from .shards import check_shard, shard_name
from .summary import describe
from .traces import Traces, find_finished
from .workers import Worker, current_worker

__all__ = ["collect"]


def collect(config: CollectConfig, pair: Pair | None = None) -> Manifest | None:
    """Log the prompts with both models and write traces to `config.out`; finished shards are kept.

    Under torchrun or accelerate launch every process writes its share of the shards, and the one that ends last the
    manifest.

    Args:
        config: what to collect.
        pair: models already loaded; by default they are loaded from `config.pair`.

    Returns:
        The manifest; None in a process whose fellows are still at work.

    Raises:
        ValueError: the folder was begun under another plan (the key is named), a shard is damaged or foreign, a prompt
            does not fit, a reference is empty, logits are not finite, or a very large run was not agreed to.
        OSError: the folder cannot be written to, or another run is writing to it.
    """
    out, worker = Path(config.out), current_worker()
    with sole_writer(out, worker.rank, worker.count):
        crew = _gather_crew(config, pair)
        adopt_plan(out, crew.plan)
        finished = find_finished(out)
        if finished is not None:
            announce(f"Traces in {out} are complete: {finished.rows:,} positions")
            return finished
        _refuse_foreign_shards(out, len(crew.sizes))
        _write_shards(config, crew, worker)
        with folder_lock(out):
            manifest = _write_manifest(out, crew.plan)
    if manifest is None:
        announce(f"Process {worker.rank} of {worker.count} has written its shards; others are still at work")
    else:
        announce(describe(Traces.open(out, check=False)))
    return manifest


class Crew(Protocol):
    """Who does the work: the pair in this process, or actors on many hosts."""

    @property
    def plan(self) -> TracePlan:
        """What decides the bytes."""
        ...

    @property
    def sizes(self) -> list[int]:
        """Steps of progress of each shard."""
        ...

    def estimate(self, shards: Sequence[int]) -> Estimate | None:
        """Extrapolate from a few prompts what these shards will take."""
        ...

    def write(self, shards: Sequence[int], advance: Advance) -> None:
        """Write these shards; `advance` is told of steps and of tokens as they are done."""
        ...


def _gather_crew(config: CollectConfig, pair: Pair | None) -> Crew:
    if config.executor == "local":
        return prepare(config, pair)
    if pair is not None:
        raise ValueError("pair: expected none with executor 'ray', whose actors load their own, got one")
    from .ray_workers import RayCrew  # Ray is optional, and large

    return RayCrew(config)


def _refuse_foreign_shards(out: Path, shards: int) -> None:
    """Name a file that the finished traces could not be opened with, before anything is computed."""
    known = {shard_name(index) for index in range(shards)}
    foreign = sorted(path.name for path in out.glob("*.parquet") if path.name not in known)
    if foreign:
        raise ValueError(f"out: {out / foreign[0]} is foreign: the plan has no such shard; move it away")


def _write_shards(config: CollectConfig, crew: Crew, worker: Worker) -> None:
    """Write this process's share of the shards that are not there yet."""
    out, sizes = Path(config.out), crew.sizes
    mine = [shard for shard in range(len(sizes)) if worker.owns(shard)]
    finished = [shard for shard in mine if _is_finished(out, shard, crew.plan)]
    left = sorted({*mine} - {*finished})
    if worker.is_first:
        missing = [shard for shard in range(len(sizes)) if not (out / shard_name(shard)).is_file()]
        told = f"Collecting {crew.plan.examples:,} prompts in {len(sizes):,} shards ({len(missing):,} to do) into {out}"
        processes = config.ray.workers if config.executor == "ray" else worker.count
        confirm(crew.estimate(missing), told, out, processes, config.allow_large)
    title = "Collecting" if worker.count == 1 else f"Collecting, process {worker.rank + 1} of {worker.count}"
    unit = "prompts" if config.source == "cascade" else "tokens"
    with Progress(title, sum(sizes[shard] for shard in mine), unit, silent=not worker.is_first) as progress:
        progress.skip(sum(sizes[shard] for shard in finished))
        try:
            crew.write(left, progress.advance)
        except BaseException:
            written = sum((out / shard_name(shard)).is_file() for shard in range(len(sizes)))
            announce(f"Stopped with {written:,} of {len(sizes):,} shards written; the same command goes on from there")
            raise


def _is_finished(out: Path, shard: int, plan: TracePlan) -> bool:
    """Whether a shard is there; a damaged or foreign one raises."""
    path = out / shard_name(shard)
    if path.is_file():
        check_shard(path, shard, plan.digest)
    return path.is_file()


def _write_manifest(out: Path, plan: TracePlan) -> Manifest | None:
    """Vouch for the finished shards, if all are there; the manifest appears last and whole."""
    paths = [out / shard_name(index) for index in range(plan.shard_count)]
    if not all(path.is_file() for path in paths):
        return None
    for index, path in enumerate(paths):
        check_shard(path, index, plan.digest)
    manifest = record_shards(plan, paths)
    write_text(out / MANIFEST, manifest.to_json())
    return manifest
