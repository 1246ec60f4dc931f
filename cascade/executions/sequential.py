"""A cascade without speculation, token by token: one model's step for each token that the drafter keeps, two otherwise.

`SequentialCascade` asks the verifier only where a rule of the drafter alone defers; its latency is what such a cascade
truly takes. Knows no rule by name. Source: Narasimhan et al., ICLR 2025, Algorithm 2 (token cascade by deferral).

Shapes: ``B`` row, ``V`` token.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedModel

from ..closeness import distance
from ..distributions import draw_uniforms
from ..drafters import Draft, Drafter
from ..forms import Distribution
from ..models import CausalLM
from ..pair import PairLoop, PairState, tokens_of
from ..requests import Request, Row
from ..results import LedgerEntry
from ..statistics import STAT_FIELDS, Stats

__all__ = ["DeferRule", "DraftStats", "SequentialCascade"]

_DRAFT_FIELDS = ("draft_max", "draft_margin", "draft_entropy", "draft_max_processed", "draft_entropy_processed")
_VERIFIER_FIELDS = frozenset({*STAT_FIELDS, "leading", "hidden"}) - frozenset(_DRAFT_FIELDS)


@runtime_checkable
class DeferRule(Protocol):
    """Anything that decides from scalars of a position whether the verifier writes its token."""

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Decide for each position."""
        ...


class DraftStats(Stats):
    """The scalars of a position that the drafter alone gives, ``[B, 1]``; any other is refused.

    Args:
        rule: who reads them, named when it asks for too much.
        law: q ``[B, 1]``.
        raw: q°, likewise.
    """

    def __init__(self, rule: object, law: Distribution, raw: Distribution) -> None:
        # No field left to read touches the verifier's side; q stands there only to be filled.
        super().__init__(law, law, raw, raw)
        self.__dict__["_rule"] = rule

    def __getattribute__(self, name: str) -> Any:
        if name in _VERIFIER_FIELDS:
            raise ValueError(
                f"rule {self._rule!r}: reads {name}, which a sequential cascade does not know before it defers; "
                "expected a rule of the drafter alone, such as Chow"
            )
        return super().__getattribute__(name)


class SequentialCascade(PairLoop):
    """The token cascade: a drafter's step for each token; where the rule defers, the verifier draws that token instead.

    A deferred token follows p, every other one q, so π = (1 − δ)q + δp at every position. The verifier reads in one
    pass whatever it has not read since it was last asked. In a batch that pass reads every row, so that all stay in
    step, but only the rows that deferred count it among their ``verifier_calls``: with B rows, up to B calls are
    counted for one pass, and a row's counts do not depend on its neighbours. Its seconds are the batch's.

    Args:
        drafter: a Hugging Face model or any `Drafter`.
        verifier: a Hugging Face model or any `CausalLM`.
        rule: anything with ``defer(stats)`` that reads the drafter's scalars only, such as ``rules.Chow(alpha=0.3)``.
        vocab_size: number of token ids that both models share and may emit; default: the smaller head.

    Raises:
        ValueError: a rule that cannot decide, two vocabularies, or a model that cannot be run exactly. A rule that
            reads a scalar of the verifier is refused when it asks.
    """

    def __init__(
        self,
        drafter: PreTrainedModel | Drafter,
        verifier: PreTrainedModel | CausalLM,
        rule: DeferRule,
        vocab_size: int | None = None,
    ) -> None:
        if not callable(getattr(rule, "defer", None)):
            raise ValueError(f"rule: expected an object with defer(stats), got {type(rule).__name__}")
        super().__init__(drafter, verifier, vocab_size)
        self.rule = rule

    def open_session(self, prompts: Sequence[Sequence[int]]) -> "SequentialSession":
        """Begin one call with a row for each prompt."""
        return SequentialSession(self, prompts)

    def decide(self, draft: Draft) -> list[bool]:
        """Ask the rule for each row whether to defer."""
        stats = DraftStats(self.rule, draft.law, draft.raw)
        defer = self.rule.defer(stats)
        if defer.shape != stats.shape or defer.dtype != torch.bool:
            expected, got = tuple(stats.shape), f"{defer.dtype} of shape {tuple(defer.shape)}"
            raise ValueError(f"rule {self.rule!r}: expected decisions of shape {expected} and type bool, got {got}")
        return defer[:, 0].tolist()


class SequentialSession:
    """Both models' caches for one call: a block is one token."""

    def __init__(self, owner: SequentialCascade, prompts: Sequence[Sequence[int]]) -> None:
        self._owner, self._state = owner, PairState(owner, prompts)

    def step(self, rows: Sequence[Row], request: Request) -> list[list[LedgerEntry]]:
        """Write the next token of every row."""
        sequences = [row.tokens for row in rows]
        # One uniform serves both draws of a position: whether it is deferred depends on q° alone, not on the draft,
        # and of the two tokens only one is kept.
        uniforms = draw_uniforms([row.generator for row in rows], 1)
        draft = self._state.draft(sequences, uniforms, request.sampling)
        deferred, drafted = self._owner.decide(draft), tokens_of(draft)
        written, distances = drafted, list[float]()
        if any(deferred):
            verifier, _ = self._state.verify(sequences, request.sampling)
            written = verifier.sample(uniforms)[:, 0].tolist()
            if request.ledger:
                distances = distance(verifier, draft.law.to(verifier.device))[:, 0].tolist()
        for row, defer, calls in zip(rows, deferred, draft.calls, strict=True):
            row.rounds += 1
            row.drafted += 1
            row.drafter_calls += calls
            row.verifier_calls += defer
        return [
            [LedgerEntry(written[i], "verifier", True, distances[i] if distances else None)]
            if defer
            else [LedgerEntry(drafted[i], "drafter", False)]
            for i, defer in enumerate(deferred)
        ]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._state.select_rows(rows)
