"""Features of a position, as the trained heads read them: ``Stats`` in, one float32 vector out.

The same function serves training (``Stats`` from Parquet columns) and inference (``Stats`` of live q and p), so the two
cannot drift apart; ``schema_digest`` names the exact list, and a bundle refuses to load under another one.

A set is a list of names. ``logit(draft_max)`` is the statistic draft_max through logit, a bare name the statistic
itself; ``logit(draft_top[2])`` reads the third of the drafter's most probable tokens; ``draft_hidden[*]`` stands for
every number of the drafter's hidden state, so how many features such a set has depends on the pair.

Only raw confidences are read (q° and p°: temperature 1, no truncation), so one head serves every temperature.
Nothing here sees the drafted token: a target π may depend on the prefix alone, or the accepted tokens would no longer
follow it ("Speculative sampling from any target" in docs/theory.md).

Shapes: ``*batch`` any leading axes, ``F`` feature, ``H`` hidden state.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby

import torch
from jaxtyping import Float
from torch import Tensor

from ..cascade.leading import Leading
from ..cascade.statistics import Stats
from .checks import check_choice

__all__ = [
    "FEATURE_SETS",
    "build_features",
    "feature_index",
    "feature_names",
    "feature_width",
    "needs_hidden",
    "scalar_names",
    "schema_digest",
]

SCHEMA_VERSION = 1

PROBABILITY_FLOOR = 1e-6
"""Odds are taken of probabilities clamped to [floor, 1 - floor]: finite for one-hot and disjoint distributions."""

TOP_TOKENS = 8
"""How many of each model's most probable tokens the ``topk`` sets read."""

NATS_CEILING = 1e3
"""Divergences of disjoint supports are infinite; past this many nats a larger one says nothing new."""


def _identity(values: Tensor) -> Tensor:
    return values


def _logit(values: Tensor) -> Tensor:
    return torch.logit(values, eps=PROBABILITY_FLOOR)


def _log1p(values: Tensor) -> Tensor:
    return values.clamp(min=0.0, max=NATS_CEILING).log1p()


_TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {"identity": _identity, "logit": _logit, "log1p": _log1p}

_DRAFT_ONLY = (
    "draft_max",
    "draft_margin",
    "logit(draft_max)",
    "logit(draft_margin)",
    "log1p(draft_entropy)",
)

# The plain maxima stand beside their odds so that a linear gap head contains Diff, OPT and VerifierGap exactly.
_VERIFIED = (
    "draft_max",
    "verifier_max",
    "draft_margin",
    "verifier_margin",
    "verifier_at_draft",
    "draft_at_verifier",
    "argmax_agree",
    "tv_raw",
    "logit(draft_max)",
    "logit(verifier_max)",
    "logit(verifier_at_draft)",
    "logit(draft_at_verifier)",
    "logit(tv_raw)",
    "log1p(draft_entropy)",
    "log1p(verifier_entropy)",
    "log1p(kl)",
)

_TOPK = tuple(f"logit({field}[{place}])" for field in Leading._fields for place in range(TOP_TOKENS))

_HIDDEN = ("draft_hidden[*]", "verifier_hidden[*]")

FEATURE_SETS: dict[str, tuple[str, ...]] = {
    "draft_only": _DRAFT_ONLY,
    "verified": _VERIFIED,
    "verified+topk": (*_VERIFIED, *_TOPK),
    "verified+hidden": (*_VERIFIED, *_HIDDEN),
    "verified+topk+hidden": (*_VERIFIED, *_TOPK, *_HIDDEN),
}


@dataclass(frozen=True)
class _Feature:
    column: str
    transform: str

    @property
    def source(self) -> str:
        """What `_READERS` knows it by: the name of a vector, or nothing for a scalar."""
        return self.column.partition("[")[0] if "[" in self.column else ""


def _parse(name: str) -> _Feature:
    """``logit(draft_max)`` is the column draft_max through logit; a bare name is the column itself."""
    transform, opened, rest = name.partition("(")
    return _Feature(rest.rstrip(")"), transform) if opened else _Feature(name, "identity")


def _read_scalars(stats: Stats, columns: Sequence[str]) -> Tensor:
    return torch.stack([getattr(stats, column) for column in columns], dim=-1)


def _read_leading(stats: Stats, columns: Sequence[str]) -> Tensor:
    source = columns[0].partition("[")[0]
    places = [int(column.partition("[")[2].rstrip("]")) for column in columns]
    values: Tensor = getattr(stats.leading(TOP_TOKENS), source)[..., places]
    return values


