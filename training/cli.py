"""``python train_router.py --config FILE`` and ``speccascade train``: LightningCLI around the router's module and data.

One run: fit with early stopping, keep the best checkpoint (weights alone) and the last (all that a run needs to go on),
log to CSV (and TensorBoard where installed), write the resolved config beside them, export the bundle, name the next
command. With several processes the first one writes and speaks.
"""

from __future__ import annotations

import importlib.util
import logging
import pickle
import re
import shlex
import sys
import warnings
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from jsonargparse import DefaultHelpFormatter
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from ..data.progress import announce
from ..router.checks import check_choice, nearest, shorten_union
from .calibrate import CalibrationConfig
from .callbacks import EpochLines, TrainingBar
from .datamodule import TraceDataModule
from .export import ExportConfig, export_router
from .module import RouterModule
from .recalibrate import RECALIBRATIONS, check_recalibration

__all__ = ["main", "quiet_lightning"]

_DESCRIPTION = """\
Train a router head on traces with Lightning, then export it as a bundle: ONNX, calibration, card.
Flags override the file; the resolved config is written to OUT/config.yaml. `speccascade train` is the same command.

example:
  python train_router.py --config configs/train/demo.yaml
  python train_router.py --data.traces runs/demo/traces --model.kind linear --out runs/linear"""

_TRAINER_DEFAULTS = {
    "max_epochs": 60,
    "accelerator": "auto",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 10,
}


FEW_POSITIONS = 1000
FEW_PROMPTS = 20


class _Help(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description."""


@dataclass(frozen=True)
class BundleOptions:
    """The bundle that a training run ends with.

    Args:
        enabled: export the best checkpoint to OUT/router.
        alpha: the bundle's own α; by default the one that keeps the verifier's greedy quality for the fewest
            rejections.
        task: what the training prompts were, in words, for the card.
        calibration: how fine the calibration table is.
        recalibrate: none; isotonic, a rising map of the gap fitted after training; or auto, which keeps such a map
            where it lowers the error on documents that it was not fitted on.
    """

    enabled: bool = True
    alpha: float | None = None
    task: str = ""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    recalibrate: str = "auto"

    def __post_init__(self) -> None:
        check_choice("recalibrate", self.recalibrate, RECALIBRATIONS)


class RouterCLI(LightningCLI):
    """LightningCLI with the router's defaults: output folder, early stopping, best checkpoint, loggers, bundle."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Put the options of the router before the hundred of Lightning's trainer: `--help` starts with them."""
        parser.add_argument("--out", type=str, default="runs/router", help="folder for everything that this run writes")
        parser.add_lightning_class_args(RouterModule, "model")
        parser.add_lightning_class_args(TraceDataModule, "data")
        parser.add_class_arguments(BundleOptions, "bundle")
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None, help="go on with a stopped run: its OUT/checkpoints/last.ckpt"
        )
        parser.add_lightning_class_args(pl.Trainer, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in _TRAINER_DEFAULTS.items()})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add early stopping and the best checkpoint; tie together what must agree."""
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "early_stopping.monitor": "val_loss",
                "early_stopping.patience": 10,
                "checkpoint.monitor": "val_loss",
                "checkpoint.filename": "best",
                "checkpoint.enable_version_counter": False,
                "checkpoint.save_weights_only": True,
            }
        )
        parser.link_arguments("model.feature_set", "data.feature_set")
        parser.link_arguments("model.kind", "data.needs_candidates", compute_fn=_reads_candidates)
        parser.link_arguments("model.kind", "data.sequences", compute_fn=_reads_order)
        parser.link_arguments("data.hidden_sizes", "model.hidden_sizes", apply_on="instantiate")
        parser.link_arguments("data.top_k", "model.top_k", apply_on="instantiate")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)
        parser.link_arguments("out", "checkpoint.dirpath", compute_fn=_checkpoint_folder)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and refuse what is unknown or malformed on one line."""
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            raise ValueError(_explain(str(error), parser.get_defaults().keys())) from error

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Log into the output folder unless a logger was configured; keep the last epoch, to go on with."""
        out = self.config["out"]
        if self.config["trainer"]["logger"] in (None, True):
            kwargs["logger"] = [CSVLogger(out, name="logs", version="csv")]
            if importlib.util.find_spec("tensorboard") is not None:
                kwargs["logger"].append(TensorBoardLogger(out, name="logs", version="tensorboard"))
        kwargs.setdefault("default_root_dir", out)
        trainer = super().instantiate_trainer(**kwargs)
        last = ModelCheckpoint(_checkpoint_folder(out), filename="last", enable_version_counter=False)
        if trainer.checkpoint_callbacks:
            trainer.callbacks.append(last)  # type: ignore[attr-defined]  # unknown to the trainer's type
        return trainer


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the arguments say; `--help` prints and leaves with code 0.

    Raises:
        ValueError: an unknown option or key (the nearest is named), a bad value, or damaged traces.
        FileNotFoundError: a config or the traces are missing.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with quiet_lightning():
        cli = _parse([_underscored(word) for word in words])
        out = Path(cli.config["out"])
        check_recalibration(cli.model.head, cli.config_init["bundle"].recalibrate)
        cli.datamodule.setup("fit")  # missing traces are answered before anything is written
        stopped = _stopped_run(cli.config["ckpt_path"], cli.model)
        if cli.trainer.is_global_zero:
            _warn_of_few(cli.datamodule)
            out.mkdir(parents=True, exist_ok=True)
            cli.parser.save(cli.config, out / "config.yaml", overwrite=True)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=stopped, weights_only=True)
    if cli.trainer.is_global_zero:
        _finish(cli, out)


