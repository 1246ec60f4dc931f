"""Lossy speculative decoding: drafts are kept as long as the verifier's probability is not too far below.

In `Lossy` a drafted token x is accepted with min(1, p(x)/((1 − α)q(x))) whatever β is, since p/β ≤ p/(1 − α): β, and
with it a search over the vocabulary, is needed only where a draft was rejected. Source: Narasimhan et al., ICLR 2025,
Lemma 2; β* follows from Σπ = 1. `LearnedLossy` is ours: the same band around q, in units of whatever is believed of the
truth, with the width that the price of a rejection asks for (docs/theory.md).

Shapes: ``*batch`` any leading axes, ``B`` sequence, ``T`` position, ``V`` token.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..cascade.blocks import VerifyBlock
from .checks import check_range

__all__ = [
    "LearnedLossy",
    "LearnedLossyTarget",
    "Lossy",
    "LossyTarget",
    "band_multiplier",
    "lossy_beta",
    "solve_multiplier",
    "solve_scale",
]


SMALLEST = torch.finfo(torch.float32).tiny


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
    reads_confidence: ClassVar[bool] = False
    """It reads q and p as they are sampled from, and nothing else."""

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


@dataclass(frozen=True)
class LearnedLossy:
    """Keep q(v) within a band around P̂(v): π = max{min{q, P̂/(μ − α)}, P̂/μ}, Σπ = 1.

    The exact minimiser of −Σ P̂ log π + α·D_TV(q, π), P̂ being what is believed of the truth: p° where nothing was
    trained, what a `TokenRouter` estimates otherwise. It is read over the tokens that q or p may emit, normalised. At
    temperature 0 these are the two argmaxes, and π still draws between them: the log loss of a certain token that may
    be wrong is infinite.

    Args:
        alpha: the price of a rejection in nats, ≥ 0; 0 emits P̂ itself, and from max P̂/q on nothing is ever rejected.
    """

    alpha: float
    reads_masses: ClassVar[bool] = True
    """What it reads as p° must sum to one: a bound on the confidence of many tokens together will not do."""

    def __post_init__(self) -> None:
        check_range("alpha", self.alpha, 0, float("inf"))

    def decide(self, block: VerifyBlock) -> "LearnedLossyTarget":
        """Return π as verification reads it."""
        return LearnedLossyTarget(block, self.alpha)

    def defer_mask(self, block: VerifyBlock) -> Bool[Tensor, "B T"]:
        """Call a position deferred where the drafted token may be rejected: q(x) > π(x)."""
        return self.decide(block).deferred

    def target(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        """Return π."""
        return self.decide(block).dense()


@dataclass(frozen=True)
class LearnedLossyTarget:
    """π = max{min{q, P̂/(μ − α)}, P̂/μ} over a block.

    Since μ − α ≤ 1, a draft with P̂(x) ≥ q(x) is accepted for sure, and μ is searched only where one lies below.
    """

    block: VerifyBlock
    alpha: float

    @property
    def deferred(self) -> Bool[Tensor, "B T"]:
        """Where the drafted token may be rejected."""
        return self.block.draft.at(self.block.tokens) > self.at_tokens()

    def at_tokens(self) -> Float[Tensor, "B T"]:
        """Return π(x) at the drafted tokens, or q(x) where π(x) is no smaller."""
        return self._at_tokens

    @cached_property
    def _at_tokens(self) -> Float[Tensor, "B T"]:
        tokens = self.block.tokens
        kept = self.block.draft.at(tokens)
        unsure = self.block.verifier_raw.at(tokens) < kept
        columns = []
        for place, column in enumerate(kept.unbind(1)):
            if bool(unsure[:, place].any()):
                wanted = self.row(torch.full_like(tokens[:, 0], place)).gather(1, tokens[:, place : place + 1])[:, 0]
                column = torch.where(unsure[:, place], torch.minimum(wanted, column), column)
            columns.append(column)
        return torch.stack(columns, dim=1)

    def row(self, places: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return π whole at one position of each sequence."""
        block = self.block.pick(places)
        draft, belief = block.draft.dense[:, 0], _emissible_belief(block)[:, 0]
        if draft.device.type != "cpu":  # row by row it would wait for the device at every step
            return _band(draft, belief, band_multiplier(draft, belief, self.alpha), self.alpha)
        widths = [solve_multiplier(q, p, self.alpha) for q, p in zip(draft, belief, strict=True)]
        return _band(draft, belief, torch.tensor(widths), self.alpha)

    def dense(self) -> Float[Tensor, "B T V"]:
        """Return π whole."""
        draft, belief = self.block.draft.dense, _emissible_belief(self.block)
        return _band(draft, belief, band_multiplier(draft, belief, self.alpha), self.alpha)


def _band(draft: Tensor, belief: Tensor, width: Tensor, alpha: float) -> Float[Tensor, "*batch V"]:
    """π at ν = μ − α."""
    inner = width.unsqueeze(-1)
    target = torch.minimum(draft, belief / inner.clamp_min(SMALLEST)).maximum(belief / (inner + alpha))
    idle = draft * ((inner == 0) & (belief == 0))
    if not bool(idle.any()):
        return target
    # Of tokens that nothing is believed of, any share of q costs the same: together they take what is left.
    left = (1 - target.sum(dim=-1, keepdim=True)).clamp_min(0)
    return target + left * idle / idle.sum(dim=-1, keepdim=True).clamp_min(SMALLEST)


