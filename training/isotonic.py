"""Isotonic regression of a gap on its labels, as the few knots that a head's graph can hold. Knows no head.

Source: pool adjacent violators, as scikit-learn implements it. Shapes: ``N`` position, ``M`` knot.
"""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["fit_isotonic"]


def fit_isotonic(
    gap: Float[Tensor, "N"], label: Float[Tensor, "N"], weight: Float[Tensor, "N"] | None = None, points: int = 32
) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
    """Fit the rising function of ``gap`` that is nearest to ``label``; return strictly rising knots and their values.

    At most ``points`` knots, at quantiles of the gap; linear between them, constant outside, as ``set_calibration``
    takes it. Leave out positions whose gap is known (ties), or they outvote the others near zero.

    Args:
        gap: estimates on held-out positions.
        label: what they estimate, such as ``gap_labels``.
        weight: importance of each position, all equal by default.
        points: most knots.

    Raises:
        ValueError: no position of positive weight, or fewer than two points.
    """
    from sklearn.isotonic import IsotonicRegression  # slow to import

    if points < 2:
        raise ValueError(f"points: expected at least 2, got {points}")
    weight = torch.ones_like(gap) if weight is None else weight
    used = weight > 0
    if not used.any():
        raise ValueError("gap: expected at least one position of positive weight, got none")
    inputs, wanted, counts = (values[used].double().cpu() for values in (gap.float(), label, weight))
    model = IsotonicRegression(out_of_bounds="clip").fit(inputs.numpy(), wanted.numpy(), sample_weight=counts.numpy())
    ordered = inputs.sort().values
    knots = ordered[torch.linspace(0, len(ordered) - 1, points).round().long()].unique()
    values = torch.from_numpy(model.predict(knots.numpy()))
    return knots.float(), values.float().cummax(dim=0).values
