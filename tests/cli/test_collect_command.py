"""``speccascade collect``: looking at traces and merging them load no model, and ignore nothing that was given."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from speccascade.cli import main
from speccascade.cli.options import CommandLine
from speccascade.cli.trace_table import show_summary
from speccascade.data.config import CollectConfig
from speccascade.data.manifest import Manifest
from speccascade.data.summary import summarise
from speccascade.data.traces import Traces


def collect_into(out: Path, pair_folders: tuple[Path, Path], topic: str) -> Path:
    """Collect ten short prompts by the command."""
    prompts = out.with_suffix(".jsonl")
    rows = [{"prompt": f"what is {topic} {i}?", "reference": f"it is {i} {topic}."} for i in range(10)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drafter, verifier = pair_folders
    words = [f"--pair.drafter={drafter}", f"--pair.verifier={verifier}", "--pair.dtype=float32", "--pair.device=cpu"]
    words += [f"--prompts.source={prompts}", "--no-prompts.chat", "--shard-prompts=4", "--top-k=4", f"--out={out}"]
    assert main(["collect", *words, "--prompts.splits={train: 0.6, validation: 0.2, test: 0.2}"]) == 0
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, pair_folders: tuple[Path, Path]) -> tuple[Path, Path]:
    """Two collected trace folders of one pair."""
    root = tmp_path_factory.mktemp("traces")
    return collect_into(root / "sums", pair_folders, "sum"), collect_into(root / "rhymes", pair_folders, "rhyme")


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make loading a model an error."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("speccascade.data.pairs.load_model", refuse)
    monkeypatch.setattr("speccascade.data.pairs.load_tokenizer", refuse)


def test_the_written_config_is_that_of_a_collection(folders: tuple[Path, Path]) -> None:
    config = CommandLine("collect", CollectConfig, "", "").parse([f"--config={folders[0] / 'config.yaml'}"])
    assert config.shard_prompts == 4
    assert type(config) is CollectConfig


def test_inspect_prints_the_summary_and_draws(folders: tuple[Path, Path], no_models: None, capsys: Any) -> None:
    assert main(["collect", "--inspect", str(folders[0])]) == 0
    shown = capsys.readouterr()
    traces = Traces.open(folders[0])
    assert f"{traces.manifest.rows:,} positions, 3 shards" in shown.out
    assert all(word in shown.out for word in ("float32", "teacher_forced", "temperature 1", "sums.jsonl", "ECE q"))
    assert all(f"\n  {split}" in shown.out for split in traces.splits)
    assert sorted(path.name for path in (folders[0] / "inspect").iterdir()) == ["traces.png", "traces.svg"]
    assert "inspect/traces.png" in shown.err


def test_inspect_as_json_without_plots(folders: tuple[Path, Path], no_models: None, capsys: Any) -> None:
    assert main(["collect", "--inspect", str(folders[1]), "--json", "--no-plots"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(json.dumps(summarise(folders[1]).to_record()))
    assert not (folders[1] / "inspect").exists()


def test_inspect_an_unfinished_folder(folders: tuple[Path, Path], tmp_path: Path, no_models: None, capsys: Any) -> None:
    for name in ("plan.json", "part-00001.parquet"):
        (tmp_path / name).write_bytes((folders[0] / name).read_bytes())
    assert main(["collect", "--inspect", str(tmp_path)]) == 0
    assert "unfinished: manifest.json is missing, 1 of 3 shards are there" in capsys.readouterr().out
    assert (tmp_path / "inspect" / "traces.svg").is_file()


def test_the_table_of_a_terminal_turns_where_it_is_too_wide(folders: tuple[Path, Path]) -> None:
    summary = summarise(folders[0])
    for width, lines in ((200, 1 + len(summary.splits)), (60, 11)):
        out = io.StringIO()
        show_summary(summary, Console(file=out, width=width, force_terminal=True, color_system=None, highlight=False))
        table = [line.split() for line in out.getvalue().splitlines()[len(summary.head()) :] if line.strip()]
        assert table[0][0] == "split"
        assert len(table) == lines
        assert "…" not in out.getvalue()


@pytest.mark.parametrize("spelling", ["words", "repeated", "brackets"])
def test_merge(folders: tuple[Path, Path], tmp_path: Path, no_models: None, spelling: str, capsys: Any) -> None:
    one, two = map(str, folders)
    words = {
        "words": ["--merge", one, two],
        "repeated": ["--merge", one, f"--merge={two}"],
        "brackets": ["--merge", f"[{one},{two}]"],
    }[spelling]
    assert main(["collect", *words, "--out", str(tmp_path / "both")]) == 0
    manifest = Manifest.read(tmp_path / "both")
    assert manifest.rows == sum(Manifest.read(folder).rows for folder in folders)
    assert [len(origin.shards) for origin in manifest.origins] == [3, 3]
    assert "merged: " in capsys.readouterr().err
    assert main(["collect", "--inspect", str(tmp_path / "both"), "--no-plots"]) == 0


def test_a_merge_can_be_written_as_a_config(folders: tuple[Path, Path], tmp_path: Path, no_models: None) -> None:
    config = tmp_path / "merge.yaml"
    config.write_text(f"merge: [{folders[0]}, {folders[1]}]\nout: {tmp_path / 'both'}\n")
    assert main(["collect", "--config", str(config)]) == 0
    assert (tmp_path / "both" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--inspect x --merge a b", "cannot take --inspect and --merge together"),
        ("--inspect x --pair.drafter d", "--pair.drafter: --inspect runs no model and would ignore it"),
        ("--inspect x --out y", "--out: --inspect runs no model and would ignore it"),
        ("--inspect x --top-k 3", "--top-k: --inspect runs no model and would ignore it"),
        ("--merge a b --out c --temperature 0.5", "--temperature: --merge runs no model and would ignore it"),
        ("--merge a b --out c --no-prompts.chat", "--prompts.chat: --merge runs no model"),
        ("--merge a b", "--out: needed with --merge"),
        ("--merge a --out c", "merge: expected at least two trace folders, got a"),
        ("--merge [] --out c", "merge: expected at least two trace folders, got none"),
        ("--merge --out c", "--merge: expected a value, got nothing"),
        ("--merge a b --out c", "no manifest.json in a"),
        ("--inspect nowhere", "no traces there"),
        ("--json", "--json: only a summary is shown so; give --inspect DIR"),
        ("--merge a b --out c --no-plots", "--no-plots: only a summary is shown so; give --inspect DIR"),
        ("--inspct x", "did you mean --inspect?"),
    ],
)
def test_what_would_be_ignored_or_is_not_there_is_refused_on_one_line(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["collect", *words.split()]) == 2
    message = capsys.readouterr().err
    assert message.startswith("speccascade collect: error: ")
    assert said in message
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_help_says_how(capsys: Any) -> None:
    assert main(["collect", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--merge DIR DIR ... --out DIR" in text
    assert "--inspect" in text