def _finish(cli: RouterCLI, out: Path) -> None:
    best: ModelCheckpoint = cli.config_init["checkpoint"]
    announce(f"Best checkpoint: {best.best_model_path} ({best.monitor} {float(best.best_model_score or 0):.4f})")
    options: BundleOptions = cli.config_init["bundle"]
    if not options.enabled:
        return
    folder = export_router(
        ExportConfig(
            Path(best.best_model_path),
            out / "router",
            alpha=options.alpha,
            task=options.task,
            calibration=options.calibration,
            recalibrate=options.recalibrate,
        )
    )
    command = ["speccascade", "evaluate", "--offline", "--traces", str(cli.datamodule.traces_dir)]
    announce(f"Next: {shlex.join([*command, '--router', f'[{folder}]', '--out', str(out / 'evaluate')])}")


def _stopped_run(path: str | None, model: RouterModule) -> str | None:
    """Check that a checkpoint is one that this run can go on with.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it holds weights alone, or another head's.
    """
    if path is None:
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(f"ckpt_path: no checkpoint at {path!r}")
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        settings = dict(held["hyper_parameters"])
    except (KeyError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(f"ckpt_path: expected a checkpoint of a router's training, got {path!r}") from error
    if "optimizer_states" not in held:
        raise ValueError(f"ckpt_path: expected the last.ckpt of a run, got {path!r}, which holds weights alone")
    for name in ("kind", "estimator", "feature_set", "hidden", "losses", "context", "rank", "token_rank"):
        if settings.get(name) != model.hparams[name]:
            raise ValueError(
                f"ckpt_path: {path} was trained with {name} {settings.get(name)!r}, not {model.hparams[name]!r}"
            )
    return path


def _warn_of_few(data: TraceDataModule) -> None:
    """Say when there is too little to learn from."""
    assert data.train is not None, "setup comes first"
    positions, prompts = len(data.train), len(data.train.prompt_ids)
    if positions < FEW_POSITIONS or prompts < FEW_PROMPTS:
        announce(
            f"Warning: {positions:,} training positions of {prompts:,} prompts; with fewer than {FEW_POSITIONS:,} or "
            f"{FEW_PROMPTS} a router is mostly noise, and its intervals are wide: collect more"
        )


def _parse(words: list[str]) -> RouterCLI:
    return RouterCLI(
        RouterModule,
        TraceDataModule,
        save_config_callback=None,
        seed_everything_default=0,
        trainer_defaults={"callbacks": [TrainingBar(), EpochLines()]},
        parser_kwargs={
            "exit_on_error": False,
            "prog": "speccascade train",
            "usage": "speccascade train [--config FILE.yaml] [options]",
            "description": _DESCRIPTION,
            "formatter_class": _Help,
            "allow_abbrev": False,
        },
        auto_configure_optimizers=False,
        args=words,
        run=False,
    )


def _reads_candidates(kind: str) -> bool:
    return kind == "pooled"


def _reads_order(kind: str) -> bool:
    return kind == "attention"


def _checkpoint_folder(out: str) -> str:
    return str(Path(out) / "checkpoints")


def _underscored(word: str) -> str:
    """Understand `--model.learning-rate` as well as `--model.learning_rate`."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep hints on hardware, loaders and folders off the screen; what matters is announced by this command."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(pytorch_lightning|lightning_fabric)\b")
        warnings.filterwarnings("ignore", message=r".*LightningCLI's args parameter")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _explain(message: str, known: Iterable[str]) -> str:
    """Say on one line, with the nearest known name, what jsonargparse says on several."""
    text = " ".join(message.split())
    if unknown := re.search(r"unrecognized arguments: (\S+)", text):
        name = unknown[1].lstrip("-").partition("=")[0]
        return f"unknown option {unknown[1].partition('=')[0]}{_suggest(name, known, '--')}"
    if unknown := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text):
        return f"unknown key {unknown[1]}.{unknown[2]}{_suggest(f'{unknown[1]}.{unknown[2]}', known)}"
    text = re.sub(r'^Parser key "([^"]+)": ', r"--\1: ", text)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    text = shorten_union(text)
    return re.sub(r"Expected an? (.*?)\. Got value: ?(.*)$", r"expected \1, got '\2'", text)


def _suggest(name: str, known: Iterable[str], dashes: str = "") -> str:
    return nearest(name, known, lambda near: f"{dashes}{near}") or " (--help lists them)"
