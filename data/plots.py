"""A trace folder in one figure: how far the models are apart, how sure they are, and whether rightly so.

Draws the counts of `data.summary` and does no arithmetic beyond turning them into shares.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from .figures import BOUND, DRAFTER, INK, VERIFIER, figure_style, save_figure
from .summary import HISTOGRAM_BINS, HISTOGRAMS, SplitTotals, TraceSummary

__all__ = ["plot_summary"]


def plot_summary(summary: TraceSummary, directory: Path) -> list[Path]:
    """Draw all splits of a trace folder together; write ``traces.png`` and ``traces.svg`` and return their paths.

    Raises:
        ValueError: the folder holds no positions.
    """
    if not summary.rows:
        raise ValueError(f"traces: expected positions to draw, {summary.folder} holds none")
    totals = SplitTotals()
    for split in summary.splits.values():
        totals.add(split)
    numbers = totals.numbers()
    with figure_style():
        figure, axes = plt.subplots(2, 3, figsize=(13.5, 8.0))
        _draw_tv(axes[0, 0], totals, numbers["mean_tv"])
        _draw_models(axes[0, 1], totals, ("draft_max", "verifier_max"), ("largest q°", "largest p°"))
        axes[0, 1].set(title="How sure each model is", xlabel="largest probability")
        _draw_gap(axes[0, 2], totals)
        _draw_models(axes[1, 0], totals, ("draft_loss", "verifier_loss"), ("−ln q(label)", "−ln p(label)"))
        axes[1, 0].set(
            title="How surprising the label is", xlabel=f"nats ({HISTOGRAMS['draft_loss'][1]:g} and more in the last)"
        )
        if totals.has_truth:
            _draw_calibration(axes[1, 1], totals, numbers)
            _draw_right(axes[1, 2], numbers)
        else:
            for panel in axes[1, 1:]:
                panel.axis("off")
        for panel in (*axes[0], axes[1, 0]):
            panel.set_ylabel("share of positions")
            panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        names = ", ".join(summary.splits)
        state = "" if summary.finished else ", unfinished"
        about = f"q: {summary.plan.drafter}, p: {summary.plan.verifier}, {summary.plan.source}"
        title = f"{summary.rows:,} positions ({names}{state}) of {summary.plan.prompts.get('source')}; {about}"
        figure.suptitle(title, x=0.01, ha="left", color=BOUND, fontsize=10)
        figure.tight_layout(w_pad=2.0, h_pad=2.0)
        return save_figure(figure, directory, "traces")


def _edges(name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.linspace(*HISTOGRAMS[name], HISTOGRAM_BINS + 1)


def _shares(totals: SplitTotals, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.asarray(totals.histograms[name] / totals.positions, dtype=np.float64)


def _draw_tv(panel: Axes, totals: SplitTotals, mean: float) -> None:
    panel.stairs(_shares(totals, "tv"), _edges("tv"), fill=True, color=BOUND, alpha=0.75)
    panel.axvline(mean, color=INK, lw=1.2, dashes=(3, 2), label=f"mean {mean:.3f}")
    panel.set(title="How far q and p are apart", xlabel="total variation distance", xlim=HISTOGRAMS["tv"])
    panel.legend(loc="upper right", fontsize=8.5)


def _draw_models(panel: Axes, totals: SplitTotals, names: tuple[str, str], labels: tuple[str, str]) -> None:
    for name, label, color in zip(names, labels, (DRAFTER, VERIFIER), strict=True):
        shares, edges = _shares(totals, name), _edges(name)
        panel.stairs(shares, edges, fill=True, color=color, alpha=0.18)
        panel.stairs(shares, edges, color=color, lw=1.6, label=label)
    panel.set_xlim(*HISTOGRAMS[names[0]])
    panel.legend(loc="upper center", fontsize=8.5)


def _draw_gap(panel: Axes, totals: SplitTotals) -> None:
    shares, edges = _shares(totals, "gap"), _edges("gap")
    middle = HISTOGRAM_BINS // 2
    panel.stairs(shares[:middle], edges[: middle + 1], fill=True, color=DRAFTER, alpha=0.75, label="drafter surer")
    panel.stairs(shares[middle:], edges[middle:], fill=True, color=VERIFIER, alpha=0.75, label="verifier surer")
    panel.set(title="Gap in confidence", xlabel="largest p° − largest q°", xlim=HISTOGRAMS["gap"])
    panel.set_ylim(0, 1.25 * max(float(shares.max()), 1e-9))  # room for the legend
    panel.legend(loc="upper left", fontsize=8.5)


def _draw_calibration(panel: Axes, totals: SplitTotals, numbers: dict[str, float]) -> None:
    for model, label, color, marker in (("draft", "drafter", DRAFTER, "v"), ("verifier", "verifier", VERIFIER, "D")):
        count, confidence, correct = (row.numpy() for row in totals.calibration[model])
        filled = count > 0
        panel.plot(
            confidence[filled] / count[filled],
            correct[filled] / count[filled],
            color=color,
            lw=1.6,
            marker=marker,
            ms=4.5,
            label=f"{label}, ECE {numbers[f'{model}_calibration_error']:.3f}",
        )
    panel.plot([0, 1], [0, 1], color=BOUND, lw=0.9, dashes=(2, 2), zorder=1)
    panel.set(title="Calibration", xlabel="largest probability", ylabel="how often it is right")
    panel.set(xlim=(0, 1), ylim=(0, 1))
    panel.legend(loc="upper left", fontsize=8.5)


def _draw_right(panel: Axes, numbers: dict[str, float]) -> None:
    only_q, only_p = numbers["draft_only_right"], numbers["verifier_only_right"]
    both = numbers["draft_accuracy"] - only_q
    bars = {
        "both": (both, BOUND),
        "drafter only": (only_q, DRAFTER),
        "verifier only": (only_p, VERIFIER),
        "neither": (1 - both - only_q - only_p, "#dadce0"),
    }
    drawn = panel.barh(list(bars), [share for share, _ in bars.values()], color=[color for _, color in bars.values()])
    panel.bar_label(drawn, fmt="{:.1%}", padding=4, color=INK, fontsize=9)
    panel.set(title="Whose first choice is right", xlabel="share of positions")
    panel.invert_yaxis()
    panel.margins(x=0.16)
    panel.xaxis.set_major_formatter(PercentFormatter(1.0))
    panel.grid(axis="y", visible=False)
