"""(q, p) to one record of scalars a position: what rules, features, labels and offline sweeps all read.

Live, the scalars come from the two models' distributions, each computed once and only when asked for. Offline they
come from trace columns of the same names. Beside the scalars stand two richer views of a position, for whoever asks:
both models' most probable tokens, and their hidden states. Nothing here depends on a drafted token: a rule that reads
it depends on the prefix alone, which is what keeps the emitted law exact.

Shapes: ``*batch`` any leading axes (``[B, T]`` in the engine, ``[N]`` in a trace), ``V`` token, ``H`` hidden state.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .checks import check_count
from .closeness import distance, overlap
from .forms import Distribution, as_distribution, cross_entropy
from .leading import Leading, find_leading

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
        draft_probs: q ``[*batch, V]``, as a tensor or in any form of `speccascade.cascade.forms`.
        verifier_probs: p, likewise.
        draft_confidence: q°, likewise.
        verifier_confidence: p°, likewise.
        hidden: what each model's output head read to predict the token, ``[*batch, H]`` of either model, float32 or
            float16; None where it is not known.
    """

    _draft: Distribution
    _verifier: Distribution
    _draft_raw: Distribution
    _verifier_raw: Distribution
    _leading: dict[int, Leading]
    _find_leading: Callable[[int], Leading] | None
    _find_gain: Callable[[], Tensor] | None
    _find_argmax_gain: Callable[[], Tensor] | None
    _hidden: tuple[Tensor, Tensor] | None

    def __init__(
        self,
        draft_probs: Tensor | Distribution,
        verifier_probs: Tensor | Distribution,
        draft_confidence: Tensor | Distribution,
        verifier_confidence: Tensor | Distribution,
        hidden: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        draft, verifier = as_distribution(draft_probs), as_distribution(verifier_probs)
        self.__dict__.update(
            _draft=draft,
            _verifier=verifier,
            _draft_raw=draft if draft_confidence is draft_probs else as_distribution(draft_confidence),
            _verifier_raw=verifier if verifier_confidence is verifier_probs else as_distribution(verifier_confidence),
            _leading={},
            _hidden=hidden,
        )

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Tensor],
        leading: Callable[[int], Leading] | None = None,
        hidden: tuple[Tensor, Tensor] | None = None,
        gain: Callable[[], Tensor] | None = None,
        argmax_gain: Callable[[], Tensor] | None = None,
    ) -> "Stats":
        """Take every field of ``STAT_FIELDS`` as given: the same record, read back from a trace.

        Args:
            columns: every field by name ``[*batch]``.
            leading: answers `leading` for any K, once each; None where that is not known.
            hidden: both models' hidden states ``[*batch, H]``; None where they are not known.
            gain: answers `expected_gain` ``[*batch]``, once; None where that is not known.
            argmax_gain: answers `argmax_gain`, once; by default it follows from the columns.

        Raises:
            ValueError: a field is missing or unknown.
        """
        missing = [name for name in STAT_FIELDS if name not in columns]
        unknown = sorted(set(columns) - set(STAT_FIELDS))
        if missing or unknown:
            raise ValueError(f"columns: expected the fields of Stats, missing {missing}, unknown {unknown}")
        stats = cls.__new__(cls)
        stats.__dict__.update({name: columns[name] for name in STAT_FIELDS})
        stats.__dict__.update(
            _leading={}, _find_leading=leading, _find_gain=gain, _find_argmax_gain=argmax_gain, _hidden=hidden
        )
        return stats

    @property
    def shape(self) -> torch.Size:
        """Shape of every field."""
        return self._draft.shape if "_draft" in self.__dict__ else self.tv.shape

    @property
    def device(self) -> torch.device:
        """Where the fields lie."""
        return self._draft.device if "_draft" in self.__dict__ else self.tv.device

    def columns(self) -> dict[str, Tensor]:
        """Compute and return every field by name, in the order of ``STAT_FIELDS``."""
        return {name: getattr(self, name) for name in STAT_FIELDS}

    def leading(self, count: int) -> Leading:
        """Tell how probable both models' ``count`` most probable tokens are to either, ``[*batch, count]``; remembered.

        Raises:
            ValueError: statistics that were read back without them, or a count below one.
        """
        check_count("count", count)
        known = self._leading
        if count not in known:
            known[count] = self._search_leading(count)
        return known[count]

    @property
    def hidden(self) -> tuple[Float[Tensor, "*batch H1"], Float[Tensor, "*batch H2"]]:
        """The drafter's and the verifier's hidden state: what either output head read to predict the token.

        Raises:
            ValueError: they are not known; a rule must ask for them beforehand, and a trace must hold them.
        """
        if self._hidden is None:
            raise ValueError(
                "hidden: expected positions with the hidden states of both models, got none; live, a rule asks for "
                "them by `needs_hidden = True`, and a trace holds them if collected with hidden=true"
            )
        return self._hidden

    def select(self, index: Any) -> "Stats":
        """Take the same index of every field."""
        columns = {name: column[index] for name, column in self.columns().items()}
        hidden = None if self._hidden is None else (self._hidden[0][index], self._hidden[1][index])
        return Stats.from_columns(
            columns,
            lambda count: Leading(*(values[index] for values in self.leading(count))),
            hidden,
            lambda: self.expected_gain[index],
            lambda: self.argmax_gain[index],
        )

    def arrange(self, index: Int[Tensor, "*shape"]) -> "Stats":
        """Lay flat positions ``[N]`` out by ``index``; −1 stands for one of which nothing is known: NaN in every field.

        >>> columns = {name: torch.tensor([0.1, 0.2]) for name in STAT_FIELDS}
        >>> Stats.from_columns(columns).arrange(torch.tensor([[1, -1, 0]])).tv
        tensor([[0.2000,    nan, 0.1000]])
        """
        places, hole = index.clamp_min(0), index < 0

        def take(values: Tensor) -> Tensor:
            return values[places].masked_fill(hole.reshape(*hole.shape, *[1] * (values.dim() - 1)), torch.nan)

        return Stats.from_columns(
            {name: take(column) for name, column in self.columns().items()},
            lambda count: Leading(*map(take, self.leading(count))),
            None if self._hidden is None else (take(self._hidden[0].float()), take(self._hidden[1].float())),
            lambda: take(self.expected_gain),
            lambda: take(self.argmax_gain),
        )

    def greedy(self) -> "Stats":
        """Return the same positions as they are at temperature 0, where q and p are one-hot at their argmax."""
        columns = self.columns()
        agree = columns["argmax_agree"]
        one, zero = torch.ones_like(agree), torch.zeros_like(agree)
        changed = {
            "tv": 1 - agree,
            "draft_max_processed": one,
            "verifier_max_processed": one,
            "draft_entropy_processed": zero,
            "verifier_entropy_processed": zero,
            "verifier_at_draft_processed": agree,
        }
        # Where q and p are one-hot, the sample is the argmax.
        gain = (lambda: self.argmax_gain,) * 2
        return Stats.from_columns(columns | changed, self.leading, self._hidden, *gain)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Stats is frozen: cannot set {name!r}")

    def __repr__(self) -> str:
        known = [name for name in STAT_FIELDS if name in self.__dict__]
        return f"Stats(computed: {', '.join(known) or 'nothing yet'})"

    @property
    def _is_plain(self) -> bool:
        """Whether processed and raw distributions are the same, so that no distance is computed twice."""
        return self._draft is self._draft_raw and self._verifier is self._verifier_raw

    def _search_leading(self, count: int) -> Leading:
        if "_draft" in self.__dict__:
            return find_leading(self._draft_raw, self._verifier_raw, count)
        if self._find_leading is None:
            raise ValueError(
                f"leading: expected positions with both models' {count} most probable tokens, got scalars alone"
            )
        return self._find_leading(count)

    @cached_property
    def expected_gain(self) -> Float[Tensor, "*batch"]:
        """E of p(v) − q(v) over v ~ p°: how much likelier a token of p is right than one of q, if p° is the truth.

        Raises:
            ValueError: statistics that were read back without it.
        """
        if "_draft" in self.__dict__:
            return overlap(self._verifier_raw, self._verifier) - overlap(self._verifier_raw, self._draft)
        if self._find_gain is None:
            raise ValueError("expected_gain: expected positions with both models' likely tokens, got scalars alone")
        return self._find_gain()

    @cached_property
    def argmax_gain(self) -> Float[Tensor, "*batch"]:
        """p°(argmax p) − p°(argmax q): how much likelier p's choice is right than q's, if p° is the truth."""
        if "_draft" in self.__dict__:
            return self._verifier_raw.at(self._verifier.argmax) - self._verifier_raw.at(self._draft.argmax)
        if self._find_argmax_gain is None:
            return self.verifier_max - self.verifier_at_draft
        return self._find_argmax_gain()

    @cached_property
    def draft_max(self) -> Float[Tensor, "*batch"]:
        """Largest q°."""
        return self._draft_raw.maximum

    @cached_property
    def verifier_max(self) -> Float[Tensor, "*batch"]:
        """Largest p°."""
        return self._verifier_raw.maximum

    @cached_property
    def draft_margin(self) -> Float[Tensor, "*batch"]:
        """Largest minus second largest q°."""
        return self._draft_raw.margin

    @cached_property
    def verifier_margin(self) -> Float[Tensor, "*batch"]:
        """Largest minus second largest p°."""
        return self._verifier_raw.margin

    @cached_property
    def draft_entropy(self) -> Float[Tensor, "*batch"]:
        """Entropy of q°, nats."""
        return self._draft_raw.entropy

    @cached_property
    def verifier_entropy(self) -> Float[Tensor, "*batch"]:
        """Entropy of p°, nats."""
        return self._verifier_raw.entropy

    @cached_property
    def verifier_at_draft(self) -> Float[Tensor, "*batch"]:
        """p° at the argmax of q°: the verifier's opinion of the drafter's choice."""
        return self._verifier_raw.at(self._draft_raw.argmax)

    @cached_property
    def draft_at_verifier(self) -> Float[Tensor, "*batch"]:
        """q° at the argmax of p°."""
        return self._draft_raw.at(self._verifier_raw.argmax)

    @cached_property
    def argmax_agree(self) -> Float[Tensor, "*batch"]:
        """1 where both models prefer the same token, else 0."""
        return (self._draft_raw.argmax == self._verifier_raw.argmax).float()

    @cached_property
    def tv_raw(self) -> Float[Tensor, "*batch"]:
        """D_TV(p°, q°)."""
        return distance(self._verifier_raw, self._draft_raw)

    @cached_property
    def kl(self) -> Float[Tensor, "*batch"]:
        """KL(p° ‖ q°), nats; q° is floored at the smallest normal float32 so that the value stays finite."""
        return (cross_entropy(self._verifier_raw, self._draft_raw) - self.verifier_entropy).clamp_min(0)

    @cached_property
    def tv(self) -> Float[Tensor, "*batch"]:
        """D_TV(p, q): the rejection rate of a deferred position."""
        return self.tv_raw if self._is_plain else distance(self._verifier, self._draft)

    @cached_property
    def draft_max_processed(self) -> Float[Tensor, "*batch"]:
        """Largest q."""
        return self._draft.maximum

    @cached_property
    def verifier_max_processed(self) -> Float[Tensor, "*batch"]:
        """Largest p."""
        return self._verifier.maximum

    @cached_property
    def draft_entropy_processed(self) -> Float[Tensor, "*batch"]:
        """Entropy of q, nats."""
        return self._draft.entropy

    @cached_property
    def verifier_entropy_processed(self) -> Float[Tensor, "*batch"]:
        """Entropy of p, nats."""
        return self._verifier.entropy

    @cached_property
    def verifier_at_draft_processed(self) -> Float[Tensor, "*batch"]:
        """p at the argmax of q."""
        return self._verifier.at(self._draft.argmax)
