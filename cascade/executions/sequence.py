"""A cascade of whole answers: the drafter answers, and the verifier answers in its place where the drafter was unsure.

Knows no tokenizer: an answer is what a row gains until it ends. Source: the sequence-level cascade that Narasimhan et
al., ICLR 2025, compare with; Chow's rule on the probability of an answer.

Shapes: ``B`` row, ``V`` token.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from transformers import PreTrainedModel

from ..distributions import draw_uniforms
from ..drafters import Drafter
from ..generation import run_to_end
from ..models import CausalLM
from ..pair import PairLoop, draft_one, tokens_of
from ..requests import Request, Row
from ..results import LedgerEntry
from ..single import SingleModel

__all__ = ["SequenceCascade"]


class SequenceCascade(PairLoop):
    """The drafter answers whole; an answer of too little confidence is thrown away and the verifier answers afresh.

    An answer s of n tokens has confidence c(s) = (Π q°(s_t))^(1/n), the geometric mean, or the plain product; its end
    token counts like any other. It is kept where c(s) ≥ 1 − α. Answers then follow
    q(s)·1[c(s) ≥ 1 − α] + p(s)·P(c < 1 − α). A deferred row costs both answers, and the verifier's prompt on top.

    A row's one block is its whole answer, so a streamer gets it at once, when it is decided. A batch waits for its
    longest answer of the drafter, then for the verifier's answers to the deferred rows alone.

    Args:
        drafter: a Hugging Face model or any `Drafter`.
        verifier: a Hugging Face model or any `CausalLM`.
        alpha: in [0, 1]; 0 defers every answer that is not certain, 1 none.
        normalised: whether c is the geometric mean, which does not fall with the length, or the plain product.
        confidence: read the raw q° or the processed q, which is 1 everywhere at temperature 0.
        vocab_size: number of token ids that both models share and may emit; default: the smaller head.

    Raises:
        ValueError: an argument out of range, two vocabularies, or a model that cannot be run exactly.
    """

    def __init__(
        self,
        drafter: PreTrainedModel | Drafter,
        verifier: PreTrainedModel | CausalLM,
        alpha: float,
        normalised: bool = True,
        confidence: Literal["raw", "processed"] = "raw",
        vocab_size: int | None = None,
    ) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha: expected a number in [0, 1], got {alpha!r}")
        if confidence not in ("raw", "processed"):
            raise ValueError(f"confidence: expected 'raw' or 'processed', got {confidence!r}")
        super().__init__(drafter, verifier, vocab_size)
        self.alpha = alpha
        self.normalised = normalised
        self.confidence = confidence

    def open_session(self, prompts: Sequence[Sequence[int]]) -> "SequenceSession":
        """Begin one call with a row for each prompt."""
        return SequenceSession(self, prompts)

    def defers(self, log_prob: float, length: int) -> bool:
        """Decide on an answer of ``length`` tokens from the log of their joint probability under q° (or q)."""
        return math.exp(log_prob / length if self.normalised else log_prob) < 1 - self.alpha


class SequenceSession:
    """One call: every row's one block is its whole answer."""

    def __init__(self, owner: SequenceCascade, prompts: Sequence[Sequence[int]]) -> None:
        self._owner, self._prompts = owner, prompts
        self._drafting = AnswerSession(owner, prompts)

    def step(self, rows: Sequence[Row], request: Request) -> list[list[LedgerEntry]]:
        """Let the drafter answer every row, and the verifier those that are deferred."""
        drafts = [_copy(row) for row in rows]
        run_to_end(self._drafting, request, drafts)
        decisions = [
            self._owner.defers(log_prob, len(draft.entries))
            for log_prob, draft in zip(self._drafting.log_probs, drafts, strict=True)
        ]
        # The verifier goes on with the row's generator where the drafter left it: uniforms that led to the deferral
        # must not serve again.
        answers = [_copy(row) if defer else draft for row, draft, defer in zip(rows, drafts, decisions, strict=True)]
        deferred = [answer for answer, defer in zip(answers, decisions, strict=True) if defer]
        if deferred:
            unanswered = [prompt for prompt, defer in zip(self._prompts, decisions, strict=True) if defer]
            verifying = SingleModel(self._owner.verifier).open_session(unanswered)
            run_to_end(verifying, request, deferred)
        for row, draft, answer in zip(rows, drafts, answers, strict=True):
            row.rounds = draft.rounds + answer.verifier_calls
            row.drafted, row.drafter_calls = draft.drafted, draft.drafter_calls
            row.verifier_calls = answer.verifier_calls
        return [
            [replace(entry, deferred=defer) for entry in answer.entries]
            for answer, defer in zip(answers, decisions, strict=True)
        ]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Refuse: every row ends with its one block."""
        raise AssertionError(f"an answer is whole, yet rows {list(rows)} were to go on")


class AnswerSession:
    """The drafter answering alone, with the log probability of each row's answer so far."""

    def __init__(self, owner: SequenceCascade, prompts: Sequence[Sequence[int]]) -> None:
        self._raw = owner.confidence == "raw"
        self._state = owner.drafter.start(prompts)
        self._places = list(range(len(prompts)))
        self.log_probs = [0.0] * len(prompts)

    def step(self, rows: Sequence[Row], request: Request) -> list[list[LedgerEntry]]:
        """Write the next token of every row."""
        uniforms = draw_uniforms([row.generator for row in rows], 1)
        draft = draft_one(self._state, [row.tokens for row in rows], uniforms, request.sampling)
        chances = (draft.raw if self._raw else draft.law).at(draft.tokens)[:, 0].tolist()
        for place, row, chance, calls in zip(self._places, rows, chances, draft.calls, strict=True):
            self.log_probs[place] += math.log(chance) if chance > 0 else -math.inf
            row.rounds += 1
            row.drafted += 1
            row.drafter_calls += calls
        return [[LedgerEntry(token, "drafter")] for token in tokens_of(draft)]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._state.select_rows(rows)
        self._places = [self._places[row] for row in rows]


def _copy(row: Row) -> Row:
    """The row as it stands, to try an answer on: the same generator, nothing counted."""
    return Row(list(row.tokens), row.generator)
