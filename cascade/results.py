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

    ``drafter``: a draft that was kept; ``residual``: the replacement of a rejected draft; ``bonus``: the token after a
    fully accepted block; ``verifier``: the verifier's own, with no draft to judge: decoding alone, or where a cascade
    deferred before it asked. ``deferred`` is None where nothing was decided (a bonus, a model alone), D_TV is None
    where one of the two distributions is not known.
    """

    token: int
    writer: Writer
    deferred: bool | None = None
    tv: float | None = None


@dataclass(frozen=True)
class GenerationStats:
    """Counts of one generation. Every count but ``drafted``, ``rounds`` and the calls refers to tokens that were kept.

    ``new_tokens = accepted + rejected + bonus + verifier_tokens``: each rejected draft is replaced by one residual
    token, and ``verifier_tokens`` are those that the verifier wrote with no draft to judge.

    Args:
        rounds: steps of the loop: blocks of a speculative cascade, single tokens elsewhere.
        drafted: tokens that the drafter offered.
        accepted: drafts that were kept, all of a model's tokens where it drafts alone.
        rejected: drafts that the verifier replaced.
        deferred: tokens at positions that were deferred.
        bonus: tokens after blocks that were accepted whole.
        verifier_calls: forward passes of the verifier that the sequence itself asked for; rows of a batch share them.
        drafter_calls: forward passes of the drafter, likewise.
        new_tokens: tokens that were kept.
        seconds: wall clock of the whole call.
        verifier_tokens: tokens that the verifier wrote with no draft to judge.
        decided: tokens at positions where it was decided whether to defer.
        per_sequence: the same for each row.
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
    verifier_tokens: int = 0
    decided: int = 0
    per_sequence: "tuple[GenerationStats, ...]" = ()

    @property
    def examined(self) -> int:
        """Drafts that were kept or replaced; where the verifier never reads a draft, all that were kept."""
        return self.accepted + self.rejected

    @property
    def acceptance_rate(self) -> float:
        """Accepted per examined draft: 1 where the verifier never reads a draft."""
        return self.accepted / max(self.examined, 1)

    @property
    def rejection_rate(self) -> float:
        """Rejected per examined draft: 0 where the verifier never reads a draft."""
        return self.rejected / max(self.examined, 1)

    @property
    def deferral_rate(self) -> float:
        """Deferred per decided position; in a speculative cascade these are the examined drafts."""
        return self.deferred / max(self.decided, 1)

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
            verifier_tokens=sum(entry.writer == "verifier" for entry in entries),
            decided=sum(entry.deferred is not None for entry in entries),
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
