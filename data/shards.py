"""One Parquet shard of a trace: its columns, how it is written so that no half-written file bears its name, and read.

A shard carries the digest of the plan that made it, and checksums of its pages: a foreign or damaged one is recognised
even before a manifest exists. Nothing in it depends on time, machine or the number of attempts.

Shapes: ``N`` row, ``K`` slot of the top-k union.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..cascade.statistics import STAT_FIELDS
from .folders import whole_file

__all__ = [
    "CASCADE_COLUMNS",
    "FLOAT_COLUMNS",
    "HIDDEN_COLUMNS",
    "OUTCOME_COLUMNS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "check_shard",
    "measure_shard",
    "read_rows",
    "shard_name",
    "topk_columns",
    "write_shard",
]

SCHEMA_VERSION = 1

FLOAT_COLUMNS = (*STAT_FIELDS, "q_label", "p_label")

_TEXT = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        pa.field("prompt_id", _TEXT),
        pa.field("split", _TEXT),
        pa.field("position", pa.int32()),
        pa.field("draft_index", pa.int16()),
        pa.field("token", pa.int32()),
        pa.field("label", pa.int32()),
        pa.field("label_kind", _TEXT),
        pa.field("source", _TEXT),
        *(pa.field(name, pa.float32()) for name in FLOAT_COLUMNS),
        pa.field("topk_ids", pa.list_(pa.int32())),
        pa.field("topk_q", pa.list_(pa.float32())),
        pa.field("topk_p", pa.list_(pa.float32())),
    ]
)
"""``position``: index of the label in the whole sequence. ``draft_index``: place in the drafted block, -1 where there
is none (teacher-forced). ``token``: what the drafter proposes there; teacher-forced, its argmax."""

CASCADE_COLUMNS = pa.schema(
    [
        pa.field("block", pa.int32()),
        pa.field("accepted", pa.bool_()),
        pa.field("deferred", pa.bool_()),
        pa.field("q_token", pa.float32()),
        pa.field("p_token", pa.float32()),
        pa.field("q_token_raw", pa.float32()),
        pa.field("p_token_raw", pa.float32()),
    ]
)
"""Only where the source is 'cascade'. ``block``: the round that drafted the token; ``accepted``: whether it was kept;
``deferred``: what the rule decided in that run; then q, p, q° and p° at the drafted token."""

OUTCOME_COLUMNS = pa.schema(
    [
        pa.field("outcome_q", pa.float32()),
        pa.field("outcome_p", pa.float32()),
        pa.field("answer_changed", pa.bool_()),
    ]
)
"""Only where counterfactuals were asked for; null where none was tried. Score in [0, 1] of the answer that the verifier
ends after the drafter's token and after its own, and whether the two scores differ."""

HIDDEN_COLUMNS = ("draft_hidden", "verifier_hidden")
"""Only where hidden states were asked for: what each model's head reads at the position, float16 ``[H]``."""

EXPECTED_GAIN = pa.field("expected_gain", pa.float32())
"""`Stats.expected_gain` over the whole vocabulary; older traces lack it."""

OPTIONAL_COLUMNS = (EXPECTED_GAIN, *CASCADE_COLUMNS, *OUTCOME_COLUMNS)

_PLAN_KEY = b"speccascade.plan"
_INDEX_KEY = b"speccascade.shard"
_SPLIT_LISTS = ["topk_q.list.element", "topk_p.list.element"]
_DICTIONARY = ["prompt_id", "split", "label_kind", "source"]


def shard_name(index: int) -> str:
    """File name of a shard."""
    return f"part-{index:05d}.parquet"


def topk_columns(
    ids: np.ndarray[Any, Any], draft: np.ndarray[Any, Any], verifier: np.ndarray[Any, Any], kept: np.ndarray[Any, Any]
) -> dict[str, pa.ListArray]:
    """Turn the padded top-k union ``[N, K]`` and the mask of what counts in it into its three list columns."""
    return {
        "topk_ids": ragged(ids, kept, pa.int32()),
        "topk_q": ragged(draft, kept, pa.float32()),
        "topk_p": ragged(verifier, kept, pa.float32()),
    }


def ragged(values: np.ndarray[Any, Any], kept: np.ndarray[Any, Any], kind: pa.DataType) -> pa.ListArray:
    """Turn padded ``[N, K]`` values and the mask of those that count into a list column."""
    offsets = np.concatenate([[0], kept.sum(axis=1).cumsum()]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values[kept], kind))


def write_shard(path: Path, columns: Mapping[str, Any], index: int, plan_digest: str) -> None:
    """Write all columns of `SCHEMA`, and the optional ones that are given, under a temporary name, then rename.

    Raises:
        OSError: the disk is full or the folder cannot be written to; nothing bears the shard's name then.
    """
    metadata = {_PLAN_KEY: plan_digest.encode(), _INDEX_KEY: str(index).encode()}
    table = _build_table(columns).replace_schema_metadata(metadata)
    with whole_file(path) as file:
        _write_table(table, file)


def measure_shard(columns: Mapping[str, Any]) -> int:
    """How many bytes a shard of these columns takes; nothing is written."""
    buffer = io.BytesIO()
    _write_table(_build_table(columns), buffer)
    return buffer.tell()


def _build_table(columns: Mapping[str, Any]) -> pa.Table:
    schema = [*SCHEMA, *(f for f in OPTIONAL_COLUMNS if f.name in columns)]
    arrays = [pa.array(columns[f.name], f.type) if f.type != _TEXT else _dictionary(columns[f.name]) for f in schema]
    for name in HIDDEN_COLUMNS:
        if name in columns:
            values = columns[name]
            schema.append(pa.field(name, pa.list_(pa.float16(), values.shape[1])))
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1]))
    return pa.Table.from_arrays(arrays, schema=pa.schema(schema))


def _write_table(table: pa.Table, file: BinaryIO) -> None:
    floats = [f.name for f in table.schema if f.type == pa.float32()]
    pq.write_table(
        table,
        file,
        compression="zstd",
        use_dictionary=_DICTIONARY,
        use_byte_stream_split=[*floats, *_SPLIT_LISTS],
        write_page_checksum=True,
    )


def check_shard(path: Path, index: int, plan_digest: str) -> None:
    """Read a finished shard through, page checksums included.

    Raises:
        ValueError: it is damaged, or was made under another plan; the message names it.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            metadata = file.schema_arrow.metadata or {}
            file.read()
    except PermissionError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}") from error
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is damaged ({reason}); remove it, and it will be collected again") from error
    if metadata.get(_PLAN_KEY) != plan_digest.encode() or metadata.get(_INDEX_KEY) != str(index).encode():
        raise ValueError(f"{path} is foreign: it was not made by this plan as shard {index}; move it away")


def read_rows(paths: list[Path], split: str | None = None, columns: list[str] | None = None) -> pa.Table:
    """Read the rows of one split, or all, from shards in the given order."""
    tables = []
    for path in paths:
        table = pq.read_table(path, columns=columns, filters=None if split is None else [("split", "==", split)])
        tables.append(table.replace_schema_metadata(None))
    return pa.concat_tables(tables).unify_dictionaries()


def _dictionary(values: list[str]) -> pa.DictionaryArray:
    return pa.array(values, pa.string()).dictionary_encode()
