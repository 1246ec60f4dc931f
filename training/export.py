"""Checkpoint and traces to a router bundle: the head as ONNX, its calibration and bounds, whom it was trained for.

The checkpoint remembers the traces and splits of its training. Of the validation split one part chose the checkpoint:
it also decides on a recalibration and on the grid of α. The other part was held back: the table and its bounds come
from it alone. The test split stays unseen.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.progress import announce
from ..data.resampling import documents
from ..data.traces import Traces
from ..router.budgets import by_quality_drop
from ..router.bundle import save_bundle
from ..router.checks import check_choice
from ..router.config import CalibrationRow, RouterConfig
from ..router.drift import summarise_features
from ..router.export import check_finite
from ..router.features import scalar_names
from .calibrate import LOSS_OF_REGIME, CalibrationConfig, calibrate, choose_alpha
from .estimates import estimate, loss_column, mean_loss
from .holdout import divide
from .metrics import frontier_area
from .module import RouterModule
from .recalibrate import RECALIBRATIONS, Recalibration, recalibrate
from .splits import Reading, TraceTensors, read_split

__all__ = ["ExportConfig", "describe_budgets", "export_router", "find_checkpoint"]

_DROPS_TOLD = (0.01, 0.02, 0.05)


@dataclass(frozen=True)
class ExportConfig:
    """What to export, and where to.

    Args:
        checkpoint: a checkpoint, or the folder of a training run (its best checkpoint is taken).
        out: folder for the bundle.
        traces: traces to calibrate on; those of the training by default.
        split: split to calibrate on; by default what the training held back of its validation split.
        alpha: the bundle's own α; by default the one that keeps the verifier's greedy quality on the calibration split
            for the fewest rejections.
        task: what the training prompts were, in words, for the card.
        calibration: how fine the calibration table is.
        recalibrate: none; isotonic, a rising map of the gap fitted after training; or auto, which keeps such a map
            where it lowers the error on documents that it was not fitted on.
    """

    checkpoint: Path
    out: Path
    traces: Path | None = None
    split: str | None = None
    alpha: float | None = None
    task: str = ""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    recalibrate: str = "auto"

    def __post_init__(self) -> None:
        check_choice("recalibrate", self.recalibrate, RECALIBRATIONS)


def export_router(config: ExportConfig) -> Path:
    """Write the bundle and return its folder.

    Raises:
        FileNotFoundError: there is no checkpoint or no traces.
        ValueError: the checkpoint is no router or its training diverged, the traces are damaged, or ONNX and torch
            disagree.
    """
    module, trained_on = _load_checkpoint(find_checkpoint(config.checkpoint))
    try:
        check_finite(module.head)
    except ValueError as error:
        raise ValueError(f"checkpoint: {error}: training diverged; lower model.learning_rate") from error
    head, traces = module.head, Traces.open(config.traces or trained_on.traces)
    source = _calibration_source(config, trained_on, traces)
    found = recalibrate(head, source.chosen_on, config.recalibrate)
    table = calibrate(head, source.held_out, config.calibration, grid_from=source.chosen_on)
    stated = _state(config, traces, source, table)
    figures = _figures(head, source.held_out, table) | _recalibration_figures(found)
    # Of other traces nobody knows that they are like the training's.
    reference = _reference(traces, trained_on) if config.traces is None else {}
    saved = save_bundle(config.out, head, replace(stated, figures=figures, reference=reference))
    announce(f"Router ready: {config.out} ({saved.kind} {saved.estimator}, alpha {saved.default_alpha:.3g})")
    announce(describe_budgets(saved))
    return Path(config.out)


def describe_budgets(config: RouterConfig, confidence: float = 0.95) -> str:
    """Say in one line how few rejections keep which quality drop, and how far that can be relied on."""
    kept = []
    for regime, rows in config.calibration.items():
        for drop in _DROPS_TOLD:
            try:
                row = by_quality_drop(rows, drop, confidence)
            except ValueError:  # out of reach
                continue
            kept.append(f"{regime}: quality drop at most {drop:g} at {row.rejection:.1%} rejected")
    how = "exact" if config.calibration_exact else "approximate: these documents served a choice before"
    where = f"{config.calibration_documents} documents of {config.calibration_split!r}, {how}"
    least = f"no quality drop up to {_DROPS_TOLD[-1]:g} is within reach"
    return f"Bounds ({confidence:.0%}, {where}): {'; '.join(kept) or least}"


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


@dataclass(frozen=True)
class _Training:
    """What a checkpoint remembers of the data that it was trained on."""

    traces: Path
    train_split: str
    validation_split: str
    calibration_share: float
    reading: Reading


@dataclass(frozen=True)
class _Source:
    """Positions to calibrate on, beside those that choices are made on, and whether the two are strangers."""

    split: str
    held_out: TraceTensors
    chosen_on: TraceTensors
    exact: bool


def _load_checkpoint(path: Path) -> tuple[RouterModule, _Training]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        data = content["datamodule_hyper_parameters"]
        reading = Reading(data["feature_set"], data["labels"], data["needs_candidates"], data["sequences"])
        splits = data["train_split"], data["validation_split"]
        training = _Training(Path(data["traces"]), *splits, data["calibration_share"], reading)
        return RouterModule.load_from_checkpoint(path, map_location="cpu", weights_only=True), training
    except (KeyError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"checkpoint: expected one of a router's training, got {str(path)!r}: {reason}") from error


def _calibration_source(config: ExportConfig, training: _Training, traces: Traces) -> _Source:
    """Find documents that served nothing before: those held back in training, or a split of their own.

    Of other traces than the training's nobody knows which documents those are: bounds are then approximate.
    """
    split = config.split or training.validation_split
    loaded = read_split(traces, split, training.reading)
    own = config.traces is None
    if split == training.validation_split:
        chosen_on, back = divide(loaded, training.calibration_share)
        return _Source(split, loaded if back is None else back, chosen_on, exact=own and back is not None)
    if not own:
        return _Source(split, loaded, loaded, exact=False)
    chosen_on, _ = divide(read_split(traces, training.validation_split, training.reading), training.calibration_share)
    return _Source(split, loaded, chosen_on, exact=split != training.train_split)


def _state(
    config: ExportConfig, traces: Traces, source: _Source, table: dict[str, tuple[CalibrationRow, ...]]
) -> RouterConfig:
    pair = traces.manifest.identity
    known = source.held_out.counted
    return RouterConfig(
        drafter=pair.drafter,
        verifier=pair.verifier,
        vocabulary_fingerprint=pair.vocabulary_fingerprint,
        drafter_digest=pair.drafter_digest,
        verifier_digest=pair.verifier_digest,
        trace_digest=traces.manifest.digest,
        default_alpha=choose_alpha(table["greedy"]) if config.alpha is None else config.alpha,
        calibration=table,
        task=config.task,
        calibration_split=source.split,
        calibration_documents=len(np.unique(documents(known.prompt_ids, known.prompt_index.numpy()))),
        calibration_exact=source.exact,
    )


def _reference(traces: Traces, training: _Training) -> dict[str, tuple[float, ...]]:
    """What the features were like in training, for drift to be noticed; hidden states are left out."""
    names = scalar_names(training.reading.feature_set)
    features = read_split(traces, training.train_split, training.reading).features
    return summarise_features(features[:, : len(names)], names)


def _recalibration_figures(found: dict[str, Recalibration]) -> dict[str, float]:
    """Which losses have a map (1) and what it does to the squared error of the gap on documents it has not seen."""
    figures = {}
    for loss, result in found.items():
        figures[f"isotonic_{loss}"] = float(result.kept)
        if math.isfinite(result.after):
            figures[f"isotonic_error_ratio_{loss}"] = result.after / max(result.before, 1e-12)
    return figures


def _figures(head: Any, held_out: TraceTensors, table: dict[str, tuple[CalibrationRow, ...]]) -> dict[str, float]:
    """Held-out figures for the card; quality at lossless decoding is that of the row with most rejections."""
    figures, seen = {"validation_loss": mean_loss(head, held_out)}, held_out.counted
    if head.estimator != "cost_sensitive":
        gap = estimate(head, held_out)
        for row, loss in enumerate(LOSS_OF_REGIME.values()):
            wrong = 1 - seen.correctness[:, row]
            own = gap[:, loss_column(head, loss)]
            figures[f"validation_frontier_area_{loss}"] = frontier_area(own, seen.tv, wrong[:, 0], wrong[:, 1])
    for regime, rows in table.items():
        figures[f"lossless_quality_{regime}"] = max(rows, key=lambda row: row.rejection).quality
    figures["validation_positions"] = float(len(seen))
    figures["validation_prompts"] = float(len(seen.prompt_index.unique()))
    return figures
