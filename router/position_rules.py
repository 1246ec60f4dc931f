"""Rules that decide a whole position: π = (1 − δ)·q + δ·p.

Every rule reads the scalars of `Stats` only, so the same object serves the engine (live), the labels and the offline
sweep (from trace columns). Source: Narasimhan et al., ICLR 2025, Table 1 and Lemma 4; the forms ending in ``Log`` are
those for log loss, and `VerifierGap` and `ExpectedGain` are ours (docs/theory.md).

Shapes: ``*batch`` any leading axes, ``B`` sequence, ``T`` position, ``V`` token.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..cascade.blocks import VerifyBlock
from ..cascade.statistics import Stats
from ..cascade.targets import Switched
from .checks import check_choice, check_range

__all__ = [
    "OPT",
    "BiLDStar",
    "Chow",
    "ChowLog",
    "Diff",
    "DiffLog",
    "ExpectedGain",
    "Fixed",
    "OPTLog",
    "SpecDecode",
    "VerifierGap",
]

View = Literal["raw", "processed"]
VIEWS = ("raw", "processed")


def check_dial(rule: Any, low: float, high: float) -> None:
    """Check a rule's alpha, and from which distributions it reads its terms."""
    check_range("alpha", rule.alpha, low, high)
    for term in ("confidence", "tv"):
        if hasattr(rule, term):
            check_choice(term, getattr(rule, term), VIEWS)


class PositionRule:
    """What the position rules share: from the decision to the target."""

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Decide for each position of ``stats`` whether to defer to the verifier (δ = 1)."""
        raise AssertionError(f"{type(self).__name__} must decide")

    def defer_mask(self, block: VerifyBlock) -> Bool[Tensor, "B T"]:
        """Decide for each position of a block."""
        return self.defer(block.stats)

    def decide(self, block: VerifyBlock) -> Switched:
        """Return π as verification reads it."""
        return Switched(block, self.defer_mask(block))

    def target(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        """Return π: q where δ = 0, p where δ = 1."""
        return self.decide(block).dense()


@dataclass(frozen=True)
class SpecDecode(PositionRule):
    """Always defer: π = p, lossless speculative decoding."""

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Defer everywhere."""
        return torch.ones(stats.shape, dtype=torch.bool, device=stats.device)


