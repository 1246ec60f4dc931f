"""Which row of a table keeps a budget: against plain searches, closed forms and a simulated round."""

from __future__ import annotations

import random
from typing import Any

import pytest

from speccascade.router.budgets import (
    by_deferral,
    by_latency,
    by_quality_drop,
    by_rejection,
    choose_row,
    last_within,
    relative_latency,
)
from speccascade.router.config import CalibrationRow


def _row(alpha: float, rejection: float, quality: float, bound: float) -> CalibrationRow:
    drops = {"0.9": bound - 0.01, "0.95": bound}
    return CalibrationRow(alpha, deferral=rejection + 0.1, rejection=rejection, quality=quality, drop_upper=drops)


ROWS = (
    _row(-1.0, 0.40, 0.70, 0.02),
    _row(0.0, 0.30, 0.73, 0.03),
    _row(0.2, 0.20, 0.72, 0.06),
    _row(0.5, 0.10, 0.72, 0.04),
    _row(1.0, 0.00, 0.60, 0.20),
)
TABLES = {"sampled": ROWS, "greedy": ROWS[1:]}


def test_the_best_quality_within_a_rate_is_taken_and_of_equals_the_cheapest():
    assert [by_rejection(ROWS, budget).alpha for budget in (1, 0.3, 0.29, 0.1, 0.05)] == [0.0, 0.0, 0.5, 0.5, 1.0]
    assert [by_deferral(ROWS, budget).alpha for budget in (1, 0.4, 0.39, 0.2, 0.1)] == [0.0, 0.0, 0.5, 0.5, 1.0]


def test_latency_is_the_time_of_a_round_over_its_tokens():
    assert relative_latency(0.0, 0.1, 5) == pytest.approx((0.5 + 1) / 6)
    assert relative_latency(1.0, 0.1, 5) == pytest.approx(1.5)
    rejection, gamma = 0.3, 4
    closed = (1 - (1 - rejection) ** (gamma + 1)) / rejection
    assert relative_latency(rejection, 0.2, gamma, verify_ratio=1.25) == pytest.approx((0.8 + 1.25) / closed)
    # Verifying by the token alone: no draft is cheap enough to pay.
    assert relative_latency(0.2, 0.0, 5, verify_ratio=6.0) > 1


def test_the_tokens_of_a_round_are_those_of_simulated_rounds():
    """200,000 rounds at acceptance 0.7, γ 3: a mean of 2.53, standard error 0.003; off by 0.015 has odds below 1e-6."""
    generator = random.Random(0)
    total = 0
    for _ in range(200_000):
        accepted = 0
        while accepted < 3 and generator.random() < 0.7:
            accepted += 1
        total += accepted + 1
    assert 1 / relative_latency(0.3, 0.0, 3) == pytest.approx(total / 200_000, abs=0.015)


def test_a_latency_budget_finds_the_best_row_that_is_fast_enough():
    times = [relative_latency(row.rejection, 0.1, 5) for row in ROWS]
    assert times == sorted(times, reverse=True)
    assert by_latency(ROWS, times[1], 0.1).alpha == 0.0
    assert by_latency(ROWS, times[1] - 1e-9, 0.1).alpha == 0.5
    assert by_latency(ROWS, times[4], 0.1).alpha == 1.0
    assert choose_row(TABLES, latency=1.0, cost_ratio=0.1, gamma=2).alpha == 0.0


@pytest.mark.parametrize(
    ("bounds", "last"),
    [([], None), ([0.1], None), ([0.05], 0), ([0.0, 0.0, 0.1, 0.0], 1), ([0.0, float("nan"), 0.0], 0), ([0.0] * 3, 2)],
)
def test_testing_ends_at_the_first_failure(bounds: list[float], last: int | None):
    assert last_within(bounds, 0.05) == last


def test_a_guarantee_never_jumps_over_a_row_that_failed():
    assert by_quality_drop(ROWS, 0.05).alpha == 0.0, "the row at 0.5 has bound 0.04, but stands behind one of 0.06"
    assert by_quality_drop(ROWS, 0.05, 0.9).alpha == 0.5
    assert by_quality_drop(ROWS, 0.25).alpha == 1.0
    assert by_quality_drop(tuple(reversed(ROWS)), 0.05).alpha == 0.0, "the order is alpha's, not the table's"
    assert choose_row(TABLES, quality_drop=0.05, confidence=0.9, greedy=True).alpha == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "budget: expected one of rejection, deferral, latency, quality_drop, got none"),
        ({"rejection": 0.1, "latency": 0.5}, "got rejection and latency"),
        ({"rejection": 0.1, "confidence": 0.9}, "confidence: belongs to a budget of quality_drop, got it with rej"),
        ({"quality_drop": 0.1, "gamma": 5}, "gamma: belongs to a budget of latency, got it with quality_drop"),
        ({"deferral": 0.1, "cost_ratio": 0.1}, "cost_ratio: belongs to a budget of latency, got it with deferral"),
        ({"latency": 0.5}, "cost_ratio: expected the cost of a drafter's step relative to a verifier's, got none"),
        ({"latency": 0.1, "cost_ratio": 0.1}, r"latency: expected a budget within reach of the .*, 0\.25 to 0\.\d+;"),
        ({"quality_drop": 0.01}, r"quality_drop: expected a budget within reach of the calibration, 0\.02 to 0\.2;"),
        ({"quality_drop": 0.1, "confidence": 0.8}, r"confidence: expected one of 0\.9, 0\.95, got '0\.8'"),
        ({"rejection": 1.5}, r"rejection: expected a number in \[0, 1\], got 1\.5"),
        ({"latency": -1, "cost_ratio": 0.1}, r"latency: expected a number in \[0, inf"),
        ({"latency": 0.5, "cost_ratio": -0.1}, r"cost_ratio: expected a number in \[0, inf"),
        ({"rejection": True}, "rejection: expected a number, got True"),
        ({"latency": 0.5, "cost_ratio": 0.1, "gamma": 0}, r"gamma: expected a number in \[1, inf"),
    ],
)
def test_what_cannot_be_kept_or_is_not_meant_is_refused_by_name(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        choose_row(TABLES, **arguments)


def test_an_old_table_without_bounds_says_so():
    bare = (CalibrationRow(alpha=0.0, deferral=0.1, rejection=0.1, quality=0.5),)
    with pytest.raises(ValueError, match="holds no bounds; export it again"):
        choose_row({"sampled": bare}, quality_drop=0.1)
    with pytest.raises(ValueError, match="rejection: this router holds no 'greedy' calibration; set alpha instead"):
        choose_row({"sampled": bare}, rejection=0.1, greedy=True)
    with pytest.raises(ValueError, match="calibration drop_upper 0.9: expected a finite number, got inf"):
        CalibrationRow(alpha=0.0, deferral=0.1, rejection=0.1, quality=0.5, drop_upper={"0.9": float("inf")})
