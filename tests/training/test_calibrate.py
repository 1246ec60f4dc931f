"""The calibration table: what it says is a plain count, and α orders it."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from speccascade.data.traces import Traces
from speccascade.router.heads import RouterHead, make_head
from speccascade.training.bounds import mean_upper_bound
from speccascade.training.calibrate import (
    CalibrationConfig,
    Regime,
    alpha_grid,
    calibrate,
    calibrate_regime,
    choose_alpha,
    searched_grid,
)
from speccascade.training.estimates import estimate
from speccascade.training.splits import Reading, TraceTensors, read_split


def _regime(gap: Tensor, tv: Tensor, correctness: Tensor, document: NDArray[np.int64]) -> Regime:
    return Regime(lambda alpha: gap > alpha * tv, tv, correctness, document)


@pytest.fixture(scope="module")
def held_out(traces_dir: Path) -> TraceTensors:
    return read_split(Traces.open(traces_dir), "validation", Reading("verified"))


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


def test_intervals_hold_the_value_and_shrink_with_more_documents(held_out: TraceTensors, head: RouterHead) -> None:
    config = CalibrationConfig(points=5, resamples=400)
    with torch.inference_mode():
        gap = head(held_out.features)[:, 1]
    alphas = alpha_grid(gap, held_out.tv, 5)
    widths = []
    for document in (held_out.prompt_index.numpy(), (held_out.prompt_index // 8).numpy()):
        rows = calibrate_regime(_regime(gap, held_out.tv, held_out.correctness[:, 1], document), alphas, config)
        for row in rows:
            assert row.quality_low <= row.quality <= row.quality_high
            assert row.rejection_low <= row.rejection <= row.rejection_high
        widths.append(sum(row.quality_high - row.quality_low for row in rows))
    # Positions are drawn independently here, so grouping them changes little but the number of draws.
    assert widths[0] == pytest.approx(widths[1], rel=0.5)


def test_the_interval_of_one_rate_is_that_of_a_binomial() -> None:
    """One position a document, always deferred or never: a proportion of known spread."""
    torch.manual_seed(0)
    right = (torch.rand(2000) < 0.3).float()
    regime = _regime(torch.full((2000,), 0.5), torch.ones(2000), torch.stack([right, right], dim=1), np.arange(2000))
    rows = calibrate_regime(regime, [0.0, 1.0], CalibrationConfig())
    spread = 2 * 1.96 * (0.3 * 0.7 / 2000) ** 0.5
    assert rows[0].quality_high - rows[0].quality_low == pytest.approx(spread, rel=0.15)


def test_windows_of_one_document_are_one_draw(held_out: TraceTensors, head: RouterHead) -> None:
    """The table of a split cut into windows is that of the split whole, bounds and intervals included."""
    config = CalibrationConfig(points=5, resamples=50)
    whole = calibrate(head, held_out, config)
    names = tuple(f"{name}{suffix}" for name in held_out.prompt_ids for suffix in ("", "-1"))
    turn = torch.arange(len(held_out)) % 2
    cut = dataclasses.replace(held_out, prompt_ids=names, prompt_index=2 * held_out.prompt_index + turn)
    assert calibrate(head, cut, config) == whole


def test_the_bound_of_the_drop_is_that_of_document_means(held_out: TraceTensors, head: RouterHead) -> None:
    rows = calibrate(head, held_out, CalibrationConfig(points=7, resamples=10))["sampled"]
    with torch.inference_mode():
        gap = head(held_out.features)[:, 1]
    for row in rows:
        lost: dict[int, list[float]] = {}
        for document, g, tv, (draft, verifier) in zip(
            held_out.prompt_index.tolist(), gap, held_out.tv, held_out.correctness[:, 1].tolist(), strict=True
        ):
            lost.setdefault(document, []).append(0.0 if g > row.alpha * tv else verifier - draft)
        means = [sum(values) / len(values) for values in lost.values()]
        assert set(row.drop_upper) == {"0.9", "0.95", "0.99"}
        for level, bound in row.drop_upper.items():
            assert bound == pytest.approx(mean_upper_bound(means, float(level), -1, 1), abs=1e-4)
            assert bound > sum(means) / len(means)
    assert rows[0].drop_upper["0.95"] < 0.1, "who defers everywhere loses nothing"
    assert rows[0].drop_upper["0.9"] < rows[0].drop_upper["0.99"]


def test_the_grid_may_come_from_other_positions(held_out: TraceTensors, head: RouterHead) -> None:
    half = torch.arange(len(held_out)) < len(held_out) // 2
    config = CalibrationConfig(points=9, resamples=10)
    own = calibrate(head, held_out.take(half), config)
    other = calibrate(head, held_out.take(~half), config, grid_from=held_out.take(half))
    for regime in ("greedy", "sampled"):
        assert [row.alpha for row in other[regime]] == [row.alpha for row in own[regime]]
        assert [row.quality for row in other[regime]] != [row.quality for row in own[regime]]


class _Decider(torch.nn.Module):
    """A head that is fed α and answers with a margin: the given gap head's, turned into a decision."""

    estimator, context, gap_losses = "cost_sensitive", 0, ("zero_one", "sampled")

    def __init__(self, head: RouterHead, held_out: TraceTensors) -> None:
        super().__init__()
        self.gaps = head(held_out.features).detach()
        self.tv = torch.stack([1 - held_out.agree, held_out.tv], dim=1)

    def forward(self, features: Tensor, alpha: Tensor) -> Tensor:
        return self.gaps - alpha[:, None] * self.tv


