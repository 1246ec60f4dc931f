"""The logged tokens of many positions as blocks that any rule can be called on, the unlogged tail in its extremes.

A trace keeps the union of the two top-k. Everything outside it, the *tail*, is known by three numbers: its mass under
q, its mass under p, and its share of D_TV(p, q). A block's last two columns stand for it, split in the two extreme
ways that agree with these numbers (`apart`, `overlapping`), with the largest confidence that one of its tokens can
have, or none (`faint`). What a trained token-level router believes takes the place of the verifier's confidences in
the same blocks: what is emitted stays p.

Knows no rule, loss or file. Shapes: ``N`` position, ``K`` logged token, ``C`` column of a block (K, the label, the
tail twice).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..cascade.blocks import VerifyBlock
from ..cascade.statistics import Stats
from ..data.traces import TraceSplit

__all__ = ["NEGLIGIBLE", "Columns"]

NEGLIGIBLE = 1e-6
"""A tail of less mass under both models holds nothing that could matter."""

_OPINION_FIELDS = (
    "verifier_max", "verifier_margin", "verifier_entropy", "verifier_at_draft", "draft_at_verifier", "argmax_agree",
    "tv_raw", "kl",
)  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """Tokens ``[N, K+1]`` in order of ids (−1 pads last), the label among them, and what is known of the tail.

    Args:
        ids: token ids.
        draft: q.
        verifier: p.
        is_label: bool; one True a row.
        label_unlogged: ``[N, 1]`` bool, whether the label was added to what the trace holds.
        draft_tail: q of the tail ``[N]``.
        verifier_tail: p of the tail ``[N]``.
        distance_tail: how far q exceeds p on the tail ``[N]``.
        draft_ceiling: the largest q° that a token of the tail can have ``[N]``.
        verifier_ceiling: the largest p°, or confidence in its place ``[N]``.
        opinion: what rules read as p° ``[N, K+1]``: p, or the belief of a router.
        opinion_tail: its mass on the tail ``[N]``.
        logged: ids, q and p ``[N, K]`` as the trace holds them, without a label that was not among them.
    """

    ids: Tensor
    draft: Tensor
    verifier: Tensor
    is_label: Tensor
    label_unlogged: Tensor
    draft_tail: Tensor
    verifier_tail: Tensor
    distance_tail: Tensor
    draft_ceiling: Tensor
    verifier_ceiling: Tensor
    opinion: Tensor
    opinion_tail: Tensor
    logged: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def from_source(cls, source: TraceSplit, logged: int | None, part: slice = slice(None)) -> Columns:
        """Read the positions ``part`` of a split whose union is that of the two top-``logged`` (None: every token)."""
        held = source.topk_ids[part].long(), source.topk_q[part].float(), source.topk_p[part].float()
        ids, draft, verifier = held
        ceilings = [_kth_largest(probs, logged) for probs in (draft, verifier)]
        label = source.label[part].long().unsqueeze(-1)
        outside = ~(ids == label).any(dim=-1, keepdim=True)
        order, ids = _place_label(ids, label, outside)
        missing = [torch.where(outside, one[part].unsqueeze(-1), 0.0) for one in (source.q_label, source.p_label)]
        draft, verifier = (
            torch.cat(pair, dim=-1).gather(-1, order) for pair in zip((draft, verifier), missing, strict=True)
        )
        draft_tail, verifier_tail = ((1 - column.sum(dim=-1)).clamp_min(0) for column in (draft, verifier))
        logged_distance = (draft - verifier).clamp_min(0).sum(dim=-1)
        distance = torch.maximum((source.stats.tv[part] - logged_distance).clamp_min(0), draft_tail - verifier_tail)
        empty = (draft_tail < NEGLIGIBLE) & (verifier_tail < NEGLIGIBLE)
        tails = (draft_tail, verifier_tail)  # no token of the tail has more than the whole of it
        limits = [torch.where(empty, 0.0, torch.minimum(*pair)) for pair in zip(ceilings, tails, strict=True)]
        return cls(
            ids,
            draft,
            verifier,
            ids == label,
            outside,
            draft_tail,
            verifier_tail,
            torch.minimum(distance, draft_tail),
            draft_ceiling=limits[0],
            verifier_ceiling=limits[1],
            opinion=verifier,
            opinion_tail=verifier_tail,
            logged=held,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def forget_blocks(self) -> None:
        """Let go of the blocks, which hold several times as much as the columns."""
        for name in ("sampled_blocks", "mass_blocks", "greedy_block"):
            vars(self).pop(name, None)

    @cached_property
    def sampled_blocks(self) -> dict[str, VerifyBlock]:
        """The block ``[1, N, K+3]`` under each extreme reading of the tail: two splits, and one without confidence."""
        return {
            "apart": self._block(overlap=False, ceiling=True),
            "overlapping": self._block(overlap=True, ceiling=True),
            "faint": self._block(overlap=False, ceiling=False),
        }

    @cached_property
    def mass_blocks(self) -> dict[str, VerifyBlock]:
        """The same splits for rules that read p° as masses: in the tail it is the mass, not a token's confidence.

        What such a rule rejects under another split may lie a little outside of both: by a tenth of the tail or so.
        """
        return {name: self._mass_block(overlap) for name, overlap in (("apart", False), ("overlapping", True))}

    @cached_property
    def greedy_block(self) -> VerifyBlock:
        """The block at temperature 0: one-hot at the argmaxes, confidences as they are."""
        one_hot = [_one_hot(probs, 2) for probs in (self.draft, self.verifier)]
        confident = self._confidences(ceiling=True)
        return _make_block(*one_hot, *confident)

    def _block(self, overlap: bool, ceiling: bool) -> VerifyBlock:
        """Build a block with one extreme split of the tail and one extreme confidence of its tokens."""
        draft_tails, verifier_tails = self._split_tail(overlap)
        return _make_block(
            torch.cat([self.draft, draft_tails], dim=-1),
            torch.cat([self.verifier, verifier_tails], dim=-1),
            *self._confidences(ceiling),
        )

    def _mass_block(self, overlap: bool) -> VerifyBlock:
        draft_tails, verifier_tails = self._split_tail(overlap)
        draft = torch.cat([self.draft, draft_tails], dim=-1)
        verifier = torch.cat([self.verifier, verifier_tails], dim=-1)
        if self.opinion is self.verifier:
            return _make_block(draft, verifier, None, None)
        share = verifier_tails / self.verifier_tail.unsqueeze(-1).clamp_min(torch.finfo(torch.float32).tiny)
        return _make_block(
            draft, verifier, None, torch.cat([self.opinion, share * self.opinion_tail.unsqueeze(-1)], dim=-1)
        )

    def _split_tail(self, overlap: bool) -> tuple[Tensor, Tensor]:
        """q and p ``[N, 2]`` of the two columns that stand for the tail."""
        shared = self.draft_tail - self.distance_tail if overlap else torch.zeros_like(self.draft_tail)
        first = self.distance_tail + shared
        drafts = torch.stack([first, self.draft_tail - first], dim=-1)
        return drafts, torch.stack([shared, (self.verifier_tail - shared).clamp_min(0)], dim=-1)

    def _confidences(self, ceiling: bool) -> list[Tensor]:
        sides = (self.draft, self.draft_ceiling), (self.opinion, self.verifier_ceiling)
        return [
            torch.cat([probs, (limit if ceiling else torch.zeros_like(limit)).unsqueeze(-1).expand(-1, 2)], dim=-1)
            for probs, limit in sides
        ]

    def believing(self, router: Any, stats: Stats) -> Columns:
        """Put what a token-level router believes in the place of the verifier's confidences.

        The belief is asked for on the logged tokens alone: a label that is none of them must not be seen. Such a label
        gets its share of the believed tail, in proportion to p, and so does the largest token that the tail can hold.

        Args:
            router: has ``belief_over(draft [N, K], verifier [N, K], tokens [N, K], stats) -> (belief, tail [N])``.
            stats: of these positions.
        """
        ids, draft, verifier = self.logged
        belief, tail = router.belief_over(draft, verifier, ids, stats)
        unlogged = (1 - verifier.sum(dim=-1)).clamp_min(0)
        scale = torch.where(unlogged > NEGLIGIBLE, tail / unlogged.clamp_min(NEGLIGIBLE), 0.0)
        label = self.ids.gather(-1, self.is_label.int().argmax(dim=-1, keepdim=True))
        order, _ = _place_label(ids, label, self.label_unlogged)
        p_label = (self.verifier * self.is_label).sum(dim=-1)
        at_label = torch.where(self.label_unlogged[:, 0], torch.minimum(p_label * scale, tail), 0.0)
        left = (tail - at_label).clamp_min(0)
        opinion = torch.cat([belief, at_label.unsqueeze(-1)], dim=-1).gather(-1, order)
        ceiling = torch.minimum(self.verifier_ceiling * scale, left)
        return replace(self, opinion=opinion, verifier_ceiling=ceiling, opinion_tail=left)

    def believed_stats(self, logged: Stats, greedy: bool) -> Stats:
        """The record of these positions in which the opinion stands for the verifier's confidences.

        Everything that reads q and p as they are sampled from, D_TV(p, q) above all, stays as logged; so does what
        reads the drafter alone. The gains are those of the tokens that q and p emit, as the opinion sees them.
        """
        block, columns = self.sampled_blocks["apart"], logged.columns()
        believed = {
            name: getattr(block.stats, name)[0] if name in _OPINION_FIELDS else column
            for name, column in columns.items()
        }
        gain = self._argmax_gain if greedy else self._expected_gain
        return Stats.from_columns(believed, gain=gain, argmax_gain=self._argmax_gain)

    def _expected_gain(self) -> Tensor:
        seen = ~(self.is_label & self.label_unlogged)
        return (seen * self.opinion * (self.verifier - self.draft)).sum(dim=-1)

    def _argmax_gain(self) -> Tensor:
        ours, theirs = (
            self.opinion.gather(-1, side.argmax(dim=-1, keepdim=True))[:, 0] for side in (self.verifier, self.draft)
        )
        return ours - theirs


def _place_label(ids: Tensor, label: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Add a label that is none of ``ids`` ``[N, K]``: how to order the ``[N, K+1]`` columns by id, and these ids."""
    ids = torch.cat([ids, torch.where(outside, label, -1)], dim=-1)
    order = torch.where(ids < 0, torch.iinfo(torch.long).max, ids).argsort(dim=-1)
    return order, ids.gather(-1, order)


def _make_block(*distributions: Tensor | None) -> VerifyBlock:
    """Build a block of one sequence; its tokens are not read, so they are not searched for."""
    draft, verifier, draft_confidence, verifier_confidence = (
        None if one is None else one.unsqueeze(0) for one in distributions
    )
    assert draft is not None and verifier is not None, "a block needs q and p"
    tokens = torch.zeros(draft.shape[:2], dtype=torch.long)
    return VerifyBlock.from_probs(draft, verifier, draft_confidence, verifier_confidence, tokens)


def _kth_largest(probs: Tensor, logged: int | None) -> Tensor:
    if logged is None or logged > probs.shape[-1]:
        return torch.zeros(probs.shape[0])
    return probs.topk(logged, dim=-1).values[:, -1]


def _one_hot(probs: Tensor, extra: int) -> Tensor:
    best = probs.argmax(dim=-1, keepdim=True)
    return torch.nn.functional.pad(torch.zeros_like(probs).scatter_(-1, best, 1.0), (0, extra))
