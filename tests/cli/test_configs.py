"""Every config that ships is one that its command takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from speccascade.cli import COMMANDS, main
from speccascade.cli.options import CommandLine, leaf_types
from speccascade.data.config import CollectConfig
from speccascade.eval.config import EvaluateConfig
from speccascade.training.module import RouterModule
from speccascade.training.tune_drafter import TuneDrafterConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CLASSES = {"collect": CollectConfig, "evaluate": EvaluateConfig, "tune-drafter": TuneDrafterConfig}
OTHER_HEADS = ("attention", "token", "trees")
"""Heads to train on the demo's traces beside its own."""
FILES = sorted(CONFIGS.glob("*/*.yaml"))


def test_configs_stand_under_the_name_of_their_command() -> None:
    assert {file.parent.name for file in FILES} <= set(COMMANDS)
    assert {"collect/demo", "train/demo", "evaluate/demo", "tune-drafter/demo"} <= {
        f"{file.parent.name}/{file.stem}" for file in FILES
    }


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.parent.name in CLASSES], ids=lambda f: f"{f.parent.name}-{f.stem}"
)
def test_config_is_taken_by_its_command(file: Path) -> None:
    config_class = CLASSES[file.parent.name]
    config = CommandLine(file.parent.name, config_class, "", "").parse([f"--config={file}"])
    assert isinstance(config, config_class)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("train/*.yaml")), ids=lambda f: f.stem)
def test_train_config_is_taken(file: Path, capsys) -> None:
    assert main(["train", f"--config={file}", "--print_config"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["out"] == f"runs/{file.stem}"
    assert resolved["data"]["traces"] == f"runs/{'demo' if file.stem in OTHER_HEADS else file.stem}/traces"
    model = resolved["model"] | ({"top_k": 16} if resolved["model"]["kind"] == "pooled" else {})
    RouterModule(**{name: tuple(value) if isinstance(value, list) else value for name, value in model.items()})


@pytest.mark.parametrize(
    "name", sorted({f.stem for f in FILES if f.parent.name in ("train", "evaluate")} - {"demo", *OTHER_HEADS})
)
def test_the_three_stages_of_a_pair_fit_together(name: str) -> None:
    collect, train, evaluate = (
        yaml.safe_load((CONFIGS / command / f"{name}.yaml").read_text()) for command in ("collect", "train", "evaluate")
    )
    assert collect["pair"] == evaluate["pair"]
    assert collect["prompts"] == evaluate["prompts"]
    assert collect["out"] == train["data"]["traces"] == evaluate["traces"]
    assert evaluate["router"] == [f"{train['out']}/router"]


def test_demo_reads_what_the_commands_read() -> None:
    demo = {command: yaml.safe_load((CONFIGS / command / "demo.yaml").read_text()) for command in CLASSES}
    assert demo["collect"]["pair"] == demo["evaluate"]["pair"]
    assert demo["collect"]["pair"]["verifier"] == demo["tune-drafter"]["verifier"]
    sources = {command: config["prompts"] for command, config in demo.items()}
    assert sources["collect"] == sources["evaluate"] == sources["tune-drafter"], "the splits must be the same in all"
    assert "tune" not in demo["collect"]["splits"]
    assert "pair.drafter" in leaf_types(CollectConfig)
