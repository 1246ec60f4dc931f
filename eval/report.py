"""Results to a report: what was found, in words first, then tables, figures and where every number came from.

Reads what `sweep` and `offline` wrote into a run folder, either or both; measures nothing that they did not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ..data.embedded import EMBEDDED_DATA, EMBEDDED_MODELS
from .markdown import render_report
from .plots import plot_distances, plot_frontier, plot_live, plot_regret, plot_reliability
from .provenance import describe_run
from .summary import FEW_PROMPTS, drafter_cost_ratio, summarise_answers
from .tables import read_json, read_table, write_json, write_text

__all__ = ["Findings", "gather", "report"]


_OWN_PARTS = ("losses", "diversity", "origins", "rates", "regret")


@dataclass(frozen=True)
class Findings:
    """Everything a report says, before it is laid out.

    Args:
        live: one row a live setting, joined with what the traces say about it; empty without a live run.
        frontiers: one row a method × loss; empty without an offline run.
        record: the rest: who, what, how, verdicts and notes; goes to ``report.json`` together with the tables.
    """

    live: pd.DataFrame
    frontiers: pd.DataFrame
    record: dict[str, Any]


def report(run_dir: str | os.PathLike[str]) -> Path:
    """Write ``report.md``, ``report.json`` and the figures (PNG and SVG) into a run folder; return the page's path.

    Raises:
        FileNotFoundError: the folder holds no results.
    """
    folder = Path(run_dir)
    findings = gather(folder)
    figures = _draw(folder, findings)
    content = {
        **findings.record,
        "live": findings.live.to_dict(orient="records"),
        "frontiers": findings.frontiers.to_dict(orient="records"),
        "figures": figures,
    }
    write_json(folder / "report.json", content)
    write_text(folder / "report.md", render_report(findings.live, findings.frontiers, findings.record, figures))
    return folder / "report.md"


def gather(folder: Path) -> Findings:
    """Read a run folder and work out what the report says.

    Raises:
        FileNotFoundError: the folder holds no results.
    """
    results, offline = read_table(folder / "results.parquet"), read_json(folder / "frontier.json")
    if results is None and offline is None:
        raise FileNotFoundError(
            f"run folder: expected results.parquet or frontier.json in {folder}, found neither; "
            "speccascade evaluate writes them"
        )
    run = read_json(folder / "run.json") or {}
    live = _live_table(results, read_table(folder / "settings.parquet"), int(run.get("seed", 0)))
    frontiers = _frontier_table(offline, read_table(folder / "frontier.parquet"))
    record = {
        "models": _name_models(run, offline),
        "data": _name_data(run, offline),
        "live_run": run,
        "offline_run": {}
        if offline is None
        else {name: value for name, value in offline.items() if name not in _OWN_PARTS},
        "losses": {} if offline is None else offline["losses"],
        "diversity": [] if offline is None else offline.get("diversity", []),
        "rates": [] if offline is None else offline.get("rates", []),
        "origins": {} if offline is None else offline.get("origins", {}),
        "regret": [] if offline is None else offline.get("regret", []),
        "drafter_cost_ratio": None if results is None else drafter_cost_ratio(results),
        "notes": _notes(live, run, offline),
        "report": describe_run(),
    }
    return Findings(live, frontiers, record)


def _live_table(results: pd.DataFrame | None, settings: pd.DataFrame | None, seed: int) -> pd.DataFrame:
    if results is None:
        return pd.DataFrame()
    live = summarise_answers(results, seed=seed)
    if settings is None:
        return live
    extra = [name for name in settings.columns if name == "key" or name not in live.columns]
    return live.merge(settings[extra], on="key", how="left", sort=False)


def _frontier_table(offline: dict[str, Any] | None, points: pd.DataFrame | None) -> pd.DataFrame:
    """One row a method × loss: distance, losses at the budgets, and every router's verdict on it."""
    if offline is None or points is None:
        return pd.DataFrame()
    about = points.drop_duplicates("method").set_index("method")
    rows = []
    for loss, found in offline["losses"].items():
        for method, area in found["area"].items():
            if method == "clairvoyant":
                continue
            rows.append(
                {
                    "loss": loss,
                    "method": method,
                    "label": about.loc[method, "label"],
                    "kind": about.loc[method, "kind"],
                    "area": area,
                    "distance": found["distance_percent"].get(method),
                    "at_budgets": found["loss_at_budgets"][method],
                    "against": {row["router"]: row for row in found["comparisons"] if row["rule"] == method},
                }
            )
    return pd.DataFrame(rows)


