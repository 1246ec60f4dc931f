"""Arrays in, numbers out: frontiers and their areas, and calibration. Knows no rule, file or figure.

A *frontier* is read as a budget: the loss that can be had while rejecting at most so much. Randomising between two
settings is allowed, so a method's frontier is the lower convex hull of its points, from (0, loss of the drafter) on,
and flat after its best point: nobody must spend a budget.

Shapes: ``N`` position, ``M`` point of a curve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Reliability",
    "budget_hull",
    "curve_area",
    "curve_at",
    "equal_count_calibration_error",
    "reliability",
]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Reliability:
    """Mean confidence and accuracy per bin of equal counts; ``weight`` is the share of positions in the bin."""

    confidence: Array
    accuracy: Array
    weight: Array


def budget_hull(rejection: ArrayLike, loss: ArrayLike) -> NDArray[np.int64]:
    """Return the indices ``[H]`` of the lower convex hull up to its lowest point, in order of rejection."""
    x, y = np.asarray(rejection, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    hull: list[int] = []
    for index in np.lexsort((y, x)):
        if hull and (x[index] == x[hull[-1]] or y[index] >= y[hull[-1]]):
            continue
        while len(hull) >= 2 and not _turns_up(x, y, hull[-2], hull[-1], index):
            hull.pop()
        hull.append(int(index))
    return np.asarray(hull, dtype=np.int64)


def _turns_up(x: Array, y: Array, first: int, middle: int, last: int) -> bool:
    cross = (x[middle] - x[first]) * (y[last] - y[first]) - (y[middle] - y[first]) * (x[last] - x[first])
    return bool(cross > 0)


def curve_area(rejection: ArrayLike, loss: ArrayLike, limit: ArrayLike) -> Array:
    """Mean height ``[...]`` over rejection 0 to ``limit`` of the curve through the points ``[..., M]``.

    The curve is flat before its first and after its last point. A point left of its predecessor (resampling can
    do that to settings that are nearly equal) is moved onto it. Over nothing (a resample in which the two models
    never differ has limit 0) the mean is NaN.
    """
    x = np.maximum.accumulate(np.asarray(rejection, dtype=np.float64), axis=-1)
    y = np.asarray(loss, dtype=np.float64)
    stop = np.asarray(limit, dtype=np.float64)
    stop = np.where(stop > 0, stop, np.nan)
    left, right = np.minimum(x[..., :-1], stop[..., None]), np.minimum(x[..., 1:], stop[..., None])
    width = np.maximum(x[..., 1:] - x[..., :-1], 1e-300)
    slope = (y[..., 1:] - y[..., :-1]) / width
    middle = y[..., :-1] + slope * ((left + right) / 2 - x[..., :-1])
    inside = np.where(right > left, (right - left) * middle, 0.0).sum(axis=-1)
    before = np.minimum(x[..., 0], stop) * y[..., 0]
    after = np.maximum(stop - x[..., -1], 0.0) * y[..., -1]
    return np.asarray((before + inside + after) / stop, dtype=np.float64)


def curve_at(rejection: ArrayLike, loss: ArrayLike, budget: ArrayLike) -> Array:
    """Height ``[...]`` of the curve through the points ``[..., M]`` at one ``budget`` ``[...]`` per curve."""
    x = np.maximum.accumulate(np.asarray(rejection, dtype=np.float64), axis=-1)
    y = np.asarray(loss, dtype=np.float64)
    at = np.broadcast_to(np.asarray(budget, dtype=np.float64), x.shape[:-1])
    after = np.clip((x <= at[..., None]).sum(axis=-1), 1, max(x.shape[-1] - 1, 1))[..., None]
    if x.shape[-1] == 1:
        return np.asarray(y[..., 0], dtype=np.float64)
    x0, x1 = np.take_along_axis(x, after - 1, -1)[..., 0], np.take_along_axis(x, after, -1)[..., 0]
    y0, y1 = np.take_along_axis(y, after - 1, -1)[..., 0], np.take_along_axis(y, after, -1)[..., 0]
    share = np.where(x1 > x0, np.clip((at - x0) / np.maximum(x1 - x0, 1e-300), 0.0, 1.0), (at >= x1).astype(float))
    return np.asarray(y0 + share * (y1 - y0), dtype=np.float64)


def reliability(confidence: ArrayLike, correct: ArrayLike, bins: int = 15) -> Reliability:
    """Compare stated confidence ``[N]`` with what came true ``[N]`` in bins of equal counts."""
    stated, truth = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if stated.size == 0:
        empty = np.zeros(0)
        return Reliability(empty, empty, empty)
    parts = np.array_split(np.argsort(stated, kind="stable"), min(bins, stated.size))
    return Reliability(
        np.array([stated[part].mean() for part in parts]),
        np.array([truth[part].mean() for part in parts]),
        np.array([part.size / stated.size for part in parts]),
    )


def equal_count_calibration_error(stated: ArrayLike, observed: ArrayLike, bins: int = 15) -> float:
    """Mean distance between what was stated and what came true, over bins of equal counts; NaN for no position.

    For what is no probability, such as a router's gap from -1 to 1, most of which lies near 0. Chances in [0, 1] are
    measured by `data.calibration.calibration_error`, over bins of equal width.
    """
    table = reliability(stated, observed, bins)
    if table.weight.size == 0:
        return float("nan")
    return float((table.weight * np.abs(table.confidence - table.accuracy)).sum())
