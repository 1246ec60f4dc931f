"""What rules that narrow sampling pay in diversity, picked from the measured points: a row a method and budget.

Computes nothing new. Source of the figures: `outcomes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

__all__ = ["DIVERSITY_LOSS", "pick_settings"]

DIVERSITY_LOSS = "sampled"
_COLUMNS = (
    "method", "label", "kind", "alpha", "rejection", "rejection_high", "quality", "entropy", "distinctness",
)  # fmt: skip


def pick_settings(points: pd.DataFrame, budgets: Sequence[float], routers: Sequence[str]) -> list[dict[str, Any]]:
    """List both ends, every token rule and the ``routers`` at the settings whose rejection is nearest to each budget.

    Args:
        points: as `measure_frontiers` returns them; without the loss of a sample nothing is listed.
        budgets: shares of lossless decoding's rejection.
        routers: names of routers of tokens and of positions.
    """
    table = points[points["loss"] == DIVERSITY_LOSS]
    if table.empty:
        return []
    lossless = table.loc[table["method"] == "specdecode", "rejection"].to_numpy(dtype=float)[0]
    rows = [table[table["kind"] == "end"].drop_duplicates("method")]
    for method, settings in table.groupby("method", sort=False):
        if (settings["kind"] == "token").all() or method in routers:
            nearest = [(settings["rejection"] - share * lossless).abs().idxmin() for share in budgets]
            rows.append(settings.loc[list(dict.fromkeys(nearest))])
    picked: list[Any] = pd.concat(rows)[list(_COLUMNS)].to_dict(orient="records")
    return picked
