"""The frontier area: by hand on four positions, and as a metric over batches."""

import math

import torch

from speccascade.data.calibration import calibration_error
from speccascade.training.metrics import CalibrationError, FrontierArea, frontier_area


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
