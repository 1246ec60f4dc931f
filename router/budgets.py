"""Budgets: which row of a stored calibration table keeps one. Reads `CalibrationRow` and knows no head, rule or model.

Every row was really measured; nothing is interpolated. Four budgets:

* ``rejection``, ``deferral``: the row of best quality whose rate stays within.
* ``latency``: the same for the modelled time per token relative to the verifier alone (`relative_latency`).
* ``quality_drop``: the boldest row up to which every row's upper bound of the mean quality drop stays within. This is
  fixed-sequence testing (Angelopoulos et al., Learn then Test, 2021, section 3.1): the order is by rising α, that is
  from the most deferral to the least, and testing ends at the first row that fails, though a later one may pass again.
  So the chance that the chosen row's true drop exceeds the budget is at most 1 − confidence, over the draw of the
  calibration documents; it speaks of new documents of the same source, on average, and of the positions of traces.
"""

from collections.abc import Callable, Mapping, Sequence

from .checks import check_choice, check_range
from .config import CalibrationRow

__all__ = [
    "BUDGETS",
    "by_deferral",
    "by_latency",
    "by_quality_drop",
    "by_rejection",
    "choose_row",
    "last_within",
    "relative_latency",
]

Rows = Sequence[CalibrationRow]

DEFAULT_CONFIDENCE = 0.95
DEFAULT_GAMMA = 5


def choose_row(
    calibration: Mapping[str, Rows],
    *,
    greedy: bool = False,
    rejection: float | None = None,
    deferral: float | None = None,
    latency: float | None = None,
    quality_drop: float | None = None,
    confidence: float | None = None,
    gamma: int | None = None,
    cost_ratio: float | None = None,
) -> CalibrationRow:
    """Choose the row that keeps one budget, of which exactly one is given; the last three say how to read it.

    Args:
        calibration: a bundle's tables, ``greedy`` and ``sampled``.
        greedy: read the table at temperature 0 instead of the sampled one.
        rejection: largest share of drafted tokens rejected, in [0, 1].
        deferral: largest share of positions deferred, in [0, 1].
        latency: largest modelled time per token relative to the verifier alone, above 0.
        quality_drop: largest mean loss of quality against the verifier, in [0, 1].
        confidence: for ``quality_drop``; one that the table holds, 0.95 by default.
        gamma: for ``latency``: tokens drafted a round, 5 by default.
        cost_ratio: for ``latency``, which needs it: cost of a drafter's step relative to a verifier's.

    Raises:
        ValueError: no such table, not exactly one budget, an argument of another one, one out of range, or a budget
            that no row keeps, answered with the range within reach.
    """
    budgets = {"rejection": rejection, "deferral": deferral, "latency": latency, "quality_drop": quality_drop}
    given = {name: value for name, value in budgets.items() if value is not None}
    if len(given) != 1:
        raise ValueError(f"budget: expected one of {', '.join(BUDGETS)}, got {' and '.join(given) or 'none'}")
    kind, budget = next(iter(given.items()))
    choose, takes = BUDGETS[kind]
    extra = {"confidence": confidence, "gamma": gamma, "cost_ratio": cost_ratio}
    extra = {name: value for name, value in extra.items() if value is not None}
    for name in extra:
        if name not in takes:
            owners = [other for other, (_, theirs) in BUDGETS.items() if name in theirs]
            raise ValueError(f"{name}: belongs to a budget of {' or '.join(owners)}, got it with {kind}")
    if kind == "latency" and cost_ratio is None:
        raise ValueError("cost_ratio: expected the cost of a drafter's step relative to a verifier's, got none")
    key = "greedy" if greedy else "sampled"
    if not calibration.get(key):
        raise ValueError(f"{kind}: this router holds no {key!r} calibration; set alpha instead")
    return choose(calibration[key], budget, **extra)


def by_rejection(rows: Rows, budget: float) -> CalibrationRow:
    """Choose the row of best quality that rejects at most ``budget`` of the drafted tokens; of equals, the fewest."""
    check_range("rejection", budget, 0, 1)
    return _best_within(rows, "rejection", budget, [row.rejection for row in rows])


def by_deferral(rows: Rows, budget: float) -> CalibrationRow:
    """Choose the row of best quality that defers at most ``budget`` of the positions; of equals, the fewest."""
    check_range("deferral", budget, 0, 1)
    return _best_within(rows, "deferral", budget, [row.deferral for row in rows])


