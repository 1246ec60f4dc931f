"""Checks of arguments that several modules share."""

__all__ = ["check_count", "check_number", "is_integer"]


def is_integer(value: object) -> bool:
    """Whether ``value`` is an integer, which a truth value is not meant to be."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_count(name: str, value: object) -> None:
    """Raise unless ``value`` is an integer of at least 1.

    Raises:
        ValueError: the message names the argument and what came.
    """
    if not isinstance(value, int) or not is_integer(value) or value < 1:
        raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")


def check_number(name: str, value: object) -> None:
    """Raise unless ``value`` is an integer or a float, as a text from a file or a command line is not.

    Raises:
        ValueError: the message names the argument and what came.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name}: expected a number, got {value!r}")
