"""One sentence for a name that does not exist: what was given, the nearest that does, and the list."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["unknown_name"]


def unknown_name(argument: str, given: str, known: Iterable[str]) -> str:
    """Say that `given` is no value of `argument`.

    >>> unknown_name("split", "tran", ["train", "test"])
    "split: expected one of train, test, got 'tran'; did you mean 'train'?"
    """
    names = [str(name) for name in known]
    near = get_close_matches(given, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{argument}: expected one of {', '.join(names)}, got {given!r}{hint}"
