"""The decoding loop: draft with the small model, verify against a rule's target with the large one.

Knows no rule by name, no tokenizer and no file. One round: draft γ tokens, score them in one verifier pass, ask the
rule for π, accept and replace, roll both caches back to the last kept token. The law of every emitted token is π;
a bonus token after a fully accepted block follows p (``bonus="verifier"``, the paper) or π (``bonus="target"``).
Source: Narasimhan et al., ICLR 2025, Algorithms 4 and 5.

Shapes: ``B`` sequence, ``L`` tokens so far, ``T`` drafted tokens, ``V`` token.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from .blocks import TargetRule, VerifyBlock
from .distributions import Sampling, draw, logits_to_probs
from .drafters import Drafter, DraftState, ModelDrafter
from .models import CausalLM, PrefixState, TransformersLM, vocab_rows
from .results import GenerationResult, GenerationStats, LedgerEntry
from .stopping import Decoder, Stopping, as_eos_ids
from .verify import verify_block

__all__ = ["SingleModel", "SpeculativeCascade", "Streamer"]


@runtime_checkable
class Streamer(Protocol):
    """A transformers streamer: tokens go in as they are kept."""

    def put(self, value: Any) -> None:
        """Take the prompt first, then each round's tokens."""
        ...

    def end(self) -> None:
        """Learn that nothing more comes."""
        ...


