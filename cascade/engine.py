"""The decoding loop: draft with the small model, verify against a rule's target with the large one.

Knows no rule by name, no tokenizer and no file. One round: draft γ tokens a row, score them in one verifier pass, ask
the rule for π, accept and replace row by row, roll both caches back to each row's last kept token. The law of every
emitted token is π; a bonus token after a fully accepted block follows p (``bonus="verifier"``, the paper) or π
(``bonus="target"``). Source: Narasimhan et al., ICLR 2025, Algorithms 4 and 5.

Shapes: ``B`` row, ``L`` tokens of a prompt, ``T`` drafted tokens, ``V`` token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from .blocks import TargetRule, VerifyBlock, pick_states
from .checks import check_count
from .distributions import Sampling, draw, draw_uniforms
from .drafters import Draft, Drafter, DraftRequest, DraftState, ModelDrafter
from .forms import Distribution, Whole, view_sides
from .memory import Memory, RememberingRule, context_of
from .models import CausalLM, PrefixState
from .pace import AdaptiveGamma, Pacer
from .pair import PairLoop, PairState, Scored, score
from .requests import Request, Row
from .results import LedgerEntry
from .targets import Target, check_hidden, check_rule, read_target
from .verify import emission_law, judge

__all__ = ["Round", "RoundObserver", "SpeculativeCascade"]


@dataclass(frozen=True)
class Round:
    """What one round did: the block, π, how much of each row was accepted, and the token that ended each row.

    ``after`` is the position behind each row's drafted tokens; its drafter side is known only with ``bonus="target"``.
    """

    block: VerifyBlock
    target: Target
    lengths: list[int]
    accepted: list[int]
    last: list[int]
    after: VerifyBlock
    drafter_calls: list[int]

    def tokens(self) -> list[list[int]]:
        """Each row's accepted drafts, then its residual token, or its bonus token after a full acceptance."""
        rows = zip(self.block.tokens.tolist(), self.accepted, self.last, strict=True)
        return [[*tokens[:accepted], last] for tokens, accepted, last in rows]


@runtime_checkable
class RoundObserver(Protocol):
    """Whoever looks on while a cascade generates; what it is shown stays as it is."""

    def observe(self, round_: Round, rows: Sequence[int], kept: Sequence[int]) -> None:
        """Take note of one round.

        Args:
            round_: what was drafted, decided and accepted.
            rows: which prompt of the call each row of the block belongs to; rows that have ended are gone.
            kept: how many of each row's ``round_.tokens()`` stay; the rest stands behind the end of the sequence.
        """
        ...


