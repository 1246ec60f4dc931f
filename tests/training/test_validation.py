"""What a head is measured by: any kind of head, through the few things that the module asks of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from speccascade.router.examples import Examples
from speccascade.router.heads import make_head
from speccascade.training.metrics import auroc, frontier_area, spread_prices
from speccascade.training.validation import GapMetrics, losses_of, metrics_for


def examples(count: int = 200, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    features = torch.rand(count, 16, generator=generator)
    right = (torch.rand(count, 1, 2, generator=generator) < torch.tensor([0.4, 0.6])).float()
    probs = torch.rand(count, 1, 2, generator=generator)
    return Examples(features, torch.cat([right, probs], dim=1), torch.rand(count, generator=generator))


class Fake(nn.Module):
    """A head that reads its gaps off the features: what it is asked is what it was told."""

    kind, estimator, feature_set = "fake", "gap", "verified"
    losses: tuple[str, ...] = ("zero_one", "sampled")

    @property
    def gap_losses(self) -> tuple[str, ...]:
        return self.losses

    def estimate(self, batch: Examples) -> Tensor:
        return self(batch.features)

    def loss(self, batch: Examples) -> Tensor:
        weight = torch.ones_like(batch.tv) if batch.weight is None else batch.weight
        return (batch.features[..., 0].nan_to_num() * weight).sum() / weight.sum()

    def forward(self, features: Tensor) -> Tensor:
        return features[..., : len(self.losses)] - 0.5


class Decides(Fake):
    """Told α, it defers as the gaps of `Fake` say where D_TV is a half."""

    estimator = "cost_sensitive"

    def forward(self, features: Tensor, alpha: Tensor) -> Tensor:
        return features[..., :2] - 0.5 - 0.5 * alpha[..., None]


class Logs(Fake):
    losses = ("zero_one", "sampled", "log")


class Pooled(Fake):
    kind = estimator = "pooled"
    losses, gap_losses = ("log",), ("zero_one", "sampled")

    def forward(self, features: Tensor) -> Tensor:
        return features[..., :2] - 0.5


def measure(head: nn.Module, *batches: Examples, prices: tuple[float, ...] | None = None) -> dict[str, float]:
    metrics = metrics_for(head, batches[0], prices)
    for batch in batches:
        metrics.update(head, batch)
    return {name: float(value) for name, value in metrics.compute().items()}


def test_gaps_are_measured_by_loss() -> None:
    data, head = examples(), Fake()
    figures = measure(head, data)
    for column, loss in enumerate(head.losses):
        gap, (draft, verifier) = head(data.features)[:, column], losses_of(data.correctness, loss)
        assert figures[f"val_area_{loss}"] == pytest.approx(frontier_area(gap, data.tv, draft, verifier), rel=1e-5)
        differ = draft != verifier
        expected = auroc(gap[differ], (draft > verifier)[differ])
        assert figures[f"val_auroc_{loss}"] == pytest.approx(expected, rel=1e-5)
        regrets = []
        for price in spread_prices(draft, verifier, data.tv):
            paid = torch.where(gap > price * data.tv, verifier + price * data.tv, draft)
            regrets.append((paid - torch.minimum(draft, verifier + price * data.tv)).mean())
        assert figures[f"val_regret_{loss}"] == pytest.approx(float(torch.stack(regrets).mean()), rel=1e-5)
    assert figures["val_loss"] == pytest.approx(float(data.features[:, 0].mean()), rel=1e-5)
    assert not any("brier" in name or "ece" in name for name in figures)


def test_log_loss_has_its_own_columns() -> None:
    figures = measure(Logs(), examples())
    assert {"val_area_log", "val_auroc_log", "val_regret_log", "val_area_zero_one"} <= set(figures)
    draft, verifier = losses_of(torch.tensor([[[1.0, 0.0], [0.5, 0.0]]]), "log")
    assert (float(draft), float(verifier)) == (pytest.approx(math.log(2)), pytest.approx(20.0))


def test_confidences_have_a_brier_score_and_a_calibration_error() -> None:
    data, head = examples(), make_head("linear", "two_confidence")
    figures = measure(head, data)
    # Untrained, it says one half of everything.
    assert figures["val_brier_draft"] == pytest.approx(0.25)
    assert figures["val_ece_verifier"] == pytest.approx(abs(float(data.correctness[:, 0, 1].mean()) - 0.5), abs=1e-6)


def test_decisions_have_a_regret_alone() -> None:
    data = examples()._replace(tv=torch.full((200,), 0.5))
    figures, gaps = (measure(head, data, prices=(0.0, 0.3, 1.0)) for head in (Decides(), Fake()))
    assert set(figures) == {"val_loss", "val_regret_zero_one", "val_regret_sampled"}
    for name in ("val_regret_zero_one", "val_regret_sampled"):
        assert figures[name] == pytest.approx(gaps[name], rel=1e-6), "the same decisions"


def test_a_belief_is_compared_with_both_models() -> None:
    candidates = torch.tensor([[[0.5, 0.2], [0.25, 0.7]], [[0.5, 0.4], [0.0, 0.0]]])
    data = examples(40)._replace(candidates=candidates.repeat(20, 1, 1), truth=torch.tensor([1, 2]).repeat(20))
    figures, gaps = measure(Pooled(), data), measure(Fake(), data)
    assert set(figures) == {*gaps, "val_log_loss_draft", "val_log_loss_verifier"}
    assert all(figures[name] == pytest.approx(gaps[name]) for name in gaps), "the gaps that follow are measured as any"
    assert figures["val_log_loss_draft"] == pytest.approx(-(math.log(0.25) + math.log(0.5)) / 2, rel=1e-5)
    assert figures["val_log_loss_verifier"] == pytest.approx(-(math.log(0.7) + math.log(0.6)) / 2, rel=1e-5)


def test_padding_does_not_count() -> None:
    """Two prompts of 5 and 3 positions are measured as the eight positions are."""
    data, shape = examples(10), (2, 5)
    weight = torch.ones(shape)
    weight[1, 3:] = 0
    padded = Examples(
        data.features.reshape(*shape, -1).masked_fill(weight[..., None] == 0, float("nan")),
        data.correctness.reshape(*shape, 2, 2),
        data.tv.reshape(shape),
        weight,
    )
    loose = Examples(*(values[:8] for values in (data.features, data.correctness, data.tv)))
    assert measure(Fake(), padded) == pytest.approx(measure(Fake(), loose), rel=1e-5)


def test_batches_of_unequal_weight_add_up() -> None:
    data = examples(30)
    parts = [Examples(*(None if v is None else v[rows] for v in data)) for rows in (slice(0, 7), slice(7, 30))]  # type: ignore[arg-type]
    prices = (0.1, 0.5)
    assert measure(Fake(), *parts, prices=prices) == pytest.approx(measure(Fake(), data, prices=prices), rel=1e-5)


def test_metrics_are_forgotten_between_epochs() -> None:
    head, data = Fake(), examples()
    metrics = GapMetrics(head, torch.zeros(2, 1))
    metrics.update(head, data)
    first = {name: float(value) for name, value in metrics.compute().items()}
    metrics.reset()
    metrics.update(head, data)
    assert {name: float(value) for name, value in metrics.compute().items()} == first
