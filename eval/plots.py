"""Tables in, figures out. No measuring here: what is drawn was computed before, by `frontier` and `summary`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter

from ..data.figures import BOUND, DRAFTER, INK, QUIET, VERIFIER, figure_style, save_figure
from .style import Look, label_lines, look_of

__all__ = ["plot_distances", "plot_frontier", "plot_live", "plot_regret", "plot_reliability"]

_TITLES = {
    "zero_one": "The more likely token is right: quality for a budget of rejections",
    "sampled": "A sampled token is right: quality for a budget of rejections",
    "log": "Log probability of the label: quality for a budget of rejections",
    "greedy": "Temperature 0: quality for a budget of rejections",
}
_SHORT = {
    "zero_one": "0-1 loss",
    "sampled": "sampled-token loss",
    "log": "log loss (nats)",
    "greedy": "0-1 loss at T = 0",
}
_PART_COLORS = {"threshold": "#E69F00", "calibration": "#D55E00", "ranking": "#56B4E9"}


def plot_frontier(curves: pd.DataFrame, points: pd.DataFrame, loss: str, directory: Path) -> list[Path]:
    """Draw every method's frontier under one loss, the router's interval as a band, and the two end points.

    Token rules that believe a router's P̂ are thin and dashed, and without a band of their own.
    """
    curves, points = curves[curves["loss"] == loss], points[points["loss"] == loss]
    routers = list(curves.loc[curves["kind"] == "router", "method"].unique())
    with figure_style():
        figure, axes = plt.subplots(figsize=(8.2, 5.4))
        named: dict[tuple[float, ...], tuple[list[str], Look]] = {}
        quiet: list[str] = []
        for method, curve in curves.groupby("method", sort=False):
            look = look_of(str(method), str(curve["kind"].iat[0]), routers)
            believes = "P̂" in str(curve["label"].iat[0])
            look = replace(look, width=1.4, dashes=(4, 1.5)) if believes else look
            axes.plot(curve["rejection"], curve["quality"], **look.line)
            if curve["kind"].iat[0] == "router" and not believes:
                axes.fill_between(
                    curve["rejection"], curve["quality_low"], curve["quality_high"], color=look.color, alpha=0.13, lw=0
                )
            if look.color != QUIET and method != "clairvoyant":
                # One label for curves that lie on each other, so that none is hidden.
                named.setdefault(tuple(curve["quality"].round(6)), ([], look))[0].append(str(curve["label"].iat[0]))
            elif look.color == QUIET:
                quiet.append(str(curve["label"].iat[0]))
        _draw_ends(axes, points)
        _focus(axes, curves)
        _mark_bound(axes, curves, loss)
        labels = [(heights[-1], " = ".join(names), look) for heights, (names, look) in named.items()]
        label_lines(axes, labels, x=curves["rejection"].max())
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        if loss != "log":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("drafted tokens rejected, at most")
        axes.set_ylabel("log π(label), nats" if loss == "log" else "tokens right")
        axes.set_title(_TITLES.get(loss, loss))
        notes = [f"grey: {', '.join(quiet)}"] if quiet else []
        notes += ["dashed: token rules"] if (curves["kind"] == "token").any() else []
        notes += ["band: 95% of resampled documents"] if (curves["kind"] == "router").any() else []
        figure.text(0.125, -0.005, fill("; ".join(notes), 110), color=BOUND, fontsize=8.5, va="top")
        return save_figure(figure, directory, f"frontier_{loss}")


def _draw_ends(axes: Axes, points: pd.DataFrame) -> None:
    """The drafter at no rejection and lossless decoding at its own, with their intervals."""
    for _, end in points[points["kind"] == "end"].iterrows():
        look = look_of(end["method"], "end")
        spread = [[end["quality"] - end["quality_low"]], [end["quality_high"] - end["quality"]]]
        axes.errorbar(
            end["rejection"], end["quality"], yerr=spread, color=INK, fmt=look.marker, ms=9, capsize=0, lw=1.1,
            zorder=7, clip_on=False,
        )  # fmt: skip
        inward = end["method"] == "drafter"
        axes.annotate(
            end["label"], (end["rejection"], end["quality"]), xytext=(10 if inward else -10, -6 if inward else -14),
            textcoords="offset points", ha="left" if inward else "right", va="top", color=INK, fontsize=9, zorder=7,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip


def _focus(axes: Axes, curves: pd.DataFrame) -> None:
    """Fit the axes to the methods; the clairvoyant may leave at the top."""
    shown = curves[curves["kind"] != "bound"]
    low, high = shown["quality"].min(), shown["quality"].max()
    routers = shown[shown["kind"] == "router"]
    if len(routers):
        low, high = min(low, routers["quality_low"].min()), max(high, routers["quality_high"].max())
    margin = 0.08 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(0, curves["rejection"].max())


def _mark_bound(axes: Axes, curves: pd.DataFrame, loss: str) -> None:
    """Say where the clairvoyant goes once it has left the frame."""
    bound = curves[curves["kind"] == "bound"]
    top = axes.get_ylim()[1]
    if bound.empty:
        return
    leaving = bound[bound["quality"] > top]
    best = bound["quality"].max()
    at = leaving.iloc[0] if len(leaving) else bound.iloc[-1]
    reach = f"{best:.2f} nats" if loss == "log" else f"{best:.1%}"
    text = f"clairvoyant choice of q or p\n(up to {reach})" if len(leaving) else "clairvoyant choice of q or p"
    axes.annotate(
        text, (at["rejection"], min(at["quality"], top)), xytext=(8, -6) if len(leaving) else (-6, 5),
        textcoords="offset points", ha="left" if len(leaving) else "right", va="top" if len(leaving) else "bottom",
        color=BOUND, fontsize=8.5,
    )  # fmt: skip


def plot_distances(distances: pd.DataFrame, directory: Path) -> list[Path]:
    """Draw each frontier's distance from the clairvoyant's, OPT being 100, one panel a loss.

    Args:
        distances: columns ``loss, method, label, kind, value, low, high``.
        directory: where the files go.
    """
    losses = list(distances["loss"].unique())
    routers = list(distances.loc[distances["kind"] == "router", "method"].unique())
    rows = int(distances.groupby("loss").size().max())
    with figure_style():
        figure, panels = plt.subplots(1, len(losses), figsize=(4.1 * len(losses), 0.32 * rows + 1.5), squeeze=False)
        for axes, loss in zip(panels[0], losses, strict=True):
            table = distances[distances["loss"] == loss].sort_values("value", ascending=False)
            for height, (_, row) in enumerate(table.iterrows()):
                look = look_of(row["method"], row["kind"], routers)
                axes.plot([row["low"], row["high"]], [height, height], color=look.color, lw=2.2, alpha=0.55)
                axes.plot(row["value"], height, look.marker, color=look.color, ms=7 if look.order == 6 else 5.5)
            axes.axvline(100, color=BOUND, lw=0.9, dashes=(2, 2))
            axes.set_yticks(range(len(table)), table["label"])
            for text, kind in zip(axes.get_yticklabels(), table["kind"], strict=True):
                text.set(color=INK, fontweight="bold" if kind == "router" else "normal")
            axes.grid(axis="y", visible=False)
            axes.set_title(_SHORT.get(loss, loss))
            axes.set_xlabel("distance from the clairvoyant, OPT = 100")
        figure.text(0.0, -0.02, "Left is better. Squares: token rules, which the clairvoyant does not bound. "
                    "Bars: 95% of resampled documents.", color=BOUND, fontsize=9)  # fmt: skip
        figure.tight_layout(w_pad=2.0)
        return save_figure(figure, directory, "distances")


def plot_regret(regret: pd.DataFrame, loss: str, directory: Path) -> list[Path]:
    """Draw the parts of every rule's regret under one loss as stacked bars, one panel a price.

    Args:
        regret: columns ``loss, label, kind, alpha, threshold, calibration, ranking, regret_low, regret_high, noise``.
        loss: which rows.
        directory: where the files go.
    """
    table = regret[regret["loss"] == loss]
    prices, labels = list(table["alpha"].unique()), list(table["label"].unique())[::-1]
    with figure_style():
        figure, panels = plt.subplots(
            1, len(prices), figsize=(2.6 * len(prices) + 1.2, 0.36 * len(labels) + 1.7), squeeze=False, sharey=True
        )
        for axes, alpha in zip(panels[0], prices, strict=True):
            _stack_parts(axes, table[table["alpha"] == alpha].set_index("label").loc[labels])
            axes.set_title(f"α = {alpha:g}")
            axes.set_xlabel(f"regret, {_SHORT.get(loss, loss)}")
            axes.grid(axis="y", visible=False)
        panels[0][0].set_yticks(range(len(labels)), labels)
        kinds = table.drop_duplicates("label").set_index("label")["kind"]
        for text, label in zip(panels[0][0].get_yticklabels(), labels, strict=True):
            text.set(color=INK, fontweight="bold" if kinds[label] == "router" else "normal")
        handles, names = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="lower center", ncols=len(names), bbox_to_anchor=(0.5, -0.1), fontsize=9)
        figure.tight_layout(w_pad=1.5)
        return save_figure(figure, directory, f"regret_{loss}")


def _stack_parts(axes: Axes, rows: pd.DataFrame) -> None:
    """One bar a rule; what is below 0 goes to the left, so that the right end is no longer the sum by that much."""
    heights = range(len(rows))
    ends = {True: [0.0] * len(rows), False: [0.0] * len(rows)}
    for part, color in _PART_COLORS.items():
        for height, value in zip(heights, rows[part], strict=True):
            side = ends[value >= 0]
            axes.barh(height, value, left=side[height], color=color, height=0.62, label=part if height == 0 else None)
            side[height] += value
    axes.hlines(heights, rows["regret_low"], rows["regret_high"], color=INK, lw=1.4, label="regret, 95%")
    axes.axvline(
        rows["noise"].to_numpy(dtype=float)[0], color=BOUND, lw=0.9, dashes=(2, 2), label="noise, were p the truth"
    )


def plot_reliability(bins: pd.DataFrame, errors: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draw stated against observed: both models everywhere and where they differ, and the routers' gaps.

    Args:
        bins: columns ``source, where, confidence, accuracy, weight``.
        errors: calibration error by source and ``all`` or ``differ``.
        directory: where the files go.
    """
    routers = [name for name in bins["source"].unique() if name not in ("drafter", "verifier")]
    panels = 3 if routers else 2
    with figure_style():
        figure, axes = plt.subplots(1, panels, figsize=(4.3 * panels, 4.3), squeeze=False)
        for panel, where, title in zip(
            axes[0], ("all", "differ"), ("All positions", "Where they differ"), strict=False
        ):
            for source, color, marker in (("drafter", DRAFTER, "v"), ("verifier", VERIFIER, "D")):
                label = f"{source}, ECE {errors[source][where]:.3f}"
                _draw_bins(panel, bins, source, where, color, marker, label)
            panel.plot([0, 1], [0, 1], color=BOUND, lw=0.9, dashes=(2, 2), zorder=1)
            panel.set(xlabel="largest probability", ylabel="how often it is right", xlim=(0, 1), ylim=(0, 1))
            panel.set_title(title)
            panel.legend(loc="upper left", fontsize=8.5)
        if routers:
            _draw_gaps(axes[0][2], bins, errors, routers)
        figure.tight_layout(w_pad=2.0)
        return save_figure(figure, directory, "reliability")