def test_a_head_that_is_fed_alpha_is_searched_for_its_grid(held_out: TraceTensors, head: RouterHead) -> None:
    config = CalibrationConfig(points=9, resamples=10)
    gaps, decisions = (calibrate(made, held_out, config) for made in (head, _Decider(head, held_out)))
    for regime in ("greedy", "sampled"):
        reached, wanted = ([row.rejection for row in table[regime]] for table in (decisions, gaps))
        assert reached == sorted(reached, reverse=True)
        assert reached[0] == pytest.approx(wanted[0], abs=1e-6) and reached[-1] < 1e-4 and wanted[-1] == 0
        assert len(reached) >= 7 and max(a - b for a, b in pairwise(reached)) < wanted[0] / 4


class _Reader(torch.nn.Module):
    """A head that reads order: its gap is the mean of the first feature over the positions of the prompt so far."""

    estimator, context, losses = "gap", 8, ("sampled",)

    def forward(self, features: Tensor) -> Tensor:
        steps = torch.arange(1, features.shape[1] + 1)
        return (features[..., :1].cumsum(dim=1) / steps[:, None]) - 0.5


def test_a_head_that_reads_order_is_given_whole_prompts(held_out: TraceTensors) -> None:
    shuffled = held_out.take(torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0)))
    found = estimate(_Reader(), shuffled)
    seen: dict[int, list[float]] = {}
    for prompt, value, gap in zip(shuffled.prompt_index.tolist(), shuffled.features[:, 0].tolist(), found, strict=True):
        so_far = seen.setdefault(prompt, [])
        so_far.append(value)
        assert gap.item() == pytest.approx(sum(so_far) / len(so_far) - 0.5, abs=1e-4)


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
        alpha_grid(torch.ones(4), torch.zeros(4), 5)
    with pytest.raises(ValueError, match="nothing to route"):
        searched_grid(lambda alpha: torch.ones(4, dtype=torch.bool), torch.zeros(4), 5)
    with pytest.raises(ValueError, match="points: expected at least 2, got 1"):
        CalibrationConfig(points=1)


def test_a_seed_below_zero_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="seed: expected at least 0, got -1"):
        CalibrationConfig(seed=-1)
