"""What a rule would have done at every logged position: loss, rejection and deferral, from a trace and no model.

Position rules need the statistics alone and are replayed exactly. Token rules need q and p token by token, of which
a trace keeps the union of the two top-k. Everything outside it, the *tail*, is known by three numbers: its mass under
q, its mass under p, and its share of D_TV(p, q). The rule itself is called on a block whose last two columns stand for
the tail, split in the two extreme ways that agree with these numbers:

* ``p`` and ``q`` overlap as little as possible, or as much as possible: for any target that is a multiple of p
  on the tail, the rejection of every other split lies between (``rejection``, the lower end, and ``rejection_high``);
* the confidences of the tail are at most the k-th largest; where a rule would keep a token of that confidence but
  replace one of confidence 0, the tail is *undecided*, and both ends are widened by what it could change.

At temperature 0 only the two argmaxes matter, which the union always holds: exact again.

Knows no file and no grid. Shapes: ``N`` position, ``K`` logged token, ``C`` column of a block (K, the label, the tail).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cascade.blocks import VerifyBlock
from ..cascade.statistics import Stats
from ..cascade.verify import rejection_probability
from ..data.resampling import sum_by_prompt
from ..data.traces import TraceSplit
from .methods import check_loss

__all__ = ["Outcome", "Replay"]

Array = NDArray[np.float64]

_CHUNK = 16_384
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class Outcome:
    """What one rule does at ``N`` positions; ``rejection_high`` differs from ``rejection`` for token rules only.

    ``deferral`` is the chance that a drafted token is handed to the verifier, NaN where a rule has no such notion.
    """

    loss: Array
    rejection: Array
    rejection_high: Array
    deferral: Array


class Replay:
    """One split of a trace, ready to be asked for the outcome of any rule under any loss of `REPLAY_LOSSES`.

    Args:
        source: the positions.
        logged: the k of the trace's top-k; None if the union holds the whole vocabulary.
    """

    def __init__(self, source: TraceSplit, logged: int | None) -> None:
        if len(source) == 0:
            raise ValueError("source: expected a split with at least one position, got none")
        self.source, self.logged = source, logged
        self.correctness = source.correctness
        self.greedy_stats = source.stats.greedy()
        values, inverse = np.unique(source.prompt_index.numpy(), return_inverse=True)
        self.num_prompts = int(values.size)
        self.prompt_index: NDArray[np.int64] = inverse.astype(np.int64)
        self._known: dict[Any, Array] = {}
        self._thinned: dict[int, Replay] = {}

    def __len__(self) -> int:
        return len(self.source)

    def thin(self, positions: int) -> Replay:
        """Keep about so many positions, evenly spread: enough to search a dial, several times as fast."""
        stride = max(len(self) // positions, 1)
        if stride > 1 and stride not in self._thinned:
            self._thinned[stride] = Replay(_stride(self.source, stride), self.logged)
        return self if stride == 1 else self._thinned[stride]

    def stats(self, loss: str) -> Stats:
        """The statistics that a rule sees under ``loss``."""
        return self.greedy_stats if loss == "greedy" else self.source.stats

    def model_losses(self, loss: str) -> tuple[Tensor, Tensor]:
        """Loss ``[N]`` of the drafter's and of the verifier's own emission at each position."""
        check_loss(loss)
        correctness = self.correctness[:, 1 if loss == "sampled" else 0]
        return 1 - correctness[:, 0], 1 - correctness[:, 1]

    def outcome(self, rule: Any, loss: str, bounds: bool = True) -> Outcome:
        """Replay ``rule``; ``bounds=False`` skips the upper end of a token rule's rejection (for searching)."""
        if hasattr(rule, "defer"):
            return self.choice(rule.defer(self.stats(loss)), loss)
        check_loss(loss)
        return _pick_loss(self._token_outcomes(rule, loss == "greedy", bounds), loss)

    def choice(self, defer: Tensor, loss: str) -> Outcome:
        """Replay a choice between q and p: mask ``[N]`` of the deferred positions, of a rule or of an oracle."""
        draft_loss, verifier_loss = self.model_losses(loss)
        rejection = _array(torch.where(defer, self.stats(loss).tv, 0.0))
        return Outcome(_array(torch.where(defer, verifier_loss, draft_loss)), rejection, rejection, _array(defer))

    def sums(self, rule: Any, loss: str, bounds: bool = True) -> Array:
        """Loss, rejection, its upper end and deferral of ``rule``, summed by prompt: ``[P, 4]``.

        A token rule is replayed once for both losses at the trace's temperature, and remembered.
        """
        if hasattr(rule, "defer"):
            return self.sum_outcome(self.outcome(rule, loss, bounds))
        check_loss(loss)
        key = (rule, loss == "greedy", bounds) if isinstance(rule, Hashable) else object()
        if key not in self._known:
            outcomes = self._token_outcomes(rule, loss == "greedy", bounds)
            self._known[key] = sum_by_prompt(outcomes, self.prompt_index, self.num_prompts)
        known = self._known[key]
        return np.concatenate([known[:, [1 if loss == "sampled" else 0]], known[:, 2:]], axis=1)

    def sum_outcome(self, outcome: Outcome) -> Array:
        """Sum an outcome over the positions of each prompt: ``[P, 4]``."""
        values = np.stack([outcome.loss, outcome.rejection, outcome.rejection_high, outcome.deferral])
        return sum_by_prompt(values, self.prompt_index, self.num_prompts)

    @cached_property
    def _columns(self) -> list[_Columns]:
        """The logged tokens in order of their ids, the label among them, and what is known of the tail, in chunks."""
        columns = _Columns.from_source(self.source, self.logged)
        return [columns.slice(start, start + _CHUNK) for start in range(0, len(self), _CHUNK)]

    def _token_outcomes(self, rule: Any, greedy: bool, bounds: bool) -> Array:
        replay = _replay_greedy if greedy else _replay_sampled
        return _array(torch.cat([torch.stack(replay(rule, columns, bounds)) for columns in self._columns], dim=1))


