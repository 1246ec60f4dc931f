"""Checkpoint and traces to a router bundle: the head as ONNX, its calibration, whom it was trained for.

The checkpoint remembers the traces and splits of its training; calibration and figures come from the validation split
alone, so that the test split stays unseen.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..data.progress import announce
from ..data.traces import Traces
from ..router.bundle import save_bundle
from ..router.config import CalibrationRow, RouterConfig
from ..router.heads import RouterHead
from .calibrate import CalibrationConfig, calibrate, choose_alpha
from .datamodule import TraceTensors, load_split
from .metrics import frontier_area
from .module import RouterModule

__all__ = ["ExportConfig", "export_router", "find_checkpoint"]


@dataclass(frozen=True)
class ExportConfig:
    """What to export, and where to.

    Args:
        checkpoint: a checkpoint, or the folder of a training run (its best checkpoint is taken).
        out: folder for the bundle.
        traces: traces to calibrate on; those of the training by default.
        split: split to calibrate on; the validation split of the training by default.
        alpha: the bundle's own α; by default the one that keeps the verifier's greedy quality on the calibration split
            for the fewest rejections.
        task: what the training prompts were, in words, for the card.
        calibration: how fine the calibration table is.
    """

    checkpoint: Path
    out: Path
    traces: Path | None = None
    split: str | None = None
    alpha: float | None = None
    task: str = ""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)


def export_router(config: ExportConfig) -> Path:
    """Write the bundle and return its folder.

    Raises:
        FileNotFoundError: there is no checkpoint or no traces.
        ValueError: the checkpoint is no router, the traces are damaged, or ONNX and torch disagree.
    """
    module, data = _load_checkpoint(find_checkpoint(config.checkpoint))
    traces = Traces.open(config.traces or Path(data["traces"]))
    held_out = load_split(traces, config.split or data["validation_split"], module.head.feature_set)
    table = calibrate(module.head, held_out, config.calibration)
    pair = traces.manifest.identity
    saved = save_bundle(
        config.out,
        module.head,
        RouterConfig(
            drafter=pair.drafter,
            verifier=pair.verifier,
            vocabulary_fingerprint=pair.vocabulary_fingerprint,
            drafter_digest=pair.drafter_digest,
            verifier_digest=pair.verifier_digest,
            trace_digest=traces.manifest.digest,
            default_alpha=choose_alpha(table["greedy"]) if config.alpha is None else config.alpha,
            calibration=table,
            task=config.task,
            figures=_figures(module.head, held_out, table),
        ),
    )
    announce(f"Router ready: {config.out} ({saved.kind} {saved.estimator}, alpha {saved.default_alpha:.3g})")
    return Path(config.out)


def find_checkpoint(path: Path) -> Path:
    """Return a checkpoint file: the path itself, or the best one of a training run's folder.

    Raises:
        FileNotFoundError: there is none.
    """
    if path.is_file():
        return path
    for folder in (path / "checkpoints", path):
        found = sorted(folder.glob("best*.ckpt"), key=lambda file: file.stat().st_mtime)
        if found:
            return found[-1]
    raise FileNotFoundError(
        f"checkpoint: expected a checkpoint or a training run's folder, found none at {str(path)!r}"
    )


def _load_checkpoint(path: Path) -> tuple[RouterModule, dict[str, Any]]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        data = dict(content["datamodule_hyper_parameters"])
        splits = {name: data[name] for name in ("traces", "validation_split")}
        return RouterModule.load_from_checkpoint(path, map_location="cpu", weights_only=True), splits
    except (KeyError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"checkpoint: expected one of a router's training, got {str(path)!r}: {reason}") from error


def _figures(
    head: RouterHead, held_out: TraceTensors, table: dict[str, tuple[CalibrationRow, ...]]
) -> dict[str, float]:
    """Held-out figures for the card; quality at lossless decoding is that of the row with most rejections."""
    with torch.inference_mode():
        gap = head.eval()(held_out.features)
        figures = {"validation_loss": float(head.loss(held_out.examples))}
    for column, loss in enumerate(head.losses):
        wrong = 1 - held_out.correctness[:, column]
        figures[f"validation_frontier_area_{loss}"] = frontier_area(
            gap[:, column], held_out.tv, wrong[:, 0], wrong[:, 1]
        )
    for regime, rows in table.items():
        figures[f"lossless_quality_{regime}"] = max(rows, key=lambda row: row.rejection).quality
    figures["validation_positions"] = float(len(held_out))
    figures["validation_prompts"] = float(len(held_out.prompt_ids))
    return figures
