"""Rich tables for the terminal: what was found, in a dozen lines. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .markdown import format_number
from .methods import Method

__all__ = ["print_distances", "render_distances", "render_live_table"]

_HEADS = {"zero_one": "0-1", "sampled": "sampled", "log": "log", "greedy": "0-1 at T=0"}


def print_distances(losses: Mapping[str, Any], methods: Sequence[Method]) -> None:
    """Print every method's distance from the clairvoyant to standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 160)
    console.print(render_distances(losses, methods))


def render_distances(losses: Mapping[str, Any], methods: Sequence[Method]) -> Table:
    """Lay out the distances by method and loss, OPT being 100: sorted by the first loss, the best of each in bold.

    Args:
        losses: what `measure_frontiers` found under each loss.
        methods: all that took part.
    """
    table = Table(
        title="Distance from the clairvoyant, OPT = 100 (95% of resampled documents)",
        title_justify="left",
        pad_edge=False,
    )
    distances = {loss: found["distance_percent"] for loss, found in losses.items()}
    best = {loss: min(found, key=lambda name: found[name]["value"], default="") for loss, found in distances.items()}
    table.add_column("method", overflow="ellipsis", no_wrap=True)
    for loss, found in distances.items():
        widest = max((len(_distance(measured)) for measured in found.values()), default=1)
        table.add_column(_HEADS.get(loss, loss), justify="right", no_wrap=True, min_width=widest)

    def height(method: Method) -> list[float]:
        return [found[method.name]["value"] if method.name in found else float("inf") for found in distances.values()]

    for method in sorted(methods, key=height):
        cells = [
            Text(_distance(found.get(method.name)), style="bold" if best[loss] == method.name else "")
            for loss, found in distances.items()
        ]
        table.add_row(method.label, *cells)
    return table


def _distance(measured: Mapping[str, float] | None) -> str:
    if measured is None:
        return "–"
    return f"{measured['value']:.0f} ({measured['low']:.0f}–{measured['high']:.0f})"


def render_live_table(live: pd.DataFrame, quality_name: str) -> Table:
    """Lay out the live run for a terminal."""
    table = Table(title="Live run, with what the traces say offline", title_justify="left", pad_edge=False)
    for column in ("method", "α", "budget"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for column in (
        "offline\nquality",
        "offline\nrejection",
        f"live\n{quality_name}",
        "live\nrejection",
        "calls/\ntoken",
        "tok/s",
        "× verifier",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for _, row in live.iterrows():
        half = (row["quality_high"] - row["quality_low"]) / 2
        table.add_row(
            row["label"],
            format_number(row["alpha"], ".3g"),
            row.get("budgets") or "–",
            format_number(row.get("offline_quality"), ".3f"),
            format_number(row.get("offline_rejection"), ".3f"),
            f"{row['quality']:.3f} ±{half:.3f}",
            format_number(row["rejection"], ".3f"),
            format_number(row["calls_per_token"], ".2f"),
            format_number(row["tokens_per_second"], ".1f"),
            format_number(row["speed_ratio"], ".2f"),
            style="bold" if row["kind"] == "router" else None,
        )
    return table
