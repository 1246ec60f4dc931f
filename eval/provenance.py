"""Which code and which command made a result."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from .. import __version__

__all__ = ["describe_run"]


def describe_run() -> dict[str, Any]:
    """The command line, the version, and in a checkout the commit, marked ``+changes`` if files differ from it."""
    program = Path(sys.argv[0]).name
    started = ["python", "-m", "speccascade"] if program == "__main__.py" else [program]
    command = shlex.join([*started, *sys.argv[1:]])
    return {"command": command, "version": __version__, "commit": _commit()}


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    return f"{commit}+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else commit


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
