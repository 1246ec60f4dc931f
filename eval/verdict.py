"""Does a trained router lose to any plug-in rule beyond the noise? Paired numbers first, then the same in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.resampling import interval

__all__ = ["compare_frontiers", "state_verdict"]

Measured = tuple[float, NDArray[np.float64]]

_IN_WORDS = {
    "zero_one": "0-1 loss",
    "sampled": "sampled-token loss",
    "log": "log loss",
    "greedy": "0-1 loss at temperature 0",
}


def compare_frontiers(
    areas: Mapping[str, Measured],
    at_budgets: Mapping[str, Sequence[Measured]],
    kinds: Mapping[str, str],
    budgets: Sequence[float],
) -> list[dict[str, Any]]:
    """Paired differences, router minus rule, in frontier area and at each budget; below 0 the router is better.

    ``outcome`` is ``loses`` (the 95% interval lies above 0), ``wins`` (below 0) or ``ties`` (holds 0).
    """
    rows = []
    for router in (name for name, kind in kinds.items() if kind == "router"):
        for rule in (name for name, kind in kinds.items() if kind != "router"):
            difference = _difference(areas[router], areas[rule])
            pointwise = [
                {"budget": share, **_difference(ours, theirs)}
                for share, ours, theirs in zip(budgets, at_budgets[router], at_budgets[rule], strict=True)
            ]
            rows.append({"router": router, "rule": rule, "kind": kinds[rule], **difference, "at_budgets": pointwise})
    return rows


def _difference(ours: Measured, theirs: Measured) -> dict[str, Any]:
    spread = interval(ours[0] - theirs[0], ours[1] - theirs[1])
    outcome = "loses" if spread.low > 0 else "wins" if spread.high < 0 else "ties"
    return {"difference": spread.value, "low": spread.low, "high": spread.high, "outcome": outcome}


def state_verdict(
    loss: str,
    comparisons: Sequence[Mapping[str, Any]],
    kinds: Mapping[str, str],
    labels: Mapping[str, str],
    twins: Mapping[str, str],
) -> list[str]:
    """Say in words who loses: a paragraph for each router's own choice, a sentence for all token rules with P̂ together.

    Args:
        loss: one of `methods.REPLAY_LOSSES`.
        comparisons: of `compare_frontiers`.
        kinds: kind of every method.
        labels: how tables call it.
        twins: the plug-in rule of each method that is one with P̂ in the place of p°.
    """
    choosing = [name for name, kind in kinds.items() if kind == "router" and name not in twins]
    said = [_state_one(loss, one, [row for row in comparisons if row["router"] == one], labels) for one in choosing]
    paired = [row for row in comparisons if twins.get(row["router"]) == row["rule"]]
    return said + ([_state_twins(loss, paired, labels)] if paired else [])


def _state_twins(loss: str, rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """How rules that believe P̂ do against themselves with p°."""
    named = {
        said: [labels[row["router"]] for row in rows if row["outcome"] == outcome]
        for outcome, said in (("loses", "LOSES"), ("wins", "wins"), ("ties", "ties"))
    }
    found = "; ".join(f"{said}: {_join(names)}" for said, names in named.items() if names)
    return f"Token rules with P̂, each against itself with p°, {_IN_WORDS[loss]}: {found}."


def _state_one(loss: str, router: str, rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    positional = [row for row in rows if row["kind"] != "token"]
    token = [row for row in rows if row["kind"] == "token"]
    parts = [_against("position-level plug-in rules", positional, labels)] if positional else []
    parts += [_against("token-specific rules", token, labels)] if token else []
    if loss in ("sampled", "log") and any(row["outcome"] == "loses" for row in token):
        parts.append(
            "Token rules sample from a third distribution, nearer the mode, which no choice between q and p reaches."
        )
    return f"{labels[router]}, {_IN_WORDS[loss]}. {' '.join(parts)}"


def _against(family: str, rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    named = {
        outcome: [labels[row["rule"]] for row in rows if row["outcome"] == outcome]
        for outcome in ("loses", "wins", "ties")
    }
    lost_somewhere = [
        f"{labels[row['rule']]} at {_shares(row)}"
        for row in rows
        if row["outcome"] != "loses" and any(point["outcome"] == "loses" for point in row["at_budgets"])
    ]
    said = [f"LOSES beyond its interval to {_join(named['loses'])}" if named["loses"] else "loses to none"]
    if named["wins"]:
        said.append(f"is better than {'all: ' if len(named['wins']) == len(rows) > 1 else ''}{_join(named['wins'])}")
    said += [f"no difference is seen from {_join(named['ties'])}"] if named["ties"] else []
    said += [f"at single budgets it is worse than {_join(lost_somewhere)}"] if lost_somewhere else []
    return f"Against {family} it {'; '.join(said)}."


def _shares(row: Mapping[str, Any]) -> str:
    shares = [f"{point['budget']:.0%}" for point in row["at_budgets"] if point["outcome"] == "loses"]
    return f"{_join(shares)} of lossless rejection"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
