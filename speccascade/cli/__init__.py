"""The command line: ``speccascade COMMAND ...`` reads arguments and calls one function of a layer below.

A command is a module of this package with ``run(arguments)``, imported only when called, so that ``--help`` stays
instant. Errors are answered on one line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..router.checks import nearest
from .shell import UsageError, guard

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "tune-drafter": "make a drafter of a few of the verifier's own layers, tuned on your task",
    "collect": "run the pair over prompts with references and log traces (resumable)",
    "train": "train a router head on traces",
    "export": "turn a trained head into a router bundle: ONNX, calibration, card",
    "generate": "prompts to text, by a plug-in rule or by a trained router",
    "evaluate": "compare methods: offline from traces, or live with both models",
    "report": "results to tables and plots",
    "demo": "all of it on a small embedded pair: no GPU, no account",
}

_USAGE = """usage: speccascade COMMAND [--config FILE.yaml] [options]

Trainable routers for speculative cascades of language models.

commands:
{commands}

options:
  -h, --help    show this text; `speccascade COMMAND --help` explains a command
  --version     show the version
  --debug       show the whole traceback of an error

Every command takes --config FILE.yaml; flags override the file, and the resolved config is written beside the output.
Start with: speccascade demo
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 for an error in what was given, 130 when interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"speccascade {__version__}")
        return 0
    command, rest = words[0], words[1:]
    name = f"speccascade {command}" if command in COMMANDS else "speccascade"
    return guard(name, lambda: _dispatch(command, rest), debug=debug)


def _dispatch(command: str, arguments: list[str]) -> None:
    if command not in COMMANDS:
        raise UsageError(f"unknown command {command!r}{nearest(command, COMMANDS)} One of: {', '.join(COMMANDS)}")
    module = import_module(f".{command.replace('-', '_')}", __name__)
    module.run(arguments)


def _help() -> str:
    width = max(map(len, COMMANDS))
    return _USAGE.format(commands="\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()))
