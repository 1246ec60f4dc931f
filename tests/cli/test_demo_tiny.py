"""The demo from end to end on a tiny random model: every stage, every file, and what a second run does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from speccascade.cli import main

STAGES = ("fetch", "tune-drafter", "collect", "train", "offline", "live", "report")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tiny_llama, tiny_tokenizer) -> Path:
    """A folder with a four-layer verifier, sixty questions and a config a command."""
    root = tmp_path_factory.mktemp("demo")
    tiny_llama(0, layers=4).save_pretrained(root / "verifier")
    tiny_tokenizer.save_pretrained(root / "verifier")
    rows = [{"prompt": f"what is {n}+{n}?", "reference": f"it is {2 * n}."} for n in range(60)]
    (root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = {
        "source": "questions.jsonl",
        "chat": False,
        "splits": dict(tune=0.3, train=0.3, validation=0.2, test=0.2),
    }
    pair = {"drafter": "d", "verifier": "verifier", "dtype": "float32"}
    configs = {
        "tune-drafter": dict(
            out="d", verifier="verifier", prompts=prompts, layers=3, steps=2, batch_size=4, dtype="float32"
        ),
        "collect": dict(pair=pair, prompts=prompts, out="t", splits=["train", "validation", "test"]),
        "train": dict(
            out="o", data=dict(traces="t"), model=dict(kind="linear"), trainer=dict(max_epochs=2),
            bundle=dict(calibration=dict(resamples=20)),
        ),
        "evaluate": dict(
            pair=pair, prompts=prompts, traces="t", router=["r"], out="e", max_new_tokens=6, limit=2, gamma=3,
            methods=["verifier", "drafter", "specdecode", "opt", "token_v3", "router"], budgets=[0.5],
            frontier=dict(points=5, resamples=20),
        ),
    }  # fmt: skip
    for command, config in configs.items():
        (root / "configs" / command).mkdir(parents=True)
        (root / "configs" / command / "demo.yaml").write_text(yaml.safe_dump(config))
    return root


def _demo(workplace: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # Its own process: the demo sets up logging and threads as a user's would, and must not meet those of other tests.
    return subprocess.run(
        [sys.executable, "-m", "speccascade", "demo", "--out=runs/demo", *words],
        cwd=workplace, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def first(workplace: Path) -> subprocess.CompletedProcess[str]:
    return _demo(workplace)


def test_every_stage_tells_its_time(first) -> None:
    assert first.returncode == 0, first.stderr
    for number in range(1, len(STAGES) + 1):
        assert re.search(rf"^\[{number}/{len(STAGES)}\] .*: done in \d", first.stderr, re.MULTILINE)


def test_it_ends_with_the_table_and_the_next_command(first) -> None:
    for label in ("Verifier alone", "Drafter alone", "SpecDecode", "OPT", "TokenV3"):
        assert label in first.stdout
    assert "Figures: runs/demo/evaluate/figures" in first.stderr
    assert "speccascade generate --router runs/demo/router" in first.stderr.splitlines()[-1]


def test_every_output_is_there_with_its_resolved_config(first, workplace) -> None:
    out = workplace / "runs" / "demo"
    for name in (
        "demo.yaml", "drafter/config.yaml", "drafter/model.safetensors", "traces/manifest.json", "traces/config.yaml",
        "config.yaml", "checkpoints/best.ckpt", "router/router.onnx", "router/router_config.json",
        "evaluate/config.yaml", "evaluate/results.parquet", "evaluate/frontier.json", "evaluate/report.md",
        *(f"stages/{stage}.json" for stage in STAGES),
    ):  # fmt: skip
        assert (out / name).is_file(), f"{name} is missing"
    assert list((out / "evaluate" / "figures").glob("*.png"))


def test_a_second_run_reuses_every_stage(first, workplace) -> None:
    again = _demo(workplace)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count(": reused (") == len(STAGES)
    assert again.stdout and first.stdout.endswith(again.stdout), "the offline table is printed where it is made"


def test_lost_results_are_made_again(first, workplace) -> None:
    shutil.rmtree(workplace / "runs" / "demo" / "evaluate")
    again = _demo(workplace)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count(": reused (") == STAGES.index("offline")
    for name in ("results.parquet", "frontier.json", "report.md"):
        assert (workplace / "runs" / "demo" / "evaluate" / name).is_file(), f"{name} is missing"


def test_what_the_demo_made_serves_the_other_commands(first, workplace, monkeypatch, capsys) -> None:
    monkeypatch.chdir(workplace)
    assert main(["generate", "what is 7+7?", "--max-new-tokens=6", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert "acceptance" in captured.err
    assert main(["export", "--checkpoint=runs/demo", "--out=again", "--calibration.resamples=20"]) == 0
    assert (workplace / "again" / "router_config.json").is_file()


def test_a_missing_config_is_answered_before_anything_is_done(workplace) -> None:
    done = _demo(workplace, "--out=runs/none", "--configs=nowhere")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not (workplace / "runs" / "none").exists()
