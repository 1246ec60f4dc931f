"""A cascade that asks both models before every token: what a rule could reach if asking cost nothing.

For headroom only. Every token costs a step of both models, so its seconds are never reported as a speed. Knows no rule
by name. Source: Narasimhan et al., ICLR 2025, Algorithm 3 (oracle deferral).

Shapes: ``B`` row, ``V`` token.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from .blocks import TargetRule, VerifyBlock
from .distributions import draw, draw_uniforms
from .drafters import Drafter
from .models import CausalLM
from .pair import PairLoop, PairState
from .requests import Request, Row
from .results import LedgerEntry

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
        ValueError: an object without a target, two vocabularies, or a model that cannot be run exactly.
    """

    def __init__(
        self,
        drafter: PreTrainedModel | Drafter,
        verifier: PreTrainedModel | CausalLM,
        rule: TargetRule,
        vocab_size: int | None = None,
    ) -> None:
        if not callable(getattr(rule, "target", None)):
            raise ValueError(f"rule: expected an object with target(block), got {type(rule).__name__}")
        super().__init__(drafter, verifier, vocab_size)
        self.rule = rule

    def open_session(self, prompts: Sequence[Sequence[int]]) -> "OracleSession":
        """Begin one call with a row for each prompt."""
        return OracleSession(self, prompts)

    def ask_rule(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        """Return the rule's target, checked: a distribution at every position."""
        target = self.rule.target(block)
        if target.shape != block.draft_probs.shape:
            expected, shape = tuple(block.draft_probs.shape), tuple(target.shape)
            raise ValueError(f"rule {self.rule!r}: expected a target of shape {expected}, got {shape}")
        mass, least = target.sum(dim=-1), float(target.amin())
        if not (least >= 0 and bool(((mass - 1).abs() < 1e-3).all())):
            got = f"sums of {float(mass.amin()):.4g} to {float(mass.amax()):.4g} and a least value of {least:.4g}"
            raise ValueError(f"rule {self.rule!r}: expected a target of values >= 0 that sum to one, got {got}")
        return target

    def decide(self, block: VerifyBlock, target: Float[Tensor, "B T V"]) -> list[bool]:
        """Return the rule's own decision for each row; for a rule that states none, whether π differs from q."""
        defer_mask = getattr(self.rule, "defer_mask", None)
        mask = (target != block.draft_probs).any(dim=-1) if defer_mask is None else defer_mask(block)
        decisions: list[bool] = mask[:, 0].tolist()
        return decisions


class OracleSession:
    """Both models' caches for one call: a block is one token."""

    def __init__(self, owner: OracleCascade, prompts: Sequence[Sequence[int]]) -> None:
        self._owner, self._state = owner, PairState(owner, prompts)

    def step(self, rows: Sequence[Row], request: Request) -> list[list[LedgerEntry]]:
        """Write the next token of every row."""
        sequences = [row.tokens for row in rows]
        uniforms = draw_uniforms([row.generator for row in rows], 1)
        draft = self._state.draft(sequences, uniforms, request.sampling)
        probs, confidence = self._state.verify(sequences, request.sampling)
        block = VerifyBlock(
            draft_probs=draft.probs.to(probs.device),
            verifier_probs=probs,
            draft_confidence=draft.confidence.to(probs.device),
            verifier_confidence=confidence,
            tokens=draft.tokens.to(probs.device),
            positions=torch.tensor([[len(row)] for row in sequences], device=probs.device),
        )
        target = self._owner.ask_rule(block)
        tokens = draw(target[:, 0], uniforms[:, 0]).tolist()
        distances = block.stats.tv[:, 0].tolist() if request.ledger else [None] * len(tokens)
        for row in rows:
            row.rounds += 1
            row.drafted += 1
            row.drafter_calls += draft.calls
            row.verifier_calls += 1
        return [
            [LedgerEntry(token, "verifier" if defer else "drafter", defer, tv)]
            for token, defer, tv in zip(tokens, self._owner.decide(block, target), distances, strict=True)
        ]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._state.select_rows(rows)
