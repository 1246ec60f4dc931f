"""Runs that die: in a process of their own, by SIGKILL, at a chosen call or after some time."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from speccascade.data import shards


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(run: Callable[[], Any], module: Any, name: str, count: int, when: str) -> None:
    """Kill this process before, half way through or after the `count`-th call of a function of a module."""
    original, calls = getattr(module, name), itertools.count(1)

    def patched(*arguments: Any, **named: Any) -> Any:
        if next(calls) != count:
            return original(*arguments, **named)
        if when == "before":
            die()
        if when == "half":
            shards.pq.write_table = lambda table, file, **_: (file.write(b"PAR1 half"), file.flush(), die())
        result = original(*arguments, **named)
        die()
        return result

    setattr(module, name, patched)
    run()


def run_until_killed(target: Any, *arguments: Any, delay: float | None = None) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    if delay is not None:
        time.sleep(delay)
        process.kill()
    process.join()
    return process.exitcode
