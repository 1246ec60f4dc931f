"""From a folder of traces to frontier tables on disk: what ``speccascade evaluate --offline`` does. Runs no model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..data.calibration import calibration_error
from ..data.pairs import PairIdentity
from ..data.progress import announce
from ..data.traces import Traces
from ..router.checks import check_choice
from .config import DEFAULT_METHODS, EvaluateConfig
from .diversity import pick_settings
from .frontier import FrontierConfig, Frontiers, measure_frontiers
from .methods import DEFAULT_LOSSES, Method, colder_methods, plug_in_methods, router_methods
from .metrics import equal_count_calibration_error, reliability
from .provenance import describe_run
from .regret import measure_regret, scored_methods, scores_positions
from .replay import Replay
from .tables import write_json, write_table
from .terminal import print_distances

__all__ = ["check_router", "measure_calibration", "open_replays", "open_routers", "run_offline"]


def run_offline(config: EvaluateConfig) -> Path:
    """Draw all frontiers and split all regrets; print distances.

    Writes ``frontier``, ``frontier_curves``, ``rates``, ``reliability``, ``regret`` (Parquet) and ``frontier.json``.
    Every plug-in rule takes part, which costs seconds, unless ``config.methods`` differs from its default: then those
    it names, and OPT, whose distance is the unit. The log loss is added to the default losses where a router of
    positions has learned it.

    Raises:
        ValueError: no traces given, or a split that they lack.
    """
    if config.traces is None:
        raise ValueError("traces: expected a folder of traces to replay, got none")
    out, started = Path(config.out), time.monotonic()
    traces = Traces.open(config.traces)
    routers = open_routers(config.router)
    for router in routers.values():
        check_router(build_any(router), traces.manifest.identity)
    hidden = needs_hidden(routers.values())
    validation = open_replays(traces, (config.choose_on,), hidden=hidden)[config.choose_on]
    same = config.choose_on == config.split and config.origin is None
    test = validation if same else open_replays(traces, (config.split,), hidden, config.origin)[config.split]
    methods = [*_replayable(_plug_ins(config.methods), traces), *routers.values()]
    settings = _add_learned_losses(config.frontier, routers.values())
    announce(f"offline: {len(methods)} methods on {test.size}")
    frontiers = measure_frontiers(methods, validation, test, settings)
    calibration, bins = measure_calibration(test, routers.values())
    regret = measure_regret(
        scored_methods(methods), test, settings.losses, settings.prices, settings.resamples, settings.seed
    )
    record = {
        **describe_run(),
        "traces": _describe_traces(traces),
        "chosen_on": config.choose_on,
        "reported_on": config.split,
        "origin": config.origin,
        "resamples": settings.resamples,
        "losses": frontiers.summary,
        "origins": _measure_origins(config, traces, methods, validation, settings, hidden) if config.by_origin else {},
        "rates": frontiers.rates.to_dict(orient="records"),
        "calibration": calibration,
        "drift": warn_of_drift(test, routers.values()),
        "diversity": pick_settings(frontiers.points, settings.budgets, list(routers)),
        "regret": regret.to_dict(orient="records"),
    }
    _write(out, frontiers, bins, regret, record)
    announce(f"offline: done in {time.monotonic() - started:.1f} s")
    print_distances(frontiers.summary, methods)
    return out


def _write(out: Path, frontiers: Frontiers, bins: pd.DataFrame, regret: pd.DataFrame, record: dict[str, Any]) -> None:
    write_table(out / "frontier.parquet", frontiers.points)
    write_table(out / "frontier_curves.parquet", frontiers.curves)
    write_table(out / "rates.parquet", frontiers.rates)
    write_table(out / "reliability.parquet", bins)
    write_table(out / "regret.parquet", regret)
    write_json(out / "frontier.json", record)


def _measure_origins(
    config: EvaluateConfig,
    traces: Traces,
    methods: Sequence[Method],
    validation: Replay,
    settings: FrontierConfig,
    hidden: bool,
) -> dict[str, Any]:
    """Measure the same methods on each set that a merged one was made of; α is chosen on all of them together."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(part.source for part in traces.manifest.parts):
        try:
            test = open_replays(traces, (config.split,), hidden, name)[config.split]
            measured = measure_frontiers(methods, validation, test, settings).summary
        except ValueError as error:  # no row in this split, or nothing to cascade: the others stand all the same
            announce(f"offline: origin {name}: left out: {error}")
            continue
        kept = ("positions", "documents", "rejection_of_lossless", "area", "distance_percent")
        found[name] = {loss: {key: summary[key] for key in kept} for loss, summary in measured.items()}
        announce(f"offline: origin {name}: {test.size}")
    return found


def _plug_ins(names: Sequence[str]) -> list[Method]:
    """All plug-in rules and colder verifiers, or those among ``names``, with OPT."""
    offered = [*plug_in_methods(), *colder_methods()]
    if tuple(names) == DEFAULT_METHODS:
        return offered
    ends = ("verifier", "drafter", "specdecode", "router")  # drawn anyway, or given by folder
    known = [method.name for method in offered]
    for name in names:
        check_choice("methods", name, [*known, *ends])
    return [method for method in offered if method.name in names or method.name == "opt"]


def _add_learned_losses(settings: FrontierConfig, routers: Iterable[Method]) -> FrontierConfig:
    """Ask for the log loss too where a router has a gap for it; token rules that believe P̂ serve every loss."""
    learned = any("log" in router.losses and not router.twin for router in routers)
    if settings.losses != DEFAULT_LOSSES or not learned:
        return settings
    return replace(settings, losses=(*DEFAULT_LOSSES, "log"))


