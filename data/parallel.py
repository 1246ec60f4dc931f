"""Work on a pair's batches so that no number depends on how many cores or processes there are.

On a CPU each core works on a batch of its own with one thread: nothing waits for the slowest core at every layer, which
matters most where other programs share the machine, and a product of matrices is always summed in the same order.
On GPUs one batch runs after the other, while the results of the last are written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from .pairs import Pair, length_borders

__all__ = ["map_in_order"]

_MOST_WORKERS = 16
"""Each worker holds the logits of one batch, so that memory, not cores, sets a limit."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], pair: Pair
) -> Generator[Result, None, None]:
    """Yield the function's results in the order of the items; at most one more than there are workers is under way."""
    cores = torch.get_num_threads()
    on_cpu = pair.verifier.device.type == pair.drafter.device.type == "cpu"
    workers, threads_each = (min(cores, _MOST_WORKERS), 1) if on_cpu else (1, cores)
    if length_borders(pair):
        workers = 1  # one call would change the frequencies under another
    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads_each,))
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)