@dataclass(frozen=True)
class Chow(PositionRule):
    """Defer where max q° < 1 − α.

    Args:
        alpha: in [0, 1]; 0 always defers unless q° is one-hot, 1 never does.
        confidence: read the raw q° or the processed q.
    """

    alpha: float
    confidence: View = "raw"

    def __post_init__(self) -> None:
        check_dial(self, 0, 1)

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Decide from the drafter's largest probability."""
        return _draft_max(stats, self.confidence) < 1 - self.alpha

    def surely_kept(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Tell where the rule will not defer, which the drafter alone decides; read by an adaptive γ."""
        return ~self.defer(stats)


@dataclass(frozen=True)
class ChowLog(PositionRule):
    """Defer where H(q°) > α (nats): Chow's rule for log loss."""

    alpha: float
    confidence: View = "raw"

    def __post_init__(self) -> None:
        check_dial(self, 0, math.inf)

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Decide from the drafter's entropy."""
        return _draft_entropy(stats, self.confidence) > self.alpha

    def surely_kept(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Tell where the rule will not defer, which the drafter alone decides; read by an adaptive γ."""
        return ~self.defer(stats)


@dataclass(frozen=True)
class Diff(PositionRule):
    """Defer where max q° < max p° − α, α in [−1, 1]."""

    alpha: float
    confidence: View = "raw"

    def __post_init__(self) -> None:
        check_dial(self, -1, 1)

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Decide from the two largest probabilities."""
        return _draft_max(stats, self.confidence) < _verifier_max(stats, self.confidence) - self.alpha


@dataclass(frozen=True)
class DiffLog(PositionRule):
    """Defer where H(q°) > H(p°) + α (nats)."""

    alpha: float
    confidence: View = "raw"

    def __post_init__(self) -> None:
        check_dial(self, -math.inf, math.inf)

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Decide from the two entropies."""
        return _draft_entropy(stats, self.confidence) > _verifier_entropy(stats, self.confidence) + self.alpha


@dataclass(frozen=True)
class OPT(PositionRule):
    """Defer where max q° < max p° − α·D_TV(p, q): the plug-in of the optimal rule.

    Args:
        alpha: the price of a rejection, any finite number.
        confidence: read the maxima from the raw q°, p° or the processed q, p.
        tv: read D_TV from the processed q, p (it is the rejection rate) or from the raw q°, p°.
    """

    alpha: float
    confidence: View = "raw"
    tv: View = "processed"

    def __post_init__(self) -> None:
        check_dial(self, -math.inf, math.inf)

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Decide from the gain in confidence against the cost of rejecting."""
        gain = _verifier_max(stats, self.confidence) - _draft_max(stats, self.confidence)
        return gain > self.alpha * _tv(stats, self.tv)


@dataclass(frozen=True)
class OPTLog(PositionRule):
    """Defer where H(q°) > H(p°) + α·D_TV(p, q): OPT for log loss."""

    alpha: float
    confidence: View = "raw"
    tv: View = "processed"

    def __post_init__(self) -> None:
        check_dial(self, -math.inf, math.inf)

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Decide from the loss of entropy against the cost of rejecting."""
        gain = _draft_entropy(stats, self.confidence) - _verifier_entropy(stats, self.confidence)
        return gain > self.alpha * _tv(stats, self.tv)


@dataclass(frozen=True)
class BiLDStar(PositionRule):
    """Defer where −log p°(argmax q°) > α, α ≥ 0: the paper's variant of BiLD (Kim et al., 2023)."""

    alpha: float
    confidence: View = "raw"

    def __post_init__(self) -> None:
        check_dial(self, 0, math.inf)

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Decide from the verifier's surprise at the drafter's choice."""
        return -_verifier_at_draft(stats, self.confidence).log() > self.alpha


@dataclass(frozen=True)
class VerifierGap(PositionRule):
    """Defer where p°(argmax p) − p°(argmax q) > α·D_TV(p, q), α ≥ 0.

    OPT with the verifier's opinion of the drafter's choice in place of the drafter's own; needs no training. The first
    term is max p°, unless p may not emit that token or a trained P̂ stands in for p°.
    """

    alpha: float
    confidence: View = "raw"
    tv: View = "processed"

    def __post_init__(self) -> None:
        check_dial(self, 0, math.inf)

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Decide from what the verifier thinks is lost with the drafter's choice."""
        if self.confidence == "raw":
            gain = stats.argmax_gain
        else:
            gain = stats.verifier_max_processed - stats.verifier_at_draft_processed
        return gain > self.alpha * _tv(stats, self.tv)


@dataclass(frozen=True)
class ExpectedGain(PositionRule):
    """Defer where E of p(v) − q(v) over v ~ p° exceeds α·D_TV(p, q).

    The optimal rule for a sampled token where the verifier's confidence is the truth; at temperature 0 it is
    `VerifierGap`, the optimal rule for the argmax. Needs no training, at any temperature and cut-off.

    Args:
        alpha: the price of a rejection, any finite number.
    """

    alpha: float

    def __post_init__(self) -> None:
        check_dial(self, -math.inf, math.inf)

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Decide from what the verifier expects of one more chance to be right."""
        return stats.expected_gain > self.alpha * stats.tv


@dataclass(frozen=True, eq=False)
class Fixed(PositionRule):
    """Defer where a given mask says so: for tests and oracles. The mask broadcasts against the positions."""

    mask: Bool[Tensor, "*batch"]

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Return the mask, one value a position."""
        return self.mask.to(stats.device).expand(stats.shape)


def _draft_max(stats: Stats, view: View) -> Tensor:
    return stats.draft_max if view == "raw" else stats.draft_max_processed


def _verifier_max(stats: Stats, view: View) -> Tensor:
    return stats.verifier_max if view == "raw" else stats.verifier_max_processed


def _draft_entropy(stats: Stats, view: View) -> Tensor:
    return stats.draft_entropy if view == "raw" else stats.draft_entropy_processed


def _verifier_entropy(stats: Stats, view: View) -> Tensor:
    return stats.verifier_entropy if view == "raw" else stats.verifier_entropy_processed


def _verifier_at_draft(stats: Stats, view: View) -> Tensor:
    return stats.verifier_at_draft if view == "raw" else stats.verifier_at_draft_processed


def _tv(stats: Stats, view: View) -> Tensor:
    return stats.tv_raw if view == "raw" else stats.tv