def _emissible_belief(block: VerifyBlock) -> Float[Tensor, "B T V"]:
    """P̂ over the tokens that q or p may emit, normalised; p where P̂ has nothing there."""
    if block.verifier_raw is block.verifier:
        return block.verifier.dense
    belief, verifier = block.verifier_raw.dense, block.verifier.dense
    if block.draft_raw is not block.draft:  # something may be cut off
        belief = belief * ((block.draft.dense > 0) | (verifier > 0))
    mass = belief.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, belief / mass, verifier)


def band_multiplier(
    draft_probs: Float[Tensor, "*batch V"], belief: Float[Tensor, "*batch V"], alpha: float
) -> Float[Tensor, "*batch"]:
    """Solve Σ max{min{q, P̂/ν}, P̂/(ν + α)} = 1 for ν = μ − α in [0, 1], a position.

    The sum falls in ν: at ν = 1 it is at most ΣP̂ = 1, at ν = 1 − α at least ΣP̂. Where it stays below 1 down to ν = 0
    the answer is 0. Newton's steps within the bracket, and halves of it where a step leaves it. Positions that have
    arrived are set aside.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    draft, believed = (probs.double().reshape(-1, probs.shape[-1]) for probs in (draft_probs, belief))
    low = torch.full(draft.shape[:-1], max(1 - alpha, 0.0), dtype=torch.float64, device=draft.device)
    high = torch.where(_band_excess(draft, believed, low, alpha)[0] <= 0, low, 1.0)
    width, widths = high, high.clone()
    rows = torch.arange(len(width), device=width.device)
    for _ in range(200):
        excess, slope = _band_excess(draft, believed, width, alpha)
        widths[rows] = width
        going = (~((excess.abs() <= 1e-12) | (high - low <= 1e-15))).nonzero().squeeze(-1)
        if len(going) == 0:
            return widths.to(draft_probs.dtype).reshape(draft_probs.shape[:-1])
        low, high = torch.where(excess > 0, width, low), torch.where(excess > 0, high, width)
        step = width - excess / slope
        inside = (step > low) & (step < high)
        width = torch.where(inside, step, (low + high) / 2)
        rows, draft, believed, low, high, width = (one[going] for one in (rows, draft, believed, low, high, width))
    raise ValueError("draft_probs, belief: expected finite probabilities, got NaN or infinity")


def _band_excess(draft: Tensor, belief: Tensor, width: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Σπ − 1 at ν, and its slope."""
    inner, safe = width.unsqueeze(-1), width.clamp_min(1e-150)  # at ν = 0 only what nothing is believed of is cut
    raised, cut = belief > (inner + alpha) * draft, belief <= inner * draft
    over, under = ((belief * chosen).sum(dim=-1) for chosen in (raised, cut))
    kept = (draft * ~(raised | cut)).sum(dim=-1)
    return over / (width + alpha) + under / safe + kept - 1, -over / (width + alpha) ** 2 - under / safe**2


def solve_multiplier(draft_probs: Float[Tensor, "V"], belief: Float[Tensor, "V"], alpha: float) -> float:
    """Return ν of one position: `band_multiplier` for a large vocabulary.

    Σπ = Σq + Σ max(0, P̂ − (ν + α)q)/(ν + α) − Σ max(0, νq − P̂)/ν costs a CPU a fraction of what telling the tokens
    apart does, so the steps are those of a false position (Anderson and Björck), which takes no slope.
    """
    scratch, lacking = torch.empty_like(belief), 1 - _total(draft_probs)

    def excess(width: float) -> float:
        raised = _total(torch.sub(belief, draft_probs, alpha=width + alpha, out=scratch).clamp_min_(0))
        if width == 0:  # the limit from above: what nothing is believed of is cut
            return raised / alpha - _total(draft_probs * (belief == 0)) - lacking
        cut = _total(torch.sub(belief, draft_probs, alpha=width, out=scratch).clamp_max_(0))
        return raised / (width + alpha) + cut / width - lacking

    low, high = max(1 - alpha, 0.0), 1.0
    above, below, stayed = excess(low), excess(high), 0
    if above <= 0 or below >= 0:
        return low if above <= 0 else high
    for step in count():
        if high - low <= 1e-9:
            break
        # Every fourth step halves the bracket: where the sum is nearly flat the others get nowhere.
        width = (low + high) / 2 if step % 4 == 3 else high - below * (high - low) / (below - above)
        value = excess(width)
        if abs(value) <= 1e-8:
            return width
        if value > 0:
            below *= _shrink(value, above) if stayed > 0 else 1.0
            low, above, stayed = width, value, 1
        else:
            above *= _shrink(value, below) if stayed < 0 else 1.0
            high, below, stayed = width, value, -1
    return high


def _shrink(value: float, before: float) -> float:
    """By how much the value at an end that stayed again is lowered."""
    factor = 1 - value / before
    return factor if factor > 0 else 0.5


def _total(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))
