"""What every command shares: one-line errors with exit codes, and packaged configs.

Knows no command and no config. Imports nothing heavy, since ``speccascade --help`` passes through here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from ..router.checks import nearest

__all__ = ["UsageError", "find_config", "guard"]

_PACKAGE = Path(__file__).resolve().parents[1]


class UsageError(ValueError):
    """The command line or a config file asks for something that does not exist."""


def guard(name: str, action: Callable[[], None], *, debug: bool = False) -> int:
    """Run ``action``; answer any error with one line on stderr and an exit code, or with its traceback if ``debug``.

    0 done; 2 something given was wrong (bad argument, missing file or model); 1 anything else; 130 interrupted.
    """
    if not debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        action()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left (`... | head`): not an error, but Python must not complain while closing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Exception as error:
        if debug:
            raise
        return _answer(name, error)
    return 0


def _answer(name: str, error: Exception) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (ValueError, OSError, ImportError)):
        print(f"{name}: error: {text}", file=sys.stderr)
        return 2
    print(f"{name}: internal error: {type(error).__name__}: {text} (--debug shows where)", file=sys.stderr)
    return 1


def find_config(name: str | os.PathLike[str]) -> Path:
    """Return the path of a config file: as given, or ``configs/...`` as packaged where the working folder has none.

    Raises:
        UsageError: no such file; names the nearest one.
    """
    given = Path(name)
    if given.is_file():
        return given
    candidates = {
        path.relative_to(folder.parent).as_posix(): path
        for folder in _config_folders()
        for path in folder.glob("*/*.yaml")
    }
    if given.as_posix() in candidates:
        return candidates[given.as_posix()]
    near = [*candidates, *(path.as_posix() for path in given.parent.glob("*.yaml"))]
    raise UsageError(f"--config: no such file: {str(name)!r}{nearest(given.as_posix(), near)}")


def _config_folders() -> list[Path]:
    """Inside the package once installed, beside it in a checkout."""
    return [folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()]
