"""Say how far a long stage is: a bar on a terminal, plain lines in a batch job. Knows nothing of models or traces."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

__all__ = ["Progress", "announce", "quiet_transformers"]


def announce(message: str) -> None:
    """Write one line about a stage to standard error (standard output belongs to results)."""
    print(message, file=sys.stderr, flush=True)


class Progress:
    """Count positions against a known total; a Rich bar on a terminal, else a line every `log_every` seconds."""

    def __init__(self, description: str, total: int, unit: str = "positions", log_every: float = 10.0) -> None:
        self._description, self._total, self._unit, self._log_every = description, total, unit, log_every
        self._done = 0
        self._skipped = 0
        self._logged = -1
        self._start = self._last_line = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = _rich_bar()
            self._task = self._bar.add_task(description, total=total, rate="")

    def __enter__(self) -> Progress:
        """Start the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the bar; in a batch job, close with the totals."""
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and self._done != self._logged:
            announce(self._line())

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def rate(self) -> float:
        """Units a second since the start, what was skipped left out."""
        return (self._done - self._skipped) / max(self.seconds, 1e-9)

    def skip(self, amount: int) -> None:
        """Count work that an earlier run had finished, without letting it flatter the rate."""
        self._skipped += amount
        self.advance(amount)

    def advance(self, amount: int) -> None:
        """Count finished work and show it."""
        self._done += amount
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=f"{_pace(self.rate)} {self._unit}/s")
        elif time.monotonic() - self._last_line >= self._log_every:
            self._last_line, self._logged = time.monotonic(), self._done
            announce(self._line())

    def _line(self) -> str:
        left = (self._total - self._done) / self.rate if self.rate > 0 else float("inf")
        remaining = f", {left:.0f} s left" if 0 < left < float("inf") else ""
        return f"{self._description}: {self._done:,}/{self._total:,} {self._unit}, {_pace(self.rate)}/s{remaining}"


def _pace(rate: float) -> str:
    """A rate with the digits that say something: thousands of positions, or a third of a step.

    >>> _pace(12345.6), _pace(0.3456)
    ('12,346', '0.35')
    """
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _rich_bar() -> Any:
    # Imported late: Rich is needed on terminals only.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the library's loading bars out of the terminal; the stages say what they do themselves."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
