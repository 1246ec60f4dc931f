"""``speccascade train``: a router head from traces (the same as ``python train_router.py``)."""

from __future__ import annotations

from .shell import find_config

__all__ = ["run"]


def run(arguments: list[str]) -> None:
    """Hand the arguments to the LightningCLI of the training package; packaged configs are found from anywhere."""
    from ..training.cli import main

    main(_with_config_paths(arguments))


def _with_config_paths(arguments: list[str]) -> list[str]:
    words = list(arguments)
    for position, word in enumerate(words):
        if word.startswith("--config="):
            words[position] = f"--config={find_config(word.partition('=')[2])}"
        elif word == "--config" and position + 1 < len(words):
            words[position + 1] = str(find_config(words[position + 1]))
    return words
