"""What a live run has done so far, on disk after every answer: a run killed anywhere goes on where it stopped.

One JSON line an answer, the first line saying which run this is. The last line of a killed run may be torn; it is
dropped, and that answer is generated again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["Journal"]

Unit = tuple[str, str, int]


class Journal:
    """Answers by unit: (setting key, prompt id, repeat).

    Args:
        path: the file; made if there is none.
        identity: everything that decides an answer and is not part of the unit.

    Raises:
        ValueError: the file belongs to another run; the first difference is named.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.answers: dict[Unit, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        records = _read_whole_lines(path)
        if not records:
            self._append({"identity": identity})
            return
        _check_identity(path, records[0].get("identity", {}), json.loads(json.dumps(identity)))
        self.answers = {_unit(record): record for record in records[1:]}

    def __contains__(self, unit: object) -> bool:
        return unit in self.answers

    def add(self, answer: dict[str, Any]) -> None:
        """Keep one answer; once this returns, it survives a kill."""
        self._append(answer)
        self.answers[_unit(answer)] = answer

    def _append(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _unit(record: dict[str, Any]) -> Unit:
    return record["key"], record["prompt_id"], record["repeat"]


def _read_whole_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records and cut off a torn last line, so that the next one does not follow it on the same line."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    try:
        return [json.loads(line) for line in whole.split(b"\n") if line]
    except ValueError as error:
        raise ValueError(f"out: {path} is damaged ({error}); remove it to start again") from error


def _check_identity(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"out: {path.parent} holds a run with {name}={found.get(name)!r}, this one has {expected.get(name)!r}; "
                "give another folder, or remove that one"
            )