class SpeculativeCascade(PairLoop):
    """Two models and a rule: tokens whose law is the rule's target π.

    Args:
        drafter: a Hugging Face model or any `Drafter`; two encoder-decoders (T5 family), or neither.
        verifier: a Hugging Face model or any `CausalLM`.
        rule: anything with ``target(block) -> [B, T, V]``, such as ``rules.OPT(alpha=0.3)`` or a `LearnedRouter`. With
            ``needs_hidden = True`` it is also shown both models' hidden states.
        gamma: tokens drafted per block, or an `AdaptiveGamma`, which stops a block when the next token would not pay.
        bonus: where the token after a fully accepted block comes from: the ``"verifier"`` (p) or the ``"target"`` (π,
            at the price of one more drafter step a block).
        vocab_size: number of token ids that both models share and may emit; default: the smaller head.
        observer: is shown every round of ``generate``; not those that the cascade drafts for a larger model.

    Raises:
        ValueError: an argument out of range, a model that cannot be run exactly (recurrent, an encoder-decoder with
            absolute positions), an encoder-decoder beside a decoder-only model, a rule with a ``context`` that does not
            say what to remember, or one that needs the hidden states of a drafter that has none (a look-up, a cascade).
    """

    def __init__(
        self,
        drafter: PreTrainedModel | Drafter,
        verifier: PreTrainedModel | CausalLM,
        rule: TargetRule,
        gamma: int | AdaptiveGamma = 5,
        bonus: Literal["verifier", "target"] = "verifier",
        vocab_size: int | None = None,
        observer: RoundObserver | None = None,
    ) -> None:
        if not isinstance(gamma, AdaptiveGamma):
            check_count("gamma", gamma)
        if bonus not in ("verifier", "target"):
            raise ValueError(f"bonus: expected 'verifier' or 'target', got {bonus!r}")
        check_rule(rule)
        context_of(rule)
        super().__init__(drafter, verifier, vocab_size)
        if isinstance(gamma, AdaptiveGamma) and not isinstance(self.drafter, ModelDrafter):
            raise ValueError(f"gamma: AdaptiveGamma needs a model that drafts token by token, not {self.drafter.name}")
        self.rule = rule
        self.needs_hidden = check_hidden(rule, self.drafter, self.verifier)
        self.pace = gamma if isinstance(gamma, AdaptiveGamma) else None
        self.gamma = gamma.maximum if isinstance(gamma, AdaptiveGamma) else gamma
        self.bonus = bonus
        self.observer = observer

    @property
    def name(self) -> str:
        """How the cascade is called where it drafts for a larger model."""
        return f"{self.drafter.name} → {self.verifier.name}"

    def open_session(self, prompts: Sequence[Sequence[int]]) -> "CascadeSession":
        """Begin one call with a row for each prompt."""
        pacer = None if self.pace is None else Pacer(self.pace, len(prompts), self.rule)
        return CascadeSession(self, PairState(self, prompts), self._open_memory(), pacer, self.observer)

    def start(self, prompts: Sequence[Sequence[int]]) -> "CascadeSession":
        """Begin to draft for a larger model: a cascade is a drafter.

        Raises:
            ValueError: its block length is adaptive: how many rounds a draft takes would then teach a row's pace.
        """
        if self.pace is not None:
            raise ValueError(f"drafter {self.name}: expected a fixed gamma where a cascade drafts, got {self.pace!r}")
        return CascadeSession(self, PairState(self, prompts), self._open_memory())

    def _open_memory(self) -> Memory | None:
        return Memory(cast(RememberingRule, self.rule)) if context_of(self.rule) else None

    def run_round(
        self,
        rows: Sequence[Sequence[int]],
        limits: Sequence[int],
        sampling: Sampling,
        generators: Sequence[torch.Generator],
        draft_state: DraftState,
        verify_state: PrefixState,
        pacer: Pacer | None = None,
        memory: Memory | None = None,
    ) -> Round:
        """Draft up to ``limits[i]`` tokens after row i, verify, replace, and roll both states back to what is kept."""
        # Every round takes the same number of uniforms from a row: for γ drafts, γ tests, a replacement and a bonus.
        uniforms = draw_uniforms(generators, 2 * self.gamma + 2)
        peek = self.bonus == "target"
        draft = draft_state.propose(
            DraftRequest(rows, limits, uniforms[:, : self.gamma], sampling, peek, pacer, self.needs_hidden)
        )
        block, after = self._score(rows, draft, sampling, verify_state)
        lengths = list(draft.lengths)
        ends = torch.tensor(lengths, device=block.tokens.device)
        if memory is not None:
            block, after = memory.join(block, after, ends, peek)
        target = read_target(self.rule, block)
        accepted, excess = judge(target, block.draft, block.tokens, uniforms[:, self.gamma : -2], ends)
        last = self._draw_last(accepted == ends, excess, after, uniforms[:, -2:])
        round_ = Round(block, target, lengths, accepted.tolist(), last.tolist(), after, list(draft.calls))
        kept = [len(row) + count for row, count in zip(rows, round_.accepted, strict=True)]
        verify_state.rollback(kept)
        draft_state.rollback(kept)
        if memory is not None:
            memory.keep(block, after, accepted, ends)
        if pacer is not None:
            pacer.learn(round_.accepted, lengths)
        return round_

    def _score(
        self, rows: Sequence[Sequence[int]], draft: Draft, sampling: Sampling, verify_state: PrefixState
    ) -> tuple[VerifyBlock, VerifyBlock]:
        """One verifier pass over the drafted block; the second block holds the position after each row's tokens.

        There the drafter's distribution is known only if it was asked for; otherwise the verifier's stands in, and the
        block serves for its ``verifier`` alone.
        """
        length, drafted = draft.tokens.shape[1], draft.tokens.tolist()
        read = [[*row, *new] for row, new in zip(rows, drafted, strict=True)]
        scored = score(self.verifier, verify_state, read, sampling, length + 1, "verifier", self.needs_hidden)
        draft = draft.to(self.verifier.device)
        starts = torch.tensor([[len(row)] for row in rows], device=self.verifier.device)
        block = VerifyBlock(
            *view_sides(draft.law, draft.raw, lambda side: side.first(length)),
            *view_sides(scored.law, scored.raw, lambda side: side.first(length)),
            tokens=draft.tokens,
            positions=starts + torch.arange(length, device=starts.device),
            draft_hidden=None if draft.hidden is None else draft.hidden[:, :length],
            verifier_hidden=None if scored.hidden is None else scored.hidden[:, :length],
        )
        return block, _position_after(draft, scored, starts)

    def _draw_last(
        self, full: Bool[Tensor, "B"], excess: Tensor | None, after: VerifyBlock, uniforms: Float[Tensor, "B 2"]
    ) -> Int[Tensor, "B"]:
        """Draw each row's residual token, or its bonus token where its whole block was accepted."""
        uniforms = uniforms.to(full.device)
        if excess is None:
            return self.bonus_law(after).sample(uniforms[:, 1:])[:, 0]
        if not bool(full.any()):
            return draw(excess, uniforms[:, 0])
        weights = torch.where(full.unsqueeze(1), self.bonus_law(after).dense[:, 0], excess)
        return draw(weights, torch.where(full, uniforms[:, 1], uniforms[:, 0]))

    def bonus_law(self, after: VerifyBlock) -> Distribution:
        """What the token after a fully accepted block follows: p, or what any drafted position does (π, if Σπ = 1)."""
        if self.bonus == "verifier":
            return after.verifier
        return Whole(emission_law(read_target(self.rule, after).dense(), after.draft_probs))


