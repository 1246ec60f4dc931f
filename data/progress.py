"""Say how far a long stage is: a bar on a terminal, plain lines in a batch job. Knows nothing of models or traces."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

__all__ = ["Progress", "announce", "describe_bytes", "describe_seconds", "quiet_transformers"]


def announce(message: str) -> None:
    """Write one line about a stage to standard error (standard output belongs to results)."""
    print(message, file=sys.stderr, flush=True)


def describe_bytes(size: float) -> str:
    """Write a size as people say it.

    >>> describe_bytes(2_340_000), describe_bytes(31e9)
    ('2.3 MB', '31.0 GB')
    """
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{max(size / 1e6, 0.1):,.1f} MB"


def describe_seconds(seconds: float) -> str:
    """Write a duration as people say it.

    >>> describe_seconds(3.21), describe_seconds(185), describe_seconds(7300)
    ('3.2 s', '3 min 5 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


class Progress:
    """Count steps against a known total; a Rich bar on a terminal, else a line every `log_every` seconds.

    Args:
        description: what is being done.
        total: all steps.
        unit: what a step is.
        log_every: seconds between two lines of a batch job.
        silent: count, and show nothing.
    """

    def __init__(
        self,
        description: str,
        total: int,
        unit: str = "positions",
        log_every: float = 10.0,
        silent: bool = False,
    ) -> None:
        self._description, self._total, self._unit, self._log_every = description, total, unit, log_every
        self._silent = silent
        self._done = 0
        self._skipped = 0
        self._tokens: int | None = None
        self._logged = -1
        self._start = self._last_line = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty() and not silent:
            self._bar = _rich_bar()
            self._task = self._bar.add_task(description, total=total, rate="", unit=unit)

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
        elif kind is None and self._done != self._logged and not self._silent:
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

    def advance(self, amount: int, tokens: int | None = None) -> None:
        """Count finished work and show it; where a step is no token, `tokens` says how many there were in it."""
        self._done += amount
        if tokens is not None and self._unit != "tokens":
            self._tokens = (self._tokens or 0) + tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=self._rates())
        elif time.monotonic() - self._last_line >= self._log_every and not self._silent:
            self._last_line, self._logged = time.monotonic(), self._done
            announce(self._line())

    def _line(self) -> str:
        return f"{self._description}: {self._done:,}/{self._total:,} {self._unit}, {self._rates()}"

    def _rates(self) -> str:
        """Steps and tokens a second, and the time left at that pace."""
        shown = f"{_pace(self.rate)}/s"
        if self._tokens is not None:
            shown += f" ({_pace(self._tokens / max(self.seconds, 1e-9))} tokens/s)"
        left = (self._total - self._done) / self.rate if self.rate > 0 else 0.0
        return f"{shown}, {describe_seconds(left)} left" if left > 0 else shown


def _pace(rate: float) -> str:
    """A rate with the digits that say something: thousands of positions, or a third of a step.

    >>> _pace(12345.6), _pace(0.3456)
    ('12,346', '0.35')
    """
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _rich_bar() -> Any:
    # Imported late: Rich is needed on terminals only.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TextColumn("{task.fields[rate]}"),
        console=Console(stderr=True),
        refresh_per_second=2,
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
