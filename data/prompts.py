"""Prompts with references: read from a data set, split by prompt, written as text and turned into token ids once.

A reference is the ground truth that a good model would write: the drafter is tuned on it, routers are trained on it and
answers are scored against it. The split of a prompt follows from a hash of its text alone, so that it stays the same
whatever else is in the data set, and the same prompt never stands in two splits.

Knows nothing of models, traces or rules.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ..router.checks import unknown_name
from .embedded import gsm8k, humaneval

__all__ = [
    "Example",
    "PromptConfig",
    "load_examples",
    "split_of",
]

EMBEDDED_GSM8K = "embedded:gsm8k"
EMBEDDED_HUMANEVAL = "embedded:humaneval"
EMBEDDED_COLUMNS = {EMBEDDED_GSM8K: ("question", "answer"), EMBEDDED_HUMANEVAL: ("prompt", "canonical_solution")}
"""Prompt and reference columns of the embedded texts."""

_CALCULATOR_NOTES = re.compile(r"<<[^<>]*>>")


def _default_splits() -> dict[str, float]:
    return {"tune": 0.56, "train": 0.20, "validation": 0.08, "test": 0.16}


@dataclass(frozen=True)
class PromptConfig:
    """Where prompts and references come from, and how they are put to a model.

    Args:
        source: 'embedded:gsm8k' (test questions of GSM8K with worked answers), 'embedded:humaneval' (functions of
            HumanEval to complete), a .jsonl, .parquet or .csv file, or a data set on the hub.
        prompt_column: column of the prompt (unless given, the embedded text's own, else 'prompt').
        reference_column: column of the reference (unless given, the embedded text's own, else 'reference').
        hub_config: configuration (subset) of a data set on the hub.
        hub_split: its split.
        instruction: what the model is asked; {prompt} and every column name in braces are filled in.
        chat: put the instruction into the tokenizer's chat template as the user's message.
        reference_filter: 'gsm8k' strips GSM8K's <<...>> calculator notes and keeps the worked answer with its final
            '#### N' line; 'none' changes nothing; 'auto' is 'gsm8k' for the embedded GSM8K.
        limit: use the first so many rows only.
        splits: split names and their shares of all prompts; they add up to 1.
    """

    source: str = EMBEDDED_GSM8K
    prompt_column: str | None = None
    reference_column: str | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    instruction: str = "{prompt}"
    chat: bool = True
    reference_filter: str = "auto"
    limit: int | None = None
    splits: dict[str, float] = field(default_factory=_default_splits)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit: expected at least 1 row, or none for all, got {self.limit}")
        if self.reference_filter != "auto" and self.reference_filter not in REFERENCE_FILTERS:
            raise ValueError(unknown_name("reference_filter", self.reference_filter, ["auto", *REFERENCE_FILTERS]))
        _check_splits(self.splits)


@dataclass(frozen=True)
class Example:
    """One prompt with its reference.

    `prompt_id` is a hash of the prompt column (a repeated prompt gets a suffix '-1', '-2', ...); `prompt` is the
    instruction filled in; `fields` holds the row as it came.
    """

    prompt_id: str
    prompt: str
    reference: str
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


def load_examples(config: PromptConfig, split: str | None = None) -> list[Example]:
    """Read all examples, or those of one split, in the order of the data set.

    Raises:
        ValueError: a column is missing, a prompt or reference is empty, or the source cannot be understood.
        FileNotFoundError: the file does not exist.
    """
    if split is not None and split not in config.splits:
        raise ValueError(unknown_name("split", split, config.splits))
    own_prompt, own_reference = EMBEDDED_COLUMNS.get(config.source, ("prompt", "reference"))
    prompt_column = config.prompt_column or own_prompt
    reference_column = config.reference_column or own_reference
    seen: dict[str, int] = {}
    examples = []
    for number, row in enumerate(islice(_read_rows(config), config.limit), start=1):
        where = f"row {number} of {config.source}"
        text = _cell(row, prompt_column, "prompt_column", where)
        reference = _reference_filter(config)(_cell(row, reference_column, "reference_column", where)).strip()
        if not reference:
            raise ValueError(f"{reference_column}: expected a reference with text, got an empty one in {where}")
        prompt_id = hashlib.sha256(text.encode()).hexdigest()[:16]
        repeats = seen[prompt_id] = seen.get(prompt_id, -1) + 1
        prompt_id += f"-{repeats}" if repeats else ""
        if split is None or split_of(prompt_id, config.splits) == split:
            examples.append(Example(prompt_id, _fill(config.instruction, text, row), reference, row))
    if not examples and split is None:
        raise ValueError(f"source: expected at least one row, {config.source!r} has none")
    return examples


def split_of(prompt_id: str, splits: Mapping[str, float]) -> str:
    """Name the split of a prompt: a hash of its id, read as a number in [0, 1), falls into one share.

    >>> split_of("a", {"train": 1.0})
    'train'
    """
    text_id = prompt_id.partition("-")[0]  # repeats of one prompt stay together
    place = int.from_bytes(hashlib.sha256(text_id.encode()).digest()[:8], "big") / 2**64
    edge = 0.0
    for name, share in splits.items():
        edge += share
        if place < edge:
            return name
    return next(reversed(list(splits)))


def _fill(instruction: str, prompt: str, row: Mapping[str, Any]) -> str:
    """Put the prompt and columns into the instruction; braces in the values stay as they are."""
    try:
        return instruction.format_map({**row, "prompt": prompt})
    except KeyError as error:
        raise ValueError(
            f"instruction: {error.args[0]!r} is neither 'prompt' nor a column; columns: {', '.join(map(str, row))}"
        ) from error
    except (IndexError, ValueError) as error:
        raise ValueError(f"instruction: expected names in braces, such as {{prompt}}, got {instruction!r}") from error


def _cell(row: Mapping[str, Any], column: str, argument: str, where: str) -> str:
    if column not in row:
        raise ValueError(f"{unknown_name(argument, column, row)} (in {where})")
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{argument}: expected text in column {column!r}, got {value!r} in {where}")
    return value


def _check_splits(splits: Mapping[str, float]) -> None:
    if not splits or any(share < 0 for share in splits.values()) or abs(sum(splits.values()) - 1) > 1e-6:
        raise ValueError(f"splits: expected shares that add up to 1, got {dict(splits)}")


def _reference_filter(config: PromptConfig) -> Callable[[str], str]:
    name = config.reference_filter
    if name == "auto":
        name = "gsm8k" if config.source == EMBEDDED_GSM8K else "none"
    return REFERENCE_FILTERS[name]


def strip_calculator_notes(reference: str) -> str:
    """Remove GSM8K's calculator notes, which no model writes unasked.

    >>> strip_calculator_notes("16 - 3 = <<16-3=13>>13 eggs")
    '16 - 3 = 13 eggs'
    """
    return _CALCULATOR_NOTES.sub("", reference)


def _unchanged(reference: str) -> str:
    return reference


def _read_rows(config: PromptConfig) -> Iterator[Mapping[str, Any]]:
    source = config.source
    if source == EMBEDDED_GSM8K:
        return _read_jsonl(gsm8k())
    if source == EMBEDDED_HUMANEVAL:
        return _read_jsonl(humaneval())
    if source.startswith("embedded:"):
        raise ValueError(unknown_name("source", source, EMBEDDED_COLUMNS))
    path = Path(source)
    reader = FILE_READERS.get(path.suffix.lower())
    if reader is not None:
        if not path.is_file():
            raise FileNotFoundError(f"source: no such file: {source}")
        return reader(path)
    if path.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        kinds = ", ".join(FILE_READERS)
        raise ValueError(f"source: expected '{EMBEDDED_GSM8K}', a file ({kinds}) or a hub data set, got {source!r}")
    return _read_hub(config)


def _read_jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    read = gzip.open if path.suffix == ".gz" else open
    with read(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"source: line {number} of {path} is not JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise ValueError(f"source: line {number} of {path}: expected an object with columns, got {line[:40]!r}")
            yield row


def _read_parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"source: {path} is not a readable Parquet file: {str(error).splitlines()[0]}") from error


def _read_csv(path: Path) -> Iterator[Mapping[str, Any]]:
    import csv

    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _read_hub(config: PromptConfig) -> Iterator[Mapping[str, Any]]:
    from datasets import load_dataset

    try:
        rows = load_dataset(config.source, config.hub_config, split=config.hub_split)
    except Exception as error:  # the library raises a dozen unrelated kinds; each means the same to the user
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise FileNotFoundError(f"source: data set {config.source!r} cannot be loaded: {reason}") from error
    return iter(rows)


REFERENCE_FILTERS: dict[str, Callable[[str], str]] = {"none": _unchanged, "gsm8k": strip_calculator_notes}

FILE_READERS: dict[str, Callable[[Path], Iterator[Mapping[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
