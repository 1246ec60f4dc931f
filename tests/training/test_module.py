"""Training on traces whose truth is known: probabilities are recovered, gaps get the right sign."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from speccascade.data.traces import Traces
from speccascade.router.examples import Examples
from speccascade.router.heads import HeadSpec, RouterHead, make_head
from speccascade.training import module as module_under_test
from speccascade.training.cli import quiet_lightning
from speccascade.training.datamodule import TraceDataModule
from speccascade.training.metrics import frontier_area
from speccascade.training.module import RouterModule
from speccascade.training.splits import Reading, TraceTensors, read_split

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
    return read_split(Traces.open(traces_dir), "test", Reading("verified"))


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
    train = read_split(Traces.open(folder), "train", Reading("verified"))
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
    train = read_split(Traces.open(traces_dir), "train", Reading("verified"))
    torch.testing.assert_close(module.head.feature_mean, train.features.mean(dim=0), rtol=1e-4, atol=1e-5)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        RouterModule(kind="liner")
    with pytest.raises(ValueError, match="learning_rate: expected a positive number"):
        RouterModule(learning_rate=0.0)
    with pytest.raises(ValueError, match=r"weight_decay: expected a number in \[0, inf\), got -1"):
        RouterModule(weight_decay=-1.0)


class Fitted(RouterHead):
    """A head that fits itself: it remembers what it was given, and takes one step by hand."""

    def fit(self, examples: Examples, validation: Examples, seed: int) -> None:
        self.given = (len(examples.tv), len(validation.tv), seed)
        with torch.no_grad():
            self.trunk[-1].bias[:] = 0.125


def test_a_head_that_fits_itself_is_fitted_once(
    traces_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(spec: HeadSpec) -> Fitted:
        return Fitted(spec, make_head("linear").trunk)

    monkeypatch.setattr(module_under_test, "build_head", build)
    module = RouterModule(kind="linear", hidden=())
    best = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", filename="best", save_weights_only=True)
    with quiet_lightning():
        trainer = pl.Trainer(
            max_epochs=7, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[best],
        )  # fmt: skip
        data = TraceDataModule(str(traces_dir), batch_size=512, seed=5)
        trainer.fit(module, datamodule=data)
    assert data.validation is not None
    assert module.head.given == (9600, len(data.validation), 5)
    assert trainer.current_epoch == 1
    assert (module.head.trunk[-1].bias == 0.125).all(), "no gradient step follows"
    assert trainer.callback_metrics["val_loss"].isfinite()
    assert capsys.readouterr().err.count("Fitting linear on 9,600 positions, once") == 1
    saved = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert (saved["state_dict"]["head.trunk.0.bias"] == 0.125).all()
    with pytest.raises(ValueError, match="memory: expected 'whole' for a head of kind 'linear', got 'scan'"):
        other = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
        other.fit(RouterModule(kind="linear"), datamodule=TraceDataModule(str(traces_dir), memory="scan"))


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"sequences": True}, "sequences: expected False for a head of kind 'mlp', got True"),
        ({"needs_candidates": True}, "needs_candidates: expected False for a head of kind 'mlp', got True"),
        ({"feature_set": "draft_only"}, "feature_set: expected the head's, 'verified', got 'draft_only'"),
    ],
)
def test_batches_that_do_not_fit_the_head_are_refused(options: dict[str, Any], answer: str, traces_dir: Path) -> None:
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    with quiet_lightning(), pytest.raises(ValueError, match=answer):
        trainer.fit(RouterModule(), datamodule=TraceDataModule(str(traces_dir), **options))


def test_training_from_disk_learns_as_well(traces_dir: Path) -> None:
    """Other batches, the same positions: the validation losses differ by far less than training gains."""
    losses = []
    for memory in ("whole", "scan"):
        with quiet_lightning(), torch.random.fork_rng():
            torch.manual_seed(0)
            trainer = pl.Trainer(
                max_epochs=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, num_sanity_val_steps=0,
            )  # fmt: skip
            module = RouterModule(kind="linear")
            trainer.fit(module, datamodule=TraceDataModule(str(traces_dir), batch_size=512, memory=memory))
        losses.append(float(trainer.callback_metrics["val_loss"]))
    validation = read_split(Traces.open(traces_dir), "validation", Reading("verified"))
    untrained = RouterModule(kind="linear").head.loss(validation.examples).detach()
    assert abs(losses[0] - losses[1]) < 0.1 * (float(untrained) - min(losses))


def test_a_resumed_run_ends_where_an_unbroken_one_does(traces_dir: Path, tmp_path: Path) -> None:
    def run(checkpoint: Path | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = RouterModule(kind="linear")
        every = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
        trainer = pl.Trainer(
            max_epochs=4, accelerator="cpu", logger=False, callbacks=[every], enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        data = TraceDataModule(str(traces_dir), batch_size=1024)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        return module.head.state_dict()

    with quiet_lightning(), torch.random.fork_rng():
        unbroken, resumed = run(None), run(tmp_path / "epoch=1.ckpt")
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)


def test_prices_are_checked() -> None:
    for prices in ((), (0.1, -0.2)):
        with pytest.raises(ValueError, match="prices: expected one number at least, none below 0"):
            RouterModule(prices=prices)
