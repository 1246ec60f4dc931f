"""Lossy speculative decoding: drafts are kept as long as the verifier's probability is not too far below.

A drafted token x is accepted with min(1, p(x)/((1 − α)q(x))) whatever β is, since p/β ≤ p/(1 − α): β, and with it a
search over the vocabulary, is needed only where a draft was rejected. Source: Narasimhan et al., ICLR 2025, Lemma 2;
β* follows from Σπ = 1 (docs/theory.md).

Shapes: ``*batch`` any leading axes, ``B`` sequence, ``T`` position, ``V`` token.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..cascade.blocks import VerifyBlock
from .checks import check_range

__all__ = ["Lossy", "LossyTarget", "lossy_beta", "solve_scale"]


@dataclass(frozen=True)
class Lossy:
    """Lossy speculative decoding: π = max{min{q, p/(1 − α)}, p/β}, α in [0, 1).

    Args:
        alpha: leniency; 0 is lossless.
        beta: ≥ 1 − α. Default: β*, solved a position so that Σπ = 1. β = 1 is the usual heuristic: its Σπ exceeds 1,
            accept and residual then run as written, and the emitted law is that of ``emission_law``.
    """

    alpha: float
    beta: float | None = None

    def __post_init__(self) -> None:
        check_range("alpha", self.alpha, 0, 1, below_high=True)
        if self.beta is not None:
            check_range("beta", self.beta, 1 - self.alpha, float("inf"))

    def decide(self, block: VerifyBlock) -> "LossyTarget":
        """Return π as verification reads it."""
        return LossyTarget(block, self.alpha, self.beta)

    def defer_mask(self, block: VerifyBlock) -> Bool[Tensor, "B T"]:
        """Call a position deferred where the drafted token may be rejected: q(x) > p(x)/(1 − α)."""
        return self.decide(block).deferred

    def target(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        """Return π."""
        return self.decide(block).dense()


@dataclass(frozen=True)
class LossyTarget:
    """π = max{min{q, p/(1 − α)}, p/β} over a block."""

    block: VerifyBlock
    alpha: float
    beta: float | None

    @property
    def deferred(self) -> Bool[Tensor, "B T"]:
        """Where the drafted token may be rejected."""
        return self.block.draft.at(self.block.tokens) > self.at_tokens()

    def at_tokens(self) -> Float[Tensor, "B T"]:
        """Return p(x)/(1 − α) at the drafted tokens: π(x) wherever that lies below q(x)."""
        return self.block.verifier.at(self.block.tokens) / (1 - self.alpha)

    def row(self, places: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return π whole at one position of each sequence."""
        draft, verifier = self.block.draft.row(places), self.block.verifier.row(places)
        if self.beta is not None:
            return self._law(draft, verifier, 1 / self.beta)
        if draft.device.type != "cpu":  # row by row it would wait for the device at every step
            return self._law(draft, verifier, (1 / lossy_beta(draft, verifier, self.alpha)).unsqueeze(-1))
        scales = [solve_scale(q, p, self.alpha) for q, p in zip(draft, verifier, strict=True)]
        return self._law(draft, verifier, torch.tensor(scales, device=draft.device).unsqueeze(-1))

    def dense(self) -> Float[Tensor, "B T V"]:
        """Return π whole."""
        draft, verifier = self.block.draft_probs, self.block.verifier_probs
        if self.beta is not None:
            return self._law(draft, verifier, 1 / self.beta)
        return self._law(draft, verifier, (1 / lossy_beta(draft, verifier, self.alpha)).unsqueeze(-1))

    def _law(self, draft: Tensor, verifier: Tensor, scale: Tensor | float) -> Tensor:
        return torch.maximum(torch.minimum(draft, verifier / (1 - self.alpha)), verifier * scale)


def lossy_beta(
    draft_probs: Float[Tensor, "*batch V"], verifier_probs: Float[Tensor, "*batch V"], alpha: float
) -> Float[Tensor, "*batch"]:
    """Solve Σ max(0, p/β − q) = Σ max(0, q − p/(1 − α)) for β ≥ 1, a position; ∞ where nothing may be rejected.

    Newton's method on the scale s = 1/β from s = 1: the left side is convex and piecewise linear in s, so the steps
    fall monotonically onto the root and end after finitely many. Positions that have arrived are set aside.
    """
    draft, verifier = (probs.double().reshape(-1, probs.shape[-1]) for probs in (draft_probs, verifier_probs))
    surplus = (draft - verifier / (1 - alpha)).clamp_min_(0).sum(dim=-1)
    scale, scales = torch.ones_like(surplus), torch.ones_like(surplus)
    rows = torch.arange(len(surplus), device=surplus.device)
    for _ in range(draft.shape[-1] + 2):  # each step but the last takes at least one token out of the active set
        active = (scale.unsqueeze(-1) * verifier > draft).double()
        slope = (active * verifier).sum(dim=-1)
        root = (surplus + (active * draft).sum(dim=-1)) / slope.clamp_min(1e-300)
        lower = torch.where(slope > 0, torch.minimum(root, scale), scale)
        scales[rows] = lower
        going = (~(scale - lower <= 1e-15)).nonzero().squeeze(-1)
        if len(going) == 0:
            return (1 / scales).to(draft_probs.dtype).reshape(draft_probs.shape[:-1])
        rows, draft, verifier, surplus, scale = (one[going] for one in (rows, draft, verifier, surplus, lower))
    raise ValueError("draft_probs, verifier_probs: expected finite probabilities, got NaN or infinity")


def solve_scale(draft_probs: Float[Tensor, "V"], verifier_probs: Float[Tensor, "V"], alpha: float) -> float:
    """Return 1/β* of one position: `lossy_beta` for a large vocabulary.

    A token that has left the active set stays out, so each step looks at the rest only.
    """
    surplus = float((draft_probs - verifier_probs / (1 - alpha)).clamp_min_(0).sum(dtype=torch.float64))
    scale, active = 1.0, verifier_probs > draft_probs
    draft, verifier = draft_probs[active].double(), verifier_probs[active].double()
    while len(draft):
        root = (surplus + float(draft.sum())) / float(verifier.sum())
        if scale - root <= 1e-15:
            break
        scale = root
        active = scale * verifier > draft
        draft, verifier = draft[active], verifier[active]
    return scale
