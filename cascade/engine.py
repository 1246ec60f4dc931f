"""The decoding loop: draft with the small model, verify against a rule's target with the large one.

Knows no rule by name, no tokenizer and no file. One round: draft γ tokens a row, score them in one verifier pass, ask
the rule for π, accept and replace row by row, roll both caches back to each row's last kept token. The law of every
emitted token is π; a bonus token after a fully accepted block follows p (``bonus="verifier"``, the paper) or π
(``bonus="target"``). Source: Narasimhan et al., ICLR 2025, Algorithms 4 and 5.

Shapes: ``B`` row, ``L`` tokens of a prompt, ``T`` drafted tokens, ``V`` token.
"""

import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from .blocks import TargetRule, VerifyBlock
from .distributions import Sampling, draw, draw_uniforms, logits_to_probs
from .drafters import Draft, Drafter, DraftRequest, DraftState, ModelDrafter, pad_unread
from .models import CausalLM, PrefixState, TransformersLM, vocab_rows
from .processing import process_logits
from .requests import Request, Row, Streamer, build_sampling, build_stopping, check_request, collect_result
from .results import GenerationResult, LedgerEntry
from .stopping import Decoder
from .verify import Verdict, verify_block

__all__ = ["SpeculativeCascade"]


class SpeculativeCascade:
    """Two models and a rule: tokens whose law is the rule's target π.

    Args:
        drafter: a Hugging Face model or any `Drafter`.
        verifier: a Hugging Face model or any `CausalLM`.
        rule: anything with ``target(block) -> [B, T, V]``, such as ``rules.OPT(alpha=0.3)`` or a `LearnedRouter`.
        gamma: tokens drafted per block.
        bonus: where the token after a fully accepted block comes from: the ``"verifier"`` (p) or the ``"target"`` (π,
            at the price of one more drafter step a block).
        vocab_size: number of token ids that both models share and may emit; default: the smaller head.

    Raises:
        ValueError: an argument out of range, or a model that cannot be run exactly (recurrent, encoder-decoder).
    """

    def __init__(
        self,
        drafter: PreTrainedModel | Drafter,
        verifier: PreTrainedModel | CausalLM,
        rule: TargetRule,
        gamma: int = 5,
        bonus: Literal["verifier", "target"] = "verifier",
        vocab_size: int | None = None,
    ) -> None:
        if gamma < 1:
            raise ValueError(f"gamma: expected an integer >= 1, got {gamma!r}")
        if bonus not in ("verifier", "target"):
            raise ValueError(f"bonus: expected 'verifier' or 'target', got {bonus!r}")
        if not callable(getattr(rule, "target", None)):
            raise ValueError(f"rule: expected an object with target(block), got {type(rule).__name__}")
        if vocab_size is None:
            vocab_size = min(_vocabulary(drafter), _vocabulary(verifier))
        self.verifier = as_language_model(verifier, vocab_size)
        self.drafter = _as_drafter(drafter, vocab_size)
        if self.drafter.vocab_size != self.verifier.vocab_size:
            sizes = f"{self.drafter.vocab_size} and {self.verifier.vocab_size}"
            raise ValueError(f"drafter, verifier: expected one vocabulary, got {sizes} tokens")
        self.rule = rule
        self.gamma = gamma
        self.bonus = bonus

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
            input_ids: the prompts ``[B, L]``.
            attention_mask: zeros mark left padding, which no model sees; default: no padding.
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
            self.verifier.vocab_size,
            build_sampling(temperature, top_k, top_p, min_p, repetition_penalty, bad_words_ids, suppress_tokens),
            build_stopping(max_new_tokens, eos_token_id, stop_strings, tokenizer),
            seed,
            streamer,
        )
        started = time.perf_counter()
        active = request.rows
        draft_state, verify_state = self.drafter.start(len(active)), self.verifier.start(len(active))
        if streamer is not None:
            streamer.put(input_ids.cpu())
        while active:
            blocks = self._run_round(active, request, draft_state, verify_state)
            going = list[int]()
            for index, (row, block) in enumerate(zip(active, blocks, strict=True)):
                kept, finished = request.stopping.keep([e.token for e in row.entries], [e.token for e in block])
                row.append(block[:kept])
                if not finished:
                    going.append(index)
                if streamer is not None:
                    streamer.put(torch.tensor([entry.token for entry in block[:kept]]))
            if going and len(going) < len(active):
                draft_state.select_rows(going)
                verify_state.select_rows(going)
            active = [active[index] for index in going]
        if streamer is not None:
            streamer.end()
        return collect_result(input_ids, request, time.perf_counter() - started, ledger, pad_token_id)

    def _run_round(
        self, rows: list[Row], request: Request, draft_state: DraftState, verify_state: PrefixState
    ) -> list[list[LedgerEntry]]:
        """Draft, verify, replace and roll back; return each row's block of tokens in order."""
        left = max(request.stopping.max_new_tokens - len(row.entries) for row in rows)
        length = min(self.gamma, left)
        # Every round takes the same number of uniforms from a row: for γ drafts, γ tests, a replacement and a bonus.
        uniforms = draw_uniforms([row.generator for row in rows], 2 * self.gamma + 2)
        draft = draft_state.propose(
            DraftRequest(
                rows=[row.tokens for row in rows],
                length=length,
                uniforms=uniforms[:, : self.gamma],
                sampling=request.sampling,
                peek=self.bonus == "target",
            )
        )
        block, after = self._score(rows, draft, request.sampling, verify_state)
        target = self._ask_rule(block)
        verdict = verify_block(target, block.draft_probs, block.tokens, uniforms[:, self.gamma : -1])
        bonus_probs = after.verifier_probs if self.bonus == "verifier" else self._ask_rule(after)
        bonus = draw(bonus_probs[:, 0], uniforms[:, -1])
        kept = [len(row.tokens) + accepted for row, accepted in zip(rows, verdict.accepted.tolist(), strict=True)]
        verify_state.rollback(kept)
        draft_state.rollback(kept)
        for row in rows:
            row.rounds += 1
            row.drafted += length
            row.verifier_calls += 1
            row.drafter_calls += draft.calls
        return _block_entries(block, self._deferral(block, target), verdict, bonus)

    def _score(
        self, rows: list[Row], draft: Draft, sampling: Sampling, verify_state: PrefixState
    ) -> tuple[VerifyBlock, VerifyBlock]:
        """One verifier pass over the drafted block; the second block holds the position after it.

        There the drafter's distribution is known only if it was asked for; otherwise the verifier's stands in, and the
        block serves for its ``verifier_probs`` alone.
        """
        device, length = self.verifier.device, draft.tokens.shape[1]
        drafted = [row.tokens + new for row, new in zip(rows, draft.tokens.tolist(), strict=True)]
        unread, counts = pad_unread(drafted, verify_state.lengths, device)
        logits = verify_state.extend(unread, counts, keep=length + 1)
        processed = process_logits(logits, drafted, sampling)
        probs = logits_to_probs(processed, sampling, f"the verifier {self.verifier.name}")
        confidence = probs if sampling.is_plain else logits_to_probs(logits)
        draft_probs, draft_confidence = draft.probs.to(probs.device), draft.confidence.to(probs.device)
        starts = torch.tensor([[len(row.tokens)] for row in rows], device=probs.device)
        block = VerifyBlock(
            draft_probs=draft_probs[:, :length],
            verifier_probs=probs[:, :length],
            draft_confidence=draft_confidence[:, :length],
            verifier_confidence=confidence[:, :length],
            tokens=draft.tokens.to(probs.device),
            positions=starts + torch.arange(length, device=probs.device),
        )
        peeked = draft_probs.shape[1] > length
        after = VerifyBlock.from_probs(
            draft_probs=draft_probs[:, length:] if peeked else probs[:, length:],
            verifier_probs=probs[:, length:],
            draft_confidence=draft_confidence[:, length:] if peeked else confidence[:, length:],
            verifier_confidence=confidence[:, length:],
            positions=starts + length,
        )
        return block, after

    def _ask_rule(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        target = self.rule.target(block)
        if target.shape != block.draft_probs.shape:
            expected, got = tuple(block.draft_probs.shape), tuple(target.shape)
            raise ValueError(f"rule {self.rule!r}: expected a target of shape {expected}, got {got}")
        if not bool((target.amin() >= 0) & target.sum().isfinite()):
            raise ValueError(f"rule {self.rule!r}: expected a target of finite values >= 0")
        return target

    def _deferral(self, block: VerifyBlock, target: Float[Tensor, "B T V"]) -> list[list[bool]]:
        """The rule's own decision a position; for a rule that states none, whether π differs from q."""
        defer_mask = getattr(self.rule, "defer_mask", None)
        mask = (target != block.draft_probs).any(dim=-1) if defer_mask is None else defer_mask(block)
        decisions: list[list[bool]] = mask.tolist()
        return decisions


def as_language_model(model: PreTrainedModel | CausalLM, vocab_size: int) -> CausalLM:
    """Adapt a Hugging Face model; pass anything else on."""
    return TransformersLM(model, vocab_size) if isinstance(model, PreTrainedModel) else model


def _as_drafter(drafter: PreTrainedModel | Drafter, vocab_size: int) -> Drafter:
    return ModelDrafter(TransformersLM(drafter, vocab_size)) if isinstance(drafter, PreTrainedModel) else drafter


def _vocabulary(model: Any) -> int:
    if isinstance(model, PreTrainedModel):
        return vocab_rows(model)
    if not hasattr(model, "vocab_size"):
        raise ValueError(f"model: expected a transformers model, a CausalLM or a Drafter, got {type(model).__name__}")
    return int(model.vocab_size)


def _block_entries(
    block: VerifyBlock, deferred: list[list[bool]], verdict: Verdict, bonus: Int[Tensor, "B"]
) -> list[list[LedgerEntry]]:
    """Each row's accepted drafts, then its residual token, or its bonus token after a full acceptance."""
    blocks = list[list[LedgerEntry]]()
    columns = zip(
        block.tokens.tolist(),
        block.stats.tv.tolist(),
        deferred,
        verdict.accepted.tolist(),
        verdict.replacement.tolist(),
        bonus.tolist(),
        strict=True,
    )
    for tokens, tv, defer, accepted, replacement, extra in columns:
        entries = [LedgerEntry(tokens[i], "drafter", defer[i], tv[i]) for i in range(accepted)]
        if accepted < len(tokens):
            entries.append(LedgerEntry(replacement, "residual", defer[accepted], tv[accepted]))
        else:
            entries.append(LedgerEntry(extra, "bonus"))
        blocks.append(entries)
    return blocks
