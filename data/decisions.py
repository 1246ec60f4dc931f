"""What a rule decides at logged positions, from the columns of a trace alone, with the rule's own code.

A rule that reads `Stats` is asked as it is. One that looks at the drafted token is shown a block whose distributions
answer from the columns: their value at that token, their maximum, their entropy. What no column holds they refuse to
say, so that a rule either gives the decision of the run itself or none. A rule that reads the positions before is asked
for whole answers, in order.

Knows no file and no model. Shapes: ``N`` position; ``P`` answer, ``L`` its places; a block is ``[1, N]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..cascade.blocks import VerifyBlock
from ..cascade.forms import Distribution
from ..cascade.statistics import Stats
from ..router.token_rules import TopK
from .traces import TraceSplit

__all__ = ["agreement", "defer_in_order", "logged_decisions"]

_POSITIONS_AT_ONCE = 1 << 16


def logged_decisions(rule: Any, split: TraceSplit) -> Tensor:
    """Tell where a rule defers, ``[N]`` bool, from the columns of positions that a cascade logged.

    Args:
        rule: the object that the engine takes; its own code runs.
        split: positions of source 'cascade'; a rule that reads `Stats` alone takes any.

    Raises:
        ValueError: the rule reads what no column holds, or the positions hold no drafted tokens.
    """
    try:
        decided = _decide_by_stats(rule, split) if hasattr(rule, "defer") else _decide_by_token(rule, split)
    except _NotLoggedError as error:
        raise ValueError(f"rule {rule!r}: cannot be replayed, since a trace does not hold {error}") from error
    if decided.shape != split.token.shape:
        expected, got = tuple(split.token.shape), tuple(decided.shape)
        raise ValueError(f"rule {rule!r}: expected a decision a position {expected}, got {got}")
    return decided


def defer_in_order(rule: Any, stats: Stats, index: Tensor, length: int = 1024) -> Tensor:
    """Ask a rule with a ``context`` for its decisions ``[N]``, given the order in which the positions stand.

    Long answers are cut, each piece behind the ``context - 1`` positions before it, so that nothing is lost.

    Args:
        rule: decides by ``defer(stats)`` on sequences ``[B, T]``, NaN where a position is unknown.
        stats: of all positions ``[N]``.
        index: which position stands where ``[P, L]``, each once, -1 for none: `TraceSplit.sequences`.
        length: most positions of a piece.

    Raises:
        ValueError: an index that does not name every position once, or a length below one.
    """
    if length < 1:
        raise ValueError(f"length: expected an integer >= 1, got {length}")
    named = index[index >= 0]
    count = stats.shape[0]
    if not torch.equal(named.sort().values, torch.arange(count)):
        raise ValueError(f"index: expected each of {count} positions once, got {len(named)} entries")
    decided = torch.zeros(count, dtype=torch.bool)
    for start in range(0, index.shape[1], length):
        before = min(start, max(rule.context - 1, 0))
        pieces = index[:, start - before : start + length]
        pieces = pieces[(pieces[:, before:] >= 0).any(dim=1)]
        for rows in pieces.split(max(_POSITIONS_AT_ONCE // pieces.shape[1], 1)):
            asked = rows[:, before:]
            decided[asked[asked >= 0]] = rule.defer(stats.arrange(rows))[:, before:][asked >= 0]
    return decided


def agreement(rule: Any, split: TraceSplit) -> tuple[int, int]:
    """Count the positions where a rule decides from the columns as was decided in the run, and all positions.

    Raises:
        ValueError: as `logged_decisions`, or the positions hold no decisions.
    """
    if split.deferred is None:
        raise ValueError("split: expected positions of source 'cascade', got some that hold no decisions")
    agreeing = int((logged_decisions(rule, split) == split.deferred).sum())
    return agreeing, len(split)


def _decide_by_stats(rule: Any, split: TraceSplit) -> Tensor:
    if getattr(rule, "context", 0) > 0:
        return defer_in_order(rule, split.stats, split.sequences())
    decided: Tensor = rule.defer(split.stats)
    return decided


def _decide_by_token(rule: Any, split: TraceSplit) -> Tensor:
    if not hasattr(rule, "defer_mask"):
        raise _NotLoggedError("the whole target of a rule that states no decisions (defer_mask)")
    decided: Tensor = rule.defer_mask(_make_block(split, _verifier_table(rule, split)))[0]
    return decided


def _make_block(split: TraceSplit, table: Tensor | None) -> LoggedBlock:
    if split.q_token is None or split.p_token is None or split.q_token_raw is None or split.p_token_raw is None:
        raise ValueError("split: expected positions of source 'cascade', got some that hold no drafted tokens")
    stats, tokens = split.stats, split.token.unsqueeze(0)
    draft = LoggedSide(tokens, split.q_token, stats.draft_max_processed, stats.draft_entropy_processed)
    draft_raw = LoggedSide(tokens, split.q_token_raw, stats.draft_max, stats.draft_entropy)
    verifier = LoggedSide(tokens, split.p_token, stats.verifier_max_processed, stats.verifier_entropy_processed)
    verifier_raw = LoggedSide(tokens, split.p_token_raw, stats.verifier_max, stats.verifier_entropy, table)
    positions = torch.arange(len(split)).unsqueeze(0)
    return LoggedBlock(draft, draft_raw, verifier, verifier_raw, tokens, positions, logged=stats.select(None))


def _verifier_table(rule: Any, split: TraceSplit) -> Tensor | None:
    """p° of the verifier's most probable tokens, for the one rule that reads no more of it than that."""
    if not isinstance(rule, TopK):
        return None
    if split.temperature != 1:
        raise _NotLoggedError(f"p° token by token at temperature {split.temperature}")
    if split.top_k is None or rule.k > split.top_k:
        raise _NotLoggedError(f"more than the {split.top_k} most probable tokens")
    return split.topk_p


