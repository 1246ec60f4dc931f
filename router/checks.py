"""Checks of arguments that rules and routers share: each error names the argument, the range and what came."""

import math
from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["check_choice", "check_range", "nearest"]


def check_range(name: str, value: float, low: float, high: float, *, below_high: bool = False) -> None:
    """Raise ValueError unless ``low <= value <= high`` (``< high`` with ``below_high``) and the value is finite."""
    inside = math.isfinite(value) and low <= value and (value < high if below_high else value <= high)
    if inside:
        return
    left = f"[{low:g}" if math.isfinite(low) else "(-inf"
    right = f"{high:g})" if below_high else f"{high:g}]" if math.isfinite(high) else "inf)"
    raise ValueError(f"{name}: expected a number in {left}, {right}, got {value!r}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is among ``choices``; name the nearest."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}{nearest(value, choices)}")


def nearest(value: object, choices: Iterable[str]) -> str:
    """Return '; did you mean …?' for the closest choice, or nothing."""
    close = get_close_matches(str(value).lower(), list(choices), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
