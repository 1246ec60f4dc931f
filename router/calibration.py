"""A monotone piecewise-linear map inside a head's graph: what isotonic regression learned on held-out positions.

Knows no head and no way to fit one (`training/isotonic.py` does).
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["PiecewiseLinear"]


class PiecewiseLinear(nn.Module):
    """Linear between knots and constant outside them; without knots, the identity.

    Written as a sum of clamped ramps, one a segment, which every runtime has.
    """

    knots: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("knots", torch.empty(0))
        self.register_buffer("values", torch.empty(0))

    @property
    def is_identity(self) -> bool:
        """Whether no knots are set."""
        return len(self.knots) == 0

    def set(self, knots: Tensor, values: Tensor) -> None:
        """Store ``[M]`` strictly rising knots and their values; M = 0 restores the identity.

        Raises:
            ValueError: shapes that differ, knots that do not rise, values that fall, or a number that is not finite.
        """
        knots, values = knots.detach().to(self.knots), values.detach().to(self.values)
        if knots.ndim != 1 or knots.shape != values.shape:
            raise ValueError(f"knots: expected [M] beside values [M], got {list(knots.shape)}, {list(values.shape)}")
        if not (torch.isfinite(knots).all() and torch.isfinite(values).all()):
            raise ValueError("knots: expected finite knots and values")
        if (knots.diff() <= 0).any() or (values.diff() < 0).any():
            raise ValueError("knots: expected strictly rising float32 knots and values that never fall")
        self.knots, self.values = knots.clone(), values.clone()

    def forward(self, inputs: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Map every number."""
        if self.is_identity:
            return inputs
        if len(self.knots) == 1:
            return inputs * 0 + self.values
        share = (inputs.unsqueeze(-1) - self.knots[:-1]) / self.knots.diff()
        return self.values[0] + (share.clamp(0.0, 1.0) * self.values.diff()).sum(dim=-1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take as many knots as were stored."""
        for name in ("knots", "values"):
            stored = state_dict.get(prefix + name)
            if stored is not None:
                setattr(self, name, torch.empty_like(stored, device=self.knots.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)
