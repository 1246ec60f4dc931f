"""Offline frontiers: every rule and router over its whole range of rejection, from traces, in seconds, without a model.

α is chosen on one split (validation): its hull says which settings are worth running and how to mix neighbours at
random. They are then measured on another (test), so that a lucky setting cannot flatter its method. Intervals come from
resampling whole documents, of which several prompts may be windows; differences between methods are taken within each
resample, so they are paired.

The *clairvoyant* knows the label and makes the best choice between q and p at each position: no position rule can do
better. Token rules are not bound by it, since they may emit what neither model would.

Source: Narasimhan et al., ICLR 2025, equation 8 (the objective) and Lemma 3 (rejection of a position rule).
Shapes: ``D`` document, ``M`` setting, ``R`` resample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ..data.progress import announce
from ..data.resampling import Interval, interval
from .grid import method_grid
from .ledger import Ledger, Measured, end_points
from .methods import DEFAULT_LOSSES, LOSS_NOTES, Method, check_loss
from .metrics import budget_hull
from .rates import RATE_LOSS, compare_at_rates
from .replay import Outcome, Replay
from .verdict import compare_frontiers, state_verdict

__all__ = ["FrontierConfig", "Frontiers", "as_quality", "measure_frontiers"]

Array = NDArray[np.float64]

_CLAIRVOYANT_POINTS = 64
_CURVE_STEPS = np.linspace(0.0, 1.0, 51)


@dataclass(frozen=True)
class FrontierConfig:
    """How to draw the offline frontiers.

    Args:
        points: settings of each rule, spread evenly over its range of rejection.
        resamples: bootstrap resamples of the documents.
        seed: of the resampling.
        losses: which of ``zero_one``, ``sampled``, ``log``, ``greedy`` to measure; to the default `run_offline` adds
            ``log`` where a router of positions has learned it.
        budgets: shares of lossless decoding's rejection at which methods are also compared one by one.
        prices: αs at which the regret of rules with a score is split into parts.
    """

    points: int = 25
    resamples: int = 1000
    seed: int = 0
    losses: tuple[str, ...] = DEFAULT_LOSSES
    budgets: tuple[float, ...] = (0.25, 0.5, 0.75)
    prices: tuple[float, ...] = (0.0, 0.1, 0.2, 0.4, 0.8)

    def __post_init__(self) -> None:
        for name, least in (("points", 2), ("resamples", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"frontier.{name}: expected at least {least}, got {getattr(self, name)}")
        if any(not 0 <= share <= 1 for share in self.budgets):
            raise ValueError(f"frontier.budgets: expected shares in [0, 1], got {list(self.budgets)}")
        if any(not 0 <= price < math.inf for price in self.prices):
            raise ValueError(f"frontier.prices: expected numbers >= 0, got {list(self.prices)}")
        if not self.losses:
            raise ValueError("frontier.losses: expected at least one, got none")
        for loss in self.losses:
            check_loss(loss)


@dataclass(frozen=True)
class Frontiers:
    """What was measured.

    ``points``: a row per method, setting and loss; ``curves``: frontiers at even budgets; ``summary``: by loss, the
    rest; ``rates``: token rules at equal rejections, empty without the loss of a sample.
    """

    points: pd.DataFrame
    curves: pd.DataFrame
    summary: dict[str, Any]
    rates: pd.DataFrame


@dataclass(frozen=True)
class _Curve:
    """One method's settings on the test split, and the path through those that validation chose."""

    method: Method
    alphas: list[float]
    settings: list[int]
    path: list[int]


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
        next((part.rates for part in parts if len(part.rates)), parts[0].rates),
    )


def _measure_loss(
    loss: str, methods: Sequence[Method], validation: Replay, test: Replay, config: FrontierConfig
) -> Frontiers:
    ledger = Ledger(test, loss, config.resamples, config.seed)
    known = [method for method in methods if loss in method.losses]
    for method in methods:
        if method not in known:
            announce(f"offline: {method.label} decides nothing by the loss {loss!r}; left out of its table")
    curves = [_measure_method(method, loss, validation, test, ledger, config) for method in known]
    bound = [ledger.add(test.sum_outcome(outcome)) for outcome in _clairvoyant(test, loss)]
    measured = ledger.close()
    if measured.limit.value <= 0:
        raise ValueError(f"traces: the two models never differ under loss {loss!r}; there is nothing to cascade")
    summary = {"note": LOSS_NOTES[loss], "positions": len(test), "prompts": test.num_prompts}
    summary["documents"] = test.num_documents
    summary |= _summarise(loss, curves, bound, measured, config)
    curve_table = pd.concat([_curve_table(loss, *drawn, measured) for drawn in _named_paths(curves, bound)])
    paths = {curve.method.name: curve.path for curve in curves}
    rates = compare_at_rates(known if loss == RATE_LOSS else (), paths, measured)
    return Frontiers(_point_table(loss, curves, bound, measured), curve_table, summary, rates)


