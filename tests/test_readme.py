"""What README, CONTRIBUTING and ARCHITECTURE tell a reader to type or open exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import speccascade
from speccascade.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_targets_configs_and_links_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = [
        f"speccascade {word}"
        for word in re.findall(r"(?<!from )\bspeccascade ([a-z][a-z-]+)", _code(text))
        if word not in COMMANDS
    ]
    missing += [f"make {word}" for word in re.findall(r"\bmake ([a-z]+)", _code(text)) if word not in _targets()]
    missing += [path for path in re.findall(r"\bconfigs/[\w./-]+\.yaml", text) if not (ROOT / path).is_file()]
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    missing += [link for link in links if not (document.parent / link).exists()]
    assert not missing, f"{document.name} names what does not exist: {missing}"


def _code(text: str) -> str:
    """Everything that is set as code: fenced or indented blocks, and words in backticks."""
    blocks = re.findall(r"```.*?```", text, re.DOTALL)
    indented = [line for line in text.splitlines() if line.startswith("    ")]
    return "\n".join([*blocks, *indented, *re.findall(r"`[^`\n]+`", text)])


def test_python_examples_use_public_names() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    nodes = [node for example in examples for node in ast.walk(ast.parse(example))]
    names = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "speccascade"
        for alias in node.names
    }
    names |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "speccascade"
    }
    assert names == set(speccascade.__all__) - {"__version__"}
    assert all(len([line for line in example.splitlines() if line.strip()]) <= 12 for example in examples)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    (command,) = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("    make test")]
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_command_table_is_complete() -> None:
    assert set(re.findall(r"^\| `speccascade ([a-z-]+)`", README, re.MULTILINE)) == set(COMMANDS)
