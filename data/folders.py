"""A folder that is written to piece by piece, so that a killed run, a full disk or a second writer spoils nothing.

Knows nothing of what the pieces are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

__all__ = ["folder_lock", "sole_writer", "whole_file", "write_text"]


@contextmanager
def sole_writer(out: Path, rank: int = 0, count: int = 1) -> Iterator[None]:
    """Be the only run that writes to a folder, as process `rank` of `count` that share the work.

    Each process holds a lock of its own, which the system lets go of when it dies, however it dies. While the first
    process of a run is at work a second run is refused, whatever its number of processes: both have a first one.

    Raises:
        OSError: another run is writing to the folder, or it cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / _lock_name(rank), timeout=0)
        lock.acquire()
    except Timeout as error:
        raise OSError(f"out: another run is writing to {out}") from error
    except OSError as error:
        raise OSError(f"out: cannot write to {out}: {error.strerror or error}") from error
    try:
        with folder_lock(out):
            _refuse_orphans(out, count)
        yield
    finally:
        lock.release()


def _lock_name(rank: int) -> str:
    return f".lock-{rank}" if rank else ".lock"


def _refuse_orphans(out: Path, count: int) -> None:
    """Make sure that no process of an earlier, larger run is still at work."""
    for path in sorted(out.glob(".lock-*")):
        rank = path.name.rpartition("-")[2]
        if not rank.isdecimal() or int(rank) < count:
            continue
        try:
            with FileLock(path, timeout=0):
                pass
        except Timeout as error:
            raise OSError(f"out: another run is writing to {out}") from error


@contextmanager
def folder_lock(out: Path) -> Iterator[None]:
    """Wait for the other processes of the same run, for moments in which one must be alone."""
    with FileLock(out / ".lock.moment"):
        yield


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; one process at a time."""
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name, and rename it once it is on the disk; what fails leaves nothing behind."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(f"out: cannot write {path}: {error.strerror or error}") from error
    finally:
        if not temporary.is_dir():
            temporary.unlink(missing_ok=True)