class CascadeSession:
    """Both models' caches for one call: writes blocks of its own, or drafts them for a larger model.

    As a drafter it hands over each token with the very law that it follows, so composition stays exact.
    """

    def __init__(
        self,
        cascade: SpeculativeCascade,
        state: PairState,
        memory: Memory | None = None,
        pacer: Pacer | None = None,
        observer: RoundObserver | None = None,
    ) -> None:
        self._cascade, self._state, self._pacer, self._observer = cascade, state, pacer, observer
        self._memory = memory
        self._prompts = list(range(len(state.verifying.lengths)))  # which prompt each row belongs to

    def step(self, rows: Sequence[Row], request: Request) -> list[list[LedgerEntry]]:
        """Write the next block of every row by one round."""
        cascade = self._cascade
        limits = [min(cascade.gamma, request.stopping.max_new_tokens - len(row.entries)) for row in rows]
        sequences, generators = [row.tokens for row in rows], [row.generator for row in rows]
        round_ = self._run_round(sequences, limits, request.sampling, generators)
        for row, drafted, calls in zip(rows, round_.lengths, round_.drafter_calls, strict=True):
            row.rounds += 1
            row.verifier_calls += 1
            row.drafted += drafted
            row.drafter_calls += calls
        if self._observer is not None:
            written = [[entry.token for entry in row.entries] for row in rows]
            kept = [request.stopping.keep(*pair)[0] for pair in zip(written, round_.tokens(), strict=True)]
            self._observer.observe(round_, self._prompts, kept)
        return _block_entries(round_, with_tv=request.ledger)

    def propose(self, request: DraftRequest) -> Draft:
        """Draft a block after every row by as many rounds of the cascade as the slowest row needs."""
        wanted = request.length + request.peek
        # Generators of its own, seeded by each row's first uniform: how many rounds the neighbours need must not
        # change what a row draws later.
        generators = [torch.Generator().manual_seed(int(u * 2**53)) for u in request.uniforms[:, 0].tolist()]
        rows, calls = [list(row) for row in request.rows], [0] * len(request.rows)
        limits = [self._cascade.gamma] * len(rows)
        laws: list[list[Tensor]] = [[] for _ in rows]
        confidences: list[list[Tensor]] = [[] for _ in rows]
        while min(map(len, laws)) < wanted:
            round_ = self._run_round(rows, limits, request.sampling, generators)
            law, confidence = self._describe(round_, request.sampling)
            for index, tokens in enumerate(round_.tokens()):
                if len(laws[index]) < request.limits[index] + request.peek:  # else only its neighbours asked for it
                    calls[index] += round_.drafter_calls[index] + 1
                rows[index] += tokens
                laws[index] += law[index, : len(tokens)]
                confidences[index] += confidence[index, : len(tokens)]
        starts = [len(row) for row in request.rows]
        if self._memory is not None:  # what lies behind a row's own draft is known only where a neighbour asked for it
            self._memory.forget([n + limit + request.peek for n, limit in zip(starts, request.limits, strict=True)])
        drafted = [row[start : start + request.length] for row, start in zip(rows, starts, strict=True)]
        emitted = Whole(torch.stack([torch.stack(steps[:wanted]) for steps in laws]))
        raw = emitted
        if not request.sampling.is_plain:
            raw = Whole(torch.stack([torch.stack(steps[:wanted]) for steps in confidences]))
        return Draft(torch.tensor(drafted, device=emitted.device), emitted, raw, calls, request.limits)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget all but at most the first ``lengths[i]`` tokens of row i."""
        self._state.rollback(lengths)
        if self._memory is not None:  # the position after the last token kept stands on kept tokens alone
            self._memory.forget([length + 1 for length in lengths])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._prompts = [self._prompts[row] for row in rows]
        self._state.select_rows(rows)
        if self._memory is not None:
            self._memory.select_rows(rows)
        if self._pacer is not None:
            self._pacer.select_rows(rows)

    def _run_round(
        self,
        rows: Sequence[Sequence[int]],
        limits: Sequence[int],
        sampling: Sampling,
        generators: Sequence[torch.Generator],
    ) -> Round:
        return self._cascade.run_round(
            rows,
            limits,
            sampling,
            generators,
            self._state.drafting,
            self._state.verifying,
            self._pacer,
            self._memory,
        )

    def _describe(self, round_: Round, sampling: Sampling) -> tuple[Float[Tensor, "B D V"], Float[Tensor, "B D V"]]:
        """The law of every token of a round, bonus included, and the same at temperature 1 with nothing cut off."""
        law = self._emitted(round_.target, round_.block, round_.after)
        if sampling.is_plain:
            return law, law
        block = round_.block.raw()
        return law, self._emitted(read_target(self._cascade.rule, block), block, round_.after.raw())

    def _emitted(self, target: Target, block: VerifyBlock, after: VerifyBlock) -> Float[Tensor, "B D V"]:
        law = emission_law(target.dense(), block.draft_probs)
        return torch.cat([law, self._cascade.bonus_law(after).dense], dim=1)


def _position_after(draft: Draft, scored: Scored, starts: Int[Tensor, "B 1"]) -> VerifyBlock:
    """The position after each row's drafted tokens, as a block of ``[B, 1]``."""
    ends = torch.tensor(list(draft.lengths), device=starts.device)
    p, p_raw = view_sides(scored.law, scored.raw, lambda side: side.pick(ends))
    q, q_raw, draft_hidden = p, p_raw, None
    if draft.law.shape[1] > draft.tokens.shape[1]:
        q, q_raw = view_sides(draft.law, draft.raw, lambda side: side.pick(ends))
        draft_hidden = pick_states(draft.hidden, ends)
    return VerifyBlock(
        q,
        q_raw,
        p,
        p_raw,
        tokens=torch.zeros_like(starts),
        positions=starts + ends.unsqueeze(1),
        draft_hidden=draft_hidden,
        verifier_hidden=pick_states(scored.hidden, ends),
    )


def _block_entries(round_: Round, with_tv: bool) -> list[list[LedgerEntry]]:
    """Each row's accepted drafts, then its residual token, or its bonus token after a full acceptance."""
    blocks = list[list[LedgerEntry]]()
    rows, length = round_.block.tokens.shape
    distances: list[list[float | None]] = round_.block.stats.tv.tolist() if with_tv else [[None] * length] * rows
    decisions: list[list[bool]] = round_.target.deferred.tolist()
    for tokens, drafted, tv, defer in zip(round_.tokens(), round_.lengths, distances, decisions, strict=True):
        *accepted, last = tokens
        entries = [LedgerEntry(token, "drafter", defer[i], tv[i]) for i, token in enumerate(accepted)]
        at = len(accepted)
        entries.append(LedgerEntry(last, "residual", defer[at], tv[at]) if at < drafted else LedgerEntry(last, "bonus"))
        blocks.append(entries)
    return blocks
