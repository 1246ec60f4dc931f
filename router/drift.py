"""Has the input drifted from what a router was trained on? Features in, a report out.

The bundle remembers for each feature of the training positions its deciles, the shares between them, the range of all
but one in a thousand at either end, and how often it was missing. Live features are counted into the same bins; the
*population stability index* Σ (now − then) · ln(now / then) over them says how far a feature moved (0.25 is the usual
mark of a large change; Siddiqi, Credit risk scorecards, 2006, chapter 8).

It sees features alone: a change of the text that leaves them alone, and whether the router's answers are still right,
it cannot see. Positions of one text are alike, so that few texts look like drift: give it tens of them.

Shapes: ``N`` position, ``F`` feature.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from ..cascade.statistics import Stats
from .features import build_features

__all__ = ["DriftReport", "DriftWatch", "measure_drift", "summarise_features"]

Reference = Mapping[str, Sequence[float]]
Array = NDArray[np.float64]

FEWEST_POSITIONS = 500
PSI_LIMIT = 0.25
OUTSIDE_LIMIT = 0.02
_TAIL = 0.001
_FLOOR = 1e-4
"""A bin that was or is empty counts as this share: the index stays finite."""


@dataclass(frozen=True)
class DriftReport:
    """How far live features are from those of the training.

    Args:
        positions: how many were looked at.
        psi: population stability index of every feature.
        outside: share of its positions at which a feature lies outside the range of all but one in a thousand training
            positions at either end.
    """

    positions: int
    psi: Mapping[str, float]
    outside: Mapping[str, float]

    @property
    def undecided(self) -> bool:
        """Whether there were too few positions to tell."""
        return self.positions < FEWEST_POSITIONS

    @property
    def drifted(self) -> bool:
        """Whether a feature's index is above 0.25 or more than 2% of its positions lie outside; never if undecided."""
        return not self.undecided and bool(self.worst)

    @property
    def worst(self) -> tuple[str, ...]:
        """The features beyond a limit, the furthest first."""

        def excess(name: str) -> float:
            return max(self.psi[name] / PSI_LIMIT, self.outside[name] / OUTSIDE_LIMIT)

        return tuple(sorted((name for name in self.psi if excess(name) > 1), key=excess, reverse=True))

    def describe(self) -> str:
        """Say it in one line."""
        if self.undecided:
            return f"drift undecided: {self.positions} positions, at least {FEWEST_POSITIONS} are needed"
        if not self.worst:
            furthest = max(self.psi, key=lambda name: self.psi[name])
            return (
                f"no drift over {self.positions} positions: the furthest feature is {furthest}, "
                f"index {self.psi[furthest]:.2f} of {PSI_LIMIT:g} allowed"
            )
        names = ", ".join(
            f"{name} (index {self.psi[name]:.2f}, {self.outside[name]:.1%} outside)" for name in self.worst[:3]
        )
        return (
            f"drifted from the training over {self.positions} positions, {len(self.worst)} of {len(self.psi)} "
            f"features: {names}; the router's calibration need not hold here"
        )


class DriftWatch:
    """Counts positions into the bins of the training as they come, and keeps none of them.

    Args:
        reference: the router's, from its config.
        feature_set: the router's.

    Raises:
        ValueError: there is no reference, or one that cannot be read.
    """

    def __init__(self, reference: Reference, feature_set: str) -> None:
        self.feature_set = feature_set
        self._counts = _Counts(reference)

    def add(self, stats: Stats, mask: Bool[Tensor, "*batch"] | None = None) -> None:
        """Count the positions ``[*batch]`` of statistics, those of the mask alone if there is one."""
        features = build_features(stats, self.feature_set)
        self._counts.add(features.flatten(end_dim=-2) if mask is None else features[mask])

    def report(self) -> DriftReport:
        """Compare what was counted so far with the training."""
        return self._counts.report()


def measure_drift(features: Float[Tensor, "N F"], reference: Reference) -> DriftReport:
    """Compare live features with the reference of the training, in the order of ``summarise_features``.

    What stands behind them (hidden states) is not looked at.

    Raises:
        ValueError: there is no reference, or one of other features.
    """
    counts = _Counts(reference)
    counts.add(features)
    return counts.report()


