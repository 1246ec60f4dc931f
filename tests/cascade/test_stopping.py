"""A sequence ends at its first end token, its first stop string or its length, also inside a block."""

import pytest

from speccascade.cascade.stopping import Stopping, as_eos_ids


class Letters:
    """Token i is the i-th letter."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def test_an_end_token_inside_a_block_drops_the_rest() -> None:
    stopping = Stopping(max_new_tokens=10, eos_token_ids=frozenset({7, 9}))
    assert stopping.keep([1, 2], [3, 9, 4, 7]) == (2, True)
    assert stopping.keep([1, 2], [3, 4]) == (2, False)


def test_length_is_exact() -> None:
    stopping = Stopping(max_new_tokens=4)
    assert stopping.keep([1, 2], [3, 4, 5]) == (2, True)
    assert stopping.keep([1], [3, 4]) == (2, False)


def test_a_stop_string_across_blocks_ends_with_the_token_that_completes_it() -> None:
    stopping = Stopping(max_new_tokens=100, stop_strings=("cde",), decoder=Letters())
    assert stopping.keep([0, 1, 2], [3, 4, 5, 6]) == (2, True)
    assert stopping.keep([0, 1, 2], [3, 5, 4]) == (3, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 1, "stop_strings": ("x",)}, "tokenizer"),
        ({"max_new_tokens": 1, "stop_strings": ("",), "decoder": Letters()}, "non-empty"),
    ],
)
def test_bad_conditions_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stopping(**arguments)  # type: ignore[arg-type]


def test_end_tokens_are_none_one_or_several() -> None:
    assert as_eos_ids(None) == frozenset()
    assert as_eos_ids(3) == {3}
    assert as_eos_ids([3, 5]) == {3, 5}