def _name_models(run: dict[str, Any], offline: dict[str, Any] | None) -> dict[str, Any]:
    source = run or (offline or {}).get("traces", {})
    named = {role: str(source.get(role, "unknown")) for role in ("drafter", "verifier")}
    licences = {name: _licence(name, EMBEDDED_MODELS) for name in named.values()}
    return {**named, "licences": {name: licence for name, licence in licences.items() if licence}}


def _name_data(run: dict[str, Any], offline: dict[str, Any] | None) -> dict[str, Any]:
    source = str(run.get("source") or (offline or {}).get("traces", {}).get("source") or "unknown")
    return {"source": source, "licence": _licence(source, EMBEDDED_DATA)}


def _licence(name: str, payloads: Any) -> str | None:
    payload = payloads.get(name.removeprefix("embedded:")) if name.startswith("embedded:") else None
    return None if payload is None else payload.licence


def _notes(live: pd.DataFrame, run: dict[str, Any], offline: dict[str, Any] | None) -> list[str]:
    """What a reader must know before believing the tables."""
    notes = []
    if len(live) and run.get("prompts", 0) < FEW_PROMPTS:
        notes.append(
            f"The live run answered {run['prompts']} prompts with at most {run['max_new_tokens']} tokens each: its "
            "intervals are wide (and, with so few prompts, still too narrow). It shows that the methods run and what "
            "they cost; "
            "the claim about quality rests on the offline frontier."
        )
    if len(live) and live["same_as"].notna().any():
        twins = int(live["same_as"].notna().sum())
        cause = "At temperature 0 many settings decide alike. " if run.get("temperature") == 0 else ""
        notes.append(
            f"{cause}{twins} of {len(live)} settings gave exactly the texts of another one, named in their rows."
        )
    if offline is not None:
        notes.append(
            "Offline figures are teacher-forced: at every position of the reference, what would each method have "
            "emitted? A live run drifts from the reference, and its rates differ somewhat."
        )
        if offline["chosen_on"] == offline["reported_on"]:
            notes.append(f"α was chosen and reported on the same split ({offline['reported_on']}): frontiers flatter.")
    return notes


def _draw(folder: Path, findings: Findings) -> list[str]:
    """Draw every figure that the results allow; return the names of the PNG files."""
    figures = folder / "figures"
    drawn: list[Path] = []
    curves, points = read_table(folder / "frontier_curves.parquet"), read_table(folder / "frontier.parquet")
    if curves is not None and points is not None:
        for loss in findings.record["losses"]:
            drawn += plot_frontier(curves, points, loss, figures)
    measured = findings.frontiers
    if len(measured) and measured["distance"].notna().any():
        rows = measured[measured["distance"].notna()]
        spread = pd.DataFrame(list(rows["distance"]), index=rows.index)
        drawn += plot_distances(rows[["loss", "method", "label", "kind"]].join(spread), figures)
    regret = read_table(folder / "regret.parquet")
    if regret is not None:
        for loss in regret["loss"].unique():
            drawn += plot_regret(regret, loss, figures)
    bins = read_table(folder / "reliability.parquet")
    if bins is not None:
        drawn += plot_reliability(bins, findings.record["offline_run"]["calibration"], figures)
    if len(findings.live):
        drawn += plot_live(findings.live, findings.record["live_run"]["scorers"][0], figures)
    return [path.relative_to(folder).as_posix() for path in drawn if path.suffix == ".png"]
