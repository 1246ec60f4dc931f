"""Offline frontiers: every rule and router over its whole range of rejection, from traces, in seconds, without a model.

α is chosen on one split (validation): its hull says which settings are worth running and how to mix neighbours at
random. They are then measured on another (test), so that a lucky setting cannot flatter its method. Intervals come from
resampling whole prompts; differences between methods are taken within each resample, so they are paired.

The *clairvoyant* knows the label and makes the best choice between q and p at each position: no position rule can do
better. Token rules are not bound by it, since they may emit what neither model would.

Source: Narasimhan et al., ICLR 2025, equation 8 (the objective) and Lemma 3 (rejection of a position rule).
Shapes: ``P`` prompt, ``M`` setting, ``R`` resample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ..data.resampling import Interval, bootstrap_weights, interval, resampled_means, sum_by_prompt
from .grid import method_grid
from .methods import LOSS_NOTES, REPLAY_LOSSES, Method
from .metrics import budget_hull, curve_area, curve_at
from .replay import Outcome, Replay
from .verdict import compare_frontiers, state_verdict

__all__ = ["FrontierConfig", "Frontiers", "measure_frontiers"]

Array = NDArray[np.float64]

_CLAIRVOYANT_POINTS = 64
_CURVE_STEPS = np.linspace(0.0, 1.0, 51)


@dataclass(frozen=True)
class FrontierConfig:
    """How to draw the offline frontiers.

    Args:
        points: settings of each rule, spread evenly over its range of rejection.
        resamples: bootstrap resamples of the prompts.
        seed: of the resampling.
        losses: which of ``zero_one``, ``sampled``, ``greedy`` to measure.
        budgets: shares of lossless decoding's rejection at which methods are also compared one by one.
    """

    points: int = 25
    resamples: int = 1000
    seed: int = 0
    losses: tuple[str, ...] = REPLAY_LOSSES
    budgets: tuple[float, ...] = (0.25, 0.5, 0.75)

    def __post_init__(self) -> None:
        for name, least in (("points", 2), ("resamples", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"frontier.{name}: expected at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Frontiers:
    """``points``: a row per method, setting and loss; ``curves``: frontiers at even budgets; ``summary``: the rest."""

    points: pd.DataFrame
    curves: pd.DataFrame
    summary: dict[str, Any]


@dataclass(frozen=True)
class _Curve:
    """One method's settings on the test split, and the path through those that validation chose."""

    method: Method
    alphas: list[float]
    settings: list[int]
    path: list[int]


@dataclass(frozen=True)
class _Measured:
    """All settings of one loss, measured together: means ``[M, 4]``, resampled losses and rejections ``[R, M]``."""

    means: Array
    losses: Array
    rejections: Array
    drafter: int
    lossless: int

    def loss(self, column: int) -> Interval:
        """Mean loss of one setting."""
        return interval(self.means[column, 0], self.losses[:, column])

    @property
    def limit(self) -> Interval:
        """Rejection of lossless decoding, the largest budget of interest."""
        return interval(self.means[self.lossless, 1], self.rejections[:, self.lossless])

    def area(self, path: list[int]) -> tuple[float, Array]:
        """Mean loss over all budgets of the curve through some settings, and in every resample."""
        return (
            float(curve_area(self.means[path, 1], self.means[path, 0], self.means[self.lossless, 1])),
            curve_area(self.rejections[:, path], self.losses[:, path], self.rejections[:, self.lossless]),
        )

    def at(self, path: list[int], share: float) -> tuple[float, Array]:
        """Loss of such a curve at a share of lossless decoding's rejection, and in every resample."""
        budget, budgets = share * self.means[self.lossless, 1], share * self.rejections[:, self.lossless]
        return (
            float(curve_at(self.means[path, 1], self.means[path, 0], budget)),
            curve_at(self.rejections[:, path], self.losses[:, path], budgets),
        )


class _Ledger:
    """Per-prompt sums of every setting measured, side by side, so that all of them are resampled together."""

    def __init__(self, replay: Replay, loss: str, config: FrontierConfig) -> None:
        self.counts = sum_by_prompt(np.ones(len(replay)), replay.prompt_index, replay.num_prompts)[:, 0]
        self.weights = bootstrap_weights(replay.num_prompts, config.resamples, config.seed)
        self._sums: list[Array] = []
        self.drafter, self.lossless = (self.add(replay.sum_outcome(end)) for end in _end_points(replay, loss))

    def add(self, sums: Array) -> int:
        """Enter one setting, ``[P, 4]``, and return its column."""
        self._sums.append(sums)
        return len(self._sums) - 1

    def close(self) -> _Measured:
        """Average and resample."""
        sums = np.stack(self._sums, axis=1)
        losses, rejections = (resampled_means(sums[:, :, part], self.counts, self.weights) for part in (0, 1))
        return _Measured(sums.sum(axis=0) / self.counts.sum(), losses, rejections, self.drafter, self.lossless)


