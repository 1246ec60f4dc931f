"""Who wrote which token, in colour and without."""

from __future__ import annotations

from io import StringIO

import torch
from rich.console import Console

from speccascade.cascade.results import GenerationResult, GenerationStats, LedgerEntry
from speccascade.cli.ledger import pieces_of, show


def _result(tokenizer) -> GenerationResult:
    ids = tokenizer("ab cd", add_special_tokens=False)["input_ids"]
    writers = ["drafter", "residual", "drafter", "bonus", "drafter"]
    entries = tuple(
        LedgerEntry(token, writer, deferred=writer == "residual", tv=0.5)
        for token, writer in zip(ids, writers, strict=True)
    )
    return GenerationResult(torch.tensor([[1, *ids]]), 1, GenerationStats(), (entries,))


def _print(tokenizer, **options) -> str:
    console = Console(file=StringIO(), width=200, **options)
    show(tokenizer, _result(tokenizer), console)
    return console.file.getvalue()


def test_without_colour_writers_are_marked(tiny_tokenizer) -> None:
    text, legend = _print(tiny_tokenizer, color_system=None).splitlines()
    assert text == "a[b] <c>d"
    assert (
        legend == "— accepted draft (3), [replaced after a rejection (1)], <verifier, after a block accepted whole (1)>"
    )


def test_with_colour_the_text_is_plain_and_the_legend_shows_the_colours(tiny_tokenizer) -> None:
    shown = _print(tiny_tokenizer, force_terminal=True, color_system="standard", no_color=False)
    assert "[b]" not in shown
    assert "\x1b[" in shown
    assert "deferred" in shown


def test_pieces_add_up_to_the_text(tiny_tokenizer) -> None:
    ids = tiny_tokenizer("tom has 3", add_special_tokens=False)["input_ids"]
    assert "".join(pieces_of(tiny_tokenizer, ids)) == "tom has 3"


class SplitBytes:
    """Decodes 'é' only once both of its bytes are there."""

    def decode(self, tokens, skip_special_tokens: bool) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_a_character_over_two_tokens_appears_with_the_second() -> None:
    assert pieces_of(SplitBytes(), list("aéb".encode())) == ["a", "", "é", "b"]
