"""Training on traces whose truth is known: probabilities are recovered, gaps get the right sign."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from speccascade.data.traces import Traces
from speccascade.training.cli import quiet_lightning
from speccascade.training.datamodule import TraceDataModule, TraceTensors, load_split
from speccascade.training.metrics import frontier_area
from speccascade.training.module import RouterModule

from .conftest import true_confidences


def fit(traces: Path, epochs: int = 25, **options: Any) -> tuple[RouterModule, pl.Trainer]:
    with quiet_lightning(), torch.random.fork_rng():
        torch.manual_seed(0)
        module = RouterModule(hidden=(32,), **options)
        trainer = pl.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(module, datamodule=TraceDataModule(str(traces), batch_size=512))
    return module, trainer


@pytest.fixture(scope="module")
def held_out(traces_dir: Path) -> TraceTensors:
    return load_split(Traces.open(traces_dir), "test", "verified")


@pytest.fixture(scope="module")
def truth(traces_dir: Path) -> torch.Tensor:
    return true_confidences(Traces.open(traces_dir).split("test").stats)


def test_two_confidences_are_recovered(traces_dir: Path, held_out: TraceTensors, truth: torch.Tensor) -> None:
    module, trainer = fit(traces_dir, kind="mlp", estimator="two_confidence")
    with torch.inference_mode():
        learned = module.head.confidences(held_out.features)[:, 0]
    error = (learned - truth).abs().mean(dim=0)
    claimed = (held_out.features[:, :2] - truth).abs().mean(dim=0)
    assert (error < 0.03).all(), f"mean error {error.tolist()}; the models' own claims err by {claimed.tolist()}"
    assert (error < claimed / 3).all()
    assert trainer.callback_metrics["val_ece_draft"] < 0.04


@pytest.mark.parametrize("estimator", ["gap", "two_confidence"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_gaps_have_the_right_sign_and_order(
    kind: str, estimator: str, traces_dir: Path, held_out: TraceTensors, truth: torch.Tensor
) -> None:
    module, _ = fit(traces_dir, epochs=20, kind=kind, estimator=estimator)
    with torch.inference_mode():
        gap = module(held_out.features)[:, 0]
    true_gap = truth[:, 1] - truth[:, 0]
    clear = true_gap.abs() > 0.1
    assert (gap[clear].sign() == true_gap[clear].sign()).float().mean() > 0.9
    wrong = 1 - held_out.correctness[:, 0]
    areas = [
        frontier_area(values, held_out.tv, wrong[:, 0], wrong[:, 1])
        for values in (gap, held_out.features[:, 1] - held_out.features[:, 0], true_gap)
    ]
    assert areas[0] < areas[1] + 1e-3, f"no better than max p - max q: {areas}"
    assert areas[0] - areas[2] < 0.01, f"far from the truth's own frontier: {areas}"


def test_the_same_seed_trains_the_same_head(traces_dir: Path) -> None:
    first, second = (fit(traces_dir, epochs=2, kind="mlp")[0].head.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_it_can_overfit(tmp_path: Path, make_traces: Any) -> None:
    """90 positions and a wide head: the training loss falls well below what honest probabilities could reach."""
    folder = make_traces(tmp_path / "few", prompts=5, length=30, seed=3)
    module, trainer = fit(
        folder, epochs=150, kind="mlp", estimator="two_confidence", learning_rate=2e-2, weight_decay=0.0
    )
    train = load_split(Traces.open(folder), "train", "verified")
    stats = Traces.open(folder).split("train").stats
    honest = true_confidences(stats).clamp(1e-4, 1 - 1e-4)
    floor = torch.nn.functional.binary_cross_entropy(honest, train.correctness[:, 0])
    with torch.inference_mode():
        learned = module.head.confidences(train.features)[:, 0]
    reached = torch.nn.functional.binary_cross_entropy(learned, train.correctness[:, 0])
    assert reached < 0.7 * floor, f"reached {reached:.3f}, honest probabilities give {floor:.3f}"
    assert trainer.callback_metrics["val_loss"] > trainer.callback_metrics["train_loss"]


def test_normalisation_comes_from_the_training_split(traces_dir: Path) -> None:
    module, _ = fit(traces_dir, epochs=1, kind="linear")
    train = load_split(Traces.open(traces_dir), "train", "verified")
    torch.testing.assert_close(module.head.feature_mean, train.features.mean(dim=0), rtol=1e-4, atol=1e-5)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        RouterModule(kind="liner")
    with pytest.raises(ValueError, match="learning_rate: expected a positive number"):
        RouterModule(learning_rate=0.0)
