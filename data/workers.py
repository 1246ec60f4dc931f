"""Which of the processes that share a run this one is: torchrun and accelerate launch tell by the environment.

Work is dealt out by shard, and a shard's bytes follow from the plan alone, so that any number of processes, on one host
or on many over one file system, ends with the same files. No process ever waits for another.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Worker", "current_worker"]


@dataclass(frozen=True)
class Worker:
    """Process `rank` of `count`."""

    rank: int = 0
    count: int = 1

    def owns(self, shard: int) -> bool:
        """Whether a shard is this process's to write."""
        return shard % self.count == self.rank

    @property
    def is_first(self) -> bool:
        """Whether this is the process that talks."""
        return self.rank == 0


def current_worker() -> Worker:
    """Read RANK and WORLD_SIZE, as torchrun and accelerate launch set them; alone where there are none.

    Raises:
        ValueError: only one of the two is set, or they are no rank and count.
    """
    rank, count = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and count is None:
        return Worker()
    try:
        worker = Worker(int(rank or ""), int(count or ""))
    except ValueError:
        raise ValueError(
            f"RANK, WORLD_SIZE: expected two integers from the launcher, got {rank!r}, {count!r}"
        ) from None
    if not 0 <= worker.rank < worker.count:
        raise ValueError(f"RANK, WORLD_SIZE: expected a rank below the count, got {rank} of {count}")
    return worker
