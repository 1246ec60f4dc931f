"""One model decoding alone, with the engine's sampling, stopping and statistics: what a cascade is compared with."""

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedModel

from .adapters import as_language_model, vocabulary_of
from .distributions import draw_uniforms
from .generation import GenerationLoop
from .models import CausalLM, PrefixState
from .pair import score
from .requests import Request, Row
from .results import LedgerEntry

__all__ = ["SingleModel"]


class SingleModel(GenerationLoop):
    """One model decoding alone.

    Args:
        model: a Hugging Face model or any `CausalLM`.
        role: whose calls are counted, ``"verifier"`` or ``"drafter"``.
        vocab_size: number of real token ids; default: all rows of the head.
    """

    def __init__(
        self,
        model: PreTrainedModel | CausalLM,
        role: Literal["verifier", "drafter"] = "verifier",
        vocab_size: int | None = None,
    ) -> None:
        if role not in ("verifier", "drafter"):
            raise ValueError(f"role: expected 'verifier' or 'drafter', got {role!r}")
        self.model = as_language_model(model, vocabulary_of(model) if vocab_size is None else vocab_size)
        self.role: Literal["verifier", "drafter"] = role

    @property
    def vocab_size(self) -> int:
        """Number of token ids that may be emitted."""
        return self.model.vocab_size

    @property
    def max_length(self) -> int | None:
        """Number of positions that the model knows."""
        return getattr(self.model, "max_length", None)

    @property
    def decoder_start(self) -> int | None:
        """First token of every row of an encoder-decoder."""
        return getattr(self.model, "decoder_start", None)

    def open_session(self, prompts: Sequence[Sequence[int]]) -> "SingleSession":
        """Begin one call with a row for each prompt."""
        return SingleSession(self, self.model.start(prompts))


class SingleSession:
    """One model's cache for one call: a block is one token."""

    def __init__(self, owner: SingleModel, state: PrefixState) -> None:
        self._owner, self._state = owner, state

    def step(self, rows: Sequence[Row], request: Request) -> list[list[LedgerEntry]]:
        """Write the next token of every row."""
        owner, sequences = self._owner, [row.tokens for row in rows]
        law = score(owner.model, self._state, sequences, request.sampling, 1, "model").law
        tokens = law.sample(draw_uniforms([row.generator for row in rows], 1))[:, 0].tolist()
        for row in rows:
            row.rounds += 1
            row.verifier_calls += owner.role == "verifier"
            row.drafter_calls += owner.role == "drafter"
        return [[LedgerEntry(token, owner.role)] for token in tokens]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._state.select_rows(rows)
