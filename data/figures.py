"""How every figure looks: sizes, frames and ink; and how it is saved, the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg", force=False)

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

__all__ = ["BOUND", "DRAFTER", "INK", "QUIET", "VERIFIER", "figure_style", "save_figure"]

QUIET = "#9aa0a6"
INK = "#202124"
BOUND = "#5f6368"
DRAFTER = "#E69F00"
VERIFIER = "#0072B2"


@contextmanager
def figure_style() -> Iterator[None]:
    """Set sizes and frames for the figures drawn inside, and leave the user's settings alone."""
    settings: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 12,
        "axes.labelcolor": INK,
        "axes.edgecolor": "#dadce0",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": "#eceff1",
        "grid.linewidth": 0.9,
        "xtick.color": BOUND,
        "ytick.color": BOUND,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "svg.hashsalt": "speccascade",
        "svg.fonttype": "path",
    }
    with matplotlib.rc_context(settings):
        yield


def save_figure(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write PNG and SVG without dates, so that the same table gives the same files, and close the figure."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    figure.savefig(paths[0], dpi=160, bbox_inches="tight", metadata={"Software": None})
    figure.savefig(paths[1], bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return paths
