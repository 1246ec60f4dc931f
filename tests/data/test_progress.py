"""Progress in a batch job: plain lines with a rate that earlier work does not flatter; a bar on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from speccascade.data import progress
from speccascade.data.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_tell_count_rate_and_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("Collecting", 1000, log_every=10) as bar:
        bar.skip(500)
        clock[0] += 5
        bar.advance(100)
        clock[0] += 5
        bar.advance(100)
        clock[0] += 15
        bar.advance(300)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "Collecting: 700/1,000 positions, 20/s, 15.0 s left",
        "Collecting: 1,000/1,000 positions, 20/s",
    ]


def test_a_failure_adds_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), Progress("Collecting", 10):
        raise KeyError
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("Collecting", 10, unit="positions") as bar:
        bar.advance(10)
    assert "Collecting" in terminal.getvalue()
    assert "positions" in terminal.getvalue()
