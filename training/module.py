"""A router head as a LightningModule: its loss, its optimiser and its validation metrics. Knows no file.

Shapes: ``N`` position, ``F`` feature; axes of length two are the losses (zero_one, sampled) and the models (q, p).
"""

import math
from typing import Any

import pytorch_lightning as pl
import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics.classification import BinaryAUROC

from ..router.examples import Examples
from ..router.heads import make_head
from .datamodule import TraceDataModule
from .metrics import CalibrationError, FrontierArea

__all__ = ["RouterModule"]


class RouterModule(pl.LightningModule):
    """Trains one head for both losses at once.

    Args:
        kind: `linear` or `mlp`.
        estimator: `gap` (squared loss on how much better the verifier did) or `two_confidence` (how often each model
            is right, by cross-entropy).
        feature_set: which statistics the head reads: `verified`, or `draft_only`.
        hidden: widths of the hidden layers of `mlp`.
        learning_rate: peak of AdamW's rate; it rises over the first twentieth of the steps and then falls to zero by a
            cosine.
        weight_decay: decoupled weight decay.
    """

    def __init__(
        self,
        kind: str = "mlp",
        estimator: str = "gap",
        feature_set: str = "verified",
        hidden: tuple[int, ...] = (64, 64),
        learning_rate: float = 3e-3,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__()
        if not learning_rate > 0:
            raise ValueError(f"learning_rate: expected a positive number, got {learning_rate}")
        self.save_hyperparameters()
        self.head = make_head(kind, estimator, feature_set, hidden)
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        names = ("draft", "verifier") if estimator == "two_confidence" else ()
        self.areas = {loss: FrontierArea() for loss in self.head.losses}
        self.rankings = {loss: BinaryAUROC() for loss in self.head.losses}
        self.calibrations = {name: CalibrationError() for name in names}
        # Registered too, so that they move to the device with the module.
        self.metrics = torch.nn.ModuleList([*self.areas.values(), *self.rankings.values(), *self.calibrations.values()])

    def setup(self, stage: str) -> None:
        """Take the normalisation from the training split."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]  # set by Trainer.fit, unknown to its type
        if stage == "fit" and isinstance(data, TraceDataModule):
            self.head.set_normalisation(*data.normalisation())

    def forward(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N 2"]:
        """Estimate the gap under each loss."""
        gap: Tensor = self.head(features)
        return gap

    def training_step(self, batch: Examples, batch_index: int) -> Tensor:
        """Loss of one batch."""
        loss: Tensor = self.head.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch.tv))
        return loss

    def validation_step(self, batch: Examples, batch_index: int) -> None:
        """Collect what the epoch's metrics need."""
        features, correctness, tv = batch.features, batch.correctness, batch.tv
        self.log("val_loss", self.head.loss(batch), batch_size=len(tv))
        gap = self.head(features)
        for column, loss in enumerate(self.head.losses):
            right_q, right_p = correctness[:, column, 0], correctness[:, column, 1]
            self.areas[loss].update(gap[:, column], tv, 1 - right_q, 1 - right_p)
            differ = right_q != right_p
            self.rankings[loss].update(gap[differ, column], (right_p > right_q)[differ].long())
        if self.calibrations:
            confidences = self.head.confidences(features)[:, 0]
            for model, name in enumerate(("draft", "verifier")):
                self.calibrations[name].update(confidences[:, model], correctness[:, 0, model])

    def on_validation_epoch_end(self) -> None:
        """Log the epoch's metrics."""
        values: dict[str, Any] = {}
        for loss in self.head.losses:
            values[f"val_area_{loss}"] = self.areas[loss].compute()
            values[f"val_auroc_{loss}"] = self.rankings[loss].compute()
        for name, metric in self.calibrations.items():
            values[f"val_ece_{name}"] = metric.compute()
        self.log_dict({name: value.float() for name, value in values.items()})
        for one in (*self.areas.values(), *self.rankings.values(), *self.calibrations.values()):
            one.reset()

    def configure_optimizers(self) -> Any:
        """AdamW; linear rise, then a cosine to zero over the planned steps."""
        optimiser = torch.optim.AdamW(self.head.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        total = max(int(self.trainer.estimated_stepping_batches), 1)
        rise = max(total // 20, 1)

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * min(step / total, 1.0)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, factor)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
