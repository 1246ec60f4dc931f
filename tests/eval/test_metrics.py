"""Hull, area and calibration against closed forms."""

import numpy as np
import pytest

from speccascade.data.resampling import interval
from speccascade.eval.metrics import (
    budget_hull,
    curve_area,
    curve_at,
    equal_count_calibration_error,
    reliability,
)


def test_the_hull_of_a_known_set_of_points():
    rejection = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    loss = [1.0, 0.9, 0.5, 0.45, 0.2, 0.3]
    assert budget_hull(rejection, loss).tolist() == [0, 2, 4]


def test_the_hull_keeps_the_lowest_of_points_at_one_rejection_and_stops_at_the_best():
    assert budget_hull([0.0, 0.0, 0.5, 1.0], [1.0, 0.8, 0.1, 0.1]).tolist() == [1, 2]
    assert budget_hull([0.3], [0.5]).tolist() == [0]


def test_no_point_lies_below_the_hull():
    generator = np.random.default_rng(0)
    for _ in range(50):
        rejection, loss = generator.random(40), generator.random(40)
        hull = budget_hull(rejection, loss)
        height = curve_at(np.tile(rejection[hull], (40, 1)), np.tile(loss[hull], (40, 1)), rejection)
        right = rejection >= rejection[hull[0]]
        assert (height[right] <= loss[right] + 1e-12).all()
        assert (np.diff(rejection[hull]) > 0).all() and (np.diff(loss[hull]) < 0).all()


def test_the_area_of_a_triangle_and_of_its_flat_continuation():
    # From (0, 1) down to (0.5, 0): mean height 1/2 up to 0.5, and 1/4 up to 1, where the curve stays at 0.
    assert curve_area([0.0, 0.5], [1.0, 0.0], 0.5) == pytest.approx(0.5)
    assert curve_area([0.0, 0.5], [1.0, 0.0], 1.0) == pytest.approx(0.25)
    # Cut in the middle of the segment: a trapezium from 1 to 1/2.
    assert curve_area([0.0, 0.5], [1.0, 0.0], 0.25) == pytest.approx(0.75)
    # Flat before its first point.
    assert curve_area([0.4, 0.5], [1.0, 0.0], 0.4) == pytest.approx(1.0)


def test_the_area_equals_a_fine_riemann_sum():
    generator = np.random.default_rng(1)
    x, y = np.sort(generator.random(7)), generator.random(7)
    grid = np.linspace(0, 0.9, 200_001)
    assert curve_area(x, y, 0.9) == pytest.approx(np.interp(grid, x, y).mean(), abs=1e-4)


def test_the_area_of_many_curves_at_once_equals_one_by_one():
    generator = np.random.default_rng(2)
    x, y, limits = np.sort(generator.random((5, 6))), generator.random((5, 6)), generator.random(5) + 0.1
    together = curve_area(x, y, limits)
    assert together == pytest.approx([float(curve_area(x[i], y[i], limits[i])) for i in range(5)])
    assert curve_at(x, y, limits) == pytest.approx([np.interp(limits[i], x[i], y[i]) for i in range(5)])


def test_an_area_over_nothing_is_nan_and_leaves_the_other_curves_and_the_interval_alone():
    curves = np.array([[0.0, 0.5], [0.0, 0.0], [0.0, 0.5]]), np.tile([1.0, 0.0], (3, 1))
    areas = curve_area(*curves, [0.5, 0.0, 0.5])
    assert areas == pytest.approx([0.5, np.nan, 0.5], nan_ok=True)
    assert interval(0.5, areas).low == interval(0.5, areas).high == pytest.approx(0.5)


def test_calibration_error_of_a_known_miscalibration():
    generator = np.random.default_rng(5)
    confidence = generator.uniform(0.5, 1.0, 40_000)
    honest = generator.random(40_000) < confidence
    boastful = generator.random(40_000) < confidence - 0.2
    assert equal_count_calibration_error(confidence, honest) < 0.015
    assert equal_count_calibration_error(confidence, boastful) == pytest.approx(0.2, abs=0.015)
    assert np.isnan(equal_count_calibration_error([], []))


def test_reliability_bins_hold_equal_shares():
    table = reliability(np.linspace(0, 1, 100), np.ones(100), bins=10)
    assert table.weight == pytest.approx(np.full(10, 0.1)) and (table.accuracy == 1).all()
