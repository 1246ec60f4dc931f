"""A router head as a LightningModule: its loss, its optimiser, and when it is measured. Knows no file.

Heads are trained by gradient steps, or, where they bring a ``fit`` of their own (trees), fitted once.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor, nn

from ..data.progress import announce
from ..router.checks import check_range
from ..router.examples import Examples
from ..router.heads import Head, HeadSpec, build_head
from .datamodule import TraceDataModule
from .directions import principal_directions
from .splits import TraceTensors
from .validation import HeadMetrics, metrics_for

__all__ = ["RouterModule"]

DEFAULT_LOSSES = ("zero_one", "sampled")

_LEAST = 5
"""Positions that a token must be named at in training to be told apart."""

_SAMPLE = 20_000
"""Positions that the directions of hidden states are found on."""


class RouterModule(pl.LightningModule):
    """Trains one head for all of its losses at once.

    Args:
        kind: `linear`, `mlp`, `trees` (boosted, fitted once), `attention` (reads the positions before too) or `pooled`
            (estimates the truth over both models' likely tokens: one head for every loss, rule and temperature).
        estimator: `gap` (squared loss on how much better the verifier did), `two_confidence` (how often each model is
            right, by cross-entropy), `cost_sensitive` (is fed α and learns the decision), `pooled` for the kind of that
            name and no other; by default that one, or `gap`.
        feature_set: which statistics the head reads: `draft_only`, `verified`, and with both models' likeliest tokens
            or hidden states `verified+topk`, `verified+hidden`, `verified+topk+hidden`.
        hidden: widths of the hidden layers of kinds that have some, such as `mlp`.
        losses: what the head's gaps are about: `zero_one` for greedy decoding, `sampled` for sampling, `log`.
        context: how many positions `attention` reads, the one that it decides on included (0: eight); 0 for all others.
        rank: how many directions of each model's hidden state are read (principal components of the training
            positions); 0 reads every number of them.
        token_rank: for `pooled`: length of the vector that is learned for every token that training meets often, so
            that the estimate may depend on which token a candidate is; 0 does not tell tokens apart.
        dropout: share of the hidden layers' outputs that is left out in each training step.
        hidden_sizes: of the hidden states; decided by the traces.
        top_k: how many tokens of each model are candidates; decided by the traces.
        learning_rate: peak of AdamW's rate; it rises over the first twentieth of the steps and then falls to zero by a
            cosine.
        weight_decay: decoupled weight decay.
        prices: values of α at which decisions are compared with those of a rule that knows the label (`val_regret_*`);
            by default eight from 0 to where rejecting everywhere costs what that rule gains.

    Raises:
        ValueError: an unknown name, a learning rate that is not positive, a weight decay or a price below 0.
    """

    def __init__(
        self,
        kind: str = "mlp",
        estimator: str | None = None,
        feature_set: str = "verified",
        hidden: tuple[int, ...] = (64, 64),
        losses: tuple[str, ...] = DEFAULT_LOSSES,
        context: int = 0,
        rank: int = 0,
        token_rank: int = 0,
        dropout: float = 0.0,
        hidden_sizes: tuple[int, ...] = (),
        top_k: int = 0,
        learning_rate: float = 3e-3,
        weight_decay: float = 1e-2,
        prices: tuple[float, ...] | None = None,
    ) -> None:
        super().__init__()
        if not learning_rate > 0:
            raise ValueError(f"learning_rate: expected a positive number, got {learning_rate}")
        check_range("weight_decay", weight_decay, 0, math.inf)
        if prices is not None and not (prices and min(prices) >= 0):
            raise ValueError(f"prices: expected one number at least, none below 0, got {prices}")
        self.save_hyperparameters()
        if estimator is None:
            estimator = "pooled" if kind == "pooled" else "gap"
        if kind == "pooled" and tuple(losses) == DEFAULT_LOSSES:
            losses = ("log",)  # what it is trained by; the gaps of both losses follow from it
        self.hparams.update(estimator=estimator)  # what a stopped run is compared with
        spec = HeadSpec(
            kind,
            estimator,
            feature_set,
            tuple(hidden),
            tuple(losses),
            context,
            top_k,
            tuple(hidden_sizes),
            rank,
            token_rank,
        )
        self.head: Any = build_head(spec)
        _set_dropout(self.head, dropout)
        self.learning_rate, self.weight_decay, self.prices = learning_rate, weight_decay, prices
        self.measured = HeadMetrics()
        self.fits_itself = callable(getattr(self.head, "fit", None))
        self.automatic_optimization = not self.fits_itself

    def setup(self, stage: str) -> None:
        """Take the normalisation from the training split, and the prices from the other.

        Raises:
            ValueError: the data module does not give what the head reads.
        """
        data = self.trainer.datamodule  # type: ignore[attr-defined]  # set by Trainer.fit, unknown to its type
        if stage != "fit" or not isinstance(data, TraceDataModule):
            return
        _check_data(self.head, self.fits_itself, data)
        self.head.set_normalisation(*data.normalisation())
        if self.head.spec.rank:
            self.head.set_directions(*_find_directions(self.head, data))
        if self.head.spec.token_rank:
            self.head.table.set_tokens(data.frequent_tokens(_LEAST), data.vocab_size, data.seed)
        self.measured = metrics_for(self.head, data.preview(), self.prices).to(self.device)
        if self.fits_itself:
            self.trainer.fit_loop.max_epochs = 1

    def on_train_start(self) -> None:
        """Go on where a resumed run stopped; fit a head that fits itself, on the whole training split."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, TraceDataModule):
            data.start_epoch(self.current_epoch)
        if self.fits_itself:
            rank_zero_only(announce)(f"Fitting {self.head.kind} on {len(data.train):,} positions, once")
            self.head.fit(data.train.examples, data.validation.examples, data.seed)

    def forward(self, features: Tensor) -> Tensor:
        """What the head estimates."""
        estimate: Tensor = self.head(features)
        return estimate

    def training_step(self, batch: Examples, batch_index: int) -> Tensor:
        """Loss of one batch."""
        loss: Tensor = self.head.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch.tv), sync_dist=True)
        if self.fits_itself and not batch_index:
            self.optimizers().step()  # type: ignore[union-attr]  # a checkpoint is saved only after some step
        return loss

    def validation_step(self, batch: Examples, batch_index: int) -> None:
        """Collect what the epoch's metrics need."""
        self.measured.update(self.head, batch)

    def on_validation_epoch_end(self) -> None:
        """Log the epoch's metrics."""
        self.log_dict(self.measured.compute())
        self.measured.reset()

    def configure_optimizers(self) -> Any:
        """AdamW; linear rise, then a cosine to zero over the planned steps."""
        if self.fits_itself:
            return torch.optim.SGD([nn.Parameter(torch.zeros(0))])
        optimiser = torch.optim.AdamW(
            self.head.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay, fused=True
        )
        total = max(int(self.trainer.estimated_stepping_batches), 1)
        rise = max(total // 20, 1)

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * min(step / total, 1.0)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, factor)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _set_dropout(head: Head, dropout: float) -> None:
    layers = [layer for layer in head.modules() if isinstance(layer, nn.Dropout)]
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: expected a share in [0, 1), got {dropout}")
    if dropout and not layers:
        raise ValueError(f"dropout: expected 0 for kind {head.kind!r}, which has no hidden layers, got {dropout}")
    for layer in layers:
        layer.p = dropout