_READERS: dict[str, Callable[[Stats, Sequence[str]], Tensor]] = {
    "": _read_scalars,
    **dict.fromkeys(Leading._fields, _read_leading),
    "draft_hidden": lambda stats, _: stats.hidden[0],
    "verifier_hidden": lambda stats, _: stats.hidden[1],
}


def _names(feature_set: str) -> tuple[str, ...]:
    check_choice("feature_set", feature_set, FEATURE_SETS)
    return FEATURE_SETS[feature_set]


@lru_cache(maxsize=32)
def _plan(names: tuple[str, ...]) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Runs of features that share a transform and a source, so that each run is one reading and one call."""
    runs = groupby(map(_parse, names), key=lambda feature: (feature.transform, feature.source))
    return tuple((transform, source, tuple(feature.column for feature in run)) for (transform, source), run in runs)


def build_features(stats: Stats, feature_set: str) -> Float[Tensor, "*batch F"]:
    """Turn statistics ``[*batch]`` into float32 features ``[*batch, F]``, F = ``feature_width(feature_set, …)``.

    Finite wherever the statistics are not NaN (one-hot, uniform and disjoint distributions included). A NaN statistic,
    such as a column that an older trace lacks, stays NaN here and is replaced by its training mean inside the head.

    Raises:
        ValueError: the feature set is unknown, or reads what the statistics do not hold.

    >>> probs = torch.tensor([0.75, 0.25])
    >>> build_features(Stats(probs, probs, probs, probs), "draft_only")
    tensor([0.7500, 0.5000, 1.0986, 0.0000, 0.4462])
    """
    parts = []
    for transform, source, columns in _plan(_names(feature_set)):
        parts.append(_TRANSFORMS[transform](_READERS[source](stats, columns).float()))
    return torch.cat(parts, dim=-1)


def needs_hidden(feature_set: str) -> bool:
    """Whether a set reads the models' hidden states.

    Raises:
        ValueError: the feature set is unknown.
    """
    return any(name in _HIDDEN for name in _names(feature_set))


def feature_names(feature_set: str, hidden_sizes: Sequence[int] | None = None) -> tuple[str, ...]:
    """Name every feature of a set.

    Args:
        feature_set: a key of ``FEATURE_SETS``.
        hidden_sizes: how long the drafter's and the verifier's hidden state are; for a set that reads them, and no
            other.

    Raises:
        ValueError: the feature set is unknown, or the sizes are missing, superfluous or not two positive integers.

    >>> feature_names("verified+hidden", hidden_sizes=(2, 1))[-3:]
    ('draft_hidden[0]', 'draft_hidden[1]', 'verifier_hidden[0]')
    """
    sizes = dict(zip(_HIDDEN, _check_sizes(feature_set, hidden_sizes), strict=False))
    spelled = [[name.replace("*", str(place)) for place in range(sizes.get(name, 1))] for name in _names(feature_set)]
    return tuple(chain.from_iterable(spelled))


def scalar_names(feature_set: str) -> tuple[str, ...]:
    """Name the features of a set that are numbers of their own; hidden states stand behind them.

    Raises:
        ValueError: the feature set is unknown.
    """
    return tuple(name for name in _names(feature_set) if name not in _HIDDEN)


def feature_width(feature_set: str, hidden_sizes: Sequence[int] | None = None) -> int:
    """Count the features of a set; arguments and errors as of `feature_names`.

    >>> feature_width("verified"), feature_width("verified+hidden", hidden_sizes=(2048, 3584))
    (16, 5648)
    """
    sizes = _check_sizes(feature_set, hidden_sizes)
    return len(_names(feature_set)) - len(sizes) + sum(sizes)


def _check_sizes(feature_set: str, hidden_sizes: Sequence[int] | None) -> tuple[int, ...]:
    sizes, count = tuple(hidden_sizes or ()), len(_HIDDEN) if needs_hidden(feature_set) else 0
    if len(sizes) != count or not all(size > 0 for size in sizes):
        raise ValueError(f"hidden_sizes: expected {count} sizes >= 1 for {feature_set!r}, got {list(sizes)}")
    return sizes


def feature_index(feature_set: str, name: str) -> int | None:
    """Where a feature stands in a set, or None where the set lacks it; the numbers of hidden states have no place."""
    names = _names(feature_set)
    return names.index(name) if name in names else None


def schema_digest(feature_set: str) -> str:
    """SHA-256 (hex) of what the features mean: names, order, transforms, clamps and schema version.

    Raises:
        ValueError: the feature set is unknown.
    """
    schema = {
        "version": SCHEMA_VERSION,
        "features": [[feature.column, feature.transform] for feature in map(_parse, _names(feature_set))],
        "probability_floor": PROBABILITY_FLOOR,
        "nats_ceiling": NATS_CEILING,
    }
    return hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()
