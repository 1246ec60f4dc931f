"""When a sequence ends: its first end token, its first stop string, or its length. Works on plain token lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from .checks import check_count

__all__ = ["Decoder", "Stopping"]


@runtime_checkable
class Decoder(Protocol):
    """What stop strings need of a tokenizer."""

    def decode(self, token_ids: Any, /) -> Any:
        """Turn token ids into text."""
        ...


@dataclass(frozen=True)
class Stopping:
    """The conditions of one call.

    Args:
        max_new_tokens: at most so many tokens after the prompt.
        eos_token_ids: a sequence ends with the first of these, which is kept.
        stop_strings: a sequence ends with the token that completes one of these; needs ``decoder``.
        decoder: a tokenizer.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    decoder: Decoder | None = None

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens)
        if self.stop_strings and self.decoder is None:
            raise ValueError("stop_strings: expected a tokenizer beside them (tokenizer=...), got none")
        if any(not string for string in self.stop_strings):
            raise ValueError("stop_strings: expected non-empty strings, got an empty one")

    def keep(self, generated: Sequence[int], new: Sequence[int]) -> tuple[int, bool]:
        """Return how many of the ``new`` tokens after ``generated`` are kept, and whether the sequence ends there."""
        for count, token in enumerate(new, start=1):
            if token in self.eos_token_ids or self._completes_stop([*generated, *new[:count]]):
                return count, True
            if len(generated) + count == self.max_new_tokens:
                return count, True
        return len(new), False

    def _completes_stop(self, tokens: list[int]) -> bool:
        if not self.stop_strings or self.decoder is None:
            return False
        # A stop string of n bytes spans at most n tokens; a few more so that a split character decodes whole.
        window = max(len(string.encode()) for string in self.stop_strings) + 4
        text = self.decoder.decode(tokens[-window:])
        return any(string in text for string in self.stop_strings)


def as_eos_ids(eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    """Normalise the end token: none, one or several."""
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)
