"""What a bundle says about its calibration: which documents it comes from, whether its bounds are exact, and drift."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from speccascade.data.traces import Traces
from speccascade.router.budgets import by_quality_drop
from speccascade.router.features import FEATURE_SETS
from speccascade.router.learned import LearnedRouter
from speccascade.training.calibrate import CalibrationConfig
from speccascade.training.cli import main
from speccascade.training.export import ExportConfig, describe_budgets, export_router, find_checkpoint

FAST = CalibrationConfig(points=9, resamples=5)


@pytest.fixture(scope="module")
def trained(traces_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "made"
    with torch.random.fork_rng():
        main([
            f"--data.traces={traces_dir}", f"--out={out}", "--trainer.max_epochs=2", "--data.batch-size=1024",
            "--bundle.calibration.points=9", "--bundle.calibration.resamples=5",
        ])  # fmt: skip
    return out


@pytest.fixture(scope="module")
def router(trained: Path) -> LearnedRouter:
    return LearnedRouter.from_pretrained(trained / "router")


def test_held_back_documents_give_an_exact_bound(router: LearnedRouter) -> None:
    config = router.config
    assert (config.calibration_split, config.calibration_exact) == ("validation", True)
    assert 22 <= config.calibration_documents <= 42, "about half of 64; beyond, the odds of a fair hash are 1%"
    for rows in config.calibration.values():
        assert all(set(row.drop_upper) == {"0.9", "0.95", "0.99"} for row in rows)
        assert rows[0].drop_upper["0.95"] < rows[-1].drop_upper["0.95"]


def test_a_quality_budget_is_kept_by_the_table(router: LearnedRouter) -> None:
    rows = router.config.calibration["greedy"]
    budget = max(row.drop_upper["0.9"] for row in rows[:4])
    chosen = router.with_budget(quality_drop=budget, confidence=0.9, greedy=True)
    assert chosen.alpha == by_quality_drop(rows, budget, 0.9).alpha >= rows[3].alpha


@pytest.mark.parametrize(
    ("split", "documents", "exact"), [("test", 64, True), ("train", 192, False), ("validation", 64, False)]
)
def test_a_bound_is_exact_only_where_its_documents_served_nothing_else(
    trained: Path, tmp_path: Path, split: str, documents: int, exact: bool
) -> None:
    """The validation split too, once a checkpoint was chosen on all of it."""
    checkpoint = find_checkpoint(trained)
    if split == "validation":
        content = torch.load(checkpoint, weights_only=True)
        content["datamodule_hyper_parameters"]["calibration_share"] = 0.0
        checkpoint = tmp_path / "best.ckpt"
        torch.save(content, checkpoint)
    export_router(ExportConfig(checkpoint, tmp_path / "router", split=split, calibration=FAST))
    config = LearnedRouter.from_pretrained(tmp_path / "router").config
    assert (config.calibration_split, config.calibration_documents) == (split, documents)
    assert config.calibration_exact is exact


def test_a_training_that_diverged_is_named(trained: Path, tmp_path: Path) -> None:
    content = torch.load(find_checkpoint(trained), weights_only=True)
    weights = content["state_dict"]
    next(values for name, values in weights.items() if name.endswith("weight")).fill_(torch.nan)
    torch.save(content, tmp_path / "best.ckpt")
    with pytest.raises(ValueError, match=r"checkpoint: head: .*: training diverged; lower model\.learning_rate"):
        export_router(ExportConfig(tmp_path / "best.ckpt", tmp_path / "router", calibration=FAST))
    assert not (tmp_path / "router").exists()


def test_other_traces_give_no_exact_bound_and_no_reference(trained: Path, traces_dir: Path, tmp_path: Path) -> None:
    export_router(ExportConfig(trained, tmp_path / "router", traces=traces_dir, split="test", calibration=FAST))
    config = LearnedRouter.from_pretrained(tmp_path / "router").config
    assert not config.calibration_exact and not config.reference


def test_the_grid_does_not_come_from_the_documents_that_it_is_measured_on(trained: Path, tmp_path: Path) -> None:
    """On another split the same α are measured: they come from the documents that chose the checkpoint."""
    export_router(ExportConfig(trained, tmp_path / "router", split="test", calibration=FAST))
    other, own = (LearnedRouter.from_pretrained(folder / "router").config for folder in (tmp_path, trained))
    for regime in ("greedy", "sampled"):
        assert [row.alpha for row in other.calibration[regime]] == [row.alpha for row in own.calibration[regime]]


def test_the_bundle_knows_the_training_features(router: LearnedRouter, traces_dir: Path) -> None:
    assert tuple(router.config.reference) == FEATURE_SETS["verified"]
    traces = Traces.open(traces_dir)
    assert not router.drift(traces.split("test").stats).drifted
    stats = traces.split("test").stats
    confident = router.drift(stats.select(stats.draft_max > 0.7))
    assert confident.positions >= 500 and confident.drifted and "draft_max" in confident.worst


def test_the_line_of_budgets_tells_what_is_kept_and_how_surely(router: LearnedRouter) -> None:
    line = describe_budgets(router.config)
    assert line.startswith(f"Bounds (95%, {router.config.calibration_documents} documents of 'validation', exact): ")
    assert "\n" not in line
    rows = router.config.calibration["greedy"]
    tight = dataclasses.replace(rows[0], drop_upper={"0.95": 0.015})
    kept = dataclasses.replace(router.config, calibration={"greedy": (tight,)}, calibration_exact=False)
    assert describe_budgets(kept).endswith(
        "approximate: these documents served a choice before): "
        f"greedy: quality drop at most 0.02 at {tight.rejection:.1%} rejected; "
        f"greedy: quality drop at most 0.05 at {tight.rejection:.1%} rejected"
    )
    none = dataclasses.replace(router.config, calibration={"greedy": (dataclasses.replace(tight, drop_upper={}),)})
    assert describe_budgets(none).endswith("no quality drop up to 0.05 is within reach")


def test_an_unknown_recalibration_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recalibrate: expected one of none, isotonic, auto, got 'platt'"):
        ExportConfig(trained, tmp_path / "router", recalibrate="platt")
