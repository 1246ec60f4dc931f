"""Collect on many hosts by Ray Data: each actor holds the pair and writes whole shards to a common file system.

The shards and the manifest are those of a run in one process. Every host must see the driver's working folder under the
same path. Ray is an optional dependency.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from .config import CollectConfig
from .estimate import Estimate
from .job import Advance, Job, prepare
from .manifest import TracePlan

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
            self._ray: Any = import_module("ray")
            self._data: Any = import_module("ray.data")
        except ImportError as error:
            raise ImportError("executor ray needs Ray; run: pip install 'speccascade[ray]'") from error
        self._config, self._folder = config, os.getcwd()
        if not self._ray.is_initialized():
            self._ray.init(address=config.ray.address, log_to_driver=False, logging_level="ERROR")
        gpus = float("GPU" in self._ray.cluster_resources()) if config.ray.gpus is None else config.ray.gpus
        self._share = {"num_cpus": config.ray.cpus, "num_gpus": gpus}
        outline: tuple[TracePlan, list[int]] = self._on_a_worker(_outline)
        self.plan, self.sizes = outline

    def estimate(self, shards: Sequence[int]) -> Estimate | None:
        """Extrapolate from a few prompts, on one worker."""
        guess: Estimate | None = self._on_a_worker(_estimate, list(shards))
        return guess

    def write(self, shards: Sequence[int], advance: Advance) -> None:
        """Deal the shards out to the actors as they become free."""
        if not shards:
            return
        self._data.DataContext.get_current().enable_progress_bars = False
        items = self._data.from_items([{"shard": shard} for shard in shards], override_num_blocks=len(shards))
        written = items.map_batches(
            ShardWriter,
            fn_constructor_args=(self._config, self._folder, self.plan.digest),
            batch_size=1,
            compute=self._data.ActorPoolStrategy(size=min(self._config.ray.workers, len(shards))),
            **self._share,
        )
        with _own_errors():
            for row in written.iter_rows():
                advance(int(row["steps"]), int(row["tokens"]))

    def _on_a_worker(self, function: Any, *arguments: Any) -> Any:
        remote = self._ray.remote(**self._share, max_retries=0)(function)
        with _own_errors():
            return self._ray.get(remote.remote(self._config, self._folder, *arguments))


@contextmanager
def _own_errors() -> Iterator[None]:
    """Let an error that a worker names come out as it is, without the layers that Ray wraps around it."""
    try:
        yield
    except Exception as error:
        inner: BaseException | None = error
        while inner is not None:
            inner = getattr(inner, "cause", None) or inner.__cause__
            if isinstance(inner, (ValueError, FileNotFoundError)):
                raise inner from None
        raise


class ShardWriter:
    """An actor: loads the pair once, then writes the shards that it is given."""

    def __init__(self, config: CollectConfig, folder: str, plan_digest: str) -> None:
        self._job = _prepare(config, folder)
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


def _prepare(config: CollectConfig, folder: str) -> Job:
    """Prepare the job where the driver's relative paths mean what they mean to it."""
    os.chdir(folder)
    return prepare(config)


def _outline(config: CollectConfig, folder: str) -> tuple[TracePlan, list[int]]:
    job = _prepare(config, folder)
    return job.plan, job.sizes


def _estimate(config: CollectConfig, folder: str, shards: list[int]) -> Estimate | None:
    return _prepare(config, folder).estimate(shards)
