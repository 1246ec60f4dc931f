"""How training says how far it is: a bar within epochs, a line now and then, a summary at the end. Knows no head.

All of it is shown by one process, on standard error, and seldom enough to cost nothing.
"""

from __future__ import annotations

import time
from typing import Any

import pytorch_lightning as pl

from ..data.progress import Progress, announce, describe_seconds

__all__ = ["EpochLines", "TrainingBar"]

_LABELS = {
    "val_loss": "validation loss",
    "val_area_zero_one": "frontier area 0-1",
    "val_area_sampled": "sampled",
    "val_log_loss_draft": "log loss of the drafter",
    "val_log_loss_verifier": "of the verifier",
}
"""Figures of a line, those of them that the head has, in this order."""


class TrainingBar(pl.Callback):
    """Counts batches: a bar on a terminal, a line every ten seconds in a batch job; looks at the clock, then is silent.

    Args:
        interval: least seconds between two updates.
    """

    def __init__(self, interval: float = 0.5) -> None:
        self.interval = interval
        self._progress: Progress | None = None
        self._shown, self._unshown = 0.0, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the bar over all epochs that may come."""
        if not trainer.is_global_zero:
            return
        epochs = (trainer.max_epochs or 1) - trainer.current_epoch
        self._progress = Progress("training", epochs * int(trainer.num_training_batches), unit="batches")
        self._progress.__enter__()
        self._shown = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch, and show the count if it is time."""
        if self._progress is None:
            return
        self._unshown += 1
        if time.monotonic() - self._shown >= self.interval:
            self._show()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the bar away."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Take the bar away, so that the error stands alone."""
        self._stop()

    def _show(self) -> None:
        assert self._progress is not None
        self._progress.advance(self._unshown)
        self._shown, self._unshown = time.monotonic(), 0

    def _stop(self) -> None:
        if self._progress is not None:
            # Early stopping leaves batches undone: a closing line of totals would read like a failure.
            self._progress.__exit__(KeyboardInterrupt, None, None)
            self._progress = None


class EpochLines(pl.Callback):
    """Says how training goes, at most one line in `every` epochs, and at its end which epoch was the best.

    Args:
        every: epochs a line.
        monitor: the figure whose least value is the best epoch's.
    """

    def __init__(self, every: int = 5, monitor: str = "val_loss") -> None:
        self.every, self.monitor = every, monitor
        self._start, self._first = 0.0, 0
        self._epochs: dict[int, dict[str, float]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the clock."""
        self._start, self._first, self._epochs = time.monotonic(), trainer.current_epoch, {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the epoch's figures; `on_validation_epoch_end` would come before the module has logged them."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        epoch = trainer.current_epoch
        self._epochs[epoch] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if epoch % self.every == 0:
            figures = self._describe(self._epochs[epoch])
            announce(f"epoch {epoch + 1:>3} of at most {trainer.max_epochs}: {figures}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sum all epochs up."""
        known = {epoch: figures for epoch, figures in self._epochs.items() if self.monitor in figures}
        if not known or not trainer.is_global_zero:
            return
        best = min(known, key=lambda epoch: known[epoch][self.monitor])
        seconds = describe_seconds(time.monotonic() - self._start)
        announce(
            f"Trained {max(known) + 1 - self._first} epochs in {seconds}; "
            f"best was epoch {best + 1}: {self._describe(known[best])}"
        )

    def _describe(self, figures: dict[str, float]) -> str:
        return ", ".join(f"{label} {figures[name]:.4f}" for name, label in _LABELS.items() if name in figures)
