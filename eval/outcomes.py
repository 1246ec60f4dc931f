"""One rule on one chunk of logged tokens: its losses, both ends of its rejection, its deferral and its diversity.

The rule's own target is the only source of truth; nothing here repeats a formula. Knows no file and no grid.
Shapes: ``N`` position, ``C`` column of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cascade.blocks import VerifyBlock
from ..cascade.verify import rejection_probability
from ..router.position_rules import Fixed
from .columns import NEGLIGIBLE, Columns

__all__ = ["OUTCOME_ROWS", "TINY", "replay_columns", "spread_of_models"]

OUTCOME_ROWS = (
    "zero_one", "sampled", "log", "rejection", "rejection_high", "deferral", "entropy", "distinctness",
)  # fmt: skip

TINY = torch.finfo(torch.float32).tiny
"""Logarithms are taken of nothing smaller."""


def replay_columns(rule: Any, columns: Columns, greedy: bool, bounds: bool) -> Tensor:
    """Return the rows of `OUTCOME_ROWS`, ``[rows, N]``, at the trace's temperature or at temperature 0.

    Args:
        rule: anything with a target.
        columns: the logged tokens.
        greedy: at temperature 0, where all three losses are that of the draw.
        bounds: work out the upper end of the rejection and the diversity too; without, the lower end and NaN.
    """
    return torch.stack(_replay_greedy(rule, columns) if greedy else _replay_sampled(rule, columns, bounds))


def spread_of_models(columns: Columns) -> Tensor:
    """Entropy and distinctness of q and of p, the tail being one token: ``[2 models, 2, N]``."""
    sides = (columns.draft, columns.draft_tail), (columns.verifier, columns.verifier_tail)
    return torch.stack([torch.stack(_spread(probs, tail)) for probs, tail in sides])


def _replay_greedy(rule: Any, columns: Columns) -> tuple[Tensor, ...]:
    """Replay at temperature 0.

    A rule that mixes q and p (Ensemble) still draws at random between two one-hot distributions: its loss at
    temperature 0 is that of the draw, not of the likelier token.
    """
    block = columns.greedy_block
    target = rule.target(block)[0]
    rejection, missed = rejection_probability(target, block.draft_probs[0]), 1 - _at_label(target, columns)
    unknown = torch.full_like(missed, float("nan"))
    return missed, missed, missed, rejection, rejection, _deferral(rule, block), unknown, unknown


def _replay_sampled(rule: Any, columns: Columns, bounds: bool) -> tuple[Tensor, ...]:
    reads_masses = getattr(rule, "reads_masses", False)
    readings = columns.mass_blocks if reads_masses else columns.sampled_blocks
    blocks = [readings[name] for name in (("apart", "overlapping") if bounds else ("apart",))]
    targets = [rule.target(block)[0] for block in blocks]
    ends = [rejection_probability(target, block.draft_probs[0]) for target, block in zip(targets, blocks, strict=True)]
    low, high = torch.stack(ends).amin(dim=0), torch.stack(ends).amax(dim=0)
    if bounds and not reads_masses and getattr(rule, "reads_confidence", True):
        low, high = _widen_undecided(rule, columns, blocks[0], targets[0], low, high)
    law = targets[0]
    at_label = _at_label(law, columns)
    missed, surprise = 1 - _argmax_correct(law, columns), -at_label.clamp_min(TINY).log()
    logged = columns.ids.shape[-1]
    unknown = torch.full_like(missed, float("nan"))
    spread = _spread(law[:, :logged], law[:, logged:].sum(dim=-1)) if bounds else (unknown, unknown)
    return missed, 1 - at_label, surprise, low, high, _deferral(rule, blocks[0]), *spread


def _widen_undecided(
    rule: Any, columns: Columns, kept: VerifyBlock, target: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    """Widen the ends where a rule would treat the tail's largest and smallest confidence differently."""
    other = rule.target(columns.sampled_blocks["faint"])[0]
    undecided = (other - target).abs().amax(dim=-1) > NEGLIGIBLE
    logged = slice(0, columns.ids.shape[-1])
    draft = kept.draft_probs[0][:, logged]
    rejected = [rejection_probability(one[:, logged], draft) for one in (target, other)]
    lower, upper = torch.stack(rejected).amin(dim=0), torch.stack(rejected).amax(dim=0) + columns.draft_tail
    return torch.where(undecided, lower, low), torch.where(undecided, upper, high)


def _deferral(rule: Any, block: VerifyBlock) -> Tensor:
    """Chance that a token drafted from q is marked by the rule, ``[N]``."""
    if isinstance(rule, Fixed):
        return rule.mask[0].float()
    if not hasattr(rule, "replaced"):
        return torch.full(block.draft_probs.shape[1:2], float("nan"))
    return torch.where(rule.replaced(block), block.draft_probs, 0.0).sum(dim=-1)[0]


def _at_label(target: Tensor, columns: Columns) -> Tensor:
    return (target[:, : columns.ids.shape[-1]] * columns.is_label).sum(dim=-1)


def _argmax_correct(target: Tensor, columns: Columns) -> Tensor:
    best = target[:, : columns.ids.shape[-1]].argmax(dim=-1, keepdim=True)
    return columns.is_label.gather(-1, best).squeeze(-1).float()


def _spread(probs: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy in nats and the chance that two draws differ, ``[N]`` each, of tokens and one tail.

    π need not sum to one where β is not β* (`Lossy`): it is normalised here.
    """
    mass = (probs.sum(dim=-1) + tail).clamp_min(TINY)
    parts, rest = probs / mass.unsqueeze(-1), tail / mass
    entropy = torch.special.entr(parts).sum(dim=-1) + torch.special.entr(rest)
    return entropy, 1 - parts.square().sum(dim=-1) - rest.square()
