"""What verification reads of π: its value at each drafted token, and one whole position a row.

A block of γ positions is accepted or rejected by γ numbers; π is needed whole only where a row's first draft was
rejected. A rule that can say more cheaply what π is answers ``decide(block)`` with one of these; any other rule's
``target(block)`` is read as it is. Both ways give the same verdict. Knows no rule by name.

Shapes: ``B`` sequence, ``T`` position in the block, ``V`` token.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .blocks import TargetRule, VerifyBlock
from .forms import Distribution

__all__ = ["Moved", "MovingRule", "Plain", "Switched", "Target", "check_hidden", "check_rule", "read_target"]


@runtime_checkable
class Target(Protocol):
    """π over a block."""

    @property
    def deferred(self) -> Bool[Tensor, "B T"]:
        """The rule's own decision a position, for the statistics and the ledger."""
        ...

    def at_tokens(self) -> Float[Tensor, "B T"]:
        """Return π(x) at the drafted tokens, or any value ≥ q(x) where π(x) ≥ q(x): only min(1, π/q) is read."""
        ...

    def row(self, places: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return π whole at one position of each sequence."""
        ...

    def dense(self) -> Float[Tensor, "B T V"]:
        """Return π whole."""
        ...


@dataclass(frozen=True)
class Switched:
    """π = p where deferred, q elsewhere: the target of a rule for whole positions."""

    block: VerifyBlock
    deferred: Bool[Tensor, "B T"]

    def at_tokens(self) -> Float[Tensor, "B T"]:
        """Return π(x) at the drafted tokens."""
        tokens = self.block.tokens
        return torch.where(self.deferred, self.block.verifier.at(tokens), self.block.draft.at(tokens))

    def row(self, places: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return π whole at one position of each sequence."""
        deferred = self.deferred.gather(1, places.unsqueeze(1))
        if bool(deferred.all()):
            return self.block.verifier.row(places)
        return torch.where(deferred, self.block.verifier.row(places), self.block.draft.row(places))

    def dense(self) -> Float[Tensor, "B T V"]:
        """Return π whole."""
        return torch.where(self.deferred.unsqueeze(-1), self.block.verifier_probs, self.block.draft_probs)


@runtime_checkable
class MovingRule(Protocol):
    """A rule that moves the drafter's mass at some tokens over to another distribution."""

    def compare(self, block: VerifyBlock) -> tuple[Distribution, Float[Tensor, "B T"]]:
        """Return a distribution and a bar a position: r(v) = 1 where v lies below the bar."""
        ...

    def replacement(self, block: VerifyBlock) -> Distribution:
        """Return s, which the moved mass follows."""
        ...


@dataclass(frozen=True)
class Moved:
    """π(v) = q(v)(1 − r(v)) + η·s(v), η = Σ r(v)q(v): the drafter's mass at some tokens moved over to s.

    A draft with r = 0 is accepted for sure, so the vocabulary is looked over only where the drafted token has r = 1.
    """

    block: VerifyBlock
    rule: MovingRule

    @cached_property
    def deferred(self) -> Bool[Tensor, "B T"]:
        """r at the drafted token of each position."""
        scores, bar = self.rule.compare(self.block)
        return scores.at(self.block.tokens) < bar

    def at_tokens(self) -> Float[Tensor, "B T"]:
        """Return π(x) = η·s(x) at the drafted tokens with r = 1; elsewhere q(x), below which π(x) does not fall."""
        kept = self.block.draft.at(self.block.tokens)
        columns = []
        for place, deferred in enumerate(self.deferred.unbind(1)):
            column = kept[:, place]
            if bool(deferred.any()):
                part = self.block.pick(torch.full_like(self.block.tokens[:, 0], place))
                eta = -self._taken(part).sum(dim=-1)
                moved = eta * self.rule.replacement(part).at(part.tokens)
                column = torch.where(deferred, moved[:, 0], column)
            columns.append(column)
        return torch.stack(columns, dim=1)

    def row(self, places: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return π whole at one position of each sequence."""
        return self._law(self.block.pick(places))[:, 0]

    def dense(self) -> Float[Tensor, "B T V"]:
        """Return π whole."""
        return self._law(self.block)

    def _law(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        taken = self._taken(block)
        return block.draft.dense + taken - taken.sum(dim=-1, keepdim=True) * self.rule.replacement(block).dense

    def _taken(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        """−r(v)q(v), with r as numbers, not truth values: a CPU multiplies several times faster than it chooses."""
        scores, bar = self.rule.compare(block)
        return scores.over(bar.unsqueeze(-1)).sign_().clamp_max_(0).mul_(block.draft.dense)


@dataclass(frozen=True)
class Plain:
    """π as a rule's ``target`` gave it: the plain reference of the other two."""

    block: VerifyBlock
    probs: Float[Tensor, "B T V"]
    mask: Bool[Tensor, "B T"] | None = None

    @cached_property
    def deferred(self) -> Bool[Tensor, "B T"]:
        """The rule's own mask; for a rule that states none, whether π differs from q."""
        return (self.probs != self.block.draft_probs).any(dim=-1) if self.mask is None else self.mask

    def at_tokens(self) -> Float[Tensor, "B T"]:
        """Return π(x) at the drafted tokens."""
        return self.probs.gather(-1, self.block.tokens.unsqueeze(-1)).squeeze(-1)

    def row(self, places: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return π whole at one position of each sequence."""
        return self.probs[torch.arange(len(places), device=places.device), places]

    def dense(self) -> Float[Tensor, "B T V"]:
        """Return π whole."""
        return self.probs


def check_rule(rule: object) -> None:
    """Refuse what cannot say what the target is.

    Raises:
        ValueError: an object without ``target(block)``.
    """
    if isinstance(rule, type):
        raise ValueError(f"rule: expected an object such as {rule.__name__}(...), got the class {rule.__name__}")
    if not callable(getattr(rule, "target", None)):
        raise ValueError(f"rule: expected an object with target(block), got {type(rule).__name__}")


def check_hidden(rule: object, drafter: Any, verifier: Any) -> bool:
    """Tell whether a rule needs hidden states; refuse a drafter or a verifier that has none.

    A rule may also say how long it expects the two models' states, by ``hidden_sizes``.

    Raises:
        ValueError: the rule says ``needs_hidden`` and a model states no ``hidden_size``, or another than expected.
    """
    if not getattr(rule, "needs_hidden", False):
        return False
    for role, model in (("drafter", drafter), ("verifier", verifier)):
        if getattr(model, "hidden_size", None) is None:
            raise ValueError(
                f"{role} {model.name}: expected a single language model, whose hidden states {rule!r} reads, "
                f"got {type(model).__name__}"
            )
    given = drafter.hidden_size, verifier.hidden_size
    wanted = tuple(getattr(rule, "hidden_sizes", given))
    if wanted != given:
        raise ValueError(f"rule {rule!r}: expected models with hidden states of sizes {wanted}, got {given}")
    return True


def read_target(rule: TargetRule, block: VerifyBlock) -> Target:
    """Ask a rule for π.

    Raises:
        ValueError: a target of another shape, with negative values or not finite.
    """
    if _decides(rule):
        decided: Target = rule.decide(block)  # type: ignore[attr-defined]
        return decided
    target: Any = rule.target(block)
    if not isinstance(target, Tensor) or not target.is_floating_point():
        got = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"rule {rule!r}: expected a target of floating-point numbers, got {got}")
    expected = (*block.tokens.shape, block.draft_probs.shape[-1])
    if tuple(target.shape) != expected:
        raise ValueError(f"rule {rule!r}: expected a target of shape {expected}, got {tuple(target.shape)}")
    mass = target.sum(dim=-1)
    if not bool((target.amin() >= 0) & mass.isfinite().all() & (mass > 0).all()):
        raise ValueError(f"rule {rule!r}: expected a target of finite values >= 0, not all zero at any position")
    defer_mask = getattr(rule, "defer_mask", None)
    return Plain(block, target, None if defer_mask is None else defer_mask(block))


def _decides(rule: TargetRule) -> bool:
    """Whether a rule says cheaply what π is; a subclass that overrides ``target`` alone must not be passed over."""
    first = next((cls for cls in type(rule).__mro__ if {"target", "decide"} & vars(cls).keys()), None)
    return first is not None and "decide" in vars(first)