class _NotLoggedError(Exception):
    """Says what a rule asked for that no column holds."""


@dataclass(frozen=True)
class LoggedBlock(VerifyBlock):
    """A block that knows of its distributions what a trace holds."""

    logged: Stats = field(kw_only=True)

    @cached_property
    def stats(self) -> Stats:
        """The scalars of every position, each ``[1, N]``, as logged."""
        return self.logged


class LoggedSide(Distribution):
    """A distribution of which a trace holds three numbers a position.

    Args:
        tokens: the drafted tokens ``[1, N]``.
        at_token: their probabilities ``[N]``.
        maximum: ``[N]``.
        entropy: ``[N]``, nats.
        table: some whole columns ``[N, K]``, for a rule that reads no more than those.
    """

    def __init__(
        self, tokens: Tensor, at_token: Tensor, maximum: Tensor, entropy: Tensor, table: Tensor | None = None
    ) -> None:
        self._tokens, self._table = tokens, table
        self._at_token, self._maximum, self._entropy = (one.unsqueeze(0) for one in (at_token, maximum, entropy))

    @property
    def shape(self) -> torch.Size:
        """The leading axes."""
        return self._tokens.shape

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._tokens.device

    @property
    def dense(self) -> Tensor:
        """The table ``[1, N, K]``; refused where there is none."""
        if self._table is None:
            _refuse("whole distributions")
        return self._table.unsqueeze(0)

    @property
    def maximum(self) -> Tensor:
        """Largest probability."""
        return self._maximum

    @property
    def argmax(self) -> Tensor:
        """Refused."""
        _refuse("the most probable token of each distribution")

    @property
    def margin(self) -> Tensor:
        """Refused: the statistics hold the raw ones."""
        _refuse("the margin of each distribution")

    @property
    def entropy(self) -> Tensor:
        """Entropy, nats."""
        return self._entropy

    def at(self, tokens: Tensor) -> Tensor:
        """Return the probability of the drafted tokens; of others it is refused."""
        if tokens is not self._tokens:
            _refuse("probabilities of other tokens than the drafted one")
        return self._at_token

    def first(self, length: int) -> Distribution:
        """Refused."""
        _refuse("blocks that can be cut")

    def pick(self, places: Tensor) -> Distribution:
        """Refused."""
        _refuse("blocks that can be cut")

    def to(self, device: torch.device) -> Distribution:
        """Return it: a trace lies where it was read."""
        return self


def _refuse(what: str) -> NoReturn:
    raise _NotLoggedError(what)
