"""Prompts with references: read from a source, split by prompt, and worded as their task asks.

A reference is the ground truth that a good model would write: the drafter is tuned on it, routers are trained on it and
answers are scored against it. The split of a prompt follows from a hash of its text alone, so that it stays the same
whatever else is in the data set, and the same prompt never stands in two splits.

Knows nothing of models, tokenizers, traces or rules.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from string import Formatter
from typing import Any

from ..cascade.checks import is_integer
from ..router.checks import unknown_name
from .presets import PRESETS, REFERENCE_FILTERS, REFERENCE_STRIPS, Preset
from .sources import EMBEDDED_TEXTS, Row, describe_value, find_value, read_rows
from .windows import cut_windows

__all__ = ["Example", "PromptConfig", "document_of", "load_examples", "read_examples", "split_of"]

EMBEDDED_GSM8K = "embedded:gsm8k"


def _default_splits() -> dict[str, float]:
    return {"tune": 0.56, "train": 0.20, "validation": 0.08, "test": 0.16}


@dataclass(frozen=True)
class PromptConfig:
    """Where prompts and references come from, and how they are put to a model.

    Args:
        source: 'embedded:NAME' (gsm8k, humaneval, xsum, nq-open, django-de, or stdlib, the Python files of the running
            Python, which differ with its version), a .jsonl, .json, .parquet, .csv or .tsv file (text also as .gz) or
            a pattern of such files, a folder that the library datasets reads, or a data set on the hub.
        task: translation, summarisation, code, maths, qa or text: sets the defaults below. An embedded text has its
            own; a source of yours has none unless given. 'text' is plain text that is its own reference.
        prompt_column: column of the prompt, such as question or translation.en (default: the embedded text's own, else
            'prompt', for task 'text' 'text').
        reference_column: column of the reference, such as answers.text.0 (default: the embedded text's own, else
            'reference').
        hub_config: configuration (subset) of a folder or a data set on the hub.
        hub_split: its split.
        instruction: what the model is asked; {prompt} and every column name in braces are filled in (default: the
            task's, else {prompt}).
        chat: put the instruction into the tokenizer's chat template as the user's message; never for task 'text'.
        system: a system message before it; without a chat, text before everything else.
        few_shot: show the first so many rows as solved examples before each prompt; they are no prompts themselves.
        shot_separator: without a chat, what stands after the system text and each solved example (default: an empty
            line).
        separator: without a chat, what stands between a prompt that does not end in white space and its reference; it
            counts as the reference's (default: the task's, else nothing).
        reference_filter: 'gsm8k' strips GSM8K's <<...>> calculator notes and keeps the worked answer with its final
            '#### N' line; 'none' changes nothing; 'auto' is 'gsm8k' for task 'maths' and the embedded GSM8K.
        reference_strip: white space to remove: 'both' sides; as in 'code', where the first line keeps its indentation;
            or 'none' (default: the task's, else 'both').
        source_language: for task 'translation' and instructions with {source_language}.
        target_language: for task 'translation' and instructions with {target_language}.
        text_window: for task 'text', most characters of a window that a document is cut into, at white space.
        text_prompt: for task 'text', most characters of a window that are its prompt, on which there is no loss.
        limit: use the first so many rows only, those of few_shot not counted.
        splits: split names and their shares of all prompts; they add up to 1.
    """

    source: str = EMBEDDED_GSM8K
    task: str | None = None
    prompt_column: str | None = None
    reference_column: str | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    instruction: str | None = None
    chat: bool = True
    system: str | None = None
    few_shot: int = 0
    shot_separator: str | None = None
    separator: str | None = None
    reference_filter: str = "auto"
    reference_strip: str | None = None
    source_language: str | None = None
    target_language: str | None = None
    text_window: int = 2000
    text_prompt: int = 200
    limit: int | None = None
    splits: dict[str, float] = field(default_factory=_default_splits)

    def __post_init__(self) -> None:
        if self.limit is not None and not (is_integer(self.limit) and 1 <= self.limit <= sys.maxsize):
            raise ValueError(f"limit: expected at least 1 row, or none for all, got {self.limit!r}")
        if not is_integer(self.few_shot) or not 0 <= self.few_shot <= sys.maxsize:
            raise ValueError(f"few_shot: expected a number of examples, 0 for none, got {self.few_shot!r}")
        if not self.source:
            raise ValueError("source: expected a text, a file, a folder or a data set, got ''")
        named = (
            ("task", self.task, PRESETS, None),
            ("reference_filter", self.reference_filter, REFERENCE_FILTERS, "auto"),
            ("reference_strip", self.reference_strip, REFERENCE_STRIPS, None),
        )
        for argument, value, known, default in named:
            if value != default and value not in known:
                raise ValueError(unknown_name(argument, value, [*filter(None, [default]), *known]))
        _check_splits(self.splits)
        _check_instruction(self)
        _check_columns(self)
        if self.task_name == "text":
            _check_text(self)
        for name in ("instruction", "system", "separator", "shot_separator"):
            _whole(getattr(self, name) or "", name, "the settings")

    @property
    def task_name(self) -> str | None:
        """The task: as given, else the embedded text's own, else none."""
        own = EMBEDDED_TEXTS.get(self.source)
        return self.task or (own.task if own else None)

    @property
    def preset(self) -> Preset:
        """The task's preset with everything in it that this config sets otherwise; `instruction` is the one to use."""
        preset = PRESETS[self.task_name] if self.task_name else Preset()
        chat = self.chat and preset.chat
        asked = preset.instruction if chat else preset.plain_instruction
        if self.source == EMBEDDED_GSM8K:
            preset = replace(preset, reference_filter="gsm8k")
        mine: dict[str, Any] = {
            "instruction": asked if self.instruction is None else self.instruction,
            "chat": chat,
            "columns": self._columns(preset),
        }
        for name in ("shot_separator", "separator", "reference_strip"):
            if getattr(self, name) is not None:
                mine[name] = getattr(self, name)
        if self.reference_filter != "auto":
            mine["reference_filter"] = self.reference_filter
        return replace(preset, **mine)

    @property
    def languages(self) -> dict[str, str]:
        """The languages by the name that an instruction calls them: as given, else the embedded text's own."""
        own = EMBEDDED_TEXTS.get(self.source)
        source, target = (own.languages if own else None) or (None, None)
        known = {
            "source_language": self.source_language or source,
            "target_language": self.target_language or target,
        }
        return {name: language for name, language in known.items() if language is not None}

    def describe(self) -> dict[str, Any]:
        """Every setting by name, as it is in force: defaults of task and source filled in."""
        preset = self.preset
        prompt_column, reference_column = preset.columns
        names = ("instruction", "chat", "shot_separator", "separator", "reference_filter", "reference_strip")
        return {
            **asdict(self),
            "task": self.task_name,
            "prompt_column": prompt_column,
            "reference_column": reference_column,
            **{name: getattr(preset, name) for name in names},
            **self.languages,
        }

    def _columns(self, preset: Preset) -> tuple[str, str]:
        own = EMBEDDED_TEXTS.get(self.source)
        prompt, reference = own.columns if own else preset.columns
        prompt = self.prompt_column or prompt
        return prompt, prompt if self.task_name == "text" else self.reference_column or reference


@dataclass(frozen=True)
class Example:
    """One prompt with its reference.

    `prompt_id` is a hash of the prompt column (a repeated prompt gets a suffix '-1', '-2', ..., as does every further
    window of a text); `prompt` is the instruction filled in; `fields` holds the row as it came. `separator` stands
    between prompt and reference where there is no chat, and `shots` are the solved examples before it. A model ends its
    answer where the reference does, unless not `ends`: the text goes on.
    """

    prompt_id: str
    prompt: str
    reference: str
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    separator: str = ""
    shots: tuple[Example, ...] = field(default=(), repr=False)
    ends: bool = True


def load_examples(config: PromptConfig, split: str | None = None) -> list[Example]:
    """Read all examples, or those of one split, in the order of the data set.

    Raises:
        ValueError: a column is missing, a prompt or reference is empty, or the source cannot be understood.
        FileNotFoundError: the file does not exist.
    """
    return list(read_examples(config, split))


def read_examples(config: PromptConfig, split: str | None = None) -> Iterator[Example]:
    """Read examples one by one, as `load_examples` does; of what was read only the prompts' ids are kept.

    Raises:
        ValueError: a column is missing, a prompt or reference is empty, or the source cannot be understood.
        FileNotFoundError: the file does not exist.
    """
    if split is not None and split not in config.splits:
        raise ValueError(unknown_name("split", split, config.splits))
    rows = read_rows(config.source, config.hub_config, config.hub_split, streaming=config.limit is not None)
    return _make_examples(config, config.preset, rows, split)


def document_of(prompt_id: str) -> str:
    """Return the id of the text that a prompt comes from: repeats of one prompt and windows of one text share it.

    >>> document_of("3f2a-2")
    '3f2a'
    """
    return prompt_id.partition("-")[0]


def split_of(prompt_id: str, splits: Mapping[str, float]) -> str:
    """Name the split of a prompt: a hash of its id, read as a number in [0, 1), falls into one share.

    >>> split_of("a", {"train": 1.0})
    'train'
    """
    place = int.from_bytes(hashlib.sha256(document_of(prompt_id).encode()).digest()[:8], "big") / 2**64
    edge = 0.0
    for name, share in splits.items():
        edge += share
        if place < edge:
            return name
    return next(reversed(list(splits)))


def _make_examples(config: PromptConfig, preset: Preset, rows: Iterator[Row], split: str | None) -> Iterator[Example]:
    numbered = ((row, f"row {number} of {config.source}") for number, row in enumerate(rows, start=1))
    shots = tuple(_read_pair(config, preset, row, where) for row, where in islice(numbered, config.few_shot))
    shown = {shot.prompt_id for shot in shots}
    seen: dict[str, int] = {}
    empty = True
    for row, where in islice(numbered, config.limit):
        empty = False
        read = _read_windows if config.task_name == "text" else _read_one
        for example in read(config, preset, row, where):
            text_id = example.prompt_id
            if text_id in shown or (split is not None and split_of(text_id, config.splits) != split):
                break
            repeats = seen[text_id] = seen.get(text_id, -1) + 1
            yield replace(example, prompt_id=f"{text_id}-{repeats}" if repeats else text_id, shots=shots)
    if empty:
        beyond = f" beyond the {len(shots)} of few_shot" if shots else ""
        raise ValueError(f"source: expected at least one row{beyond}, {config.source!r} has none")


def _read_one(config: PromptConfig, preset: Preset, row: Row, where: str) -> Iterator[Example]:
    yield _read_pair(config, preset, row, where)


def _read_pair(config: PromptConfig, preset: Preset, row: Row, where: str) -> Example:
    """Read one prompt and its reference from a row."""
    prompt_column, reference_column = preset.columns
    text = _cell(row, prompt_column, "prompt_column", where)
    reference = REFERENCE_FILTERS[preset.reference_filter](_cell(row, reference_column, "reference_column", where))
    reference = REFERENCE_STRIPS[preset.reference_strip](reference)
    if not reference.strip():
        raise ValueError(f"{reference_column}: expected a reference with text, got an empty one in {where}")
    prompt = _fill(preset.instruction, {**row, **config.languages, "prompt": text}, where)
    separator = "" if preset.chat or prompt[-1:].isspace() else preset.separator
    return Example(_text_id(text), prompt, reference, row, separator)


def _read_windows(config: PromptConfig, preset: Preset, row: Row, where: str) -> Iterator[Example]:
    """Read the windows of a document, which share its id."""
    text = _cell(row, preset.columns[0], "prompt_column", where)
    if len(text) < 2:
        raise ValueError(f"prompt_column: expected a document of two characters at least, got {text!r} in {where}")
    text_id = _text_id(text)
    for prompt, reference, ends in cut_windows(text, config.text_window, config.text_prompt):
        yield Example(text_id, prompt, reference, row, ends=ends)


def _text_id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fill(instruction: str, values: Mapping[str, Any], where: str) -> str:
    """Put the prompt and columns into the instruction; braces in the values stay as they are."""
    parts = []
    for literal, name, _, _ in Formatter().parse(instruction):
        parts.append(literal)
        if name is not None:
            value = find_value(values, name, "instruction", f" (in {where})")
            if not isinstance(value, (str, int, float)):
                raise ValueError(f"instruction: expected text in {name!r}, got {describe_value(value)} in {where}")
            parts.append(str(value))
    return _whole("".join(parts), "instruction", where)


def _cell(row: Row, column: str, argument: str, where: str) -> str:
    value = find_value(row, column, argument, f" (in {where})")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{argument}: expected text in column {column!r}, got {describe_value(value)} in {where}")
    return _whole(value, argument, f"column {column!r} of {where}")


def _whole(text: str, argument: str, where: str) -> str:
    """The text itself, unless it holds half a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{argument}: expected whole characters, got half of one, {text[error.start]!r}, in {where}"
        ) from error
    return text


def _check_splits(splits: Mapping[str, float]) -> None:
    if not splits or any(share < 0 for share in splits.values()) or not abs(sum(splits.values()) - 1) <= 1e-6:
        raise ValueError(f"splits: expected shares that add up to 1, got {dict(splits)}")


def _check_instruction(config: PromptConfig) -> None:
    """Refuse an instruction that cannot be filled in, and languages that are missing or not mentioned."""
    instruction = config.preset.instruction
    try:
        fields = [part[1:] for part in Formatter().parse(instruction) if part[1] is not None]
    except ValueError:
        fields = []
    if not fields or any(not name or spec or conversion for name, spec, conversion in fields):
        raise ValueError(f"instruction: expected names in braces, such as {{prompt}}, got {instruction!r}")
    mentioned = {name for name, _, _ in fields}
    for name in ("source_language", "target_language"):
        if name in mentioned and config.instruction is None and name not in config.languages:
            raise ValueError(f"{name}: expected a language for the task 'translation', such as German, got none")
        given = getattr(config, name)
        if given is not None and (name not in mentioned or not given.strip()):
            raise ValueError(f"{name}: expected a language, and {{{name}}} in the instruction, got {given!r}")


def _check_columns(config: PromptConfig) -> None:
    prompt, reference = config.preset.columns
    if config.task_name != "text" and prompt == reference:
        raise ValueError(
            f"reference_column: expected another column than the prompt's, got {reference!r} for both; "
            "for plain text, which is its own reference, set task: text"
        )


def _check_text(config: PromptConfig) -> None:
    """Refuse what plain text has no place for, and windows that would leave no reference."""
    if config.text_prompt < 1:
        raise ValueError(f"text_prompt: expected at least 1 character, got {config.text_prompt}")
    if config.text_window < 2 * config.text_prompt + 2:
        raise ValueError(
            f"text_window: expected at least {2 * config.text_prompt + 2} characters, twice text_prompt and two, "
            f"got {config.text_window}"
        )
    none: dict[str, Any] = dict.fromkeys(("instruction", "system", "separator", "shot_separator"))
    for name, default in {**none, "few_shot": 0, "reference_filter": "auto", "reference_strip": None}.items():
        if getattr(config, name) != default:
            raise ValueError(f"{name}: expected none for the task 'text', got {getattr(config, name)!r}")
    if config.reference_column not in (None, config.preset.columns[0]):
        raise ValueError(
            f"reference_column: expected none for the task 'text', which is its own reference, "
            f"got {config.reference_column!r}"
        )
