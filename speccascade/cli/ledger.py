"""Text with its writers: who wrote each token, in colour, or with marks where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from ..cascade.results import GenerationResult

__all__ = ["pieces_of", "show"]

STYLES = {"drafter": "green", "residual": "bold red", "bonus": "blue", "verifier": "cyan"}
MARKS = {"drafter": ("", ""), "residual": ("[", "]"), "bonus": ("<", ">"), "verifier": ("", "")}
MEANINGS = {
    "drafter": "accepted draft",
    "residual": "replaced after a rejection",
    "bonus": "verifier, after a block accepted whole",
    "verifier": "verifier alone",
}
DEFERRED_STYLE = "underline"


def show(tokenizer: Any, result: GenerationResult, console: Console | None = None) -> None:
    """Print a generated text and a legend; deferred positions are underlined where there is colour.

    Args:
        tokenizer: decodes token ids.
        result: a generation that kept its ledger.
        console: where to print; default: stdout, in colour if it is a terminal and NO_COLOR is not set.
    """
    console = console or Console(highlight=False)
    coloured = console.color_system is not None and not console.no_color
    assert result.ledger is not None, "show needs a generation with ledger=True"
    entries = result.ledger[0]
    text = Text()
    for entry, piece in zip(entries, pieces_of(tokenizer, [entry.token for entry in entries]), strict=True):
        if coloured:
            style = STYLES[entry.writer] + (f" {DEFERRED_STYLE}" if entry.deferred else "")
            text.append(piece, style=style)
        else:
            text.append(_mark(piece, *MARKS[entry.writer]))
    console.print(text, soft_wrap=True)
    console.print(_legend([entry.writer for entry in entries], coloured), soft_wrap=True)


def _mark(piece: str, opening: str, closing: str) -> str:
    """Put marks around what can be seen, so that spaces and line breaks stay outside."""
    inner = piece.strip()
    return piece.replace(inner, f"{opening}{inner}{closing}", 1) if inner else piece


def _legend(writers: Sequence[str], coloured: bool) -> Text:
    legend = Text("— ")
    for number, (writer, meaning) in enumerate(MEANINGS.items()):
        count = sum(one == writer for one in writers)
        if not count:
            continue
        label = f"{meaning} ({count})"
        opening, closing = MARKS[writer]
        legend.append("" if number == 0 or legend.plain == "— " else ", ")
        legend.append(label if coloured else f"{opening}{label}{closing}", style=STYLES[writer] if coloured else "")
    if coloured:
        legend.append(", ").append("deferred", style=DEFERRED_STYLE)
    return legend


def pieces_of(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds: a special token none, the last token of a character all of it."""
    pieces, before = [], ""
    for end in range(1, len(tokens) + 1):
        after = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        if after.endswith("\ufffd"):
            pieces.append("")
            continue
        pieces.append(after[len(before) :])
        before = after
    return pieces
