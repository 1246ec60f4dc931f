"""Tables and records to files, whole or not at all: a reader never meets half a table."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pandas as pd

__all__ = ["read_json", "read_table", "write_json", "write_table", "write_text"]


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write Parquet that pandas, DuckDB or Arrow open as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    table.to_parquet(beside, index=False, compression="zstd")
    os.replace(beside, path)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write JSON; what is not a finite number becomes null, since JSON has no NaN."""
    write_text(path, json.dumps(_finite(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def read_table(path: Path) -> pd.DataFrame | None:
    """Read a table, or None if there is none."""
    return pd.read_parquet(path) if path.is_file() else None


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a record, or None if there is none."""
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
