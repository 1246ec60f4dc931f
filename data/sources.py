"""Rows of a source, one by one: files, folders and data sets on the hub, and the embedded texts.

A row is a mapping of columns, as it came. Knows nothing of prompts, splits or tokenizers.
"""

from __future__ import annotations

import csv
import glob
import gzip
import json
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..router.checks import nearest, unknown_name
from .embedded import fetch_text

__all__ = ["EMBEDDED_TEXTS", "EmbeddedText", "Row", "describe_value", "find_value", "read_rows"]

Row = Mapping[str, Any]

_MOST_OF_A_VALUE = 80


@dataclass(frozen=True)
class EmbeddedText:
    """A text that needs no hub: its rows, and what it is.

    Args:
        read: gives the rows.
        columns: columns of prompt and reference.
        task: the task that it is for.
        languages: source and target language of a translation.
    """

    read: Callable[[], Iterator[Row]]
    columns: tuple[str, str]
    task: str
    languages: tuple[str, str] | None = None


def read_rows(
    source: str, hub_config: str | None = None, hub_split: str = "train", streaming: bool = False
) -> Iterator[Row]:
    """Read the rows of a source lazily; only a .json file is read whole.

    Args:
        source: an embedded text, a file, a pattern of files ('data/*.jsonl', read in the order of their names), a
            folder that `datasets` saved or can load, or a data set on the hub.
        hub_config: configuration of a folder or data set on the hub.
        hub_split: its split.
        streaming: read a folder or data set on the hub without preparing all of it first.

    Raises:
        ValueError: the source cannot be understood; a file names its line.
        FileNotFoundError: there is no such file, or the data set cannot be loaded.
    """
    if source in EMBEDDED_TEXTS:
        return EMBEDDED_TEXTS[source].read()
    if source.startswith("embedded:"):
        raise ValueError(unknown_name("source", source, EMBEDDED_TEXTS))
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path, hub_config, hub_split, streaming)
    if glob.has_magic(source) and not path.exists():
        files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not files:
            raise FileNotFoundError(f"source: no file matches {source}")
        return _read_files([(file, _reader_of(file, source)) for file in files])
    if path.exists() or _kind(path) in FILE_READERS:
        reader = _reader_of(path, source)
        if not path.is_file():
            raise FileNotFoundError(f"source: no such file: {source}")
        return reader(path)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise ValueError(_not_a_source(source))
    return _read_hub(source, hub_config, hub_split, streaming)


def find_value(row: Row, column: str, argument: str, where: str = "") -> Any:
    """Look a column up: by its name, else as a path of keys and list indices, such as 'answers.text.0'.

    Raises:
        ValueError: there is no such column; the message names `argument`, what is there, and the nearest.

    >>> find_value({"answers": {"text": ["yes", "no"]}}, "answers.text.1", "reference_column")
    'no'
    """
    if column in row:
        return row[column]
    value: Any = row
    parts = column.split(".")
    for depth, part in enumerate(parts):
        within = f"{argument}: {'.'.join(parts[:depth])}" if depth else argument
        if isinstance(value, Mapping):
            if part not in value:
                raise ValueError(unknown_name(within, part if depth else column, value) + where)
            value = value[part]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if not part.isdecimal() or int(part) >= len(value):
                raise ValueError(f"{within}: expected an index below {len(value)}, got {part!r}{where}")
            value = value[int(part)]
        else:
            raise ValueError(
                f"{within}: expected columns or a list to take {part!r} from, got {describe_value(value)}{where}"
            )
    return value


def describe_value(value: object) -> str:
    """Write a value for an error message, cut to what a reader needs."""
    text = repr(value)
    return text if len(text) <= _MOST_OF_A_VALUE else f"{text[:_MOST_OF_A_VALUE]}…"


def _kind(path: Path) -> str:
    """Ending that says what a file is, '.gz' left out where it may stand."""
    kind = path.suffix.lower()
    packed = path.with_suffix("").suffix.lower() if kind == ".gz" else ""
    return packed if packed in FILE_READERS and packed != ".parquet" else kind


def _reader_of(path: Path, source: str) -> Callable[[Path], Iterator[Row]]:
    if _kind(path) not in FILE_READERS:
        raise ValueError(_not_a_source(source))
    return FILE_READERS[_kind(path)]


def _not_a_source(source: str) -> str:
    kinds = ", ".join(FILE_READERS)
    return (
        f"source: expected an embedded text, a file or folder of files ({kinds}) or a hub data set, got {source!r}"
        f"{nearest(source, EMBEDDED_TEXTS)}"
    )


def _read_files(files: Sequence[tuple[Path, Callable[[Path], Iterator[Row]]]]) -> Iterator[Row]:
    for path, reader in files:
        yield from reader(path)


def _open_text(path: Path) -> TextIO:
    """Open text that may be compressed or begin with a byte order mark; line ends inside cells stay as they are."""
    read: Any = gzip.open if path.suffix.lower() == ".gz" else open
    opened: TextIO = read(path, "rt", encoding="utf-8-sig", newline="")
    return opened