def summarise_features(features: Float[Tensor, "N F"], names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Summarise training features as ``measure_drift`` and ``RouterConfig.reference`` want them.

    A list holds: share missing; low and high end of the range; the E inner edges of the bins (deciles, fewer where
    values repeat); the E + 1 shares of the bins among the values known. Of a feature that is never known, its share
    missing, 1, alone.

    Raises:
        ValueError: another number of names than of features, or no position.
    """
    if features.shape[-1] != len(names) or not len(features):
        raise ValueError(f"features: expected [N, {len(names)}] with N above 0, got {list(features.shape)}")
    return {name: _summarise(values) for name, values in zip(names, _columns(features), strict=True)}


def _summarise(values: Array) -> tuple[float, ...]:
    known = np.sort(values[~np.isnan(values)])
    missing = 1 - len(known) / len(values)
    if not len(known):
        return (missing,)
    edges = np.unique(np.quantile(known, np.arange(1, 10) / 10, method="inverted_cdf"))
    edges = edges[edges < known[-1]]  # nothing lies above the greatest value: no bin there
    ends = np.quantile(known, (_TAIL, 1 - _TAIL), method="inverted_cdf")
    shares = np.bincount(np.searchsorted(edges, known), minlength=len(edges) + 1) / len(known)
    return (missing, *ends.tolist(), *edges.tolist(), *shares.tolist())


class _Counts:
    """All features: how often each bin was met."""

    def __init__(self, reference: Reference) -> None:
        if not reference:
            raise ValueError("reference: this router remembers no features of its training; export it again")
        self.bins = {name: _read_bins(name, numbers) for name, numbers in reference.items()}
        self.positions = 0

    def add(self, features: Tensor) -> None:
        if features.shape[-1] < len(self.bins):
            raise ValueError(f"features: expected at least {len(self.bins)} of them, got {features.shape[-1]}")
        for bins, values in zip(self.bins.values(), _columns(features[..., : len(self.bins)]), strict=True):
            bins.count(values)
        self.positions += len(features)

    def report(self) -> DriftReport:
        return DriftReport(
            positions=self.positions,
            psi={name: bins.stability_index(self.positions) for name, bins in self.bins.items()},
            outside={name: bins.outside / max(self.positions, 1) for name, bins in self.bins.items()},
        )


class _Bins:
    """One feature: its range, edges and shares (of the bins, then of the missing) in training, and the counts since."""

    def __init__(self, low: float, high: float, edges: Array, shares: Array) -> None:
        self.low, self.high, self.edges, self.shares = low, high, edges, shares
        self.counts: Array = np.zeros(len(shares))
        self.outside = 0

    def count(self, values: Array) -> None:
        known = values[~np.isnan(values)]
        self.counts[:-1] += np.bincount(np.searchsorted(self.edges, known), minlength=len(self.edges) + 1)
        self.counts[-1] += len(values) - len(known)
        self.outside += int(((known < self.low) | (known > self.high)).sum())

    def stability_index(self, positions: int) -> float:
        now = np.maximum(self.counts / max(positions, 1), _FLOOR)
        then = np.maximum(self.shares, _FLOOR)
        return float(((now - then) * np.log(now / then)).sum())


def _read_bins(name: str, numbers: Sequence[float]) -> _Bins:
    missing = numbers[0] if numbers else -1.0
    if len(numbers) == 1:
        return _Bins(-np.inf, np.inf, np.zeros(0), np.array([1 - missing, missing]))
    inner = (len(numbers) - 4) // 2
    edges, shares = np.asarray(numbers[3 : 3 + inner]), np.asarray(numbers[3 + inner :])
    if len(shares) != inner + 1 or (np.diff(edges) <= 0).any() or missing < 0:
        raise ValueError(f"reference {name}: expected numbers as summarise_features gives them, got {list(numbers)}")
    return _Bins(numbers[1], numbers[2], edges, np.append(shares * (1 - missing), missing))


def _columns(features: Tensor) -> Array:
    values: Array = features.detach().double().cpu().numpy().T
    return values
