"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import speccascade

ROOT = Path(__file__).resolve().parents[1]
NAMESPACED = ("cascade", "router", "data", "training", "eval")
FOLDERS = (*NAMESPACED, "speccascade")


def _module_names() -> list[str]:
    names = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            prefix = ("speccascade", folder) if folder in NAMESPACED else (folder,)
            names.append(".".join(part for part in (*prefix, *parts) if part not in ("__init__", "__main__")))
    return names


@pytest.mark.parametrize("name", _module_names())
def test_examples_of_module(name: str) -> None:
    result = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} failed; see the output above"


def test_public_names_load() -> None:
    missing = [name for name in speccascade.__all__ if not hasattr(speccascade, name)]
    assert not missing, f"speccascade.__all__ promises {missing}, which cannot be loaded"
