"""Checks of arguments that every layer shares: each error names the argument, what was expected and what came.

Nothing but the standard library is imported: ``speccascade --help`` passes through here.
"""

import math
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches

__all__ = ["check_choice", "check_range", "nearest", "shorten_union", "unknown_name"]


def check_range(name: str, value: float, low: float, high: float, *, below_high: bool = False) -> None:
    """Raise ValueError unless ``low <= value <= high`` (``< high`` with ``below_high``) and the value is finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: expected a number, got {value!r}")
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
        raise ValueError(unknown_name(name, value, choices))


def unknown_name(argument: str, given: object, known: Iterable[str]) -> str:
    """Say that ``given`` is no value of ``argument``: what is known, and the nearest.

    >>> unknown_name("split", "tran", ["train", "test"])
    "split: expected one of train, test, got 'tran'; did you mean 'train'?"
    """
    names = [str(name) for name in known]
    return f"{argument}: expected one of {', '.join(names)}, got {given!r}{nearest(given, names)}"


def nearest(given: object, known: Iterable[str], spell: Callable[[str], str] = repr) -> str:
    """Return ``"; did you mean …?"`` with the closest known name, in any case, as ``spell`` writes it; or nothing.

    >>> nearest("colect", ["collect", "train"])
    "; did you mean 'collect'?"
    >>> nearest("xyz", ["collect"])
    ''
    """
    names = {name.lower(): name for name in known}
    close = get_close_matches(str(given).lower(), list(names), n=1, cutoff=0.5)
    return f"; did you mean {spell(names[close[0]])}?" if close else ""


def shorten_union(text: str) -> str:
    """Say in our words that a command line's value is of none of several types.

    >>> shorten_union(
    ...     "--alpha: Does not validate against any of the Union subtypes Subtypes: [float, NoneType] "
    ...     "Errors: - Expected a float - Expected a NoneType Given value type: str Given value: nan"
    ... )
    "--alpha: expected float, got 'nan'"
    """
    union = re.search(r"Does not validate .* Subtypes: \[(.*)\] Errors: .* Given value: ?(.*)$", text)
    if union is None:
        return text
    kinds = union[1].removesuffix(", NoneType")
    return f"{text[: union.start()]}expected {kinds}, got '{union[2]}'"
