"""How figures look: one palette that colour-blind readers can tell apart, one type size, labels beside their lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from ..data.figures import BOUND, INK, QUIET

__all__ = ["Look", "label_lines", "look_of"]


@dataclass(frozen=True)
class Look:
    """Colour, width, dashes, marker and drawing order of one method."""

    color: str
    width: float = 1.8
    dashes: tuple[float, ...] = ()
    marker: str = "o"
    order: int = 4

    @property
    def line(self) -> dict[str, Any]:
        """Keyword arguments for ``Axes.plot``."""
        style = {"color": self.color, "linewidth": self.width, "zorder": self.order, "solid_capstyle": "round"}
        return style | ({"dashes": self.dashes} if self.dashes else {})


# Okabe and Ito's palette; token rules are dashed, so that kinds differ without colour too.
_LOOKS: dict[str, Look] = {
    "opt": Look("#0072B2"),
    "diff": Look("#56B4E9"),
    "chow": Look("#E69F00"),
    "verifier_gap": Look("#009E73"),
    "expected_gain": Look("#882255"),
    "token_v2": Look("#CC79A7", dashes=(4, 1.5), marker="s"),
    "greedyward": Look("#8A5FBF", dashes=(4, 1.5), marker="s"),
    "clairvoyant": Look(BOUND, 1.2, dashes=(1, 2), order=3),
    "verifier": Look(INK, marker="D"),
    "drafter": Look(INK, marker="v"),
    "specdecode": Look(INK, marker="*"),
}
_ROUTERS = ("#D55E00", "#A33B00", "#F08A4B", "#7A2E00")
_OTHERS = {
    "position": Look(QUIET, 1.0, order=2),
    "token": Look(QUIET, 1.0, dashes=(4, 1.5), marker="s", order=2),
    "fixed": Look(QUIET, 1.0, order=2),
}


def look_of(method: str, kind: str, routers: Sequence[str] = ()) -> Look:
    """Choose the look of a method: routers in vermilion, the rules of the paper in colour, the rest in quiet grey."""
    if kind == "router":
        place = list(routers).index(method) if method in routers else 0
        return Look(_ROUTERS[place % len(_ROUTERS)], 2.8, order=6)
    return _LOOKS.get(method) or _OTHERS.get(kind, _OTHERS["fixed"])


def label_lines(axes: Axes, labels: Sequence[tuple[float, str, Look]], x: float, gap: float = 0.052) -> None:
    """Write each label beside the right end of its line, spread so that none overlaps, with a thin leader.

    Args:
        axes: limits must be final.
        labels: (height of the line's end, text, look).
        x: where the lines end.
        gap: least distance between labels, as a share of the height.
    """
    low, high = axes.get_ylim()
    wanted = sorted(((y - low) / (high - low), text, look) for y, text, look in labels if low <= y <= high)
    heights = _spread([height for height, _, _ in wanted], gap)
    for (height, text, look), placed in zip(wanted, heights, strict=True):
        axes.annotate(
            text,
            xy=(x, low + height * (high - low)),
            xytext=(1.06, placed),
            textcoords="axes fraction",
            va="center",
            color=look.color,
            fontsize=9.5,
            fontweight="bold" if look.order == 6 else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": look.color,
                "linewidth": 0.8,
                "shrinkA": 2,
                "shrinkB": 2,
                "relpos": (0, 0.5),
            },
        )


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move sorted heights apart to at least ``gap``, each group staying centred on where it wants to be."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _top(groups[-2], gap) + gap > _bottom(groups[-1], gap):
            last = groups.pop()
            groups[-1] += last
    placed = [_bottom(group, gap) + gap * index for group in groups for index in range(len(group))]
    shift = max(0.0, -min(placed, default=0.0)) - max(0.0, max(placed, default=0.0) - 1.0)
    return [height + shift for height in placed]


def _bottom(group: Sequence[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _top(group: Sequence[float], gap: float) -> float:
    return _bottom(group, gap) + gap * (len(group) - 1)
