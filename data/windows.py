"""Plain text as prompts with references: each window of a document begins with a prompt, the rest is its reference.

Nothing is lost or changed: the pieces of a document, put one after the other, are the document.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["cut_windows"]


def cut_windows(text: str, window: int, prompt: int) -> Iterator[tuple[str, str, bool]]:
    """Cut a document into windows; yield each one's prompt and reference, and whether the document ends there.

    Cuts are made where a token begins whatever the tokenizer, or at least at white space, as long as there is such a
    place in the second half of what a piece may hold. The rest of a document is never a scrap: the last two windows
    share what is left evenly.

    Args:
        text: at least two characters.
        window: most characters of a window, at least ``2 * prompt + 2``.
        prompt: most characters of its prompt, at least 1; a window that is shorter than two prompts gives half.

    >>> list(cut_windows("one two three four five six", window=20, prompt=5))
    [('one', ' two three', False), (' four', ' five six', True)]
    """
    start = 0
    while start < len(text):
        left = len(text) - start
        size = left
        if left > window:
            size = _find_cut(text, start, window if left >= 2 * window else (left + 1) // 2)
        middle = start + _find_cut(text, start, min(prompt, size // 2))
        end = start + size
        yield text[start:middle], text[middle:end], end == len(text)
        start = end


def _find_cut(text: str, start: int, most: int) -> int:
    """Length of a piece from `start`, at most `most`: up to where a token or white space begins, else `most` itself."""
    at_space = most
    for length in range(most, most // 2, -1):
        at = start + length
        if _begins_token(text, at):
            return length
        if at_space == most and text[at].isspace() and not text[at - 1].isspace():
            at_space = length
    return at_space


def _begins_token(text: str, at: int) -> bool:
    """Whether every common tokenizer parts the text here: before one space and a word, or where a line begins.

    Line ends are joined to the punctuation before them by some, to the indentation after them by others.
    """
    if text[at] == " ":
        return not text[at - 1].isspace() and not text[at + 1 : at + 2].isspace()
    return text[at - 1] == "\n" and not text[at].isspace()