def measure_frontiers(
    methods: Sequence[Method], validation: Replay, test: Replay, config: FrontierConfig | None = None
) -> Frontiers:
    """Measure every method under every loss: α chosen on ``validation``, everything reported on ``test``.

    Raises:
        ValueError: an unknown loss, or two models that never differ.
    """
    config = config or FrontierConfig()
    parts = [_measure_loss(loss, methods, validation, test, config) for loss in config.losses]
    return Frontiers(
        pd.concat([part.points for part in parts], ignore_index=True),
        pd.concat([part.curves for part in parts], ignore_index=True),
        {loss: part.summary for loss, part in zip(config.losses, parts, strict=True)},
    )


def _measure_loss(
    loss: str, methods: Sequence[Method], validation: Replay, test: Replay, config: FrontierConfig
) -> Frontiers:
    ledger = _Ledger(test, loss, config)
    curves = [_measure_method(method, loss, validation, test, ledger, config) for method in methods]
    bound = [ledger.add(test.sum_outcome(outcome)) for outcome in _clairvoyant(test, loss)]
    measured = ledger.close()
    if measured.limit.value <= 0:
        raise ValueError(f"traces: the two models never differ under loss {loss!r}; there is nothing to cascade")
    summary = {"note": LOSS_NOTES[loss], "positions": len(test), "prompts": test.num_prompts}
    summary |= _summarise(loss, curves, bound, measured, config)
    curve_table = pd.concat([_curve_table(loss, *drawn, measured) for drawn in _named_paths(curves, bound)])
    return Frontiers(_point_table(loss, curves, bound, measured), curve_table, summary)


def _summarise(
    loss: str, curves: list[_Curve], bound: list[int], measured: _Measured, config: FrontierConfig
) -> dict[str, Any]:
    """Areas, distances, losses at the budgets, paired comparisons and the verdict."""
    paths = {curve.method.name: curve.path for curve in curves}
    kinds = {curve.method.name: curve.method.kind for curve in curves}
    labels = {curve.method.name: curve.method.label for curve in curves}
    areas = {name: measured.area(path) for name, path in {**paths, "clairvoyant": bound}.items()}
    at_budgets = {name: [measured.at(path, share) for share in config.budgets] for name, path in paths.items()}
    comparisons = compare_frontiers(areas, at_budgets, kinds, config.budgets)
    return {
        "rejection_of_lossless": _as_dict(measured.limit),
        "drafter_loss": _as_dict(measured.loss(measured.drafter)),
        "verifier_loss": _as_dict(measured.loss(measured.lossless)),
        "rejection_open_by": {curve.method.name: _widest_gap(curve, measured) for curve in curves},
        "area": {name: _as_dict(interval(*area)) for name, area in areas.items()},
        "distance_percent": _distances(areas),
        "budgets": list(config.budgets),
        "loss_at_budgets": {
            name: [_as_dict(interval(value, samples)) for value, samples in rows] for name, rows in at_budgets.items()
        },
        "comparisons": comparisons,
        "verdict": state_verdict(loss, comparisons, kinds, labels),
    }


def _widest_gap(curve: _Curve, measured: _Measured) -> float:
    """How far apart the two ends of a token rule's rejection are at most; 0 for rules that replay exactly."""
    means = measured.means[curve.settings]
    return float((means[:, 2] - means[:, 1]).max())


def _end_points(replay: Replay, loss: str) -> tuple[Outcome, Outcome]:
    """The drafter alone (never defer) and lossless speculative decoding (always defer)."""
    return tuple(  # type: ignore[return-value]  # two masks, two outcomes
        replay.choice(torch.full((len(replay),), defer), loss) for defer in (False, True)
    )


