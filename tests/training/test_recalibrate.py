"""A map is kept where it helps on documents that it was not fitted on, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speccascade.router.examples import Examples
from speccascade.training.datamodule import TraceTensors
from speccascade.training.recalibrate import cross_validated_error, recalibrate


class Head(torch.nn.Module):
    """Its gap is the first feature times a factor: 1 is right, 3 is overconfident."""

    context, gap_losses, estimator = 0, ("zero_one", "sampled"), "gap"

    def __init__(self, factors: tuple[float, float]) -> None:
        super().__init__()
        self.factors = torch.tensor(factors)
        self.maps: dict[str, tuple[Tensor, Tensor]] = {}

    def estimate(self, examples: Examples) -> Tensor:
        return (examples.features[:, :1] * self.factors).clamp(-1, 1)

    def set_calibration(self, loss: str, knots: Tensor, values: Tensor) -> None:
        self.maps[loss] = (knots, values)


def made_split(documents: int = 100, length: int = 40, noise: float = 0.3, seed: int = 0) -> TraceTensors:
    """Positions whose true gap is the first feature; a third agree, and there the 0-1 label is 0."""
    generator = torch.Generator().manual_seed(seed)
    count = documents * length
    gap = torch.rand(count, generator=generator) - 0.5
    agree = (torch.arange(count) % 3 == 0).float()
    label = (gap + noise * (torch.rand(count, generator=generator) - 0.5)).clamp(-1, 1)
    zeros = torch.zeros(count)
    zero_one = torch.stack([zeros, torch.where(agree > 0, zeros, label)], dim=1)
    return TraceTensors(
        features=gap[:, None],
        correctness=torch.stack([zero_one, torch.stack([zeros, label], dim=1)], dim=1),
        tv=torch.ones(count),
        agree=agree,
        prompt_index=torch.arange(count) // length,
        prompt_ids=tuple(f"p{index}" for index in range(documents)),
    )


def test_auto_maps_the_overconfident_loss_alone() -> None:
    head = Head((3.0, 1.0))
    found = recalibrate(head, made_split(), "auto")
    assert set(head.maps) == {"zero_one"}
    assert found["zero_one"].kept and found["zero_one"].after < 0.3 * found["zero_one"].before
    assert not found["sampled"].kept and found["sampled"].after > found["sampled"].before
    knots, values = head.maps["zero_one"]
    inside = knots.abs() < 0.9
    assert torch.allclose(values[inside], knots[inside] / 3, atol=0.05), "the map undoes the factor"


def test_isotonic_always_maps_and_none_never_does() -> None:
    always, never = Head((1.0, 1.0)), Head((3.0, 3.0))
    assert all(result.kept for result in recalibrate(always, made_split(), "isotonic").values())
    assert set(always.maps) == {"zero_one", "sampled"}
    assert recalibrate(never, made_split(), "none") == {} and not never.maps


def test_positions_whose_gap_is_known_have_no_vote() -> None:
    """Labels of ties are 0: with them, the map of the 0-1 gap would be a third too flat."""
    head = Head((1.0, 1.0))
    recalibrate(head, made_split(noise=0.0), "isotonic")
    knots, values = head.maps["zero_one"]
    assert torch.allclose(values, knots, atol=0.03)


def test_folds_are_documents() -> None:
    """Every document has a label of its own; a fold by position would learn them, a fold by document cannot."""
    generator = torch.Generator().manual_seed(0)
    document = torch.arange(2000) // 100
    label = torch.rand(20, generator=generator)[document]
    gap = document / 20 + 0.01 * torch.rand(2000, generator=generator)
    before, after = cross_validated_error(gap, label, document)
    constant = float((label - label.mean()).square().mean())
    assert after > 0.7 * constant
    assert before == pytest.approx(float((gap - label).double().square().mean()))
    assert cross_validated_error(gap[:100], label[:100], document[:100])[1] == float("inf")


def test_a_head_without_a_gap_has_no_map() -> None:
    head = Head((1.0, 1.0))
    head.estimator = "cost_sensitive"
    assert recalibrate(head, made_split(), "auto") == {}
    with pytest.raises(ValueError, match="recalibrate: expected none or auto for estimator 'cost_sensitive'"):
        recalibrate(head, made_split(), "isotonic")
    with pytest.raises(ValueError, match="recalibrate: expected one of none, isotonic, auto, got 'isotone'"):
        recalibrate(head, made_split(), "isotone")
