"""What a generation returns: tokens, counts with their denominators, and who wrote each token."""

from dataclasses import dataclass, fields
from typing import Literal

from jaxtyping import Int
from torch import Tensor

__all__ = ["GenerationResult", "GenerationStats", "LedgerEntry", "Writer"]

Writer = Literal["drafter", "verifier", "residual", "bonus"]


@dataclass(frozen=True)
class LedgerEntry:
    """One generated token: its id, who wrote it, whether its position was deferred, and D_TV(p, q) there.

    ``drafter``: an accepted draft; ``residual``: the replacement of a rejected draft; ``bonus``: the token after a
    fully accepted block; ``verifier``: a model that decodes alone. The last two have no deferral decision and no
    D_TV (None).
    """

    token: int
    writer: Writer
    deferred: bool | None = None
    tv: float | None = None


@dataclass(frozen=True)
class GenerationStats:
    """Counts of one generation. Every count but ``drafted`` and the calls refers to tokens that were kept.

    ``new_tokens = accepted + rejected + bonus`` for a cascade: each rejected draft is replaced by one residual token.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    deferred: int = 0
    bonus: int = 0
    verifier_calls: int = 0
    drafter_calls: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    per_sequence: "tuple[GenerationStats, ...]" = ()

    @property
    def examined(self) -> int:
        """Drafted positions that were verified: accepted ones and the rejected one that ended a block."""
        return self.accepted + self.rejected

    @property
    def acceptance_rate(self) -> float:
        """Accepted per examined position."""
        return self.accepted / max(self.examined, 1)

    @property
    def rejection_rate(self) -> float:
        """Rejected per examined position."""
        return self.rejected / max(self.examined, 1)

    @property
    def deferral_rate(self) -> float:
        """Deferred per examined position."""
        return self.deferred / max(self.examined, 1)

    @property
    def calls_per_token(self) -> float:
        """Verifier calls per new token."""
        return self.verifier_calls / max(self.new_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall clock, reading the prompt included."""
        return self.new_tokens / self.seconds if self.seconds > 0 else 0.0

    @classmethod
    def of_entries(
        cls,
        entries: "list[LedgerEntry]",
        rounds: int,
        drafted: int,
        verifier_calls: int,
        drafter_calls: int,
        seconds: float,
    ) -> "GenerationStats":
        """Count the kept tokens of one sequence by writer and deferral, beside its rounds and calls."""
        return cls(
            rounds=rounds,
            drafted=drafted,
            accepted=sum(entry.writer == "drafter" for entry in entries),
            rejected=sum(entry.writer == "residual" for entry in entries),
            deferred=sum(bool(entry.deferred) for entry in entries),
            bonus=sum(entry.writer == "bonus" for entry in entries),
            verifier_calls=verifier_calls,
            drafter_calls=drafter_calls,
            new_tokens=len(entries),
            seconds=seconds,
        )

    @classmethod
    def total(cls, parts: "tuple[GenerationStats, ...]", seconds: float) -> "GenerationStats":
        """Sum the counts of several sequences that ran together for ``seconds``."""
        names = [field.name for field in fields(cls) if field.name not in ("seconds", "per_sequence")]
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in names}, seconds=seconds, per_sequence=parts
        )


@dataclass(frozen=True)
class GenerationResult:
    """Generated sequences ``[B, L]`` with their prompts, right-padded; counts; the ledger where asked for."""

    sequences: Int[Tensor, "B L"]
    prompt_length: int
    stats: GenerationStats
    ledger: tuple[tuple[LedgerEntry, ...], ...] | None = None
