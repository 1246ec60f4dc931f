"""Rules that decide token by token, and the other targets that run in the same engine.

Token rules: π(v) = q(v)(1 − r(v)) + p(v)·η with η = Σ r(v) q(v); r(v) = 1 moves the drafter's mass at v over to the
verifier. r depends on the prefix and on v, never on which token was drafted, so π is a distribution and the engine's
accept/reject step emits exactly it. The moved mass may follow p at a temperature of its own
(``replacement_temperature``, on top of the request's; 0 is p's argmax). Source: Narasimhan et al., ICLR 2025,
section 4.4 (Token V1–V3); `Greedyward` is ours (docs/theory.md); typical acceptance is Medusa's.

Shapes: ``B`` sequence, ``T`` position, ``V`` token.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..cascade.blocks import VerifyBlock
from ..cascade.forms import Certain, Distribution, Whole
from ..cascade.targets import Moved
from .checks import check_range
from .position_rules import View, check_dial

__all__ = ["Ensemble", "Greedyward", "TokenV1", "TokenV2", "TokenV3", "TopK", "Typical"]


class TokenRule:
    """What the token rules share: from the replaced set r to the target."""

    def compare(self, block: VerifyBlock) -> tuple[Distribution, Float[Tensor, "B T"]]:
        """Return a distribution and a bar a position: r(v) = 1, so that mass is moved, where v lies below the bar."""
        raise AssertionError(f"{type(self).__name__} must decide")

    def replaced(self, block: VerifyBlock) -> Bool[Tensor, "B T V"]:
        """Return r: whether the drafter's mass at each token is moved."""
        scores, bar = self.compare(block)
        return scores.dense < bar.unsqueeze(-1)

    def replacement(self, block: VerifyBlock) -> Distribution:
        """Return the distribution that the replaced mass follows: p."""
        return block.verifier

    def defer_mask(self, block: VerifyBlock) -> Bool[Tensor, "B T"]:
        """Return r at the drafted token of each position."""
        return self.decide(block).deferred

    def decide(self, block: VerifyBlock) -> Moved:
        """Return π as verification reads it."""
        return Moved(block, self)

    def target(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        """Return π."""
        return self.decide(block).dense()


@dataclass(frozen=True)
class DialledTokenRule(TokenRule):
    """What Token V1–V3 share: their dial, what they read, and the temperature of the mass that they move."""

    alpha: float
    confidence: View = "raw"
    replacement_temperature: float = 1.0

    def __post_init__(self) -> None:
        check_dial(self, -1, 1)
        check_range("replacement_temperature", self.replacement_temperature, 0, float("inf"))

    def replacement(self, block: VerifyBlock) -> Distribution:
        """Return p at the rule's own temperature."""
        return _temper(block.verifier, self.replacement_temperature)


@dataclass(frozen=True)
class TokenV1(DialledTokenRule):
    """r(v) = 1 where q°(v) < max p° − α, α in [−1, 1]."""

    def compare(self, block: VerifyBlock) -> tuple[Distribution, Float[Tensor, "B T"]]:
        """Replace tokens that the drafter holds less likely than the verifier's best, by α."""
        draft = block.draft_raw if self.confidence == "raw" else block.draft
        return draft, _verifier(block, self.confidence).maximum - self.alpha


@dataclass(frozen=True)
class TokenV2(DialledTokenRule):
    """r(v) = 1 where p°(v) < max p° − α, α in [−1, 1]."""

    def compare(self, block: VerifyBlock) -> tuple[Distribution, Float[Tensor, "B T"]]:
        """Replace tokens that the verifier holds less likely than its best, by α."""
        verifier = _verifier(block, self.confidence)
        return verifier, verifier.maximum - self.alpha


@dataclass(frozen=True)
class TokenV3(DialledTokenRule):
    """r(v) = 1 where p°(v) < (1 − α)·max p°, α in [−1, 1].

    α = 0 is not lossless (the drafter keeps its mass at the verifier's best token); only α < 0 is.
    """

    def compare(self, block: VerifyBlock) -> tuple[Distribution, Float[Tensor, "B T"]]:
        """Replace tokens that the verifier holds less likely than a fraction of its best."""
        verifier = _verifier(block, self.confidence)
        return verifier, (1 - self.alpha) * verifier.maximum


@dataclass(frozen=True)
class Greedyward(TokenRule):
    """Keep q(v) where p°(v) ≥ max p° − α; move the rest of the mass to the verifier's argmax. α in [0, 1].

    The exact minimiser of the 0-1 loss of a sample plus α·D_TV(q, π) when p° is the truth. It narrows sampling towards
    the mode: look at diversity beside quality.
    """

    alpha: float
    confidence: View = "raw"

    def __post_init__(self) -> None:
        check_dial(self, 0, 1)

    def compare(self, block: VerifyBlock) -> tuple[Distribution, Float[Tensor, "B T"]]:
        """Replace tokens that the verifier holds less likely than its best, by α."""
        verifier = _verifier(block, self.confidence)
        return verifier, verifier.maximum - self.alpha

    def replacement(self, block: VerifyBlock) -> Distribution:
        """Return the one-hot distribution at the verifier's argmax; at p's own where nobody may emit that token."""
        best = _verifier(block, self.confidence).argmax
        allowed = (block.verifier.at(best) > 0) | (block.draft.at(best) > 0)
        if not bool(allowed.all()):
            best = torch.where(allowed, best, block.verifier.argmax)
        return Certain(best, block.verifier.vocab_size)


@dataclass(frozen=True)
class Typical(TokenRule):
    """r(v) = 1 where p°(v) ≤ min(ε, δ·exp(−H(p°))): typical acceptance (Medusa)."""

    epsilon: float = 0.3
    delta: float = 0.09

    def __post_init__(self) -> None:
        check_range("epsilon", self.epsilon, 0, 1)
        check_range("delta", self.delta, 0, float("inf"))

    def compare(self, block: VerifyBlock) -> tuple[Distribution, Float[Tensor, "B T"]]:
        """Replace tokens that are untypical for the verifier."""
        typical = (self.delta * (-block.stats.verifier_entropy).exp()).clamp_max(self.epsilon)
        # What lies at the bar itself is replaced too.
        return block.verifier_raw, torch.nextafter(typical, torch.ones_like(typical))


@dataclass(frozen=True)
class TopK(TokenRule):
    """r(v) = 1 where v is less probable than the verifier's k-th most probable token."""

    k: int

    def __post_init__(self) -> None:
        check_range("k", self.k, 1, float("inf"))
        if self.k != int(self.k):
            raise ValueError(f"k: expected an integer, got {self.k!r}")

    def compare(self, block: VerifyBlock) -> tuple[Distribution, Float[Tensor, "B T"]]:
        """Replace tokens outside the verifier's top k."""
        verifier = block.verifier_raw
        return verifier, verifier.dense.topk(min(int(self.k), verifier.vocab_size), dim=-1).values[..., -1]


@dataclass(frozen=True)
class Ensemble:
    """π = (1 − w)·q + w·p, a mixture of probabilities with weight w in [0, 1] on the verifier."""

    weight: float
    reads_confidence: ClassVar[bool] = False
    """It reads q and p as they are sampled from, and nothing else."""

    def __post_init__(self) -> None:
        check_range("weight", self.weight, 0, 1)

    def defer_mask(self, block: VerifyBlock) -> Bool[Tensor, "B T"]:
        """Defer everywhere, unless the verifier has no weight."""
        return torch.full_like(block.tokens, self.weight > 0, dtype=torch.bool)

    def target(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        """Return π."""
        return block.draft_probs + self.weight * (block.verifier_probs - block.draft_probs)


def _verifier(block: VerifyBlock, view: View) -> Distribution:
    return block.verifier_raw if view == "raw" else block.verifier


def _temper(distribution: Distribution, temperature: float) -> Distribution:
    """The distribution at a temperature of its own: its probabilities to the power 1/t, normalised."""
    if temperature == 1 or isinstance(distribution, Certain):
        return distribution
    if temperature == 0:
        return Certain(distribution.argmax, distribution.vocab_size)
    return Whole((distribution.dense.log() / temperature).softmax(dim=-1))
