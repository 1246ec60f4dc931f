"""Finite-sample upper bounds for the mean of bounded losses of independent units, valid for every distribution.

A *unit* is a document: its loss is a mean over its positions, so the bound is about the mean over documents, not over
tokens. The units must be independent draws of one source, in an order that does not depend on their losses, and must
not have been used before: not to train, not to stop early or choose a checkpoint, not to fit a calibration map.

`mean_upper_bound` is the betting bound of Waudby-Smith and Ramdas (Estimating means of bounded random variables by
betting, JRSS-B 2024, section 4) in the one-sided form in which Bates et al. use it (Distribution-free,
risk-controlling prediction sets, J. ACM 2021, proposition 5): of the two bets that are hedged for a two-sided interval,
the one against small means alone. `hoeffding_upper_bound` is the plain reference beside it.

Together with `router.budgets.last_within` the bounds give Learn-then-Test by fixed-sequence testing (Angelopoulos et
al., Learn then Test, 2021, section 3.1): settings in an order fixed beforehand, from the safest on, each tested at the
full δ while the bound stays within ε. The last to pass has a true mean above ε with a chance of at most δ, however
many were tried.

Shapes: ``n`` unit. Knows no rule, head or file.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..router.checks import check_range

__all__ = ["hoeffding_upper_bound", "mean_upper_bound"]

Array = NDArray[np.float64]

TRUNCATION = 0.75
"""Share of the capital that may be staked at most, so that no single loss ruins the bettor ("c" in the paper)."""

_HALVINGS = 40


def mean_upper_bound(values: ArrayLike, confidence: float, low: float = 0.0, high: float = 1.0) -> float:
    """Bound the mean from above by betting: it lies below the bound with a chance of at least ``confidence``.

    A bettor starts with 1 and stakes, at each value, on the mean being smaller than m. Were the mean m or more, the
    capital would ever reach 1 / δ with a chance of at most δ (Ville's inequality), so every m at which it did is ruled
    out. Capital grows with m, so what is left is an interval. Small variance makes it narrow, which Hoeffding's is not.

    Args:
        values: losses ``[n]`` of independent units, in [low, high].
        confidence: 1 − δ, in (0, 1).
        low: least possible loss.
        high: greatest possible loss.

    Returns:
        A number in [low, high].

    Raises:
        ValueError: no value, one outside the range, or a confidence outside (0, 1).

    >>> round(mean_upper_bound([0.1] * 200, 0.95), 3), round(hoeffding_upper_bound([0.1] * 200, 0.95), 3)
    (0.118, 0.187)
    """
    unit = _to_unit(values, confidence, low, high)
    stakes = _stakes(unit, 1 - confidence)
    goal = -math.log(1 - confidence)
    inside, outside = 0.0, 1.0
    if _most_log_capital(unit, stakes, np.nextafter(1.0, 0.0)) < goal:
        return float(high)
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        if _most_log_capital(unit, stakes, middle) >= goal:
            outside = middle
        else:
            inside = middle
    return low + (high - low) * outside


def hoeffding_upper_bound(values: ArrayLike, confidence: float, low: float = 0.0, high: float = 1.0) -> float:
    """Bound the mean from above by its observed value plus (high − low) √(log(1/δ) / 2n) (Hoeffding 1963).

    Arguments and errors are those of `mean_upper_bound`.
    """
    unit = _to_unit(values, confidence, low, high)
    reach = math.sqrt(-math.log(1 - confidence) / (2 * len(unit)))
    return low + (high - low) * min(float(unit.mean()) + reach, 1.0)


def _to_unit(values: ArrayLike, confidence: float, low: float, high: float) -> Array:
    """Values as a share of the range, checked."""
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1 or given.size == 0:
        raise ValueError(f"values: expected a list of at least one number, got shape {list(given.shape)}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1, got {confidence!r}")
    check_range("low", low, -math.inf, high, below_high=True)
    # Sums of float32 may leave the range by rounding, which is no error.
    slack = 1e-6 * (high - low)
    if not ((given >= low - slack) & (given <= high + slack)).all():
        raise ValueError(f"values: expected numbers in [{low:g}, {high:g}], got {given.min():g} to {given.max():g}")
    unit: Array = np.clip((given - low) / (high - low), 0.0, 1.0)
    return unit


def _stakes(unit: Array, risk: float) -> Array:
    """The stake on each value, from those before it alone: near the best one for a sample of n of their variance."""
    count = np.arange(1, len(unit) + 1)
    means = (0.5 + np.cumsum(unit)) / (1 + count)
    variances = (0.25 + np.cumsum((unit - means) ** 2)) / (1 + count)
    before: Array = np.concatenate([[0.25], variances[:-1]])
    return np.asarray(np.sqrt(2 * math.log(1 / risk) / (len(unit) * before)), dtype=np.float64)


def _most_log_capital(unit: Array, stakes: Array, mean: float) -> float:
    """The greatest log capital that betting on a mean below ``mean`` ever had."""
    staked = np.minimum(stakes, TRUNCATION / (1 - mean))
    return float(np.cumsum(np.log1p(-staked * (unit - mean))).max())
