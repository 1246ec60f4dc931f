"""One call of ``generate``, checked: prompts as token lists, sampling, stopping, and a generator for each row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from .checks import is_integer
from .distributions import Sampling
from .results import GenerationResult, GenerationStats, LedgerEntry
from .stopping import Decoder, Stopping, as_eos_ids

__all__ = ["Request", "Row", "Streamer", "check_request", "collect_result"]


@runtime_checkable
class Streamer(Protocol):
    """A transformers streamer: tokens go in as they are kept."""

    def put(self, value: Any) -> None:
        """Take the prompt first, then each round's tokens."""
        ...

    def end(self) -> None:
        """Learn that nothing more comes."""
        ...


@dataclass
class Row:
    """One sequence in the making."""

    tokens: list[int]
    generator: torch.Generator
    entries: list[LedgerEntry] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    verifier_calls: int = 0
    drafter_calls: int = 0

    def append(self, entries: Sequence[LedgerEntry]) -> None:
        """Add kept tokens."""
        self.entries += entries
        self.tokens += [entry.token for entry in entries]

    def count(self, seconds: float) -> GenerationStats:
        """Return the row's statistics."""
        return GenerationStats.of_entries(
            self.entries, self.rounds, self.drafted, self.verifier_calls, self.drafter_calls, seconds
        )


@dataclass(frozen=True)
class Request:
    """What to generate and how; ``rows`` begin with their ``prompts``, or with an encoder-decoder's start token."""

    prompts: list[list[int]]
    rows: list[Row]
    sampling: Sampling
    stopping: Stopping
    ledger: bool


def check_request(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    vocab_size: int,
    sampling: Sampling,
    stopping: Stopping,
    seed: int | Sequence[int] | None,
    streamer: Streamer | None,
    max_length: int | None,
    ledger: bool,
    decoder_start: int | None = None,
) -> Request:
    """Check the arguments of ``generate`` and start a row for each prompt.

    Raises:
        ValueError: an argument out of range or of another shape; the message names it.
    """
    for name, tensor in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: expected a tensor [B, L], got {type(tensor).__name__}")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids: expected integers, got {input_ids.dtype}")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids: expected prompts [B, L] with B, L >= 1, got shape {tuple(input_ids.shape)}")
    if streamer is not None and input_ids.shape[0] != 1:
        raise ValueError(f"streamer: expected one prompt beside it, got {input_ids.shape[0]}")
    prompts = _strip_padding(input_ids, attention_mask, either_side=decoder_start is not None)
    _check_ids("input_ids", [token for prompt in prompts for token in prompt], vocab_size)
    _check_ids("suppress_tokens", sampling.suppress_tokens, vocab_size)
    _check_ids("bad_words_ids", [token for word in sampling.bad_words for token in word], vocab_size)
    starts = [list(prompt) if decoder_start is None else [decoder_start] for prompt in prompts]
    longest = max(map(len, starts))
    if max_length is not None and longest + stopping.max_new_tokens > max_length:
        asked = f"a prompt of {longest} and {stopping.max_new_tokens} new ones"
        raise ValueError(f"max_new_tokens: expected at most {max_length} tokens, as the models know, got {asked}")
    generators = _row_generators(seed, len(prompts))
    rows = [Row(start, generator) for start, generator in zip(starts, generators, strict=True)]
    return Request(prompts, rows, sampling, stopping, ledger)


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if not all(map(is_integer, ids)):
        raise ValueError(f"{name}: expected token ids, which are integers, got {list(ids)!r}")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"{name}: expected token ids from 0 to {vocab_size - 1}, got {min(ids)} to {max(ids)}")


def build_sampling(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    bad_words_ids: Sequence[Sequence[int]] | None,
    suppress_tokens: Sequence[int] | None,
) -> Sampling:
    """Gather the arguments of ``generate`` that shape the distributions."""
    bad_words = tuple(tuple(word) for word in bad_words_ids or ())
    return Sampling(temperature, top_k, top_p, min_p, repetition_penalty, bad_words, tuple(suppress_tokens or ()))


def build_stopping(
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    stop_strings: Sequence[str] | None,
    tokenizer: Decoder | None,
) -> Stopping:
    """Gather the arguments of ``generate`` that end a sequence."""
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings or ())
    return Stopping(max_new_tokens, as_eos_ids(eos_token_id), strings, tokenizer)


def collect_result(
    input_ids: Int[Tensor, "B L"], request: Request, seconds: float, pad_token_id: int | None
) -> GenerationResult:
    """Right-pad the generated tokens after the prompts as they were given; sum the statistics."""
    if pad_token_id is None:
        pad_token_id = min(request.stopping.eos_token_ids, default=0)
    longest = max(len(row.entries) for row in request.rows)
    fresh = torch.full((len(request.rows), longest), pad_token_id, dtype=input_ids.dtype, device=input_ids.device)
    for index, row in enumerate(request.rows):
        tokens = [entry.token for entry in row.entries]
        fresh[index, : len(tokens)] = torch.tensor(tokens, dtype=input_ids.dtype, device=input_ids.device)
    parts = tuple(row.count(seconds) for row in request.rows)
    return GenerationResult(
        sequences=torch.cat([input_ids, fresh], dim=1),
        prompt_length=input_ids.shape[1],
        stats=GenerationStats.total(parts, seconds),
        ledger=tuple(tuple(row.entries) for row in request.rows) if request.ledger else None,
    )


def _strip_padding(input_ids: Tensor, attention_mask: Tensor | None, either_side: bool) -> list[list[int]]:
    if attention_mask is None:
        rows: list[list[int]] = input_ids.tolist()
        return rows
    if attention_mask.shape != input_ids.shape:
        expected, got = tuple(input_ids.shape), tuple(attention_mask.shape)
        raise ValueError(f"attention_mask: expected the shape of input_ids {expected}, got {got}")
    mask = attention_mask != 0
    if either_side:
        runs = mask[:, 0].int() + (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1)
        if bool((runs != 1).any()):
            raise ValueError("attention_mask: expected one run of ones a row, zeros for padding before or after it")
    elif not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError("attention_mask: expected ones, after zeros for left padding; found zeros after a one")
    return [tokens[keep].tolist() for tokens, keep in zip(input_ids, mask, strict=True)]


def _as_list(name: str, values: Any) -> list[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"{name}: expected an integer or a list of them, got {values!r}")
    return list(values)


def _row_generators(seed: int | Sequence[int] | None, count: int) -> list[torch.Generator]:
    generators = [torch.Generator() for _ in range(count)]
    if seed is None:
        for generator in generators:
            generator.seed()
        return generators
    seeds: list[Any] = [seed + row for row in range(count)] if isinstance(seed, int) else _as_list("seed", seed)
    if not all(is_integer(value) and -(2**63) <= value < 2**64 for value in seeds):
        raise ValueError(f"seed: expected integers of 64 bits, got {seed!r}")
    if len(seeds) != count:
        raise ValueError(f"seed: expected an integer or one for each of {count} prompts, got {len(seeds)}")
    for generator, value in zip(generators, seeds, strict=True):
        generator.manual_seed(value)
    return generators