def _pick_loss(outcomes: Array, loss: str) -> Outcome:
    return Outcome(outcomes[1 if loss == "sampled" else 0], *outcomes[2:])


def _stride(source: TraceSplit, stride: int) -> TraceSplit:
    """Take every ``stride``-th position."""
    columns = {field.name: getattr(source, field.name) for field in fields(source)}
    kept: dict[str, Any] = {name: column[::stride] for name, column in columns.items() if isinstance(column, Tensor)}
    return replace(source, stats=source.stats.select(slice(None, None, stride)), **kept)


@dataclass(frozen=True)
class _Columns:
    """Tokens ``[N, K+1]`` in order of ids (−1 pads last), their q and p, and the tail's mass, overlap and ceilings."""

    ids: Tensor
    draft: Tensor
    verifier: Tensor
    is_label: Tensor
    draft_tail: Tensor
    verifier_tail: Tensor
    distance_tail: Tensor
    draft_ceiling: Tensor
    verifier_ceiling: Tensor

    @classmethod
    def from_source(cls, source: TraceSplit, logged: int | None) -> _Columns:
        ids, draft, verifier = source.topk_ids.long(), source.topk_q.float(), source.topk_p.float()
        ceilings = [_kth_largest(probs, logged) for probs in (draft, verifier)]
        label = source.label.long().unsqueeze(-1)
        outside = ~(ids == label).any(dim=-1, keepdim=True)
        ids = torch.cat([ids, torch.where(outside, label, -1)], dim=-1)
        draft = torch.cat([draft, torch.where(outside, source.q_label.unsqueeze(-1), 0.0)], dim=-1)
        verifier = torch.cat([verifier, torch.where(outside, source.p_label.unsqueeze(-1), 0.0)], dim=-1)
        order = torch.where(ids < 0, torch.iinfo(torch.long).max, ids).argsort(dim=-1)
        ids, draft, verifier = (column.gather(-1, order) for column in (ids, draft, verifier))
        draft_tail, verifier_tail = ((1 - column.sum(dim=-1)).clamp_min(0) for column in (draft, verifier))
        logged_distance = (draft - verifier).clamp_min(0).sum(dim=-1)
        distance = torch.maximum((source.stats.tv - logged_distance).clamp_min(0), draft_tail - verifier_tail)
        empty = (draft_tail < _NEGLIGIBLE) & (verifier_tail < _NEGLIGIBLE)
        ceilings = [torch.where(empty, 0.0, ceiling) for ceiling in ceilings]
        return cls(
            ids,
            draft,
            verifier,
            ids == label,
            draft_tail,
            verifier_tail,
            torch.minimum(distance, draft_tail),
            *ceilings,
        )

    def slice(self, start: int, stop: int) -> _Columns:
        """Take some of the positions."""
        return _Columns(*(getattr(self, name)[start:stop] for name in self.__dataclass_fields__))

    @cached_property
    def sampled_blocks(self) -> dict[str, VerifyBlock]:
        """The block ``[1, N, K+3]`` under each extreme reading of the tail."""
        return {
            "apart": self._block(overlap=False, ceiling=True),
            "overlapping": self._block(overlap=True, ceiling=True),
            "faint": self._block(overlap=False, ceiling=False),
        }

    def _block(self, overlap: bool, ceiling: bool) -> VerifyBlock:
        """Build a block with one extreme split of the tail and one extreme confidence of its tokens."""
        shared = self.draft_tail - self.distance_tail if overlap else torch.zeros_like(self.draft_tail)
        more_drafted = (self.distance_tail + shared, shared)
        less_drafted = ((self.draft_tail - more_drafted[0]), (self.verifier_tail - shared).clamp_min(0))
        tails = [torch.stack(pair, dim=-1) for pair in zip(more_drafted, less_drafted, strict=True)]
        limits = [
            limit if ceiling else torch.zeros_like(limit) for limit in (self.draft_ceiling, self.verifier_ceiling)
        ]
        confident = [limit.unsqueeze(-1).expand(-1, 2) for limit in limits]
        return _make_block(
            torch.cat([self.draft, tails[0]], dim=-1),
            torch.cat([self.verifier, tails[1]], dim=-1),
            torch.cat([self.draft, confident[0]], dim=-1),
            torch.cat([self.verifier, confident[1]], dim=-1),
        )

    @cached_property
    def greedy_block(self) -> VerifyBlock:
        """The block at temperature 0: one-hot at the argmaxes, confidences as logged."""
        raw = self.sampled_blocks["apart"]
        one_hot = [_one_hot(probs, 2) for probs in (self.draft, self.verifier)]
        return _make_block(*one_hot, raw.draft_confidence[0], raw.verifier_confidence[0])


