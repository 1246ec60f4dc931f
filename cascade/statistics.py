"""(q, p) to one record of scalars a position: what rules, features, labels and offline sweeps all read.

Live, the scalars come from the two models' distributions, each computed once and only when asked for. Offline they
come from trace columns of the same names. No scalar depends on a drafted token: a rule that reads them depends on
the prefix alone, which is what keeps the emitted law exact.

Shapes: ``*batch`` any leading axes (``[B, T]`` in the engine, ``[N]`` in a trace), ``V`` token.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .distributions import total_variation

__all__ = ["STAT_FIELDS", "Stats"]

STAT_FIELDS: tuple[str, ...] = (
    "draft_max",
    "verifier_max",
    "draft_margin",
    "verifier_margin",
    "draft_entropy",
    "verifier_entropy",
    "verifier_at_draft",
    "draft_at_verifier",
    "argmax_agree",
    "tv_raw",
    "kl",
    "tv",
    "draft_max_processed",
    "verifier_max_processed",
    "draft_entropy_processed",
    "verifier_entropy_processed",
    "verifier_at_draft_processed",
)


class Stats:
    """Scalars of one or many positions, each a float32 tensor ``[*batch]``; frozen, computed lazily.

    Fields without a suffix read the raw confidences q°, p° (temperature 1, nothing cut off); ``tv`` and the fields
    ending in ``_processed`` read q, p, the distributions as they are sampled from. Entropies and ``kl`` are in nats.

    Args:
        draft_probs: q ``[*batch, V]``.
        verifier_probs: p ``[*batch, V]``.
        draft_confidence: q° ``[*batch, V]``.
        verifier_confidence: p° ``[*batch, V]``.
    """

    _draft_probs: Tensor
    _verifier_probs: Tensor
    _draft_confidence: Tensor
    _verifier_confidence: Tensor

    def __init__(
        self,
        draft_probs: Float[Tensor, "*batch V"],
        verifier_probs: Float[Tensor, "*batch V"],
        draft_confidence: Float[Tensor, "*batch V"],
        verifier_confidence: Float[Tensor, "*batch V"],
    ) -> None:
        self.__dict__.update(
            _draft_probs=draft_probs,
            _verifier_probs=verifier_probs,
            _draft_confidence=draft_confidence,
            _verifier_confidence=verifier_confidence,
        )

    @classmethod
    def from_columns(cls, columns: Mapping[str, Tensor]) -> "Stats":
        """Take every field of ``STAT_FIELDS`` as given: the same record, read back from a trace.

        Raises:
            ValueError: a field is missing or unknown.
        """
        missing = [name for name in STAT_FIELDS if name not in columns]
        unknown = sorted(set(columns) - set(STAT_FIELDS))
        if missing or unknown:
            raise ValueError(f"columns: expected the fields of Stats, missing {missing}, unknown {unknown}")
        stats = cls.__new__(cls)
        stats.__dict__.update({name: columns[name] for name in STAT_FIELDS})
        return stats

    @property
    def shape(self) -> torch.Size:
        """Shape of every field."""
        return self._draft_probs.shape[:-1] if "_draft_probs" in self.__dict__ else self.tv.shape

    @property
    def device(self) -> torch.device:
        """Where the fields lie."""
        return self._draft_probs.device if "_draft_probs" in self.__dict__ else self.tv.device

    def columns(self) -> dict[str, Tensor]:
        """Compute and return every field by name, in the order of ``STAT_FIELDS``."""
        return {name: getattr(self, name) for name in STAT_FIELDS}

    def select(self, index: Any) -> "Stats":
        """Take the same index of every field."""
        return Stats.from_columns({name: column[index] for name, column in self.columns().items()})

    def greedy(self) -> "Stats":
        """Return the same positions as they are at temperature 0, where q and p are one-hot at their argmax."""
        columns = self.columns()
        agree = columns["argmax_agree"]
        one, zero = torch.ones_like(agree), torch.zeros_like(agree)
        return Stats.from_columns(
            columns
            | {
                "tv": 1 - agree,
                "draft_max_processed": one,
                "verifier_max_processed": one,
                "draft_entropy_processed": zero,
                "verifier_entropy_processed": zero,
                "verifier_at_draft_processed": agree,
            }
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Stats is frozen: cannot set {name!r}")

    def __repr__(self) -> str:
        known = [name for name in STAT_FIELDS if name in self.__dict__]
        return f"Stats(computed: {', '.join(known) or 'nothing yet'})"

    @property
    def _is_plain(self) -> bool:
        """Whether processed and raw distributions are the same tensors, so that nothing need be computed twice."""
        return self._draft_probs is self._draft_confidence and self._verifier_probs is self._verifier_confidence

    @cached_property
    def _draft_argmax(self) -> Int[Tensor, "*batch 1"]:
        return self._draft_confidence.argmax(dim=-1, keepdim=True)

    @cached_property
    def _verifier_argmax(self) -> Int[Tensor, "*batch 1"]:
        return self._verifier_confidence.argmax(dim=-1, keepdim=True)

    @cached_property
    def draft_max(self) -> Float[Tensor, "*batch"]:
        """Largest q°."""
        return self._draft_confidence.amax(dim=-1)

    @cached_property
    def verifier_max(self) -> Float[Tensor, "*batch"]:
        """Largest p°."""
        return self._verifier_confidence.amax(dim=-1)

    @cached_property
    def draft_margin(self) -> Float[Tensor, "*batch"]:
        """Largest minus second largest q°."""
        return _margin(self._draft_confidence)

    @cached_property
    def verifier_margin(self) -> Float[Tensor, "*batch"]:
        """Largest minus second largest p°."""
        return _margin(self._verifier_confidence)

    @cached_property
    def draft_entropy(self) -> Float[Tensor, "*batch"]:
        """Entropy of q°, nats."""
        return _entropy(self._draft_confidence)

    @cached_property
    def verifier_entropy(self) -> Float[Tensor, "*batch"]:
        """Entropy of p°, nats."""
        return _entropy(self._verifier_confidence)

    @cached_property
    def verifier_at_draft(self) -> Float[Tensor, "*batch"]:
        """p° at the argmax of q°: the verifier's opinion of the drafter's choice."""
        return self._verifier_confidence.gather(-1, self._draft_argmax).squeeze(-1)

    @cached_property
    def draft_at_verifier(self) -> Float[Tensor, "*batch"]:
        """q° at the argmax of p°."""
        return self._draft_confidence.gather(-1, self._verifier_argmax).squeeze(-1)

    @cached_property
    def argmax_agree(self) -> Float[Tensor, "*batch"]:
        """1 where both models prefer the same token, else 0."""
        return (self._draft_argmax == self._verifier_argmax).squeeze(-1).float()

    @cached_property
    def tv_raw(self) -> Float[Tensor, "*batch"]:
        """D_TV(p°, q°)."""
        return total_variation(self._verifier_confidence, self._draft_confidence)

    @cached_property
    def kl(self) -> Float[Tensor, "*batch"]:
        """KL(p° ‖ q°), nats; q° is floored at the smallest normal float32 so that the value stays finite."""
        smallest = torch.finfo(torch.float32).tiny
        cross_entropy = -(self._verifier_confidence * self._draft_confidence.clamp_min(smallest).log()).sum(dim=-1)
        return (cross_entropy - self.verifier_entropy).clamp_min(0)

    @cached_property
    def tv(self) -> Float[Tensor, "*batch"]:
        """D_TV(p, q): the rejection rate of a deferred position."""
        return self.tv_raw if self._is_plain else total_variation(self._verifier_probs, self._draft_probs)

    @cached_property
    def draft_max_processed(self) -> Float[Tensor, "*batch"]:
        """Largest q."""
        return self.draft_max if self._is_plain else self._draft_probs.amax(dim=-1)

    @cached_property
    def verifier_max_processed(self) -> Float[Tensor, "*batch"]:
        """Largest p."""
        return self.verifier_max if self._is_plain else self._verifier_probs.amax(dim=-1)

    @cached_property
    def draft_entropy_processed(self) -> Float[Tensor, "*batch"]:
        """Entropy of q, nats."""
        return self.draft_entropy if self._is_plain else _entropy(self._draft_probs)

    @cached_property
    def verifier_entropy_processed(self) -> Float[Tensor, "*batch"]:
        """Entropy of p, nats."""
        return self.verifier_entropy if self._is_plain else _entropy(self._verifier_probs)

    @cached_property
    def verifier_at_draft_processed(self) -> Float[Tensor, "*batch"]:
        """p at the argmax of q."""
        return (
            self.verifier_at_draft
            if self._is_plain
            else self._verifier_probs.gather(-1, self._draft_probs.argmax(dim=-1, keepdim=True)).squeeze(-1)
        )


def _margin(probs: Tensor) -> Tensor:
    top_two = probs.topk(min(2, probs.shape[-1]), dim=-1).values
    return top_two[..., 0] - top_two[..., 1] if top_two.shape[-1] == 2 else top_two[..., 0]


def _entropy(probs: Tensor) -> Tensor:
    smallest = torch.finfo(torch.float32).tiny  # twice as fast as xlogy, and equal: 0 · log(tiny) is 0
    return -(probs * probs.clamp_min(smallest).log()).sum(dim=-1).clamp_max(0)