def by_latency(
    rows: Rows, budget: float, cost_ratio: float, gamma: int = DEFAULT_GAMMA, verify_ratio: float = 1.0
) -> CalibrationRow:
    """Choose the row of best quality whose modelled time per token is at most ``budget`` times the verifier's alone.

    The other arguments are those of `relative_latency`.
    """
    check_range("latency", budget, 0, float("inf"))
    times = [relative_latency(row.rejection, cost_ratio, gamma, verify_ratio) for row in rows]
    return _best_within(rows, "latency", budget, times)


def by_quality_drop(rows: Rows, budget: float, confidence: float = DEFAULT_CONFIDENCE) -> CalibrationRow:
    """Choose the boldest row that fixed-sequence testing reaches: a drop above ``budget`` has odds 1 − ``confidence``.

    Raises:
        ValueError: the table holds no bounds, or none at this confidence; or its safest row is above the budget.
    """
    check_range("quality_drop", budget, 0, 1)
    ordered = sorted(rows, key=lambda row: row.alpha)
    if not ordered or not ordered[0].drop_upper:
        raise ValueError("quality_drop: this router's calibration holds no bounds; export it again")
    check_range("confidence", confidence, 0, 1)
    check_choice("confidence", f"{confidence:g}", ordered[0].drop_upper)
    bounds = [row.drop_upper[f"{confidence:g}"] for row in ordered]
    last = last_within(bounds, budget)
    if last is None:
        raise _out_of_reach("quality_drop", budget, bounds[0], max(bounds))
    return ordered[last]


def last_within(bounds: Sequence[float], limit: float) -> int | None:
    """Test in order while the bound stays within the limit: the index of the last that passed, None if the first fails.

    >>> last_within([0.01, 0.02, 0.06, 0.04], 0.05)
    1
    """
    failed = next((index for index, bound in enumerate(bounds) if not bound <= limit), len(bounds))
    return failed - 1 if failed else None


def relative_latency(
    rejection: float, cost_ratio: float, gamma: int = DEFAULT_GAMMA, verify_ratio: float = 1.0
) -> float:
    """Model the time per token relative to the verifier alone: (γc + v) / E with E = (1 − a^(γ+1)) / (1 − a).

    E is the mean number of tokens a round of drafting and verifying gives.

    Leviathan et al., Fast inference from transformers via speculative decoding, ICML 2023, section 3.3. It takes every
    draft to be accepted with the same chance a = 1 − rejection, independently; a real run is to be measured.

    Args:
        rejection: expected share of drafted tokens rejected, in [0, 1].
        cost_ratio: c, time of a drafter's step over that of a verifier's, at least 0.
        gamma: γ, tokens drafted a round, at least 1.
        verify_ratio: v, time of verifying γ + 1 tokens over that of one.

    >>> relative_latency(0.0, cost_ratio=0.1, gamma=5), relative_latency(1.0, cost_ratio=0.1, gamma=5)
    (0.25, 1.5)
    """
    check_range("rejection", rejection, 0, 1)
    check_range("cost_ratio", cost_ratio, 0, float("inf"))
    check_range("gamma", gamma, 1, float("inf"))
    if not isinstance(gamma, int):
        raise ValueError(f"gamma: expected a whole number, got {gamma!r}")
    check_range("verify_ratio", verify_ratio, 0, float("inf"))
    tokens = sum((1 - rejection) ** power for power in range(gamma + 1))
    return (gamma * cost_ratio + verify_ratio) / tokens


def _best_within(rows: Rows, measure: str, budget: float, costs: Sequence[float]) -> CalibrationRow:
    if not rows:
        raise ValueError(f"{measure}: expected at least one row of calibration, got none")
    within = [index for index, cost in enumerate(costs) if cost <= budget]
    if not within:
        raise _out_of_reach(measure, budget, min(costs), max(costs))
    return rows[max(within, key=lambda index: (rows[index].quality, -costs[index]))]


def _out_of_reach(measure: str, budget: float, low: float, high: float) -> ValueError:
    return ValueError(
        f"{measure}: expected a budget within reach of the calibration, {low:.4g} to {high:.4g}; got {budget:g}"
    )


BUDGETS: Mapping[str, tuple[Callable[..., CalibrationRow], tuple[str, ...]]] = {
    "rejection": (by_rejection, ()),
    "deferral": (by_deferral, ()),
    "latency": (by_latency, ("gamma", "cost_ratio")),
    "quality_drop": (by_quality_drop, ("confidence",)),
}
"""Each budget's choice, and the further arguments that it takes."""
