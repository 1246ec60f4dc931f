"""Training from the command line: one run from traces to a router that loads; mistakes are answered on one line."""

import csv
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from speccascade.cli import main as speccascade
from speccascade.cli.options import CommandLine
from speccascade.data.resampling import held_back
from speccascade.data.traces import Traces
from speccascade.eval.config import EvaluateConfig
from speccascade.router.learned import LearnedRouter
from speccascade.training.cli import main
from speccascade.training.export import ExportConfig, export_router, find_checkpoint
from speccascade.training.splits import Reading, read_split

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(traces_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "made"
    with torch.random.fork_rng():
        main([
            f"--data.traces={traces_dir}", f"--out={out}", "--trainer.max_epochs=6", "--data.batch-size=1024",
            "--bundle.calibration.resamples=50", "--bundle.task=made-up positions", "--model.estimator=two_confidence",
        ])  # fmt: skip
    return out


def test_a_run_leaves_checkpoint_log_config_and_router(trained: Path, traces_dir: Path) -> None:
    assert find_checkpoint(trained) == trained / "checkpoints" / "best.ckpt"
    logged = (trained / "logs" / "csv" / "metrics.csv").read_text()
    for name in ("val_loss", "train_loss", "val_auroc_zero_one", "val_area_sampled", "val_ece_draft"):
        assert name in logged.splitlines()[0]
    resolved = yaml.safe_load((trained / "config.yaml").read_text())
    assert resolved["data"]["batch_size"] == 1024
    assert resolved["trainer"]["max_epochs"] == 6
    assert resolved["seed_everything"] == 0
    router = LearnedRouter.from_pretrained(trained / "router")
    assert router.config.trace_digest == Traces.open(traces_dir).manifest.digest
    assert router.config.task == "made-up positions"
    assert router.config.drafter == "small"


def test_the_line_of_an_epoch_shows_that_epoch(
    traces_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([
        f"--data.traces={traces_dir}", f"--out={tmp_path}", "--trainer.max_epochs=6", "--data.batch-size=1024",
        "--bundle.enabled=false",
    ])  # fmt: skip
    shown = re.findall(
        r"epoch +(\d+) of at most 6: validation loss ([\d.]+), frontier area 0-1 ([\d.]+), sampled ([\d.]+)",
        capsys.readouterr().err,
    )
    with (tmp_path / "logs" / "csv" / "metrics.csv").open() as file:
        logged = {int(row["epoch"]) + 1: row for row in csv.DictReader(file) if row["val_loss"]}
    assert [int(epoch) for epoch, *_ in shown] == [1, 6]
    for epoch, *figures in shown:
        of_epoch = [logged[int(epoch)][name] for name in ("val_loss", "val_area_zero_one", "val_area_sampled")]
        assert figures == [f"{float(figure):.4f}" for figure in of_epoch]


def test_the_router_decides_as_its_calibration_says(trained: Path, traces_dir: Path) -> None:
    """The exported ONNX head on what was held back of the validation split gives the stored rates, in both regimes."""
    router = LearnedRouter.from_pretrained(trained / "router")
    split = Traces.open(traces_dir).split("validation")
    back = torch.from_numpy(held_back(split.prompt_ids, 0.5))[split.prompt_index]
    assert router.config.calibration_documents == len(split.prompt_index[back].unique()) > 20
    split = dataclasses.replace(split, stats=split.stats.select(back))
    for regime, stats in (("greedy", split.stats.greedy()), ("sampled", split.stats)):
        for row in router.config.calibration[regime]:
            defer = router.with_alpha(row.alpha).defer(stats)
            assert float(defer.float().mean()) == pytest.approx(row.deferral, abs=2e-3)
            assert float((defer * stats.tv).mean()) == pytest.approx(row.rejection, abs=2e-3)


def test_the_resolved_config_repeats_the_run(trained: Path, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        main([f"--config={trained / 'config.yaml'}", f"--out={tmp_path}", "--bundle.enabled=false"])
    first, again = (
        torch.load(find_checkpoint(folder), weights_only=True)["state_dict"] for folder in (trained, tmp_path)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not (tmp_path / "router").exists()


def test_export_takes_another_alpha_and_split(trained: Path, tmp_path: Path) -> None:
    export_router(ExportConfig(trained, tmp_path / "router", split="test", alpha=0.25))
    router = LearnedRouter.from_pretrained(tmp_path / "router")
    assert router.alpha == 0.25
    assert router.config.calibration != LearnedRouter.from_pretrained(trained / "router").config.calibration


def test_what_cannot_be_exported_is_named(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="checkpoint: expected a checkpoint or a training run's folder"):
        export_router(ExportConfig(tmp_path, tmp_path / "router"))
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="checkpoint: expected one of a router's training"):
        export_router(ExportConfig(tmp_path / "other.ckpt", tmp_path / "router"))
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    with pytest.raises(ValueError, match="checkpoint: expected one of a router's training"):
        export_router(ExportConfig(tmp_path / "text.ckpt", tmp_path / "router"))
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        export_router(ExportConfig(trained, tmp_path / "router", traces=tmp_path))
    assert not (tmp_path / "router").exists()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--model.knd=mlp"], r"unknown option --model\.knd; did you mean --model\.kind\?"),
        (["--dta.traces=x"], r"unknown option --dta\.traces; did you mean --data\.traces\?"),
        (["--model.kind=liner"], "did you mean 'linear'"),
        (["--bundle.alpha=fast"], r"--bundle\.alpha: expected float, got 'fast'"),
        (["--data.batch_size="], r"--data\.batch_size: expected int, got ''"),
        (["--data.calibration_share=-1"], r"calibration_share: expected a number in \[0, 1\], got -1"),
        (["--model.learning_rate=fast"], r"--model\.learning_rate: expected float, got 'fast'"),
        (["--trainer.max_epoch=3"], r"unknown option --trainer\.max_epoch; did you mean --trainer\.max_epochs\?"),
        (["--config=nowhere.yaml"], r"nowhere\.yaml"),
        (["--data.traces=nowhere"], "nowhere"),
        (["--data.batch_size=0"], "batch_size: expected at least 1, got 0"),
        (["--data.memory=hole"], "did you mean 'whole'"),
        (["--data.labels=outcomes"], "did you mean 'outcome'"),
        (["stray"], "unknown option stray"),
    ],
)
def test_mistakes_are_answered_on_one_line_with_code_2(
    arguments: list[str],
    answer: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert speccascade(["train", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("speccascade train: error: ")
    assert re.search(answer, lines[0]), lines[0]
    assert not list(tmp_path.iterdir()), "nothing is written before the mistake is answered"


def test_an_unknown_key_in_a_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model:\n  hiden: [32]\n")
    assert speccascade(["train", "--config", str(config)]) == 2
    assert "unknown key model.hiden; did you mean model.hidden?" in capsys.readouterr().err


def test_help_explains_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert speccascade(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "two_confidence",
        "decoupled weight decay",
        "folder that `speccascade collect` wrote",
        "--out",
        "--ckpt_path",
        "--data.memory",
        "--data.weight",
        "--data.labels",
    ):
        assert part in text


def test_a_run_says_how_it_went_and_what_comes_next(
    make_traces: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few positions are warned of; the next command can be pasted, odd folder names and all."""
    traces = make_traces(tmp_path / "my traces", prompts=20, length=30)
    main([f"--data.traces={traces}", f"--out={tmp_path / 'out'}", "--trainer.max_epochs=3"])
    shown = capsys.readouterr().err
    assert "Warning: 360 training positions of 12 prompts" in shown
    with (tmp_path / "out" / "logs" / "csv" / "metrics.csv").open() as file:
        logged = {int(row["epoch"]) + 1: float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]}
    best = min(logged, key=logged.__getitem__)
    assert re.search(rf"Trained 3 epochs in .*; best was epoch {best}: validation loss {logged[best]:.4f}", shown)
    words = shlex.split(shown.split("Next: ")[1])
    assert words[:3] == ["speccascade", "evaluate", "--offline"]
    config = CommandLine("evaluate", EvaluateConfig, "", "").parse(words[2:])
    assert (config.traces, config.router) == (str(traces), (str(tmp_path / "out" / "router"),))


def test_enough_positions_are_not_warned_of(trained: Path, traces_dir: Path, tmp_path: Path, capsys) -> None:
    main([f"--data.traces={traces_dir}", f"--out={tmp_path}", "--trainer.max_epochs=1", "--bundle.enabled=false"])
    assert "Warning" not in capsys.readouterr().err


def test_a_stopped_run_goes_on(trained: Path, traces_dir: Path, tmp_path: Path) -> None:
    last = trained / "checkpoints" / "last.ckpt"
    assert "optimizer_states" not in torch.load(find_checkpoint(trained), weights_only=True), (
        "the best has weights alone"
    )
    with torch.random.fork_rng():
        main([
            f"--config={trained / 'config.yaml'}", f"--out={tmp_path}", "--trainer.max_epochs=8",
            f"--ckpt_path={last}", "--bundle.enabled=false",
        ])  # fmt: skip
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 7
    with (tmp_path / "logs" / "csv" / "metrics.csv").open() as file:
        assert {row["epoch"] for row in csv.DictReader(file)} == {"6", "7"}


def test_what_cannot_be_gone_on_with_is_named(trained: Path, traces_dir: Path, tmp_path: Path) -> None:
    rest = [f"--data.traces={traces_dir}", f"--out={tmp_path / 'out'}"]
    with pytest.raises(FileNotFoundError, match="ckpt_path: no checkpoint at 'nowhere'"):
        main([*rest, "--ckpt_path=nowhere"])
    with pytest.raises(ValueError, match=r"ckpt_path: expected the last\.ckpt of a run, .* holds weights alone"):
        main([*rest, f"--ckpt_path={find_checkpoint(trained)}"])
    with pytest.raises(ValueError, match="was trained with estimator 'two_confidence', not 'gap'"):
        main([*rest, f"--ckpt_path={trained / 'checkpoints' / 'last.ckpt'}"])
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    with pytest.raises(ValueError, match="ckpt_path: expected a checkpoint of a router's training"):
        main([*rest, f"--ckpt_path={tmp_path / 'text.ckpt'}"])
    assert not (tmp_path / "out").exists()


_RECORDING = """
import os, sys, torch
from speccascade.training import cli, export, module

seen, saved, step, save = [], [], module.RouterModule.training_step, export.save_bundle

def recording_step(self, batch, index):
    if self.current_epoch == 0:
        seen.append(batch.features)
    return step(self, batch, index)

def recording_save(*arguments):
    saved.append(str(arguments[0]))
    return save(*arguments)

module.RouterModule.training_step, export.save_bundle = recording_step, recording_save
cli.main(sys.argv[2:])
torch.save({"seen": seen, "saved": saved}, f"{sys.argv[1]}/rank{os.environ.get('LOCAL_RANK', '0')}.pt")
"""


def test_two_processes_train_one_router(traces_dir: Path, tmp_path: Path) -> None:
    """Each takes its own rows, together the split; the first one writes the bundle, once."""
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(_RECORDING)
    done = subprocess.run(
        [
            sys.executable, script, tmp_path, f"--data.traces={traces_dir}", f"--out={out}", "--data.batch_size=1000",
            "--trainer.max_epochs=2", "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.accelerator=cpu",
            "--bundle.calibration.resamples=20",
        ],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert [len(rank["seen"]) for rank in ranks] == [5, 5]
    rows = [{tuple(row) for batch in rank["seen"] for row in batch.tolist()} for rank in ranks]
    split = read_split(Traces.open(traces_dir), "train", Reading("verified")).features
    assert not rows[0] & rows[1]
    assert rows[0] | rows[1] == {tuple(row) for row in split.tolist()}
    assert [rank["saved"] for rank in ranks] == [[str(out / "router")], []]
    assert done.stderr.count("Router ready") == done.stderr.count("Traces: ") == 1
    assert LearnedRouter.from_pretrained(out / "router").config.drafter == "small"


def test_the_entry_point_script_is_the_same_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "train_router.py", "--config", "configs/train/demo.yaml", f"--data.traces={tmp_path}"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"speccascade train: error: .*manifest\.json.*\n", done.stderr), done.stderr
