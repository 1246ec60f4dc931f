"""What a rule sees of a drafted block, and what it must answer: the interface between `cascade` and `router`.

Shapes: ``B`` sequence, ``T`` position in the block, ``V`` token, ``H`` hidden state; ``R`` = C + T positions that end
with the block, C of them before it, ``M`` number that a rule remembers of each.
"""

import copy
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .forms import Distribution, as_distribution, view_sides
from .statistics import Stats

__all__ = ["TargetRule", "VerifyBlock", "pick_states"]


@dataclass(frozen=True)
class VerifyBlock:
    """Both models' distributions at every position of a drafted block.

    Args:
        draft: q at ``[B, T]`` positions, as sampled from.
        draft_raw: q° at temperature 1 with nothing cut off.
        verifier: p, processed in the same way as q.
        verifier_raw: p°.
        tokens: the drafted tokens ``[B, T]``.
        positions: their places in the sequence ``[B, T]``, counted from 0, prompt included.
        memory: for a rule with a ``context``, what it remembers of the C = context − 1 positions before the block and
            of the block's own ``[B, C + T, M]``, in order; NaN where nothing is known. None: nobody remembered.
        draft_hidden: what the drafter's output head read at each position ``[B, T, H1]``, float32; known to a rule that
            asks for it by ``needs_hidden = True``.
        verifier_hidden: what the verifier's read ``[B, T, H2]``, likewise.
    """

    draft: Distribution
    draft_raw: Distribution
    verifier: Distribution
    verifier_raw: Distribution
    tokens: Int[Tensor, "B T"]
    positions: Int[Tensor, "B T"]
    _: KW_ONLY
    memory: Float[Tensor, "B R M"] | None = None
    draft_hidden: Float[Tensor, "B T H1"] | None = None
    verifier_hidden: Float[Tensor, "B T H2"] | None = None

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
        draft, verifier = as_distribution(draft_probs), as_distribution(verifier_probs)
        return cls(
            draft=draft,
            verifier=verifier,
            draft_raw=draft if draft_confidence is None else as_distribution(draft_confidence),
            verifier_raw=verifier if verifier_confidence is None else as_distribution(verifier_confidence),
            tokens=draft_probs.argmax(dim=-1) if tokens is None else tokens,
            positions=torch.arange(length, device=draft_probs.device).expand(batch, length)
            if positions is None
            else positions,
        )

    @property
    def draft_probs(self) -> Float[Tensor, "B T V"]:
        """q, whole."""
        return self.draft.dense

    @property
    def verifier_probs(self) -> Float[Tensor, "B T V"]:
        """p, whole."""
        return self.verifier.dense

    @property
    def draft_confidence(self) -> Float[Tensor, "B T V"]:
        """q°, whole."""
        return self.draft_raw.dense

    @property
    def verifier_confidence(self) -> Float[Tensor, "B T V"]:
        """p°, whole."""
        return self.verifier_raw.dense

    @property
    def recent(self) -> Float[Tensor, "B C M"] | None:
        """What was remembered of the positions before the block, the last one last."""
        return None if self.memory is None else self.memory[:, : -self.tokens.shape[1]]

    def with_memory(self, recent: Float[Tensor, "B C M"], own: Float[Tensor, "B T M"]) -> "VerifyBlock":
        """The same block and what is remembered of the positions before it and of its own."""
        block = copy.copy(self)  # unlike `replace`, keeps the statistics computed so far
        block.__dict__["memory"] = torch.cat([recent, own], dim=1)
        return block

    def pick(self, places: Int[Tensor, "B"]) -> "VerifyBlock":
        """One position of each sequence, as a block of ``[B, 1]``; what is remembered before it comes along."""
        draft, draft_raw = view_sides(self.draft, self.draft_raw, lambda side: side.pick(places))
        verifier, verifier_raw = view_sides(self.verifier, self.verifier_raw, lambda side: side.pick(places))
        index = places.unsqueeze(1)
        tokens, positions = self.tokens.gather(1, index), self.positions.gather(1, index)
        memory = None
        if self.memory is not None:
            reach = torch.arange(self.memory.shape[1] - self.tokens.shape[1] + 1, device=index.device)
            memory = self.memory[torch.arange(len(places), device=index.device).unsqueeze(1), index + reach]
        return VerifyBlock(
            draft,
            draft_raw,
            verifier,
            verifier_raw,
            tokens,
            positions,
            memory=memory,
            draft_hidden=pick_states(self.draft_hidden, places),
            verifier_hidden=pick_states(self.verifier_hidden, places),
        )

    def raw(self) -> "VerifyBlock":
        """The same positions as they are at temperature 1 with nothing cut off: q°, p° in the place of q, p.

        What is remembered stays as it was noted.
        """
        return replace(self, draft=self.draft_raw, verifier=self.verifier_raw)

    @cached_property
    def stats(self) -> Stats:
        """The scalars of every position, each ``[B, T]``, computed once."""
        draft, verifier = self.draft_hidden, self.verifier_hidden
        hidden = None if draft is None or verifier is None else (draft, verifier)
        return Stats(self.draft, self.verifier, self.draft_raw, self.verifier_raw, hidden)


def pick_states(states: Float[Tensor, "B T H"] | None, places: Int[Tensor, "B"]) -> Float[Tensor, "B 1 H"] | None:
    """The hidden state at one position of each sequence, where states are known."""
    return None if states is None else states.take_along_dim(places[:, None, None], dim=1)


@runtime_checkable
class TargetRule(Protocol):
    """Anything that turns a block into the distribution to emit from: a rule, a trained router, a user's own.

    A rule may also offer ``defer_mask(block) -> bool [B, T]``, which the statistics and the ledger read, or
    ``decide(block) -> Target`` (`speccascade.cascade.targets`), which spares verification the whole of π. With
    ``needs_hidden = True`` it finds both models' hidden states in the block; one that reads the positions before a
    block has a ``context`` (`speccascade.cascade.memory`).
    """

    def target(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        """Return π ``[B, T, V]``; it may depend on q, p and the position, never on the drafted tokens.

        The block is the engine's own and must stay as it is: π is written to a tensor of its own.
        """
        ...
