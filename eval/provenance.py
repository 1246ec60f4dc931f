"""Which code, which command and which machine made a result."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__

__all__ = ["describe_machine", "describe_run"]


def describe_run() -> dict[str, Any]:
    """The command line, the version, and in a checkout the commit, marked ``+changes`` if files differ from it."""
    program = Path(sys.argv[0]).name
    started = ["python", "-m", "speccascade"] if program == "__main__.py" else [program]
    command = shlex.join([*started, *sys.argv[1:]])
    return {"command": command, "version": __version__, "commit": _commit()}


def describe_machine(*packages: str) -> dict[str, Any]:
    """The processor, Python and the versions of some packages."""
    versions = {name: _version(name) for name in packages}
    return {"cpu": _cpu(), "python": platform.python_version(), "versions": versions}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else "unknown"


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