def _read_lines(path: Path) -> Iterator[str]:
    """Lines of a file, what cannot be read named as such."""
    try:
        with _open_text(path) as file:
            yield from file
    except UnicodeDecodeError as error:
        raise ValueError(f"source: {path} is not UTF-8: {error.reason}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"source: {path} is not a readable gzip file: {error}") from error


def _read_jsonl(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # a number with thousands of digits is a plain ValueError
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"source: line {number} of {path} is not JSON: {reason}") from error
        if not isinstance(row, dict):
            raise ValueError(f"source: line {number} of {path}: expected an object with columns, got {line[:40]!r}")
        yield row


def _read_json(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads("".join(_read_lines(path)))
    except json.JSONDecodeError as error:
        raise ValueError(f"source: line {error.lineno} of {path} is not JSON: {error.msg}") from error
    except (RecursionError, OverflowError) as error:
        raise ValueError(f"source: {path} is not readable JSON: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"source: {path}: expected a list of objects, got {describe_value(rows)}")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(
                f"source: item {number} of {path}: expected an object with columns, got {describe_value(row)}"
            )
        yield row


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"source: {path} is not a readable Parquet file: {str(error).splitlines()[0]}") from error


def _read_csv(path: Path) -> Iterator[Row]:
    return _read_table(path, ",")


def _read_tsv(path: Path) -> Iterator[Row]:
    return _read_table(path, "\t")


def _read_table(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # of the whole process; the default of 128 kB is less than a long document
    rows = csv.DictReader(_read_lines(path), delimiter=delimiter, strict=True)
    try:
        for row in rows:
            if None in row:
                raise ValueError(
                    f"source: line {rows.reader.line_num} of {path}: expected {len(rows.fieldnames or [])} cells, "
                    f"as in the first line, got {len(row) - 1 + len(row[None])}"
                )
            yield row
    except csv.Error as error:
        raise ValueError(f"source: line {rows.reader.line_num} of {path} is not a table: {error}") from error


def _read_folder(path: Path, hub_config: str | None, hub_split: str, streaming: bool) -> Iterator[Row]:
    """Rows of a folder that `datasets` wrote with `save_to_disk`, or of the data files in a folder."""
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return _read_hub(str(path), hub_config, hub_split, streaming)
    from datasets import DatasetDict, load_from_disk

    try:
        rows = load_from_disk(str(path))
    except Exception as error:  # as for the hub: many kinds, one meaning
        raise ValueError(f"source: folder {str(path)!r} cannot be loaded: {_first_line(error)}") from error
    if not isinstance(rows, DatasetDict):
        return iter(rows)
    if hub_split not in rows:
        raise ValueError(unknown_name("hub_split", hub_split, rows))
    return iter(rows[hub_split])


def _read_hub(name: str, hub_config: str | None, hub_split: str, streaming: bool) -> Iterator[Row]:
    from datasets import load_dataset

    options = {"streaming": True} if streaming else {}
    try:
        yield from load_dataset(name, hub_config, split=hub_split, **options)
    except Exception as error:  # the library raises a dozen unrelated kinds; each means the same to the user
        raise FileNotFoundError(f"source: data set {name!r} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _embedded_jsonl(name: str, *columns: str) -> Callable[[], Iterator[Row]]:
    """Reader of an embedded text; rows that lack text in one of `columns` are left out."""

    def read() -> Iterator[Row]:
        rows = _read_jsonl(fetch_text(name))
        return (row for row in rows if all(row[column].strip() for column in columns))

    return read


_NO_CODE_TO_LEARN_FROM = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idle_test", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
"""Folders of the standard library with tests, tables, other people's code or none."""


def _read_standard_library() -> Iterator[Row]:
    """Python files of the running Python's standard library, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        inside = path.relative_to(root)
        # Build settings differ from machine to machine.
        foreign = inside.name.startswith("_sysconfigdata") or inside.parts[0].startswith("config-")
        if foreign or _NO_CODE_TO_LEARN_FROM & set(inside.parts):
            continue
        with tokenize.open(path) as file:
            text = file.read()
        if len(text.strip()) > 1:
            yield {"path": inside.as_posix(), "text": text}


def _read_txt(path: Path) -> Iterator[Row]:
    """One document."""
    with _open_text(path) as file:
        yield {"text": file.read()}


FILE_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".txt": _read_txt,
}

EMBEDDED_TEXTS: dict[str, EmbeddedText] = {
    "embedded:gsm8k": EmbeddedText(_embedded_jsonl("gsm8k"), ("question", "answer"), "maths"),
    "embedded:humaneval": EmbeddedText(_embedded_jsonl("humaneval"), ("prompt", "canonical_solution"), "code"),
    "embedded:xsum": EmbeddedText(
        _embedded_jsonl("xsum", "document", "summary"), ("document", "summary"), "summarisation"
    ),
    "embedded:nq-open": EmbeddedText(_embedded_jsonl("nq-open"), ("question", "answer.0"), "qa"),
    "embedded:django-de": EmbeddedText(
        _embedded_jsonl("django-de"), ("en", "de"), "translation", languages=("English", "German")
    ),
    "embedded:stdlib": EmbeddedText(_read_standard_library, ("text", "text"), "text"),
}
