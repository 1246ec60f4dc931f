from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from speccascade.cascade import Stats
from speccascade.router.calibration import PiecewiseLinear
from speccascade.router.features import build_features
from speccascade.router.heads import RouterHead, make_head

KNOTS, VALUES = torch.tensor([-0.6, -0.1, 0.0, 0.05, 0.9]), torch.tensor([-0.3, -0.3, 0.1, 0.1, 0.8])


@pytest.mark.parametrize("count", [1, 2, 5, 32])
def test_it_is_numpys_interpolation(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    knots = torch.rand(count, generator=generator).sort().values
    values = torch.randn(count, generator=generator).sort().values
    mapped = PiecewiseLinear()
    mapped.set(knots, values)
    inputs = torch.cat([torch.linspace(-1, 2, 301), knots])
    expected = torch.from_numpy(np.interp(inputs.double(), knots.double(), values.double()))
    torch.testing.assert_close(mapped(inputs).double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(mapped(inputs[:300].reshape(10, 30)), mapped(inputs[:300]).reshape(10, 30))


def test_without_knots_nothing_changes_by_a_bit() -> None:
    inputs = torch.randn(100)
    mapped = PiecewiseLinear()
    assert torch.equal(mapped(inputs), inputs)
    mapped.set(KNOTS, VALUES)
    assert not torch.equal(mapped(inputs), inputs)
    mapped.set(torch.empty(0), torch.empty(0))
    assert torch.equal(mapped(inputs), inputs)


def test_a_head_calibrates_one_loss_and_keeps_its_ties(
    weighted_head: Callable[..., RouterHead], make_stats: Callable[..., Stats]
) -> None:
    features = build_features(make_stats(batch=40, vocab=4), "verified").flatten(end_dim=-2)
    head = weighted_head()
    before = head(features)
    head.set_calibration("zero_one", KNOTS, VALUES)
    after = head(features)
    agree = features[:, 6] == 1
    assert (after[agree, 0] == 0).all(), "the map takes 0 to 0.1, but a tie is known to be worth nothing"
    expected = np.interp(before[~agree, 0].detach().numpy(), KNOTS.numpy(), VALUES.numpy())
    np.testing.assert_allclose(after[~agree, 0].detach().numpy(), expected, atol=1e-6)
    assert torch.equal(after[:, 1], before[:, 1])


def test_a_state_holds_as_many_knots_as_were_set(weighted_head: Callable[..., RouterHead]) -> None:
    head = weighted_head()
    head.set_calibration("sampled", KNOTS, VALUES)
    again = make_head(hidden=(16, 16))
    again.load_state_dict(head.state_dict())
    features = torch.randn(20, head.width)
    assert torch.equal(again(features), head(features))
    again.load_state_dict(weighted_head().state_dict())
    assert torch.equal(again(features), weighted_head()(features))


@pytest.mark.parametrize(
    ("loss", "knots", "values", "message"),
    [
        ("log", KNOTS, VALUES, "loss: expected one of zero_one, sampled, got 'log'"),
        ("sampled", KNOTS, VALUES[1:], r"knots: expected \[M\] beside values \[M\], got \[5\], \[4\]"),
        ("sampled", KNOTS.flip(0), VALUES, "strictly rising"),
        ("sampled", KNOTS, VALUES.flip(0), "never fall"),
        ("sampled", KNOTS[[0, 0]], VALUES[:2], "strictly rising"),
        ("sampled", KNOTS[:1] * torch.nan, VALUES[:1], "finite"),
        ("sampled", KNOTS, VALUES * 2, r"values: expected gaps in \[-1, 1\] for sampled"),
    ],
)
def test_what_is_no_rising_function_is_refused(
    weighted_head: Callable[..., RouterHead], loss: str, knots: Tensor, values: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        weighted_head().set_calibration(loss, knots, values)
