"""Choose settings of a dial by what they do, not by what they are called: evenly over the range of rejection.

α means something else in every rule, so a fixed grid would favour the rules that it happens to suit. Here each dial
is searched, with the rule itself as the only source of truth, until its settings cover its own range of rejection in
even steps. Rejection need not be monotone in the dial (it is not for some token rules); nothing here relies on it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from ..data.traces import TraceSplit
from .methods import Method, check_loss, plug_in_methods
from .replay import Replay

__all__ = ["alpha_for_rejection", "covering_grid", "method_grid"]

_SMALLEST_STEP = 1e-9
_SEARCHED = 4_000


def covering_grid(rejection_at: Callable[[float], float], points: int, limit: float, probes: int = 72) -> list[float]:
    """Find settings u in [0, 1] whose rejections cover the dial's own range in about ``points`` even steps.

    Args:
        rejection_at: mean rejection at a setting; asked at most ``probes`` times.
        points: how many settings to return at most.
        limit: rejections above it (lossless decoding's) are of no interest.
        probes: how often the rule may be tried.

    Returns:
        Settings in increasing order.
    """
    known = {u: rejection_at(u) for u in np.linspace(0.0, 1.0, 9).tolist()}
    closed: set[tuple[float, float]] = set()
    while len(known) < probes:
        settings = sorted(known)
        clipped = [min(known[u], limit) for u in settings]
        steps = [
            (abs(clipped[index + 1] - clipped[index]), (settings[index], settings[index + 1]))
            for index in range(len(settings) - 1)
            if (settings[index], settings[index + 1]) not in closed
        ]
        widest, (left, right) = max(steps, default=(0.0, (0.0, 0.0)))
        if widest <= limit / max(points - 1, 1) / 2:
            break
        if right - left < _SMALLEST_STEP:
            closed.add((left, right))
            continue
        middle = (left + right) / 2
        known[middle] = rejection_at(middle)
    return _thin(known, points, limit)


def _thin(known: dict[float, float], points: int, limit: float) -> list[float]:
    """Keep, for each of ``points`` even steps, the setting that comes nearest; the smaller one of two equals."""
    usable = {u: value for u, value in known.items() if value <= limit * (1 + 1e-9)} or known
    settings, values = np.array(sorted(usable)), np.array([usable[u] for u in sorted(usable)])
    targets = np.linspace(values.min(), values.max(), points)
    return sorted({float(settings[np.abs(values - target).argmin()]) for target in targets})


def method_grid(method: Method, replay: Replay, loss: str, points: int, limit: float) -> list[float]:
    """Choose the αs of one method on one split; one without a dial has the single setting NaN."""
    if not method.has_dial:
        return [float("nan")]

    def rejection_at(u: float) -> float:
        return _mean_rejection(method, searched, u, loss)

    # Of a text of which some positions are left out, a rule that reads their order would read another order.
    ordered = getattr(method.build(method.alpha(0.5), loss), "context", 0)
    searched = replay if ordered else replay.thin(_SEARCHED)
    return [method.alpha(u) for u in covering_grid(rejection_at, points, limit)]


def alpha_for_rejection(
    method: Method | str, validation: TraceSplit | Replay, target_rejection: float, loss: str, logged: int | None = None
) -> float:
    """Find the α at which a rule rejects as close to ``target_rejection`` per position as it can.

    Use it to compare rules at the same budget: choose on the validation split, run on the test split.

    Args:
        method: a rule's name, or a method.
        validation: the split to choose on.
        target_rejection: rejections per position, at most what lossless decoding rejects.
        loss: ``zero_one``, ``sampled`` or ``log`` (the trace's temperature) or ``greedy`` (temperature 0).
        logged: the k of the trace's top-k, for token rules.

    Raises:
        ValueError: an unknown loss or rule, or a rule without a dial.
    """
    check_loss(loss)
    replay = validation if isinstance(validation, Replay) else Replay(validation, logged)
    chosen = plug_in_methods([method])[0] if isinstance(method, str) else method
    if not chosen.has_dial:
        raise ValueError(f"method: expected a rule with a dial, got {chosen.name!r}")

    def miss(u: float) -> float:
        return _mean_rejection(chosen, replay, u, loss) - target_rejection

    return chosen.alpha(_closest(miss))


def _mean_rejection(method: Method, replay: Replay, u: float, loss: str) -> float:
    sums = replay.sums(method.build(method.alpha(u), loss), loss, bounds=False)
    return float(sums[:, 1].sum() / len(replay))


def _closest(miss: Callable[[float], float], coarse: int = 17, steps: int = 40) -> float:
    """Bracket the target on a coarse grid, bisect the bracket, and return the best setting seen."""
    seen = {u: miss(u) for u in np.linspace(0.0, 1.0, coarse).tolist()}
    settings = sorted(seen)
    brackets = [pair for pair in pairwise(settings) if seen[pair[0]] * seen[pair[1]] <= 0]
    for left, right in brackets[:1]:
        for _ in range(steps):
            middle = (left + right) / 2
            seen[middle] = miss(middle)
            if seen[middle] == 0 or right - left < _SMALLEST_STEP:
                break
            left, right = (middle, right) if seen[left] * seen[middle] > 0 else (left, middle)
    best: float = min(sorted(seen), key=lambda u: abs(seen[u]))
    return best
