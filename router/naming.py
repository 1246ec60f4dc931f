"""One way to refuse a name: the argument, the nearest known name, and the list."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["check_name"]


def check_name(argument: str, value: str, known: Iterable[str]) -> None:
    """Pass if ``value`` is one of ``known``.

    Raises:
        ValueError: it is not; the message names the argument, what came, the nearest name and all known ones.

    >>> check_name("kind", "liner", ["linear", "mlp"])
    Traceback (most recent call last):
    ValueError: kind: 'liner' is unknown; did you mean 'linear'? Known: linear, mlp
    """
    names = list(known)
    if value in names:
        return
    near = get_close_matches(str(value), names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{argument}: {value!r} is unknown; {hint}Known: {', '.join(names)}")