@dataclass(frozen=True)
class _Request:
    """One call of ``generate``, checked."""

    prompt: Int[Tensor, "B L"]
    sampling: Sampling
    stopping: Stopping
    generator: torch.Generator


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
        self.verifier = _as_language_model(verifier, vocab_size)
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
        seed: int | None = None,
        streamer: Streamer | None = None,
        ledger: bool = False,
        tokenizer: Decoder | None = None,
    ) -> GenerationResult:
        """Generate after one prompt.

        Args:
            input_ids: the prompt ``[1, L]``.
            attention_mask: zeros mark left padding, which is dropped; default: no padding.
            max_new_tokens: at most so many tokens.
            temperature: 0 decodes greedily.
            top_p: mass of the nucleus that both models are cut to; 1 keeps all.
            top_k: number of tokens that both models are cut to; 0 keeps all.
            eos_token_id: token or tokens that end a sequence.
            stop_strings: texts that end a sequence; need ``tokenizer``.
            seed: same seed, same tokens; default: a fresh one.
            streamer: a transformers streamer, fed the prompt and then the kept tokens of each round.
            ledger: whether to record who wrote each token.
            tokenizer: read for ``stop_strings`` only.

        Raises:
            ValueError: an argument out of range, or logits that are not finite.
        """
        request = _check_request(
            input_ids, attention_mask, self.verifier, Sampling(temperature, top_k, top_p),
            Stopping(max_new_tokens, as_eos_ids(eos_token_id), tuple(stop_strings or ()), tokenizer), seed,
        )  # fmt: skip
        started = time.perf_counter()
        draft_state, verify_state = self.drafter.start(), self.verifier.start()
        sequence, entries, finished = request.prompt, list[LedgerEntry](), False
        rounds = drafted = 0
        if streamer is not None:
            streamer.put(input_ids.cpu())
        while not finished:
            gamma = min(self.gamma, max_new_tokens - len(entries))
            new = self._run_round(sequence, gamma, request, draft_state, verify_state)
            kept, finished = request.stopping.keep([e.token for e in entries], [e.token for e in new])
            entries += new[:kept]
            rounds, drafted = rounds + 1, drafted + gamma
            fresh = torch.tensor([[entry.token for entry in new[:kept]]], device=sequence.device)
            sequence = torch.cat([sequence, fresh], dim=1)
            if streamer is not None:
                streamer.put(fresh[0].cpu())
        if streamer is not None:
            streamer.end()
        seconds = time.perf_counter() - started
        row = GenerationStats.of_entries(
            entries,
            rounds=rounds,
            drafted=drafted,
            verifier_calls=verify_state.calls,
            drafter_calls=draft_state.calls,
            seconds=seconds,
        )
        return _result(input_ids, entries, row, seconds, ledger)

    def _run_round(
        self,
        sequence: Int[Tensor, "B L"],
        gamma: int,
        request: _Request,
        draft_state: DraftState,
        verify_state: PrefixState,
    ) -> list[LedgerEntry]:
        """Draft, verify, replace and roll back; return the block's tokens in order."""
        sampling, generator = request.sampling, request.generator
        length = sequence.shape[1]
        draft = draft_state.propose(sequence, gamma, sampling, generator, peek=self.bonus == "target")
        tokens = draft.tokens.to(sequence.device)
        logits = verify_state.extend(torch.cat([sequence[:, verify_state.length :], tokens], dim=1), keep=gamma + 1)
        probs = logits_to_probs(logits, sampling, f"the verifier {self.verifier.name}")
        confidence = probs if sampling.is_plain else logits_to_probs(logits)
        draft_probs, draft_confidence = draft.probs.to(probs.device), draft.confidence.to(probs.device)

        block = VerifyBlock(
            draft_probs=draft_probs[:, :gamma],
            verifier_probs=probs[:, :gamma],
            draft_confidence=draft_confidence[:, :gamma],
            verifier_confidence=confidence[:, :gamma],
            tokens=tokens,
            positions=torch.arange(length, length + gamma, device=probs.device).unsqueeze(0),
        )
        target = self._ask_rule(block)
        verdict = verify_block(target, block.draft_probs, tokens, generator)
        accepted = int(verdict.accepted[0])
        entries = _examined_entries(block, self._deferral(block, target), accepted, int(verdict.replacement[0]))
        if accepted == gamma:
            bonus_probs = probs[:, gamma]
            if self.bonus == "target":
                after = VerifyBlock.from_probs(
                    draft_probs[:, gamma:], probs[:, gamma:], draft_confidence[:, gamma:], confidence[:, gamma:],
                    positions=block.positions[:, -1:] + 1,
                )  # fmt: skip
                bonus_probs = self._ask_rule(after)[:, 0]
            entries.append(LedgerEntry(int(draw(bonus_probs, generator)[0]), "bonus"))
        verify_state.rollback(length + accepted)
        draft_state.rollback(length + accepted)
        return entries

    def _ask_rule(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        target = self.rule.target(block)
        if target.shape != block.draft_probs.shape:
            expected, got = tuple(block.draft_probs.shape), tuple(target.shape)
            raise ValueError(f"rule {self.rule!r}: expected a target of shape {expected}, got {got}")
        if not bool((target.amin() >= 0) & target.sum().isfinite()):
            raise ValueError(f"rule {self.rule!r}: expected a target of finite values >= 0")
        return target

    def _deferral(self, block: VerifyBlock, target: Float[Tensor, "B T V"]) -> list[bool]:
        """The rule's own decision a position; for a rule that states none, whether π differs from q."""
        defer_mask = getattr(self.rule, "defer_mask", None)
        mask = (target != block.draft_probs).any(dim=-1) if defer_mask is None else defer_mask(block)
        decisions: list[bool] = mask[0].tolist()
        return decisions


class SingleModel:
    """One model decoding alone with the same sampling, stopping and statistics: what a cascade is compared with.

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
        self.model = _as_language_model(model, vocab_size or _vocabulary(model))
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
        seed: int | None = None,
        streamer: Streamer | None = None,
        ledger: bool = False,
        tokenizer: Decoder | None = None,
    ) -> GenerationResult:
        """Generate after one prompt, token by token; arguments as in `SpeculativeCascade.generate`."""
        request = _check_request(
            input_ids, attention_mask, self.model, Sampling(temperature, top_k, top_p),
            Stopping(max_new_tokens, as_eos_ids(eos_token_id), tuple(stop_strings or ()), tokenizer), seed,
        )  # fmt: skip
        started = time.perf_counter()
        state, unread = self.model.start(), request.prompt
        tokens, finished = list[int](), False
        if streamer is not None:
            streamer.put(input_ids.cpu())
        while not finished:
            logits = state.extend(unread, keep=1)[:, 0]
            next_token = draw(
                logits_to_probs(logits, request.sampling, f"the model {self.model.name}"), request.generator
            )
            _, finished = request.stopping.keep(tokens, [int(next_token)])
            tokens.append(int(next_token))
            unread = next_token.unsqueeze(1)
            if streamer is not None:
                streamer.put(next_token.cpu())
        if streamer is not None:
            streamer.end()
        seconds = time.perf_counter() - started
        entries = [LedgerEntry(token, self.role) for token in tokens]
        calls = {"verifier": 0, "drafter": 0, self.role: state.calls}
        row = GenerationStats(
            rounds=state.calls,
            verifier_calls=calls["verifier"],
            drafter_calls=calls["drafter"],
            new_tokens=len(tokens),
            seconds=seconds,
        )
        return _result(input_ids, entries, row, seconds, ledger)


def _examined_entries(block: VerifyBlock, deferred: list[bool], accepted: int, replacement: int) -> list[LedgerEntry]:
    """The accepted drafts and, after a rejection, the residual token."""
    tokens, tv = block.tokens[0].tolist(), block.stats.tv[0].tolist()
    entries = [LedgerEntry(tokens[i], "drafter", deferred[i], tv[i]) for i in range(accepted)]
    if accepted < len(tokens):
        entries.append(LedgerEntry(replacement, "residual", deferred[accepted], tv[accepted]))
    return entries


def _check_request(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    model: CausalLM,
    sampling: Sampling,
    stopping: Stopping,
    seed: int | None,
) -> _Request:
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids: expected one prompt [1, L] with L >= 1, got shape {tuple(input_ids.shape)}")
    prompt = input_ids
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            expected, got = tuple(input_ids.shape), tuple(attention_mask.shape)
            raise ValueError(f"attention_mask: expected the shape of input_ids {expected}, got {got}")
        padding = int((attention_mask[0] == 0).sum())
        if bool((attention_mask[0, :padding] != 0).any()) or padding == input_ids.shape[1]:
            raise ValueError(
                "attention_mask: expected ones, after zeros for left padding, got zeros elsewhere or no ones"
            )
        prompt = input_ids[:, padding:]
    if int(prompt.min()) < 0 or int(prompt.max()) >= model.vocab_size:
        bounds = f"{int(prompt.min())} to {int(prompt.max())}"
        raise ValueError(f"input_ids: expected token ids from 0 to {model.vocab_size - 1}, got {bounds}")
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return _Request(prompt.to(model.device), sampling, stopping, generator)


def _result(
    input_ids: Tensor, entries: list[LedgerEntry], row: GenerationStats, seconds: float, ledger: bool
) -> GenerationResult:
    fresh = torch.tensor([[entry.token for entry in entries]], device=input_ids.device, dtype=input_ids.dtype)
    return GenerationResult(
        sequences=torch.cat([input_ids, fresh], dim=1),
        prompt_length=input_ids.shape[1],
        stats=GenerationStats.total((row,), seconds),
        ledger=(tuple(entries),) if ledger else None,
    )


def _vocabulary(model: Any) -> int:
    if isinstance(model, PreTrainedModel):
        return vocab_rows(model)
    if not hasattr(model, "vocab_size"):
        raise ValueError(f"model: expected a transformers model, a CausalLM or a Drafter, got {type(model).__name__}")
    return int(model.vocab_size)


def _as_language_model(model: PreTrainedModel | CausalLM, vocab_size: int) -> CausalLM:
    return TransformersLM(model, vocab_size) if isinstance(model, PreTrainedModel) else model


def _as_drafter(drafter: PreTrainedModel | Drafter, vocab_size: int) -> Drafter:
    return ModelDrafter(TransformersLM(drafter, vocab_size)) if isinstance(drafter, PreTrainedModel) else drafter
