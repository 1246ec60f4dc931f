"""One model decoding alone, with the engine's sampling, stopping and statistics: what a cascade is compared with."""

import time
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from .distributions import draw, draw_uniforms, logits_to_probs
from .drafters import pad_unread
from .engine import as_language_model
from .models import CausalLM, vocab_rows
from .processing import process_logits
from .requests import Streamer, build_sampling, build_stopping, check_request, collect_result
from .results import GenerationResult, LedgerEntry
from .stopping import Decoder

__all__ = ["SingleModel"]


class SingleModel:
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
        rows = vocab_rows(model) if isinstance(model, PreTrainedModel) else model.vocab_size
        self.model = as_language_model(model, vocab_size or rows)
        self.role: Literal["verifier", "drafter"] = role

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
        """Generate after each prompt, token by token; arguments as in `SpeculativeCascade.generate`."""
        request = check_request(
            input_ids,
            attention_mask,
            self.model.vocab_size,
            build_sampling(temperature, top_k, top_p, min_p, repetition_penalty, bad_words_ids, suppress_tokens),
            build_stopping(max_new_tokens, eos_token_id, stop_strings, tokenizer),
            seed,
            streamer,
        )
        started = time.perf_counter()
        active = request.rows
        state = self.model.start(len(active))
        if streamer is not None:
            streamer.put(input_ids.cpu())
        while active:
            unread, counts = pad_unread([row.tokens for row in active], state.lengths, self.model.device)
            logits = process_logits(
                state.extend(unread, counts, keep=1), [row.tokens for row in active], request.sampling
            )
            probs = logits_to_probs(logits, request.sampling, f"the model {self.model.name}")[:, 0]
            tokens = draw(probs, draw_uniforms([row.generator for row in active], 1)[:, 0]).tolist()
            going = list[int]()
            for index, (row, token) in enumerate(zip(active, tokens, strict=True)):
                _, finished = request.stopping.keep([entry.token for entry in row.entries], [token])
                row.append([LedgerEntry(token, self.role)])
                row.rounds += 1
                row.verifier_calls += self.role == "verifier"
                row.drafter_calls += self.role == "drafter"
                if not finished:
                    going.append(index)
                if streamer is not None:
                    streamer.put(torch.tensor([token]))
            if going and len(going) < len(active):
                state.select_rows(going)
            active = [active[index] for index in going]
        if streamer is not None:
            streamer.end()
        return collect_result(input_ids, request, time.perf_counter() - started, ledger, pad_token_id)
