"""How large a run will be and how long it will take; and whether its user wants that.

Knows nothing of models: what a few prompts took is measured by `data.job`.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from .progress import announce, describe_bytes, describe_seconds

__all__ = ["Estimate", "confirm"]

SURPRISING_BYTES = 20_000_000_000
"""From this size on the user is asked."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of one process and bytes on disk, extrapolated from so many prompts."""

    seconds: float
    size: float
    prompts: int


def confirm(guess: Estimate | None, told: str, out: Path, processes: int, allow_large: bool) -> None:
    """Say what is to come; ask before a very large run.

    Args:
        guess: the estimate, if there is one.
        told: what the run does, as the beginning of a sentence.
        out: where it goes.
        processes: how many share the work.
        allow_large: large runs are agreed to.

    Raises:
        ValueError: it is large or does not fit on the disk, and nobody agreed.
    """
    if guess is None:
        announce(told)
        return
    time = describe_seconds(guess.seconds / processes)
    announce(f"{told}: about {describe_bytes(guess.size)} in {time}, judging by {guess.prompts} prompts")
    free = shutil.disk_usage(out).free
    if guess.size > SURPRISING_BYTES or guess.size > free:
        room = f"about {describe_bytes(guess.size)} with {describe_bytes(free)} free"
        if not (allow_large or _agrees(f"These traces take {room}. Go on? [y/N] ")):
            raise ValueError(f"allow_large: expected it for traces that take {room}, got none")


def _agrees(question: str) -> bool:
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
