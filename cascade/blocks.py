"""What a rule sees of a drafted block, and what it must answer: the interface between `cascade` and `router`.

Shapes: ``B`` sequence, ``T`` position in the block, ``V`` token.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .statistics import Stats

__all__ = ["TargetRule", "VerifyBlock"]


@dataclass(frozen=True)
class VerifyBlock:
    """Both models' distributions at every position of a drafted block.

    Args:
        draft_probs: q ``[B, T, V]``, as sampled from.
        verifier_probs: p ``[B, T, V]``, processed in the same way.
        draft_confidence: q° ``[B, T, V]`` at temperature 1 with nothing cut off.
        verifier_confidence: p° ``[B, T, V]``, likewise.
        tokens: the drafted tokens ``[B, T]``.
        positions: their places in the sequence ``[B, T]``, counted from 0, prompt included.
    """

    draft_probs: Float[Tensor, "B T V"]
    verifier_probs: Float[Tensor, "B T V"]
    draft_confidence: Float[Tensor, "B T V"]
    verifier_confidence: Float[Tensor, "B T V"]
    tokens: Int[Tensor, "B T"]
    positions: Int[Tensor, "B T"]

    @classmethod
    def from_probs(
        cls,
        draft_probs: Tensor,
        verifier_probs: Tensor,
        draft_confidence: Tensor | None = None,
        verifier_confidence: Tensor | None = None,
        tokens: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> "VerifyBlock":
        """Build a block for tests, offline use and loops of one's own.

        Confidences default to the processed distributions, tokens to the drafter's argmax, positions to 0..T−1.

        Raises:
            ValueError: a shape other than ``[B, T, V]``, or two shapes that differ.
        """
        if draft_probs.dim() != 3 or draft_probs.shape != verifier_probs.shape:
            shapes = f"{tuple(draft_probs.shape)} and {tuple(verifier_probs.shape)}"
            raise ValueError(f"draft_probs, verifier_probs: expected the same shape [B, T, V], got {shapes}")
        batch, length, _ = draft_probs.shape
        return cls(
            draft_probs=draft_probs,
            verifier_probs=verifier_probs,
            draft_confidence=draft_probs if draft_confidence is None else draft_confidence,
            verifier_confidence=verifier_probs if verifier_confidence is None else verifier_confidence,
            tokens=draft_probs.argmax(dim=-1) if tokens is None else tokens,
            positions=torch.arange(length, device=draft_probs.device).expand(batch, length)
            if positions is None
            else positions,
        )

    def raw(self) -> "VerifyBlock":
        """The same positions as they are at temperature 1 with nothing cut off: q°, p° in the place of q, p."""
        return replace(self, draft_probs=self.draft_confidence, verifier_probs=self.verifier_confidence)

    @cached_property
    def stats(self) -> Stats:
        """The scalars of every position, each ``[B, T]``, computed once."""
        return Stats(self.draft_probs, self.verifier_probs, self.draft_confidence, self.verifier_confidence)


@runtime_checkable
class TargetRule(Protocol):
    """Anything that turns a block into the distribution to emit from: a rule, a trained router, a user's own.

    A rule may also offer ``defer_mask(block) -> bool [B, T]``, which the statistics and the ledger read.
    """

    def target(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        """Return π ``[B, T, V]``; it may depend on q, p and the position, never on the drafted tokens."""
        ...