def _measure_method(
    method: Method, loss: str, validation: Replay, test: Replay, ledger: _Ledger, config: FrontierConfig
) -> _Curve:
    """Turn one dial: settings and hull from validation, then the same settings on test."""
    chosen_on = [validation.sum_outcome(outcome) for outcome in _end_points(validation, loss)]
    limit = float(chosen_on[1][:, 1].sum() / len(validation))
    alphas = method_grid(method, validation, loss, config.points, limit)
    settings: list[int] = []
    for alpha in alphas:
        rule = method.build(alpha, loss)
        chosen_on.append(validation.sums(rule, loss, bounds=False))
        settings.append(ledger.add(test.sums(rule, loss)))
    mean_loss, rejection = np.stack([sums.sum(axis=0)[:2] for sums in chosen_on], axis=1) / len(validation)
    affordable = np.flatnonzero(rejection <= limit * (1 + 1e-9))
    hull = affordable[budget_hull(rejection[affordable], mean_loss[affordable])]
    columns = [ledger.drafter, ledger.lossless, *settings]
    return _Curve(method, alphas, settings, [columns[index] for index in hull])


def _clairvoyant(replay: Replay, loss: str) -> list[Outcome]:
    """The best choices between q and p for one who knows the label, by gain per rejection (a fractional knapsack)."""
    draft_loss, verifier_loss = replay.model_losses(loss)
    gain, cost = (draft_loss - verifier_loss).double(), replay.stats(loss).tv.double()
    rate = torch.where(gain > 0, gain / cost.clamp_min(1e-12), -torch.inf)
    order = rate.argsort(descending=True)
    spent = torch.where(gain > 0, cost, 0.0)[order].cumsum(dim=0)
    steps = torch.linspace(0.0, 1.0, _CLAIRVOYANT_POINTS, dtype=torch.double)[1:]
    cuts = torch.searchsorted(spent, steps * spent[-1]).clamp_max(len(replay) - 1)
    thresholds = [torch.inf, *rate[order][cuts].tolist()]
    return [replay.choice((rate >= threshold) & (gain > 0), loss) for threshold in thresholds]


def _distances(areas: dict[str, tuple[float, Array]]) -> dict[str, dict[str, float]]:
    """Distance of each frontier from the clairvoyant's, OPT's being 100; none where OPT leaves nothing to gain."""
    floor, floors = areas["clairvoyant"]
    unit, units = areas.get("opt", (floor, floors))
    if unit == floor:
        return {}
    return {
        name: _as_dict(interval(100 * (value - floor) / (unit - floor), 100 * (samples - floors) / (units - floors)))
        for name, (value, samples) in areas.items()
        if name != "clairvoyant"
    }


def _point_table(loss: str, curves: list[_Curve], bound: list[int], measured: _Measured) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []

    def add(name: str, label: str, kind: str, column: int, alpha: float = float("nan"), chosen: bool = True) -> None:
        mean_loss, rejection, rejection_high, deferral = measured.means[column]
        spread = measured.loss(column)
        rows.append(
            {"loss": loss, "method": name, "label": label, "kind": kind, "alpha": alpha, "rejection": rejection,
             "rejection_high": rejection_high, "deferral": deferral, "quality": 1 - mean_loss,
             "quality_low": 1 - spread.high, "quality_high": 1 - spread.low, "chosen": chosen}
        )  # fmt: skip

    add("drafter", "Drafter alone", "end", measured.drafter)
    add("specdecode", "SpecDecode", "end", measured.lossless)
    for curve in curves:
        for alpha, column in zip(curve.alphas, curve.settings, strict=True):
            add(curve.method.name, curve.method.label, curve.method.kind, column, alpha, column in curve.path)
    for column in bound:
        add("clairvoyant", "Clairvoyant bound", "bound", column)
    return pd.DataFrame(rows)


def _named_paths(curves: list[_Curve], bound: list[int]) -> list[tuple[str, str, str, list[int]]]:
    named = [(curve.method.name, curve.method.label, curve.method.kind, curve.path) for curve in curves]
    return [*named, ("clairvoyant", "Clairvoyant bound", "bound", bound)]


def _curve_table(loss: str, name: str, label: str, kind: str, path: list[int], measured: _Measured) -> pd.DataFrame:
    """One frontier at even shares of lossless decoding's rejection, with pointwise intervals."""
    spreads = [interval(*measured.at(path, share)) for share in _CURVE_STEPS.tolist()]
    rejections = _CURVE_STEPS * measured.limit.value
    qualities = [(1 - spread.value, 1 - spread.high, 1 - spread.low) for spread in spreads]
    table = pd.DataFrame(qualities, columns=["quality", "quality_low", "quality_high"])
    names = {"loss": loss, "method": name, "label": label, "kind": kind}
    return table.assign(**names, budget=_CURVE_STEPS, rejection=rejections)


def _as_dict(measured: Interval) -> dict[str, float]:
    return {"value": measured.value, "low": measured.low, "high": measured.high}
