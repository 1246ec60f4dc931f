"""Features of a position, as the trained heads read them: ``Stats`` in, one float32 vector out.

The same function serves training (``Stats`` from Parquet columns) and inference (``Stats`` of live q and p), so the two
cannot drift apart; ``schema_digest`` names the exact list, and a bundle refuses to load under another one.

Only raw-confidence statistics are read (q° and p°: temperature 1, no truncation), so one head serves every temperature.
Nothing here sees the drafted token: a target π may depend on the prefix alone, or the accepted tokens would no longer
follow it ("Speculative sampling from any target" in docs/theory.md).

Shapes: ``*batch`` any leading axes, ``F`` feature.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from ..cascade.statistics import Stats
from .checks import check_choice

__all__ = ["FEATURE_SETS", "build_features", "feature_index", "schema_digest"]

SCHEMA_VERSION = 1

PROBABILITY_FLOOR = 1e-6
"""Odds are taken of probabilities clamped to [floor, 1 - floor]: finite for one-hot and disjoint distributions."""

NATS_CEILING = 1e3
"""Divergences of disjoint supports are infinite; past this many nats a larger one says nothing new."""


def _identity(values: Tensor) -> Tensor:
    return values


def _logit(values: Tensor) -> Tensor:
    return torch.logit(values, eps=PROBABILITY_FLOOR)


def _log1p(values: Tensor) -> Tensor:
    return values.clamp(min=0.0, max=NATS_CEILING).log1p()


_TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {"identity": _identity, "logit": _logit, "log1p": _log1p}

FEATURE_SETS: dict[str, tuple[str, ...]] = {
    "draft_only": (
        "draft_max",
        "draft_margin",
        "logit(draft_max)",
        "logit(draft_margin)",
        "log1p(draft_entropy)",
    ),
    # The plain maxima stand beside their odds so that a linear gap head contains Diff, OPT and VerifierGap exactly.
    "verified": (
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
    ),
}


@dataclass(frozen=True)
class _Feature:
    column: str
    transform: str


def _parse(name: str) -> _Feature:
    """``logit(draft_max)`` is the column draft_max through logit; a bare name is the column itself."""
    transform, opened, rest = name.partition("(")
    return _Feature(rest.rstrip(")"), transform) if opened else _Feature(name, "identity")


def _names(feature_set: str) -> tuple[str, ...]:
    check_choice("feature_set", feature_set, FEATURE_SETS)
    return FEATURE_SETS[feature_set]


@lru_cache(maxsize=32)
def _plan(names: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Runs of features that share a transform, so that each run is one stack and one call."""
    runs = groupby(map(_parse, names), key=lambda feature: feature.transform)
    return tuple((transform, tuple(feature.column for feature in run)) for transform, run in runs)


def build_features(stats: Stats, feature_set: str) -> Float[Tensor, "*batch F"]:
    """Turn statistics ``[*batch]`` into float32 features ``[*batch, F]``, F = ``len(FEATURE_SETS[feature_set])``.

    Finite wherever the statistics are not NaN (one-hot, uniform and disjoint distributions included). A NaN statistic,
    such as a column that an older trace lacks, stays NaN here and is replaced by its training mean inside the head.

    Raises:
        ValueError: the feature set is unknown.

    >>> probs = torch.tensor([0.75, 0.25])
    >>> build_features(Stats(probs, probs, probs, probs), "draft_only")
    tensor([0.7500, 0.5000, 1.0986, 0.0000, 0.4462])
    """
    parts = []
    for transform, columns in _plan(_names(feature_set)):
        stacked = torch.stack([getattr(stats, column) for column in columns], dim=-1)
        parts.append(_TRANSFORMS[transform](stacked.float()))
    return torch.cat(parts, dim=-1)


def feature_index(feature_set: str, name: str) -> int | None:
    """Where a feature stands in a set, or None where the set lacks it."""
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
