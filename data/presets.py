"""Tasks by name: how a task's prompts are worded, its references cleaned and its answers graded.

A preset states defaults; what a user sets in `PromptConfig` wins. Knows nothing of files, tokenizers or models.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["PRESETS", "REFERENCE_FILTERS", "REFERENCE_STRIPS", "Preset", "strip_calculator_notes"]

_CALCULATOR_NOTES = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class Preset:
    r"""What a task takes for granted.

    Args:
        instruction: what the model is asked in a chat.
        plain_instruction: the text that the reference continues where there is no chat.
        separator: without a chat, what stands between a prompt and its reference, unless the prompt ends in white
            space; it belongs to the reference's text, as in 'Answer:' + ' 12', where a model would write it itself.
        shot_separator: without a chat, what stands between solved examples.
        reference_filter: name in `REFERENCE_FILTERS`.
        reference_strip: name in `REFERENCE_STRIPS`.
        chat: whether the task can be put as a chat at all.
        scorer: name of the scorer that grades an answer; none where only running it, or nothing, could.
        columns: columns of prompt and reference in a file of one's own.
    """

    instruction: str = "{prompt}"
    plain_instruction: str = "{prompt}"
    separator: str = " "
    shot_separator: str = "\n\n"
    reference_filter: str = "none"
    reference_strip: str = "both"
    chat: bool = True
    scorer: str | None = None
    columns: tuple[str, str] = ("prompt", "reference")


def strip_calculator_notes(reference: str) -> str:
    """Remove GSM8K's calculator notes, which no model writes unasked.

    >>> strip_calculator_notes("16 - 3 = <<16-3=13>>13 eggs")
    '16 - 3 = 13 eggs'
    """
    return _CALCULATOR_NOTES.sub("", reference)


def strip_around_code(reference: str) -> str:
    r"""Remove empty lines before code and all white space after it; the first line keeps its indentation.

    >>> strip_around_code("\n  \n    return 1\n\n")
    '    return 1'
    """
    return re.sub(r"\A(?:[^\S\r\n]*(?:\r\n|\r|\n))+", "", reference).rstrip()


def _unchanged(reference: str) -> str:
    return reference


REFERENCE_FILTERS: dict[str, Callable[[str], str]] = {"none": _unchanged, "gsm8k": strip_calculator_notes}

REFERENCE_STRIPS: dict[str, Callable[[str], str]] = {"both": str.strip, "code": strip_around_code, "none": _unchanged}

PRESETS: dict[str, Preset] = {
    "translation": Preset(
        instruction=(
            "Translate this text from {source_language} into {target_language}. Answer with the translation only.\n\n"
            "{prompt}"
        ),
        plain_instruction="{source_language}: {prompt}\n{target_language}:",
        separator=" ",
        scorer="rouge_l",  # it reads Latin letters only: a target language of another script needs a scorer of its own
    ),
    "summarisation": Preset(
        instruction="Summarise this text.\n\n{prompt}",
        plain_instruction="{prompt}\n\nSummary:",
        separator=" ",
        scorer="rouge_l",
    ),
    "code": Preset(
        instruction="Complete this code. Answer with the code that follows it, and nothing else.\n\n{prompt}",
        separator="\n",
        reference_strip="code",
    ),
    "maths": Preset(
        plain_instruction="Question: {prompt}\nAnswer:",
        separator=" ",
        reference_filter="gsm8k",
        scorer="final_answer",
    ),
    "qa": Preset(
        instruction="Answer this question in a few words.\n\n{prompt}",
        plain_instruction="Question: {prompt}\nAnswer:",
        separator=" ",
        scorer="token_f1",
    ),
    "text": Preset(reference_strip="none", chat=False, columns=("text", "text")),
}
