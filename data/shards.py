"""One Parquet shard of a trace: its columns, how it is written so that no half-written file bears its name, and read.

A shard carries the digest of the plan that made it, and checksums of its pages: a foreign or damaged one is recognised
even before a manifest exists. Nothing in it depends on time, machine or the number of attempts.

Shapes: ``N`` row, ``K`` slot of the top-k union.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..cascade.statistics import STAT_FIELDS

__all__ = [
    "FLOAT_COLUMNS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "check_shard",
    "ragged",
    "read_rows",
    "shard_name",
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

_PLAN_KEY = b"speccascade.plan"
_INDEX_KEY = b"speccascade.shard"
_SPLIT_BYTES = [*FLOAT_COLUMNS, "topk_q.list.element", "topk_p.list.element"]
_DICTIONARY = ["prompt_id", "split", "label_kind", "source"]


def shard_name(index: int) -> str:
    """File name of a shard."""
    return f"part-{index:05d}.parquet"


def ragged(values: np.ndarray[Any, Any], kept: np.ndarray[Any, Any], kind: pa.DataType) -> pa.ListArray:
    """Turn padded ``[N, K]`` values and the mask of those that count into a list column."""
    offsets = np.concatenate([[0], kept.sum(axis=1).cumsum()]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values[kept], kind))


def write_shard(path: Path, columns: Mapping[str, Any], index: int, plan_digest: str) -> None:
    """Write all columns of `SCHEMA` under a temporary name, then rename.

    Raises:
        OSError: the disk is full or the folder cannot be written to; nothing bears the shard's name then.
    """
    arrays = [pa.array(columns[f.name], f.type) if f.type != _TEXT else _dictionary(columns[f.name]) for f in SCHEMA]
    metadata = {_PLAN_KEY: plan_digest.encode(), _INDEX_KEY: str(index).encode()}
    table = pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata(metadata))
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            pq.write_table(
                table,
                file,
                compression="zstd",
                use_dictionary=_DICTIONARY,
                use_byte_stream_split=_SPLIT_BYTES,
                write_page_checksum=True,
            )
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_shard(path: Path, index: int, plan_digest: str) -> None:
    """Read a finished shard through, page checksums included.

    Raises:
        ValueError: it is damaged, or was made under another plan; the message names it.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            metadata = file.schema_arrow.metadata or {}
            file.read()
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
