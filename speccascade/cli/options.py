"""From a config dataclass to a command line: flags, ``--config``, help, and refusals that name the nearest key.

Each command's config stands beside what it configures (``data``, ``training``, ``eval``); this module only reads it.
On top of jsonargparse: dashes in flag names, ``--flag`` and ``--no-flag`` for booleans, ``--list a b`` beside
``--list [a,b]``, flags override the file wherever they stand, and unknown keys are refused here, so that flags and
files are answered alike.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import jsonargparse
import yaml

from ..router.checks import nearest, shorten_union
from .shell import UsageError, find_config

__all__ = ["CommandLine", "write_config"]

ConfigT = TypeVar("ConfigT")


class _Help(jsonargparse.DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the line breaks of description and example."""


class CommandLine(Generic[ConfigT]):
    """Parses one command's arguments into its config dataclass.

    Args:
        command: its name, as typed.
        config_class: a dataclass whose fields, nested ones too, become flags.
        description: what the command does, for ``--help``.
        example: a few lines to copy, for the end of ``--help``.
        positional: the field that takes the words which belong to no flag (one word, or all if it is a list), if any.
    """

    def __init__(
        self, command: str, config_class: type[ConfigT], description: str, example: str, positional: str | None = None
    ) -> None:
        self.command = command
        self.config_class = config_class
        self.positional = positional
        self.leaves = leaf_types(config_class)
        self.names = list(dict.fromkeys(leaf.partition(".")[0] for leaf in self.leaves))
        self.parser = _build_parser(command, config_class, description, example, positional)

    def parse(self, arguments: Sequence[str]) -> ConfigT:
        """Return the config; ``--help`` and ``--print-config`` print and leave with code 0.

        Raises:
            UsageError: an unknown flag or key, a bad value or a missing file, on one line.
        """
        flags, words = self._split(list(arguments))
        if words and self.positional and self.leaves[self.positional] != list[str]:
            flags.append(f"--{self.positional}={words.pop(0)}")
        if words and (self.positional is None or self.leaves[self.positional] != list[str]):
            raise UsageError(f"unexpected {words[0]!r} (speccascade {self.command} --help lists the options)")
        for path in _config_paths(flags):
            self._check_keys(path)
        try:
            values = vars(self.parser.instantiate(self.parser.parse_args(flags)))
            if self.positional is not None and words:
                values[self.positional] = words
            return self.config_class(**{name: values[name] for name in self.names})
        except (ArgumentError, TypeError, ValueError) as error:
            raise UsageError(_shorten(error)) from error

    def _split(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Sort out flags, each with its value, as jsonargparse wants them and ``--config`` first; and free words."""
        configs: list[str] = []
        flags: list[str] = []
        free: list[str] = []
        lists: dict[str, list[str]] = {}
        while words:
            word = words.pop(0)
            if word == "--":
                free += words
                break
            if word in ("-h", "--help"):
                return ["--help"], []
            if not word.startswith("--"):
                free.append(word)
                continue
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if not equals and self.leaves.get(name) is bool:
                value = words.pop(0) if words and words[0] in ("true", "false") else "true"
            elif not equals and name.startswith("no_") and self.leaves.get(name[3:]) is bool:
                name, value = name[3:], "false"
            elif name == "print_config":
                flags.append("--print_config")
                continue
            else:
                self._check_flag(name)
                if not equals:
                    value = _take_value(name, words)
                if self._takes_words(name):
                    lists[name] = lists.get(name, []) + _read_list(value)
                    while words and not equals and not words[0].startswith("-"):
                        lists[name].append(words.pop(0))
                    continue
            if name == "config":
                configs.append(f"--config={find_config(value)}")
            else:
                flags.append(f"--{name}={value}")
        return configs + flags + [f"--{name}={json.dumps(items)}" for name, items in lists.items()], free

    def _takes_words(self, name: str) -> bool:
        """Whether a flag takes several words: a list of texts, where free words mean nothing else."""
        texts = (list[str], tuple[str, ...], list[str] | None, tuple[str, ...] | None)
        return self.positional is None and self.leaves.get(name) in texts

    def _check_flag(self, name: str) -> None:
        if name == "config" or self._is_known(name):
            return
        hint = nearest(name, (*self.leaves, "config", "help"), lambda near: f"--{_dashed(near)}")
        raise UsageError(f"unknown option --{_dashed(name)}{hint} (speccascade {self.command} --help lists them)")

    def _is_known(self, name: str) -> bool:
        """A leaf, a group of leaves, or a key inside a leaf that is a dictionary."""
        if name in self.leaves or any(leaf.startswith(f"{name}.") for leaf in self.leaves):
            return True
        return any(name.startswith(f"{leaf}.") and _holds_keys(kind) for leaf, kind in self.leaves.items())

    def _check_keys(self, path: Path) -> None:
        """Refuse unknown keys of a YAML file, naming the nearest."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise UsageError(f"{path}: not valid YAML: {error}") from error
        if content is None:
            return
        if not isinstance(content, dict):
            raise UsageError(f"{path}: expected keys with values, got {type(content).__name__}")
        for key in _dotted_keys(content):
            if not self._is_known(key):
                raise UsageError(f"{path}: unknown key {key!r}{nearest(key, self.leaves)}")


def _build_parser(
    command: str, config_class: type, description: str, example: str, positional: str | None
) -> jsonargparse.ArgumentParser:
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(
        prog=f"speccascade {command}",
        usage=f"speccascade {command}{f' [{positional} ...]' if positional else ''} [--config FILE.yaml] [options]",
        description=description,
        epilog=f"example:\n{example}",
        formatter_class=_Help,
        exit_on_error=False,
        default_env=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the options below; flags override it")
    parser.add_class_arguments(config_class, nested_key=None)
    return parser


class _Parser(jsonargparse.ArgumentParser):
    """Shows flags as they are best typed; both spellings are understood."""

    def format_help(self, formatter: Any = None) -> str:
        text = re.sub(r"--[a-z][a-z_.]*", lambda flag: _dashed(flag.group()), super().format_help(formatter))
        text = re.sub(r"(--\S+ \[ITEM,\.\.\.\]), --\S+\+ \[ITEM,\.\.\.\]", r"\1", text)
        return re.sub(r"--(\S+) \{true,false\}", lambda flag: f"--[no-]{flag[1]}".ljust(len(flag[0])), text)


def leaf_types(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Return every field of a dataclass and of those nested in it, by dotted name, with its type."""
    hints = get_type_hints(config_class)
    leaves: dict[str, Any] = {}
    for field in fields(config_class):
        nested = [kind for kind in (hints[field.name], *get_args(hints[field.name])) if is_dataclass(kind)]
        if nested and isinstance(nested[0], type):
            leaves |= leaf_types(nested[0], f"{prefix}{field.name}.")
        else:
            leaves[prefix + field.name] = hints[field.name]
    return leaves


def _holds_keys(kind: Any) -> bool:
    """Whether a value of this type may have keys of its own."""
    return kind is Any or any(get_origin(part) in (dict, Mapping) for part in (kind, *get_args(kind)))


def _dotted_keys(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _dotted_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _take_value(name: str, words: list[str]) -> str:
    if not words or words[0].startswith("--"):
        raise UsageError(f"--{_dashed(name)}: expected a value, got nothing")
    return words.pop(0)


def _read_list(value: str) -> list[str]:
    """Read ``[a,b]``, or a word that stands for itself."""
    if not value.startswith("["):
        return [value]
    try:
        return [str(item) for item in yaml.safe_load(value)]
    except yaml.YAMLError:
        return [value]


def _config_paths(words: Sequence[str]) -> list[Path]:
    return [Path(word.partition("=")[2]) for word in words if word.startswith("--config=")]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _shorten(error: Exception) -> str:
    """Say on one line, in our words, what jsonargparse says on several."""
    text = " ".join(str(error).split())
    text = re.sub(r'^Parser key "([^"]+)": ', lambda key: f"--{_dashed(key.group(1))}: ", text)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text).replace("typing.", "")
    text = shorten_union(text)
    text = re.sub(r"Expected an? (.*)\. Got value: ?(.*)$", r"expected \1, got '\2'", text)
    missing = re.fullmatch(r"the following arguments are required: (.*)", text)
    if missing:
        return f"needed and not given: {', '.join('--' + _dashed(name) for name in missing.group(1).split(', '))}"
    return text


def write_config(config: Any, directory: Path, name: str = "config.yaml") -> Path:
    """Write a resolved config into ``directory``; ``--config`` reads it back."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    text = yaml.dump(to_plain(config), Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")
    return path


class _PlainDumper(yaml.SafeDumper):
    """Quotes a text such as 1e3, which PyYAML takes for one, and the reader of ``--config`` for a number."""


_PlainDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def to_plain(value: Any) -> Any:
    """Turn a config into what YAML and JSON know: dictionaries, lists, text, numbers."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
