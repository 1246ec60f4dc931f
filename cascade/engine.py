"""The decoding loop: draft with the small model, verify against a rule's target with the large one.

Knows no rule by name, no tokenizer and no file. One round: draft γ tokens a row, score them in one verifier pass, ask
the rule for π, accept and replace row by row, roll both caches back to each row's last kept token. The law of every
emitted token is π; a bonus token after a fully accepted block follows p (``bonus="verifier"``, the paper) or π
(``bonus="target"``). Source: Narasimhan et al., ICLR 2025, Algorithms 4 and 5.

Shapes: ``B`` row, ``L`` tokens of a prompt, ``T`` drafted tokens, ``V`` token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from .blocks import TargetRule, VerifyBlock
from .distributions import Sampling, draw, draw_uniforms, logits_to_probs
from .drafters import Draft, Drafter, DraftRequest, DraftState, ModelDrafter, pad_unread
from .generation import GenerationLoop
from .models import CausalLM, PrefixState, TransformersLM, vocab_rows
from .processing import process_logits
from .requests import Request, Row
from .results import LedgerEntry
from .seq2seq import EncoderDecoderLM
from .verify import Verdict, emission_law, verify_block

__all__ = ["SpeculativeCascade"]


@dataclass(frozen=True)
class Round:
    """What one round did: the block, π, the verdict; and the bonus token with the distribution that it was drawn from.

    ``after`` is the position behind the block; its drafter side is known only with ``bonus="target"``.
    """

    block: VerifyBlock
    target: Float[Tensor, "B T V"]
    verdict: Verdict
    after: VerifyBlock
    bonus_probs: Float[Tensor, "B V"]
    bonus: Int[Tensor, "B"]
    drafter_calls: int

    def tokens(self) -> list[list[int]]:
        """Each row's accepted drafts, then its residual token, or its bonus token after a full acceptance."""
        drafted, replacements = self.block.tokens.tolist(), self.verdict.replacement.tolist()
        outcome = zip(drafted, self.verdict.accepted.tolist(), replacements, self.bonus.tolist(), strict=True)
        return [
            [*tokens[:accepted], replacement if accepted < len(tokens) else bonus]
            for tokens, accepted, replacement, bonus in outcome
        ]


