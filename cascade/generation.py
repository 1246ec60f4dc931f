"""The outer loop of every generation: rows go on by blocks of tokens until each has ended.

Knows neither drafting nor verification: a `Session` writes the blocks. What is here is common to a cascade and to a
model alone, so that the two are compared under the same settings, endings and statistics.

Shapes: ``B`` row, ``L`` tokens of a prompt.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from .requests import (
    Request,
    Row,
    Streamer,
    build_sampling,
    build_stopping,
    check_request,
    collect_result,
)
from .results import GenerationResult, LedgerEntry
from .stopping import Decoder

__all__ = ["GenerationLoop", "Session", "run_to_end"]


@runtime_checkable
class Session(Protocol):
    """What one call of ``generate`` holds: caches, a row for each sequence that still goes on."""

    def step(self, rows: Sequence[Row], request: Request) -> list[list[LedgerEntry]]:
        """Write the next block of every row; count the calls it took in the rows."""
        ...

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        ...


class GenerationLoop(ABC):
    """Whatever generates: opens a session and goes on by its blocks."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids that may be emitted."""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Number of positions that the models know, if they are limited."""

    @property
    def decoder_start(self) -> int | None:
        """First token of every row of an encoder-decoder; None: rows begin with their prompts."""
        return None

    @abstractmethod
    def open_session(self, prompts: Sequence[Sequence[int]]) -> Session:
        """Begin one call with a row for each prompt, nothing of it read yet."""

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B L"] | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: Sequence[str] | None = None,
        seed: int | Sequence[int] | None = None,
        streamer: Streamer | None = None,
        ledger: bool = False,
        tokenizer: Decoder | None = None,
        pad_token_id: int | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        bad_words_ids: Sequence[Sequence[int]] | None = None,
        suppress_tokens: Sequence[int] | None = None,
    ) -> GenerationResult:
        """Generate after each prompt of a batch.

        Args:
            input_ids: the prompts ``[B, L]``; those of the encoder where there is one, and then the rows begin with
                the model's decoder start token instead.
            attention_mask: zeros mark padding, which no model sees: at the left, for encoder-decoders at either side;
                default: no padding.
            max_new_tokens: at most so many tokens a row.
            temperature: 0 decodes greedily.
            top_p: mass of the nucleus that both models are cut to; 1 keeps all.
            top_k: number of tokens that both models are cut to; 0 keeps all.
            eos_token_id: token or tokens that end a sequence.
            stop_strings: texts that end a sequence; need ``tokenizer``.
            seed: row i of a batch uses ``seed + i``, or ``seed[i]`` where a list is given: same seed, same tokens,
                whatever its neighbours. Default: fresh ones.
            streamer: a transformers streamer (one prompt), fed the prompt and then the kept tokens of each round.
            ledger: whether to record who wrote each token.
            tokenizer: read for ``stop_strings`` only.
            pad_token_id: fills shorter rows on the right; default: the lowest end token, or 0.
            min_p: both models drop tokens less probable than min_p times their most probable one; 0 keeps all.
            repetition_penalty: weakens tokens that a row already holds, for both models at every position.
            bad_words_ids: sequences of tokens that are never completed.
            suppress_tokens: tokens that are never drawn.

        Raises:
            ValueError: an argument out of range, or logits that are not finite.
        """
        request = check_request(
            input_ids,
            attention_mask,
            self.vocab_size,
            build_sampling(temperature, top_k, top_p, min_p, repetition_penalty, bad_words_ids, suppress_tokens),
            build_stopping(max_new_tokens, eos_token_id, stop_strings, tokenizer),
            seed,
            streamer,
            self.max_length,
            ledger,
            self.decoder_start,
        )
        input_ids = input_ids.long()  # smaller types could not hold every token
        started = time.perf_counter()
        session = self.open_session(request.prompts)
        if self.decoder_start is not None:
            input_ids = torch.full_like(input_ids[:, :1], self.decoder_start)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        run_to_end(session, request, request.rows, streamer)
        if streamer is not None:
            streamer.end()
        return collect_result(input_ids, request, time.perf_counter() - started, pad_token_id)


def run_to_end(session: Session, request: Request, rows: Sequence[Row], streamer: Streamer | None = None) -> None:
    """Go on by the session's blocks until every one of its ``rows`` has ended, as ``request`` says."""
    active = list(rows)
    while active:
        going = list[int]()
        for index, (row, block) in enumerate(zip(active, session.step(active, request), strict=True)):
            kept, finished = request.stopping.keep([e.token for e in row.entries], [e.token for e in block])
            row.append(block[:kept])
            if not finished:
                going.append(index)
            if streamer is not None:
                streamer.put(torch.tensor([entry.token for entry in block[:kept]]))
        if going and len(going) < len(active):
            session.select_rows(going)
        active = [active[index] for index in going]