def _make_block(*distributions: Tensor) -> VerifyBlock:
    """Build a block of one sequence; its tokens are not read, so they are not searched for."""
    draft, verifier, draft_confidence, verifier_confidence = (one.unsqueeze(0) for one in distributions)
    tokens = torch.zeros(draft.shape[:2], dtype=torch.long)
    return VerifyBlock.from_probs(draft, verifier, draft_confidence, verifier_confidence, tokens)


def _replay_greedy(rule: Any, columns: _Columns, bounds: bool) -> tuple[Tensor, ...]:
    """Loss twice, rejection twice (it is exact), deferral.

    A rule that mixes q and p (Ensemble) still draws at random between two one-hot distributions: its loss at
    temperature 0 is that of the draw, not of the likelier token.
    """
    block = columns.greedy_block
    target = rule.target(block)[0]
    rejection, missed = rejection_probability(target, block.draft_probs[0]), 1 - _at_label(target, columns)
    return missed, missed, rejection, rejection, _deferral(rule, block)


def _replay_sampled(rule: Any, columns: _Columns, bounds: bool) -> tuple[Tensor, ...]:
    """0-1 loss of the argmax, loss of a sample, both ends of the rejection, deferral."""
    blocks = [columns.sampled_blocks[name] for name in (("apart", "overlapping") if bounds else ("apart",))]
    targets = [rule.target(block)[0] for block in blocks]
    ends = [rejection_probability(target, block.draft_probs[0]) for target, block in zip(targets, blocks, strict=True)]
    low, high = torch.stack(ends).amin(dim=0), torch.stack(ends).amax(dim=0)
    if bounds:
        low, high = _widen_undecided(rule, columns, blocks[0], targets[0], low, high)
    likeliest, drawn = 1 - _argmax_correct(targets[0], columns), 1 - _at_label(targets[0], columns)
    return likeliest, drawn, low, high, _deferral(rule, blocks[0])


def _widen_undecided(
    rule: Any, columns: _Columns, kept: VerifyBlock, target: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    """Widen the ends where a rule would treat the tail's largest and smallest confidence differently."""
    other = rule.target(columns.sampled_blocks["faint"])[0]
    undecided = (other - target).abs().amax(dim=-1) > _NEGLIGIBLE
    logged = slice(0, columns.ids.shape[-1])
    draft = kept.draft_probs[0][:, logged]
    rejected = [rejection_probability(one[:, logged], draft) for one in (target, other)]
    lower, upper = torch.stack(rejected).amin(dim=0), torch.stack(rejected).amax(dim=0) + columns.draft_tail
    return torch.where(undecided, lower, low), torch.where(undecided, upper, high)


def _deferral(rule: Any, block: VerifyBlock) -> Tensor:
    """Chance that a token drafted from q is marked by the rule, ``[N]``."""
    if not hasattr(rule, "replaced"):
        return torch.full(block.draft_probs.shape[1:2], float("nan"))
    return torch.where(rule.replaced(block), block.draft_probs, 0.0).sum(dim=-1)[0]


def _at_label(target: Tensor, columns: _Columns) -> Tensor:
    return (target[:, : columns.ids.shape[-1]] * columns.is_label).sum(dim=-1)


def _argmax_correct(target: Tensor, columns: _Columns) -> Tensor:
    best = target[:, : columns.ids.shape[-1]].argmax(dim=-1, keepdim=True)
    return columns.is_label.gather(-1, best).squeeze(-1).float()


def _kth_largest(probs: Tensor, logged: int | None) -> Tensor:
    if logged is None or logged > probs.shape[-1]:
        return torch.zeros(probs.shape[0])
    return probs.topk(logged, dim=-1).values[:, -1]


def _one_hot(probs: Tensor, extra: int) -> Tensor:
    best = probs.argmax(dim=-1, keepdim=True)
    return torch.nn.functional.pad(torch.zeros_like(probs).scatter_(-1, best, 1.0), (0, extra))


def _array(values: Tensor) -> Array:
    return values.double().numpy()