class SpeculativeCascade(GenerationLoop):
    """Two models and a rule: tokens whose law is the rule's target π.

    Args:
        drafter: a Hugging Face model or any `Drafter`; two encoder-decoders (T5 family), or neither.
        verifier: a Hugging Face model or any `CausalLM`.
        rule: anything with ``target(block) -> [B, T, V]``, such as ``rules.OPT(alpha=0.3)`` or a `LearnedRouter`.
        gamma: tokens drafted per block.
        bonus: where the token after a fully accepted block comes from: the ``"verifier"`` (p) or the ``"target"`` (π,
            at the price of one more drafter step a block).
        vocab_size: number of token ids that both models share and may emit; default: the smaller head.

    Raises:
        ValueError: an argument out of range, a model that cannot be run exactly (recurrent, an encoder-decoder with
            absolute positions), or an encoder-decoder beside a decoder-only model.
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
        _check_decoder_start(self.drafter, self.verifier)
        self.rule = rule
        self.gamma = gamma
        self.bonus = bonus

    @property
    def name(self) -> str:
        """How the cascade is called where it drafts for a larger model."""
        return f"{self.drafter.name} → {self.verifier.name}"

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the pair may emit."""
        return self.verifier.vocab_size

    @property
    def max_length(self) -> int | None:
        """Number of positions that both models know."""
        known = [getattr(model, "max_length", None) for model in (self.drafter, self.verifier)]
        return min((length for length in known if length is not None), default=None)

    @property
    def decoder_start(self) -> int | None:
        """First token of every row of an encoder-decoder."""
        return getattr(self.verifier, "decoder_start", None)

    def open_session(self, prompts: Sequence[Sequence[int]]) -> "CascadeSession":
        """Begin one call with a row for each prompt."""
        return CascadeSession(self, self.drafter.start(prompts), self.verifier.start(prompts))

    def start(self, prompts: Sequence[Sequence[int]]) -> "CascadeSession":
        """Begin to draft for a larger model: a cascade is a drafter."""
        return self.open_session(prompts)

    def run_round(
        self,
        rows: Sequence[Sequence[int]],
        length: int,
        sampling: Sampling,
        generators: Sequence[torch.Generator],
        draft_state: DraftState,
        verify_state: PrefixState,
    ) -> Round:
        """Draft ``length`` tokens after every row, verify, replace, and roll both states back to what is kept."""
        # Every round takes the same number of uniforms from a row: for γ drafts, γ tests, a replacement and a bonus.
        uniforms = draw_uniforms(generators, 2 * self.gamma + 2)
        peek = self.bonus == "target"
        draft = draft_state.propose(DraftRequest(rows, length, uniforms[:, : self.gamma], sampling, peek))
        block, after = self._score(rows, draft, sampling, verify_state)
        target = self.ask_rule(block)
        verdict = verify_block(target, block.draft_probs, block.tokens, uniforms[:, self.gamma : -1])
        bonus_probs = (self.ask_rule(after) if peek else after.verifier_probs)[:, 0]
        kept = [len(row) + accepted for row, accepted in zip(rows, verdict.accepted.tolist(), strict=True)]
        verify_state.rollback(kept)
        draft_state.rollback(kept)
        return Round(block, target, verdict, after, bonus_probs, draw(bonus_probs, uniforms[:, -1]), draft.calls)

    def _score(
        self, rows: Sequence[Sequence[int]], draft: Draft, sampling: Sampling, verify_state: PrefixState
    ) -> tuple[VerifyBlock, VerifyBlock]:
        """One verifier pass over the drafted block; the second block holds the position after it.

        There the drafter's distribution is known only if it was asked for; otherwise the verifier's stands in, and the
        block serves for its ``verifier_probs`` alone.
        """
        device, length = self.verifier.device, draft.tokens.shape[1]
        drafted = [[*row, *new] for row, new in zip(rows, draft.tokens.tolist(), strict=True)]
        unread, counts = pad_unread(drafted, verify_state.lengths, device)
        logits = verify_state.extend(unread, counts, keep=length + 1)
        processed = process_logits(logits, drafted, sampling)
        probs = logits_to_probs(processed, sampling, f"the verifier {self.verifier.name}")
        confidence = probs if sampling.is_plain else logits_to_probs(logits)
        draft_probs, draft_confidence = draft.probs.to(probs.device), draft.confidence.to(probs.device)
        starts = torch.tensor([[len(row)] for row in rows], device=probs.device)
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

    def ask_rule(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        """Return the rule's target, checked."""
        target = self.rule.target(block)
        if target.shape != block.draft_probs.shape:
            expected, got = tuple(block.draft_probs.shape), tuple(target.shape)
            raise ValueError(f"rule {self.rule!r}: expected a target of shape {expected}, got {got}")
        if not bool((target.amin() >= 0) & target.sum().isfinite()):
            raise ValueError(f"rule {self.rule!r}: expected a target of finite values >= 0")
        return target

    def decide(self, round_: Round) -> list[list[bool]]:
        """Return the rule's own decision a position; for a rule that states none, whether π differs from q."""
        defer_mask = getattr(self.rule, "defer_mask", None)
        block = round_.block
        mask = (round_.target != block.draft_probs).any(dim=-1) if defer_mask is None else defer_mask(block)
        decisions: list[list[bool]] = mask.tolist()
        return decisions


class CascadeSession:
    """Both models' caches for one call: writes blocks of its own, or drafts them for a larger model.

    As a drafter it hands over each token with the very law that it follows, so composition stays exact.
    """

    def __init__(self, cascade: SpeculativeCascade, draft_state: DraftState, verify_state: PrefixState) -> None:
        self._cascade = cascade
        self._draft_state, self._verify_state = draft_state, verify_state

    def step(self, rows: Sequence[Row], request: Request) -> list[list[LedgerEntry]]:
        """Write the next block of every row by one round."""
        cascade = self._cascade
        left = max(request.stopping.max_new_tokens - len(row.entries) for row in rows)
        length = min(cascade.gamma, left)
        sequences, generators = [row.tokens for row in rows], [row.generator for row in rows]
        round_ = cascade.run_round(
            sequences, length, request.sampling, generators, self._draft_state, self._verify_state
        )
        for row in rows:
            row.rounds += 1
            row.verifier_calls += 1
            row.drafted += length
            row.drafter_calls += round_.drafter_calls
        return _block_entries(round_, cascade.decide(round_), with_tv=request.ledger)

    def propose(self, request: DraftRequest) -> Draft:
        """Draft a block after every row by as many rounds of the cascade as the slowest row needs."""
        wanted = request.length + request.peek
        # Generators of its own, seeded by each row's first uniform: how many rounds the neighbours need must not
        # change what a row draws later.
        generators = [torch.Generator().manual_seed(int(u * 2**53)) for u in request.uniforms[:, 0].tolist()]
        rows, calls = [list(row) for row in request.rows], 0
        laws: list[list[Tensor]] = [[] for _ in rows]
        confidences: list[list[Tensor]] = [[] for _ in rows]
        while min(map(len, laws)) < wanted:
            round_ = self._cascade.run_round(
                rows, self._cascade.gamma, request.sampling, generators, self._draft_state, self._verify_state
            )
            calls += round_.drafter_calls + 1
            law, confidence = self._describe(round_, request.sampling)
            for index, tokens in enumerate(round_.tokens()):
                rows[index] += tokens
                laws[index] += law[index, : len(tokens)]
                confidences[index] += confidence[index, : len(tokens)]
        starts = [len(row) for row in request.rows]
        drafted = [row[start : start + request.length] for row, start in zip(rows, starts, strict=True)]
        return Draft(
            tokens=torch.tensor(drafted, device=laws[0][0].device),
            probs=torch.stack([torch.stack(law[:wanted]) for law in laws]),
            confidence=torch.stack([torch.stack(confidence[:wanted]) for confidence in confidences]),
            calls=calls,
        )

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget all but at most the first ``lengths[i]`` tokens of row i."""
        self._draft_state.rollback(lengths)
        self._verify_state.rollback([min(pair) for pair in zip(lengths, self._verify_state.lengths, strict=True)])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._draft_state.select_rows(rows)
        self._verify_state.select_rows(rows)

    def _describe(self, round_: Round, sampling: Sampling) -> tuple[Float[Tensor, "B D V"], Float[Tensor, "B D V"]]:
        """The law of every token of a round, bonus included, and the same at temperature 1 with nothing cut off."""
        law = torch.cat([emission_law(round_.target, round_.block.draft_probs), round_.bonus_probs.unsqueeze(1)], dim=1)
        if sampling.is_plain:
            return law, law
        block, after = round_.block.raw(), round_.after.raw()
        last = self._cascade.ask_rule(after) if self._cascade.bonus == "target" else after.verifier_probs
        confidence = emission_law(self._cascade.ask_rule(block), block.draft_probs)
        return law, torch.cat([confidence, last], dim=1)


def as_language_model(model: PreTrainedModel | CausalLM, vocab_size: int) -> CausalLM:
    """Adapt a Hugging Face model; pass anything else on."""
    if isinstance(model, PreTrainedModel):
        adapt = EncoderDecoderLM if model.config.is_encoder_decoder else TransformersLM
        return adapt(model, vocab_size)
    _check_vocabulary(model, vocab_size)
    return model


def _as_drafter(drafter: PreTrainedModel | Drafter, vocab_size: int) -> Drafter:
    if isinstance(drafter, PreTrainedModel):
        return ModelDrafter(as_language_model(drafter, vocab_size))
    _check_vocabulary(drafter, vocab_size)
    return drafter


def _check_vocabulary(model: CausalLM | Drafter, vocab_size: int) -> None:
    if model.vocab_size != vocab_size:
        raise ValueError(
            f"vocab_size: expected one vocabulary, {model.name} has {model.vocab_size} tokens, not {vocab_size}"
        )


def _check_decoder_start(drafter: Drafter, verifier: CausalLM) -> None:
    wanted = getattr(verifier, "decoder_start", None)
    given = getattr(drafter, "decoder_start", wanted)  # who does not say, as a look-up, drafts from rows of any kind
    if given != wanted:
        expected, got = (
            "decoder-only" if start is None else f"encoder-decoder that starts with token {start}"
            for start in (wanted, given)
        )
        raise ValueError(f"drafter {drafter.name}: expected {expected} as the verifier {verifier.name}, got {got}")


def _vocabulary(model: Any) -> int:
    if isinstance(model, PreTrainedModel):
        return vocab_rows(model)
    if not hasattr(model, "vocab_size"):
        raise ValueError(f"model: expected a transformers model, a CausalLM or a Drafter, got {type(model).__name__}")
    return int(model.vocab_size)


def _block_entries(round_: Round, deferred: list[list[bool]], with_tv: bool) -> list[list[LedgerEntry]]:
    """Each row's accepted drafts, then its residual token, or its bonus token after a full acceptance."""
    blocks = list[list[LedgerEntry]]()
    rows, length = round_.block.tokens.shape
    distances: list[list[float | None]] = round_.block.stats.tv.tolist() if with_tv else [[None] * length] * rows
    for tokens, tv, defer in zip(round_.tokens(), distances, deferred, strict=True):
        *drafted, last = tokens
        entries = [LedgerEntry(token, "drafter", defer[i], tv[i]) for i, token in enumerate(drafted)]
        at = len(drafted)
        entries.append(LedgerEntry(last, "residual", defer[at], tv[at]) if at < length else LedgerEntry(last, "bonus"))
        blocks.append(entries)
    return blocks
