"""Collect on many hosts by Ray Data: each actor holds the pair and writes whole shards to a file system that all share.

The shards and the manifest are those of a run in one process. Ray is an optional dependency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from .config import CollectConfig
from .estimate import Estimate
from .job import Advance, prepare
from .traces import TracePlan

__all__ = ["RayCrew"]


class RayCrew:
    """The actors of a Ray cluster.

    Args:
        config: the settings; `config.ray` says how many actors, and what each is given.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: no cluster at the address given.
    """

    def __init__(self, config: CollectConfig) -> None:
        try:
            ray: Any = import_module("ray")
            self._data: Any = import_module("ray.data")
        except ImportError as error:
            raise ImportError("executor ray needs Ray; run: pip install 'speccascade[ray]'") from error
        # An actor's working folder is its own: paths are made absolute where they are known.
        self._config = replace(config, out=str(Path(config.out).resolve()))
        self._ray = ray
        ray.init(address=config.ray.address, ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
        gpus = config.ray.gpus
        self._share = {
            "num_cpus": config.ray.cpus,
            "num_gpus": float("GPU" in ray.cluster_resources()) if gpus is None else gpus,
        }
        outline: tuple[TracePlan, list[int]] = self._on_a_worker(_outline)
        self.plan, self.sizes = outline

    def estimate(self, shards: Sequence[int]) -> Estimate | None:
        """Extrapolate from a few prompts, on one worker."""
        guess: Estimate | None = self._on_a_worker(_estimate, list(shards))
        return guess

    def write(self, shards: Sequence[int], advance: Advance) -> None:
        """Deal the shards out to the actors as they become free."""
        data = self._data
        data.DataContext.get_current().enable_progress_bars = False
        items = data.from_items([{"shard": shard} for shard in shards], override_num_blocks=max(len(shards), 1))
        written = items.map_batches(
            ShardWriter,
            fn_constructor_args=(self._config, self.plan.digest),
            batch_size=1,
            compute=data.ActorPoolStrategy(size=min(self._config.ray.workers, max(len(shards), 1))),
            **self._share,
        )
        for row in written.iter_rows():
            advance(int(row["steps"]), int(row["tokens"]))

    def _on_a_worker(self, function: Any, *arguments: Any) -> Any:
        remote = self._ray.remote(**self._share, max_retries=0)(function)
        try:
            return self._ray.get(remote.remote(self._config, *arguments))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None


class ShardWriter:
    """An actor: loads the pair once, then writes the shards that it is given."""

    def __init__(self, config: CollectConfig, plan_digest: str) -> None:
        self._job = prepare(config)
        if self._job.plan.digest != plan_digest:
            raise ValueError("executor ray: this host sees other prompts, models or devices than the first one did")

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[int]]:
        """Write the shards of a batch; return steps and tokens of each."""
        done: list[tuple[int, int]] = []
        for shard in batch["shard"]:
            counts = [0, 0]

            def count(steps: int, tokens: int, counts: list[int] = counts) -> None:
                counts[0] += steps
                counts[1] += tokens

            self._job.write([int(shard)], count)
            done.append((counts[0], counts[1]))
        return {"steps": [steps for steps, _ in done], "tokens": [tokens for _, tokens in done]}


def _outline(config: CollectConfig) -> tuple[TracePlan, list[int]]:
    job = prepare(config)
    return job.plan, job.sizes


def _estimate(config: CollectConfig, shards: list[int]) -> Estimate | None:
    return prepare(config).estimate(shards)
