"""From a folder of traces to frontier tables on disk: what ``speccascade evaluate --offline`` does. Runs no model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..data.calibration import calibration_error
from ..data.pairs import PairIdentity
from ..data.progress import announce
from ..data.traces import Traces
from .config import EvaluateConfig
from .frontier import measure_frontiers
from .methods import Method, plug_in_methods, router_method
from .metrics import equal_count_calibration_error, reliability
from .provenance import describe_run
from .replay import Replay
from .tables import write_json, write_table

__all__ = ["check_router", "measure_calibration", "open_replays", "open_routers", "run_offline"]


def run_offline(config: EvaluateConfig) -> Path:
    """Draw all frontiers; write ``frontier``, ``frontier_curves``, ``reliability`` (Parquet) and ``frontier.json``.

    Every plug-in rule takes part, whatever ``config.methods`` says: it costs seconds, and the verdict is about all.

    Raises:
        ValueError: no traces given, or a split that they lack.
    """
    if config.traces is None:
        raise ValueError("traces: expected a folder of traces to replay, got none")
    out, started = Path(config.out), time.monotonic()
    traces = Traces.open(config.traces)
    replays = open_replays(traces, (config.choose_on, config.split))
    routers = open_routers(config.router)
    for router in routers.values():
        check_router(router.build(0.0, "zero_one"), traces.manifest.identity)
    methods = [*_replayable(plug_in_methods(), traces), *routers.values()]
    test = replays[config.split]
    announce(f"offline: {len(methods)} methods on {len(test):,} positions of {test.num_prompts} prompts")
    frontiers = measure_frontiers(methods, replays[config.choose_on], test, config.frontier)
    calibration, bins = measure_calibration(test, routers.values())
    write_table(out / "frontier.parquet", frontiers.points)
    write_table(out / "frontier_curves.parquet", frontiers.curves)
    write_table(out / "reliability.parquet", bins)
    record = {
        **describe_run(),
        "traces": _describe_traces(traces),
        "chosen_on": config.choose_on,
        "reported_on": config.split,
        "resamples": config.frontier.resamples,
        "losses": frontiers.summary,
        "calibration": calibration,
    }
    write_json(out / "frontier.json", record)
    announce(f"offline: done in {time.monotonic() - started:.1f} s")
    return out


def check_router(rule: Any, identity: PairIdentity) -> None:
    """Refuse a trained router of another pair; a rule that is not tied to one passes.

    Raises:
        ValueError: vocabulary or weights differ; both pairs are named.
    """
    if hasattr(rule, "check_pair"):
        rule.check_pair(**asdict(identity))


def open_replays(traces: Traces, splits: Iterable[str]) -> dict[str, Replay]:
    """Load some splits of opened traces, ready to replay.

    Raises:
        ValueError: a split without positions.
    """
    return {name: Replay(traces.split(name), traces.manifest.plan.top_k) for name in dict.fromkeys(splits)}


def open_routers(directories: Sequence[str]) -> dict[str, Method]:
    """Load trained routers; a single one is called ``router``, several by the names of their folders."""
    if len(directories) == 1:
        return {"router": router_method(directories[0])}
    names = [Path(directory).name for directory in directories]
    if len(set(names)) < len(names):
        names = ["-".join(Path(directory).parts[-2:]) for directory in directories]
    if len(set(names)) < len(names):
        raise ValueError(f"router: expected folders whose names differ, got {', '.join(directories)}")
    return {
        f"router-{name}": router_method(directory, f"router-{name}", f"Router {name}")
        for name, directory in zip(names, directories, strict=True)
    }


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
        rule: Any = router.build(0.0, "zero_one")
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
    announce("offline: token rules read probabilities at temperature 1, and these traces log another; left out")
    return [method for method in methods if method.kind != "token"]


def _describe_traces(traces: Traces) -> dict[str, Any]:
    manifest = traces.manifest
    names = ("drafter", "verifier", "temperature", "top_k", "code_version")
    made = {name: getattr(manifest.plan, name) for name in names}
    return {"source": manifest.plan.prompts["source"], **made, "rows": manifest.rows, "digest": manifest.digest}
