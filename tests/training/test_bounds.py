"""Bounds hold as often as they say, whatever the distribution, and settings chosen by them keep their promise."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from speccascade.router.budgets import last_within
from speccascade.training.bounds import hoeffding_upper_bound, mean_upper_bound

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]

SOURCES: dict[str, tuple[Draw, float]] = {
    "coin": (lambda rng, n: (rng.random(n) < 0.5).astype(float), 0.5),
    "rare": (lambda rng, n: (rng.random(n) < 0.03).astype(float), 0.03),
    "frequent": (lambda rng, n: (rng.random(n) < 0.97).astype(float), 0.97),
    "narrow": (lambda rng, n: 0.5 + 0.1 * (rng.random(n) - 0.5), 0.5),
    "skewed": (lambda rng, n: rng.beta(0.3, 2.7, n), 0.1),
}


def plain_bound(values: NDArray[np.float64], confidence: float, grid: int = 2000) -> float:
    """The bound by its definition: the least mean on a grid at which some prefix makes the bettor rich."""
    n, risk = len(values), 1 - confidence
    for mean in np.linspace(0, 1, grid, endpoint=False)[1:]:
        capital, seen, spread = 1.0, 0.5, 0.25
        variance = 0.25
        for t, value in enumerate(values, start=1):
            stake = min(math.sqrt(2 * math.log(1 / risk) / (n * variance)), 0.75 / (1 - mean))
            capital *= 1 - stake * (value - mean)
            if capital >= 1 / risk:
                return float(mean)
            seen += value
            spread += (value - seen / (t + 1)) ** 2
            variance = spread / (t + 1)
    return 1.0


@pytest.mark.parametrize("name", SOURCES)
def test_the_bound_is_that_of_a_bettor_who_plays_value_by_value(name: str) -> None:
    values = SOURCES[name][0](np.random.default_rng(0), 60)
    assert mean_upper_bound(values, 0.9) == pytest.approx(plain_bound(values, 0.9), abs=1 / 2000)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("size", [25, 200])
def test_the_mean_lies_below_the_bound_as_often_as_stated(name: str, size: int) -> None:
    """400 experiments at 90%: were the coverage 0.90 only, fewer than 336 hits would have odds below 1e-4."""
    draw, mean = SOURCES[name]
    rng = np.random.default_rng(1)
    hits = sum(mean_upper_bound(draw(rng, size), 0.9) >= mean for _ in range(400))
    assert hits >= 336, f"{hits} of 400 bounds hold the mean"


def test_the_bound_is_not_idle() -> None:
    """It fails sometimes: of 400 bounds of a coin at 60%, all would hold with odds below 1e-40 at a coverage of 0.8."""
    rng = np.random.default_rng(2)
    draw, mean = SOURCES["coin"]
    assert sum(mean_upper_bound(draw(rng, 200), 0.6) >= mean for _ in range(400)) < 380


@pytest.mark.parametrize("name", SOURCES)
def test_it_is_never_much_looser_than_hoeffdings_and_far_tighter_for_small_variance(name: str) -> None:
    rng = np.random.default_rng(3)
    draw, mean = SOURCES[name]
    betting, hoeffding = np.array(
        [[bound(values, 0.95) for bound in (mean_upper_bound, hoeffding_upper_bound)] for values in
         (draw(rng, 300) for _ in range(100))]
    ).T  # fmt: skip
    assert (betting - hoeffding).max() < 0.01
    if name in ("narrow", "rare"):
        assert (betting - mean).mean() < 0.5 * (hoeffding - mean).mean()


def test_hoeffdings_bound_is_its_formula() -> None:
    assert hoeffding_upper_bound([0.0, 1.0] * 50, 0.95) == pytest.approx(0.5 + math.sqrt(math.log(20) / 200))
    assert hoeffding_upper_bound([-1.0, 1.0] * 50, 0.95, -1, 1) == pytest.approx(2 * math.sqrt(math.log(20) / 200))
    assert hoeffding_upper_bound([0.9] * 4, 0.95) == 1.0


def test_another_range_is_the_same_bound_scaled() -> None:
    values = np.random.default_rng(4).random(80)
    assert mean_upper_bound(2 * values - 1, 0.9, -1, 1) == pytest.approx(2 * mean_upper_bound(values, 0.9) - 1)


def test_more_values_more_certainty_less_slack() -> None:
    slack = [mean_upper_bound([0.0] * n, 0.95) for n in (1, 10, 100, 1000)]
    assert slack == sorted(slack, reverse=True) and slack[-1] < 0.005
    # No bound can do better than the chance that one in so many is missed n times running.
    assert all(bound >= 1 - 0.05 ** (1 / n) for n, bound in zip((1, 10, 100, 1000), slack, strict=True))
    assert mean_upper_bound([0.2] * 50, 0.9) < mean_upper_bound([0.2] * 50, 0.99)
    assert mean_upper_bound([1.0] * 50, 0.9) == 1.0


@pytest.mark.parametrize(
    ("values", "confidence", "message"),
    [
        ([], 0.9, "values: expected a list of at least one number"),
        ([[0.1]], 0.9, "values: expected a list"),
        ([0.1, 1.1], 0.9, r"values: expected numbers in \[0, 1\], got 0.1 to 1.1"),
        ([0.1, float("nan")], 0.9, "values: expected numbers in"),
        ([0.1], 1.0, "confidence: expected a number between 0 and 1, got 1.0"),
        ([0.1], 0.0, "confidence: expected"),
    ],
)
@pytest.mark.parametrize("bound", [mean_upper_bound, hoeffding_upper_bound])
def test_what_cannot_be_bounded_is_refused(
    bound: Callable[..., float], values: list[float], confidence: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bound(values, confidence)


def test_the_chosen_setting_exceeds_its_budget_as_rarely_as_stated() -> None:
    """Prompts of their own luck, settings of rising true drop: 0, then 0.02 to 0.078; budget 0.05, confidence 0.9.

    Were violations as frequent as allowed, 0.1, more than 38 of 200 would have odds below 1e-4. Taking the boldest
    setting whose *observed* drop keeps the budget violates in nearly half of the experiments.
    """
    rng = np.random.default_rng(5)
    true = np.array([0.0, *np.arange(0.02, 0.08, 0.002)])
    violations, plain_violations, chosen = 0, 0, []
    for _ in range(200):
        luck = rng.normal(0, 0.15, 300)[:, None]
        drops = np.clip(true + luck * (true > 0) + rng.normal(0, 0.02, (300, len(true))) * (true > 0), -1, 1)
        last = last_within([mean_upper_bound(column, 0.9, -1, 1) for column in drops.T], 0.05)
        plain = last_within(drops.mean(axis=0).tolist(), 0.05)
        assert last is not None and plain is not None
        violations += true[last] > 0.05 + 1e-9
        plain_violations += true[plain] > 0.05 + 1e-9
        chosen.append(true[last])
    assert violations <= 38, f"{violations} of 200 choices lose more than allowed"
    assert plain_violations > 60, "the experiment could not have noticed a rule without a bound"
    assert np.mean(chosen) > 0.02, "the budget is made use of"