def _draw_gaps(panel: Axes, bins: pd.DataFrame, errors: Mapping[str, Any], routers: Sequence[str]) -> None:
    for router in routers:
        look = look_of(router, "router", routers)
        label = f"{router}, ECE {errors[router]['differ']:.3f}"
        _draw_bins(panel, bins, router, "differ", look.color, "o", label)
    shown = bins[bins["source"].isin(routers) & (bins["where"] == "differ")]
    ends = shown[["confidence", "accuracy"]].abs().to_numpy().max(initial=0.1) * 1.08
    panel.plot([-ends, ends], [-ends, ends], color=BOUND, lw=0.9, dashes=(2, 2), zorder=1)
    panel.axhline(0, color="#dadce0", lw=0.9, zorder=0)
    panel.axvline(0, color="#dadce0", lw=0.9, zorder=0)
    panel.set(xlabel="predicted gap", ylabel="verifier right − drafter right", xlim=(-ends, ends), ylim=(-ends, ends))
    panel.set_title("Router, where they differ")
    panel.legend(loc="upper left", fontsize=8.5)


def _draw_bins(panel: Axes, bins: pd.DataFrame, source: str, where: str, color: str, marker: str, label: str) -> None:
    table = bins[(bins["source"] == source) & (bins["where"] == where)]
    panel.plot(
        table["confidence"], table["accuracy"], color=color, lw=1.6, marker=marker, ms=4.5, label=label, zorder=3
    )