def warn_of_drift(test: Replay, routers: Iterable[Method]) -> dict[str, Any]:
    """Ask each router whether these positions look like those that it learned from; warn where it says they do not."""
    found: dict[str, Any] = {}
    for router in routers:
        rule: Any = build_any(router)
        if not hasattr(rule, "drift"):
            continue
        report = rule.drift(test.source.stats)
        found[router.name] = {"drifted": bool(report.drifted), "said": report.describe()}
        if report.drifted:
            announce(f"warning: {router.label}: {report.describe()}")
    return found


def build_any(router: Method) -> Any:
    """Build a router's rule at some α and loss, to ask what does not depend on them."""
    return router.build(max(router.low, 0.0), router.losses[0])


def needs_hidden(routers: Iterable[Method]) -> bool:
    """Whether any router reads hidden states, which are loaded for it alone."""
    configs = [getattr(build_any(router), "config", None) for router in routers]
    return any(config is not None and "hidden" in config.feature_set for config in configs)


def check_router(rule: Any, identity: PairIdentity) -> None:
    """Refuse a trained router of another pair; a rule that is not tied to one passes.

    Raises:
        ValueError: vocabulary or weights differ; both pairs are named.
    """
    if hasattr(rule, "check_pair"):
        rule.check_pair(**asdict(identity))


def open_replays(
    traces: Traces, splits: Iterable[str], hidden: bool = False, origin: str | None = None
) -> dict[str, Replay]:
    """Load some splits of opened traces, ready to replay; with hidden states for routers that read them.

    Args:
        traces: opened.
        splits: by name.
        hidden: load hidden states too.
        origin: of a merged set, take the positions of this one alone.

    Raises:
        ValueError: a split without positions, or no such origin.
    """
    top_k = traces.manifest.plan.top_k
    return {name: Replay(traces.split(name, origin, hidden), top_k) for name in dict.fromkeys(splits)}


def open_routers(directories: Sequence[str]) -> dict[str, Method]:
    """Load trained routers; a single one is called ``router``, several by the names of their folders.

    A folder that is itself called ``router`` goes by the name of the one that holds it. A token-level router is one
    method for each rule that its belief is handed to, named after both.
    """
    if len(directories) == 1:
        return {method.name: method for method in router_methods(directories[0])}
    names = [_name_folder(Path(directory)) for directory in directories]
    if len(set(names)) < len(names):
        names = ["-".join(Path(directory).parts[-2:]) for directory in directories]
    if len(set(names)) < len(names):
        raise ValueError(f"router: expected folders whose names differ, got {', '.join(directories)}")
    named = zip(names, directories, strict=True)
    opened = [
        method for name, directory in named for method in router_methods(directory, f"router-{name}", f"Router {name}")
    ]
    return {method.name: method for method in opened}


def _name_folder(folder: Path) -> str:
    return folder.parent.name if folder.name == "router" and folder.parent.name else folder.name


def measure_calibration(test: Replay, routers: Iterable[Method]) -> tuple[dict[str, Any], pd.DataFrame]:
    """Calibration of both models and of each router's gap, everywhere and where the models differ: errors and bins.

    Errors of the models' confidences are over bins of equal width (`data.calibration`); of gaps, and all bins that are
    drawn, over bins of equal counts.
    """
    stats, correct = test.source.stats, test.correctness
    differ = stats.argmax_agree.numpy() == 0
    sources = {
        "drafter": (stats.draft_max, correct[:, 0, 0]),
        "verifier": (stats.verifier_max, correct[:, 0, 1]),
    }
    for router in routers:
        rule: Any = router.build(0.0, "zero_one") if "zero_one" in router.losses else None
        if not scores_positions(rule):
            continue
        # A gap runs from -1 to 1: predicted against observed difference in the chance to be right.
        sources[router.name] = (rule.gap(stats), correct[:, 0, 1] - correct[:, 0, 0])
    errors: dict[str, Any] = {"share_differing": float(differ.mean())}
    tables: list[pd.DataFrame] = []
    for name, (stated, truth) in sources.items():
        errors[name] = {}
        for where, chosen in (("all", np.ones_like(differ)), ("differ", differ)):
            here = torch.from_numpy(chosen)
            pair = (stated[here], truth[here])
            is_model = name in ("drafter", "verifier")
            errors[name][where] = calibration_error(*pair) if is_model else equal_count_calibration_error(*pair)
            bins = reliability(*pair)
            columns = {"confidence": bins.confidence, "accuracy": bins.accuracy, "weight": bins.weight}
            tables.append(pd.DataFrame({"source": name, "where": where, **columns}))
    return errors, pd.concat(tables, ignore_index=True)


def _replayable(methods: Sequence[Method], traces: Traces) -> list[Method]:
    """Drop the token rules where the logged top-k is not that of the confidences which they read."""
    if traces.manifest.plan.temperature == 1:
        return list(methods)
    announce("offline: token rules and ExpectedGain read probabilities at temperature 1, and these traces log another; "
             "left out")  # fmt: skip
    return [method for method in methods if method.kind != "token" and method.name != "expected_gain"]


def _describe_traces(traces: Traces) -> dict[str, Any]:
    manifest = traces.manifest
    names = ("drafter", "verifier", "temperature", "top_k", "code_version")
    made = {name: getattr(manifest.plan, name) for name in names}
    return {
        "source": manifest.plan.prompts.get("source", "unknown"),
        **made,
        "rows": manifest.rows,
        "digest": manifest.digest,
    }