def _find_directions(head: Head, data: TraceDataModule) -> list[Tensor]:
    """Principal directions of both models' normalised hidden states."""
    with torch.no_grad():
        deviations = head.deviations(data.preview("train", _SAMPLE).features.flatten(end_dim=-2))
    states = deviations[:, -sum(head.spec.hidden_sizes) :].split(list(head.spec.hidden_sizes), dim=-1)
    return [principal_directions(state, head.spec.rank, data.seed) for state in states]


def _check_data(head: Any, fits_itself: bool, data: TraceDataModule) -> None:
    """Refuse batches that lack what the head reads."""
    needs: Sequence[tuple[str, bool, bool]] = (
        ("needs_candidates", head.kind == "pooled", data.reading.candidates),
        ("sequences", getattr(head, "context", 0) > 0, data.sequences),
    )
    for name, expected, given in needs:
        if expected != given:
            raise ValueError(f"{name}: expected {expected} for a head of kind {head.kind!r}, got {given}")
    if data.feature_set != head.feature_set:
        raise ValueError(f"feature_set: expected the head's, {head.feature_set!r}, got {data.feature_set!r}")
    if fits_itself and not (isinstance(data.train, TraceTensors) and isinstance(data.validation, TraceTensors)):
        raise ValueError(f"memory: expected 'whole' for a head of kind {head.kind!r}, got 'scan'")
