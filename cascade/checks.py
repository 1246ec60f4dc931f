"""Checks of arguments that several modules share."""

__all__ = ["check_count"]


def check_count(name: str, value: object) -> None:
    """Raise unless ``value`` is an integer of at least 1.

    Raises:
        ValueError: the message names the argument and what came.
    """
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
