"""The calibration table: what it says is a plain count, and α orders it."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from speccascade.data.traces import Traces
from speccascade.router.heads import RouterHead, make_head
from speccascade.training.calibrate import CalibrationConfig, calibrate, calibrate_regime, choose_alpha
from speccascade.training.datamodule import TraceTensors, load_split


@pytest.fixture(scope="module")
def held_out(traces_dir: Path) -> TraceTensors:
    return load_split(Traces.open(traces_dir), "validation", "verified")


@pytest.fixture(scope="module")
def head(held_out: TraceTensors) -> RouterHead:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = make_head("linear", "gap")
        for weight in made.parameters():
            torch.nn.init.normal_(weight, std=0.05)
    made.set_normalisation(held_out.features.mean(dim=0), held_out.features.std(dim=0))
    return made.eval()


@pytest.mark.parametrize("regime", ["greedy", "sampled"])
def test_rows_equal_a_count_position_by_position(regime: str, head: RouterHead, held_out: TraceTensors) -> None:
    rows = calibrate(head, held_out, CalibrationConfig(points=9, resamples=10))[regime]
    column = 0 if regime == "greedy" else 1
    with torch.inference_mode():
        gap = head(held_out.features)[:, column].tolist()
    cost = ((1 - held_out.agree) if regime == "greedy" else held_out.tv).tolist()
    right = held_out.correctness[:, column].tolist()
    for row in rows:
        deferred = [g > row.alpha * c for g, c in zip(gap, cost, strict=True)]
        count = len(deferred)
        assert row.deferral == pytest.approx(sum(deferred) / count, abs=1e-3)
        assert row.rejection == pytest.approx(
            sum(c for d, c in zip(deferred, cost, strict=True) if d) / count, abs=1e-3
        )
        quality = sum(pair[1] if d else pair[0] for d, pair in zip(deferred, right, strict=True)) / count
        assert row.quality == pytest.approx(quality, abs=1e-3)


@pytest.mark.parametrize("regime", ["greedy", "sampled"])
def test_a_larger_alpha_rejects_and_defers_less(regime: str, head: RouterHead, held_out: TraceTensors) -> None:
    rows = calibrate(head, held_out, CalibrationConfig(resamples=10))[regime]
    alphas, rejections, deferrals = (
        [getattr(row, name) for row in rows] for name in ("alpha", "rejection", "deferral")
    )
    assert alphas == sorted(set(alphas))
    assert rejections == sorted(rejections, reverse=True)
    assert deferrals == sorted(deferrals, reverse=True)


@pytest.mark.parametrize("regime", ["greedy", "sampled"])
def test_budgets_are_covered_evenly_from_none_to_lossless(
    regime: str, head: RouterHead, held_out: TraceTensors
) -> None:
    rows = calibrate(head, held_out, CalibrationConfig(points=21, resamples=10))[regime]
    lossless = float(((1 - held_out.agree) if regime == "greedy" else held_out.tv).mean())
    reached = sorted(row.rejection for row in rows)
    assert reached[0] == 0
    assert reached[-1] == pytest.approx(lossless, rel=1e-5)
    assert max(b - a for a, b in pairwise(reached)) < 1.2 * lossless / 20


def test_intervals_hold_the_value_and_shrink_with_more_prompts(held_out: TraceTensors, head: RouterHead) -> None:
    config = CalibrationConfig(points=5, resamples=400)
    with torch.inference_mode():
        gap = head(held_out.features)[:, 1]
    arguments = (gap, held_out.tv, held_out.correctness[:, 1])
    rows = calibrate_regime(*arguments, held_out.prompt_index, config)
    few = calibrate_regime(*arguments, held_out.prompt_index // 8, config)
    widths = []
    for table in (rows, few):
        for row in table:
            assert row.quality_low <= row.quality <= row.quality_high
            assert row.rejection_low <= row.rejection <= row.rejection_high
        widths.append(sum(row.quality_high - row.quality_low for row in table))
    # Positions are drawn independently here, so grouping prompts changes little but the number of draws.
    assert widths[0] == pytest.approx(widths[1], rel=0.5)


def test_the_interval_of_one_rate_is_that_of_a_binomial() -> None:
    """One position a prompt, always deferred or never: a proportion of known spread."""
    torch.manual_seed(0)
    right = (torch.rand(2000) < 0.3).float()
    rows = calibrate_regime(
        torch.full((2000,), 0.5),
        torch.ones(2000),
        torch.stack([right, right], dim=1),
        torch.arange(2000),
        CalibrationConfig(),
    )
    spread = 2 * 1.96 * (0.3 * 0.7 / 2000) ** 0.5
    assert rows[0].quality_high - rows[0].quality_low == pytest.approx(spread, rel=0.15)


def test_the_chosen_alpha_keeps_the_verifiers_quality_for_fewest_rejections(
    head: RouterHead, held_out: TraceTensors
) -> None:
    rows = calibrate(head, held_out, CalibrationConfig(resamples=10))["greedy"]
    chosen = next(row for row in rows if row.alpha == choose_alpha(rows))
    lossless = max(rows, key=lambda row: row.rejection)
    assert chosen.quality >= lossless.quality
    assert all(row.quality < lossless.quality for row in rows if row.rejection < chosen.rejection)


def test_models_that_never_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to route"):
        calibrate_regime(torch.ones(4), torch.zeros(4), torch.ones(4, 2), torch.arange(4), CalibrationConfig())
    with pytest.raises(ValueError, match="points: expected at least 2, got 1"):
        CalibrationConfig(points=1)
