"""What a run will take is said before it starts, and a surprisingly large one asks."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from speccascade.data import estimate
from speccascade.data.collect import collect
from speccascade.data.config import CollectConfig
from speccascade.data.estimate import Estimate, confirm
from speccascade.data.job import LOGGERS, prepare
from speccascade.data.shards import measure_shard

HUGE = Estimate(seconds=7200, size=31e9, prompts=8)


@pytest.fixture
def many(collect_config: CollectConfig, tmp_path: Path) -> CollectConfig:
    """Two hundred prompts."""
    path = tmp_path / "many.jsonl"
    rows = [{"prompt": f"how much is {i}?", "reference": "so much. " * (1 + i % 9)} for i in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return replace(collect_config, prompts=replace(collect_config.prompts, source=str(path)), shard_prompts=40)


def test_the_size_is_told_from_a_few_prompts_before_anything_is_written(
    many: CollectConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    job = prepare(many)
    guess = job.estimate(range(len(job.pieces)))
    assert guess is not None
    assert guess.prompts == 8
    collect(many)
    size = sum(path.stat().st_size for path in Path(many.out).glob("*.parquet"))
    assert size / 2 < guess.size < size * 2
    told = capsys.readouterr().err
    assert re.search(r"200 prompts in 5 shards \(5 to do\) .*: about [\d.]+ MB in [\d.]+ s, judging by 8 prompts", told)


def test_an_estimate_is_of_what_is_left(many: CollectConfig) -> None:
    job = prepare(many)
    whole, part = job.estimate(range(5)), job.estimate([1, 3])
    assert whole is not None
    assert part is not None
    assert 0.2 < part.size / whole.size < 0.7
    assert job.estimate([0]) is None


def test_a_measured_shard_takes_what_it_takes_on_disk(collect_config: CollectConfig, tmp_path: Path) -> None:
    job = prepare(collect_config)
    tmp_path.joinpath("traces").mkdir()
    job.write([0], lambda steps, tokens: None)
    (columns,) = LOGGERS["teacher_forced"](job.config, job.pair, [job.pieces[0]], lambda steps, tokens: None)
    on_disk = (tmp_path / "traces" / "part-00000.parquet").stat().st_size
    assert abs(measure_shard(columns) - on_disk) < 600  # the plan's digest in its metadata


def test_a_large_run_is_refused_where_nobody_can_be_asked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"allow_large: expected it for traces that take about 31\.0 GB with .* free"):
        confirm(HUGE, "Collecting", tmp_path, 1, allow_large=False)
    confirm(HUGE, "Collecting", tmp_path, 1, allow_large=True)


def test_a_run_that_does_not_fit_on_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e6))
    with pytest.raises(ValueError, match=r"take about 5\.0 MB with 1\.0 MB free"):
        confirm(Estimate(60, 5e6, 8), "Collecting", tmp_path, 1, allow_large=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "agreed"), [("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False)])
def test_on_a_terminal_the_user_is_asked(
    answer: str, agreed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", Terminal())
    if agreed:
        confirm(HUGE, "Collecting", tmp_path, 1, allow_large=False)
    else:
        with pytest.raises(ValueError, match="allow_large: expected it"):
            confirm(HUGE, "Collecting", tmp_path, 1, allow_large=False)
    assert "Go on? [y/N]" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_many_processes_share_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    confirm(Estimate(seconds=120, size=1e6, prompts=8), "Collecting", tmp_path, 4, allow_large=False)
    assert "about 1.0 MB in 30.0 s" in capsys.readouterr().err


def test_what_was_refused_wrote_no_shard(many: CollectConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "SURPRISING_BYTES", 10)
    with pytest.raises(ValueError, match="allow_large: expected it"):
        collect(many)
    assert not list(Path(many.out).glob("*.parquet"))
    assert collect(replace(many, allow_large=True)) is not None
