"""Stages are done once, done again when something before them changed, and resumed where they can be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from speccascade.cli.demo import Stage, run_stages


class Workshop:
    """Two stages that leave a file each and remember what was there when they began."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.found: list[tuple[str, bool]] = []
        self.breaks = ""

    def stages(self, first: int = 1, second: int = 1, resumes: bool = False) -> list[Stage]:
        def make(name: str) -> Stage:
            config = {"size": {"first": first, "second": second}[name]}
            return Stage(name, f"Make the {name}", config, (name,), lambda: self.make(name), resumes)

        return [make("first"), make("second")]

    def make(self, name: str) -> None:
        folder = self.out / name
        self.found.append((name, (folder / "begun").exists()))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "begun").touch()
        if name == self.breaks:
            raise KeyboardInterrupt
        (folder / "finished").touch()


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def test_a_second_run_reuses_everything(workshop, capsys) -> None:
    assert run_stages(workshop.out, workshop.stages()) == ["first", "second"]
    assert run_stages(workshop.out, workshop.stages()) == []
    shown = capsys.readouterr().err
    assert "[1/2] Make the first: done in" in shown
    assert "[2/2] Make the second: reused" in shown


def test_a_changed_config_redoes_its_stage_and_those_after_it(workshop) -> None:
    run_stages(workshop.out, workshop.stages())
    assert run_stages(workshop.out, workshop.stages(second=2)) == ["second"]
    assert run_stages(workshop.out, workshop.stages(first=2, second=2)) == ["first", "second"]
    assert not any(there for _, there in workshop.found), "stale outputs were there when a stage began"


def test_a_lost_output_is_made_again(workshop) -> None:
    run_stages(workshop.out, workshop.stages())
    (workshop.out / "second" / "begun").unlink()
    (workshop.out / "second" / "finished").unlink()
    (workshop.out / "second").rmdir()
    assert run_stages(workshop.out, workshop.stages()) == ["second"]


def test_what_is_lost_with_the_folder_of_an_earlier_stage_is_made_again(tmp_path: Path) -> None:
    """As `rm -r runs/demo/evaluate` does: stages that write into the same folder must not claim to be there."""
    table, page = tmp_path / "evaluate" / "results.parquet", tmp_path / "evaluate" / "report.md"
    stages = [
        Stage("offline", "Replay", {}, ("evaluate",), (tmp_path / "evaluate").mkdir),
        Stage("live", "Run", {}, ("evaluate/results.parquet",), lambda: table.write_text("table"), resumes=True),
        Stage("report", "Report", {}, ("evaluate/report.md",), lambda: page.write_text("page")),
    ]
    names = [stage.name for stage in stages]
    assert run_stages(tmp_path, stages) == names
    shutil.rmtree(tmp_path / "evaluate")
    assert run_stages(tmp_path, stages) == names
    assert run_stages(tmp_path, stages) == []
    table.unlink()
    assert run_stages(tmp_path, stages) == ["live"]


def test_a_stale_file_is_removed_before_its_stage_begins(tmp_path: Path) -> None:
    page, found = tmp_path / "page.md", []

    def write() -> None:
        found.append(page.exists())
        page.write_text("page")

    for size in (1, 2):
        run_stages(tmp_path, [Stage("report", "Report", {"size": size}, ("page.md",), write)])
    assert found == [False, False]


@pytest.mark.parametrize("resumes", [True, False])
def test_a_stopped_stage_goes_on_only_if_it_can(workshop, resumes: bool) -> None:
    workshop.breaks = "second"
    with pytest.raises(KeyboardInterrupt):
        run_stages(workshop.out, workshop.stages(resumes=resumes))
    workshop.breaks = ""
    assert run_stages(workshop.out, workshop.stages(resumes=resumes)) == ["second"]
    assert workshop.found[-1] == ("second", resumes)


def test_a_stopped_stage_of_another_config_is_started_over(workshop) -> None:
    workshop.breaks = "second"
    with pytest.raises(KeyboardInterrupt):
        run_stages(workshop.out, workshop.stages(resumes=True))
    workshop.breaks = ""
    run_stages(workshop.out, workshop.stages(second=2, resumes=True))
    assert workshop.found[-1] == ("second", False)


def test_fresh_does_everything_again(workshop) -> None:
    run_stages(workshop.out, workshop.stages())
    assert run_stages(workshop.out, workshop.stages(), fresh=True) == ["first", "second"]


def test_a_damaged_record_counts_as_none(workshop) -> None:
    run_stages(workshop.out, workshop.stages())
    (workshop.out / "stages" / "first.json").write_text("{")
    assert run_stages(workshop.out, workshop.stages()) == ["first"]