def plot_live(summary: pd.DataFrame, quality_name: str, directory: Path) -> list[Path]:
    """Draw live quality against verifier calls per token, one point a setting.

    Args:
        summary: columns ``method, label, kind, alpha, calls_per_token, quality, quality_low, quality_high``.
        quality_name: what the quality is.
        directory: where the files go.
    """
    routers = list(summary.loc[summary["kind"] == "router", "method"].unique())
    with figure_style():
        figure, axes = plt.subplots(figsize=(8.2, 5.0))
        for label, method, table in _coinciding(summary):
            look = look_of(method, str(table["kind"].iat[0]), routers)
            ends = table["quality"] - table["quality_low"], table["quality_high"] - table["quality"]
            spread = [end.tolist() for end in ends]  # matplotlib 3.10 takes an array of one for a number
            axes.errorbar(
                table["calls_per_token"],
                table["quality"],
                yerr=spread,
                fmt="none",
                ecolor=look.color,
                alpha=0.3,
                lw=1.4,
            )
            axes.plot(
                table["calls_per_token"], table["quality"], look.marker, color=look.color,
                ms=8 if look.order > 2 else 6, ls="-" if len(table) > 1 else "none", lw=1.0,
                label=label, zorder=look.order,
            )  # fmt: skip
        axes.set_xlim(left=-0.03)
        axes.set_xlabel("verifier calls per token")
        axes.set_ylabel(f"quality ({quality_name})")
        axes.set_title("Live run")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)
        figure.text(0.125, -0.005, "bars: 95% of resampled prompts", color=BOUND, fontsize=8.5, va="top")
        return save_figure(figure, directory, "live")


def _coinciding(summary: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """One entry for all methods whose points are the same, so that none is hidden under another."""
    drawn: dict[tuple[tuple[float, float], ...], tuple[list[str], str, pd.DataFrame]] = {}
    for method, table in summary.groupby("method", sort=False):
        table = table.sort_values("calls_per_token")
        places = tuple(zip(table["calls_per_token"], table["quality"], strict=True))
        drawn.setdefault(places, ([], str(method), table))[0].append(str(table["label"].iat[0]))
    return [(" = ".join(labels), method, table) for labels, method, table in drawn.values()]
