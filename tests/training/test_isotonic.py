import numpy as np
import pytest
import torch
from torch import Tensor

from speccascade.router.heads import make_head
from speccascade.training.isotonic import fit_isotonic


def pool_adjacent_violators(label: Tensor, weight: Tensor) -> Tensor:
    """The plain algorithm: merge neighbours that fall, until none does."""
    blocks: list[list[float]] = []
    for value, mass in zip(label.tolist(), weight.tolist(), strict=True):
        blocks.append([value, mass, 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            value, mass, count = blocks.pop()
            total = blocks[-1][1] + mass
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + value * mass) / total, total, blocks[-1][2] + count]
    return torch.tensor([value for value, _, count in blocks for _ in range(int(count))])


def noisy(count: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gap = torch.rand(count, generator=generator).sort().values * 2 - 1
    label = (gap**3 + 0.3 * torch.randn(count, generator=generator)).clamp(-1, 1)
    return gap, label, torch.rand(count, generator=generator)


@pytest.mark.parametrize("weighted", [False, True])
def test_with_a_knot_a_position_it_is_isotonic_regression(weighted: bool) -> None:
    gap, label, weight = noisy()
    knots, values = fit_isotonic(gap, label, weight if weighted else None, points=400)
    expected = pool_adjacent_violators(label, weight if weighted else torch.ones(400))
    assert torch.equal(knots, gap)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


def test_few_knots_lose_little() -> None:
    gap, label, _ = noisy(4000)
    knots, values = fit_isotonic(gap, label)
    assert len(knots) == len(values) <= 32
    assert (knots.diff() > 0).all() and (values.diff() >= 0).all()
    error = np.interp(gap, knots, values) - (gap**3).numpy()
    assert np.sqrt((error**2).mean()) < 0.05


def test_a_head_takes_what_was_fitted() -> None:
    gap, label, weight = noisy()
    gap[:300] = 0.0
    head = make_head("linear", "gap", "draft_only")
    head.set_calibration("sampled", *fit_isotonic(gap, label, weight))
    knots, values = fit_isotonic(torch.zeros(5), label[:5])
    head.set_calibration("zero_one", knots, values)
    torch.testing.assert_close(head(torch.zeros(1, 5))[0, 0], label[:5].mean())


def test_weight_zero_is_no_position() -> None:
    gap, label, _ = noisy()
    weight = (torch.arange(400) % 2).float()
    for got, wanted in zip(fit_isotonic(gap, label, weight), fit_isotonic(gap[1::2], label[1::2]), strict=True):
        assert torch.equal(got, wanted)
    with pytest.raises(ValueError, match="at least one position of positive weight"):
        fit_isotonic(gap, label, torch.zeros(400))
    with pytest.raises(ValueError, match="points: expected at least 2, got 1"):
        fit_isotonic(gap, label, points=1)
