"""A cascade that asks both models before every token: what a rule could reach if asking cost nothing.

For headroom only. Every token costs a step of both models, so its seconds are never reported as a speed. Knows no rule
by name. Source: Narasimhan et al., ICLR 2025, Algorithm 3 (oracle deferral).

Shapes: ``B`` row, ``V`` token.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..blocks import TargetRule, VerifyBlock
from ..distributions import draw, draw_uniforms
from ..drafters import Drafter
from ..models import CausalLM
from ..pair import PairLoop, PairState
from ..requests import Request, Row
from ..results import LedgerEntry
from ..targets import Target, check_rule, read_target

__all__ = ["OracleCascade"]


class OracleCascade(PairLoop):
    """Both models at each position; the token is drawn from the rule's target π.

    Every token follows π exactly: there is no bonus token. For headroom only, never reported as a speed.

    In the ledger a token is the ``drafter``'s where the position was not deferred, else the ``verifier``'s; a rule that
    states no decision (no ``defer_mask``) defers where π differs from q.

    Args:
        drafter: a Hugging Face model or any `Drafter`.
        verifier: a Hugging Face model or any `CausalLM`.
        rule: anything with ``target(block)`` whose π sums to one.
        vocab_size: number of token ids that both models share and may emit; default: the smaller head.

    Raises:
        ValueError: an object without a target, a rule that needs hidden states, two vocabularies, or a model that
            cannot be run exactly.
    """

    def __init__(
        self,
        drafter: PreTrainedModel | Drafter,
        verifier: PreTrainedModel | CausalLM,
        rule: TargetRule,
        vocab_size: int | None = None,
    ) -> None:
        check_rule(rule)
        if getattr(rule, "needs_hidden", False):
            raise ValueError(
                f"rule {rule!r}: expected one that reads no hidden states, which an oracle does not collect"
            )
        super().__init__(drafter, verifier, vocab_size)
        self.rule = rule

    def open_session(self, prompts: Sequence[Sequence[int]]) -> "OracleSession":
        """Begin one call with a row for each prompt."""
        return OracleSession(self, prompts)

    def ask_rule(self, block: VerifyBlock) -> Target:
        """Return the rule's target, checked: a distribution at every position."""
        target = read_target(self.rule, block)
        mass = target.dense().sum(dim=-1)
        if not bool(((mass - 1).abs() < 1e-3).all()):
            got = f"sums of {float(mass.amin()):.4g} to {float(mass.amax()):.4g}"
            raise ValueError(f"rule {self.rule!r}: expected a target that sums to one, got {got}")
        return target


class OracleSession:
    """Both models' caches for one call: a block is one token."""

    def __init__(self, owner: OracleCascade, prompts: Sequence[Sequence[int]]) -> None:
        self._owner, self._state = owner, PairState(owner, prompts)

    def step(self, rows: Sequence[Row], request: Request) -> list[list[LedgerEntry]]:
        """Write the next token of every row."""
        sequences = [row.tokens for row in rows]
        uniforms = draw_uniforms([row.generator for row in rows], 1)
        draft = self._state.draft(sequences, uniforms, request.sampling)
        verifier, verifier_raw = self._state.verify(sequences, request.sampling)
        device = verifier.device
        block = VerifyBlock(
            draft=draft.law.to(device),
            verifier=verifier,
            draft_raw=draft.raw.to(device),
            verifier_raw=verifier_raw,
            tokens=draft.tokens.to(device),
            positions=torch.tensor([[len(row)] for row in sequences], device=device),
        )
        target = self._owner.ask_rule(block)
        tokens = draw(target.dense(), uniforms.to(device))[:, 0].tolist()
        decisions: list[bool] = target.deferred[:, 0].tolist()
        distances = block.stats.tv[:, 0].tolist() if request.ledger else [None] * len(tokens)
        for row, calls in zip(rows, draft.calls, strict=True):
            row.rounds += 1
            row.drafted += 1
            row.drafter_calls += calls
            row.verifier_calls += 1
        return [
            [LedgerEntry(token, "verifier" if defer else "drafter", defer, tv)]
            for token, defer, tv in zip(tokens, decisions, distances, strict=True)
        ]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._state.select_rows(rows)
