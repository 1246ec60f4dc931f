"""Metrics: by hand on a few positions, against a plain count, and over batches."""

import math

import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from speccascade.data.calibration import calibration_error
from speccascade.training.metrics import (
    BrierScore,
    CalibrationError,
    FrontierArea,
    RankingScore,
    RegretToOracle,
    auroc,
    frontier_area,
    spread_prices,
)


def test_by_hand() -> None:
    """Costs 1, 1, 2; gaps order them 2nd, 1st, 3rd; deferring the 3rd makes it worse, so nobody pays for it."""
    gap, tv = torch.tensor([0.4, 0.9, -0.2]), torch.tensor([1.0, 1.0, 2.0])
    draft, verifier = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    # Loss 2/3 at budget 0, 1/3 at 1/4, 0 at 1/2 and from there on.
    expected = 0.25 * (2 / 3 + 1 / 3) / 2 + 0.25 * (1 / 3 + 0) / 2
    assert math.isclose(frontier_area(gap, tv, draft, verifier), expected, rel_tol=1e-6)


def test_a_better_ranking_has_a_smaller_area() -> None:
    torch.manual_seed(0)
    draft, verifier = (torch.rand(2, 500) < 0.5).float()
    tv = torch.rand(500)
    good = frontier_area(draft - verifier, tv, draft, verifier)
    blind = frontier_area(torch.rand(500), tv, draft, verifier)
    worst = frontier_area(verifier - draft, tv, draft, verifier)
    assert good < blind < worst


def test_positions_without_cost_are_deferred_only_for_a_positive_gap() -> None:
    tv, draft, verifier = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
    assert frontier_area(torch.tensor([0.1, 0.1]), tv, draft, verifier) < 0.5
    assert frontier_area(torch.tensor([-0.1, -0.2]), tv, draft, verifier) > 0


def test_models_that_never_differ_have_no_area() -> None:
    assert math.isnan(frontier_area(torch.ones(2), torch.zeros(2), torch.ones(2), torch.ones(2)))


def test_batches_add_up() -> None:
    torch.manual_seed(0)
    gap, tv, draft, verifier = torch.rand(4, 100)
    metric = FrontierArea()
    for start in (0, 40, 80):
        metric.update(*(values[start : start + 40] for values in (gap, tv, draft, verifier)))
    assert math.isclose(float(metric.compute()), frontier_area(gap, tv, draft, verifier), rel_tol=1e-5)


def test_calibration_over_batches_is_that_of_the_data_package() -> None:
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(1000, generator=generator)
    correct = (torch.rand(1000, generator=generator) < confidence).float()
    metric = CalibrationError()
    for part in zip(confidence.split(300), correct.split(300), strict=True):
        metric.update(*part)
    assert math.isclose(float(metric.compute()), calibration_error(confidence, correct), abs_tol=1e-6)
    metric.reset()
    metric.update(torch.tensor([0.8]), torch.tensor([0.0]))
    assert math.isclose(float(metric.compute()), 0.8, rel_tol=1e-6)


def test_auroc_is_a_count_of_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    score = torch.randint(-5, 6, (60,), generator=generator) / 5
    positive = torch.rand(60, generator=generator) < 0.4
    pairs = [
        1.0 if high > low else 0.5 if high == low else 0.0
        for high in score[positive].tolist()
        for low in score[~positive].tolist()
    ]
    assert auroc(score, positive) == pytest.approx(sum(pairs) / len(pairs), rel=1e-9)
    assert auroc(score, positive) == pytest.approx(float(binary_auroc((score + 1) / 2, positive.long())), rel=1e-5)


def test_auroc_of_one_class_is_undefined() -> None:
    for positive in (torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool), torch.zeros(0) > 0):
        assert math.isnan(auroc(torch.rand(len(positive)), positive))
    metric = RankingScore()
    metric.update(torch.rand(3), torch.ones(3, dtype=torch.bool))
    assert math.isnan(float(metric.compute()))


def test_ranks_do_not_depend_on_how_scores_fall_into_batches() -> None:
    """A batch whose scores all lie in [0, 1] beside one whose scores do not: values stay as they are."""
    score, positive = torch.tensor([0.2, 0.9, -0.8, 3.0]), torch.tensor([False, True, False, True])
    metric = RankingScore()
    for rows in (slice(0, 2), slice(2, 4)):
        metric.update(score[rows], positive[rows])
    assert float(metric.compute()) == auroc(score, positive) == 1.0


def test_regret_by_hand() -> None:
    """Position 1: the verifier is right, for 0.5 α; position 2: both are."""
    draft, verifier, tv = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]), torch.tensor([0.5, 1.0])
    metric = RegretToOracle(torch.tensor([0.4, 4.0]))
    # At 0.4 deferring pays at 1 (0.2 for 1) and not at 2 (0.4 for nothing); at 4 nowhere (2 for 1, 4 for nothing).
    metric.update(torch.tensor([[False, False], [False, False]]), tv, draft, verifier)
    assert float(metric.compute()) == pytest.approx((0.8 + 0) / 2 / 2)
    metric.reset()
    metric.update(torch.tensor([[True, True], [True, True]]), tv, draft, verifier)
    assert float(metric.compute()) == pytest.approx(((0 + 0.4) / 2 + (1 + 4) / 2) / 2)


def test_the_oracle_has_no_regret() -> None:
    generator = torch.Generator().manual_seed(0)
    draft, verifier, tv = torch.rand(3, 50, generator=generator)
    prices = torch.tensor([0.0, 0.2, 1.0])
    metric = RegretToOracle(prices)
    metric.update((draft - verifier)[:, None] > prices * tv[:, None], tv, draft, verifier)
    assert float(metric.compute()) == 0.0


def test_prices_end_where_the_best_gain_is_spent() -> None:
    draft, verifier, tv = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.5, 0.75, 0.25])
    prices = spread_prices(draft, verifier, tv, count=5)
    assert prices.tolist() == pytest.approx([0, 1 / 6, 1 / 3, 1 / 2, 2 / 3])
    assert float(prices[-1] * tv.mean()) == pytest.approx(1 / 3), "one gain in three positions"


def test_brier_score_is_a_mean_square() -> None:
    metric = BrierScore()
    metric.update(torch.tensor([0.5, 1.0]), torch.tensor([1.0, 1.0]))
    metric.update(torch.tensor([0.2]), torch.tensor([0.7]))
    assert float(metric.compute()) == pytest.approx((0.25 + 0.25) / 3)