def _summarise(
    loss: str, curves: list[_Curve], bound: list[int], measured: Measured, config: FrontierConfig
) -> dict[str, Any]:
    """Areas, distances, losses at the budgets, paired comparisons and the verdict."""
    paths = {curve.method.name: curve.path for curve in curves}
    kinds = {curve.method.name: curve.method.kind for curve in curves}
    labels = {curve.method.name: curve.method.label for curve in curves}
    twins = {curve.method.name: curve.method.twin for curve in curves if curve.method.twin}
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
        "verdict": state_verdict(loss, comparisons, kinds, labels, twins),
    }


def _widest_gap(curve: _Curve, measured: Measured) -> float:
    """How far apart the two ends of a token rule's rejection are at most; 0 for rules that replay exactly."""
    means = measured.means[curve.settings]
    return float((means[:, 2] - means[:, 1]).max())


def _measure_method(
    method: Method, loss: str, validation: Replay, test: Replay, ledger: Ledger, config: FrontierConfig
) -> _Curve:
    """Turn one dial: settings and hull from validation, then the same settings on test."""
    chosen_on = [validation.sum_outcome(outcome) for outcome in end_points(validation, loss)]
    limit = float(chosen_on[1][:, 1].sum() / len(validation))
    alphas = method_grid(method, validation, loss, config.points, limit)
    rules = [method.build(alpha, loss) for alpha in alphas]
    chosen_on += validation.sums_of_all(rules, loss, bounds=False)
    settings = [ledger.add(sums) for sums in test.sums_of_all(rules, loss)]
    mean_loss, rejection = np.stack([sums.sum(axis=0)[:2] for sums in chosen_on], axis=1) / len(validation)
    # A single setting may cost more than lossless decoding: mixed with the drafter it is affordable all the same.
    affordable = np.flatnonzero((rejection <= limit * (1 + 1e-9)) | (not method.has_dial))
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


def _point_table(loss: str, curves: list[_Curve], bound: list[int], measured: Measured) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []

    def add(name: str, label: str, kind: str, column: int, alpha: float = float("nan"), chosen: bool = True) -> None:
        mean_loss, rejection, rejection_high, deferral, entropy, distinctness = measured.means[column]
        quality = as_quality(loss, measured.loss(column))
        rows.append(
            {"loss": loss, "method": name, "label": label, "kind": kind, "alpha": alpha, "rejection": rejection,
             "rejection_high": rejection_high, "deferral": deferral, "mean_loss": mean_loss, "quality": quality.value,
             "quality_low": quality.low, "quality_high": quality.high, "entropy": entropy,
             "distinctness": distinctness, "chosen": chosen}
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


def _curve_table(loss: str, name: str, label: str, kind: str, path: list[int], measured: Measured) -> pd.DataFrame:
    """One frontier at even shares of lossless decoding's rejection, with pointwise intervals."""
    spreads = [as_quality(loss, interval(*measured.at(path, share))) for share in _CURVE_STEPS.tolist()]
    rejections = _CURVE_STEPS * measured.limit.value
    qualities = [(spread.value, spread.low, spread.high) for spread in spreads]
    table = pd.DataFrame(qualities, columns=["quality", "quality_low", "quality_high"])
    names = {"loss": loss, "method": name, "label": label, "kind": kind}
    return table.assign(**names, budget=_CURVE_STEPS, rejection=rejections)


def as_quality(loss: str, measured: Interval) -> Interval:
    """Turn a loss into what is better the higher it is: 1 − loss, or the mean log probability of the label (nats)."""
    best = 0.0 if loss == "log" else 1.0
    return Interval(best - measured.value, best - measured.high, best - measured.low)


def _as_dict(measured: Interval) -> dict[str, float]:
    return {"value": measured.value, "low": measured.low, "high": measured.high}
