"""From a dataclass to a command line and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jsonargparse
import pytest
import yaml

from speccascade.cli.options import CommandLine, leaf_types, write_config
from speccascade.cli.shell import UsageError


@dataclass(frozen=True)
class Models:
    """Two models.

    Attributes:
        drafter: the small one.
        verifier: the large one.
    """

    drafter: str = "small"
    verifier: str = "large"


@dataclass(frozen=True)
class Sample:
    """An example of everything.

    Attributes:
        out: where to write.
        words: free words.
        pair: the models.
        max_new_tokens: where to stop.
        splits: shares by name.
        kind: which kind.
        layers: one number or several.
        chat: whether to chat.
        limit: at most so many.
    """

    out: Path
    words: list[str] = field(default_factory=list)
    pair: Models = field(default_factory=Models)
    max_new_tokens: int = 5
    splits: dict[str, float] = field(default_factory=lambda: {"test": 0.5})
    kind: Literal["mlp", "linear"] = "mlp"
    layers: int | tuple[int, ...] = 3
    chat: bool = True
    limit: int | None = None


@pytest.fixture
def line() -> CommandLine[Sample]:
    return CommandLine("sample", Sample, "Does nothing.", "  speccascade sample", positional="words")


def _write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "given.yaml"
    path.write_text(text)
    return str(path)


def test_flags_reach_fields_of_every_kind(line) -> None:
    words = "one --out o --max-new-tokens 7 --pair.drafter q --layers [1,2] --splits.tune 0.2 --no-chat two --limit 4"
    config = line.parse(words.split())
    assert config == Sample(
        Path("o"), ["one", "two"], Models("q"), 7, {"test": 0.5, "tune": 0.2}, layers=(1, 2), chat=False, limit=4
    )


@pytest.mark.parametrize("flag", ["--max-new-tokens=7", "--max_new_tokens=7", "--max-new-tokens 7"])
def test_dashes_and_underscores_are_the_same(line, flag: str) -> None:
    assert line.parse(["--out", "o", *flag.split()]).max_new_tokens == 7


@pytest.mark.parametrize(
    ("words", "expected"), [("--chat", True), ("--no-chat", False), ("--chat false", False), ("--chat=false", False)]
)
def test_booleans(line, words: str, expected: bool) -> None:
    config = line.parse(["--out", "o", *words.split(), "hello"])
    assert (config.chat, config.words) == (expected, ["hello"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [("--names a b --limit 3 --names c", ["a", "b", "c"]), ("--names [a,b]", ["a", "b"]), ("--names=a", ["a"])],
)
def test_a_list_takes_words_where_free_words_mean_nothing(words: str, expected: list[str]) -> None:
    @dataclass(frozen=True)
    class Named:
        names: list[str] | None = None
        limit: int = 0

    globals()["Named"] = Named
    assert CommandLine("sample", Named, "", "").parse(words.split()).names == expected


def test_flags_override_the_file_wherever_they_stand(line, tmp_path) -> None:
    path = _write(tmp_path, "out: from_file\nmax_new_tokens: 1\npair: {drafter: a, verifier: b}\n")
    for words in (["--max-new-tokens", "2", "--config", path], [f"--config={path}", "--max-new-tokens", "2"]):
        config = line.parse(words)
        assert (config.out, config.max_new_tokens, config.pair) == (Path("from_file"), 2, Models("a", "b"))


def test_the_resolved_config_reads_back(line, tmp_path) -> None:
    config = line.parse(["--out", str(tmp_path / "o"), "--layers", "[4,5]", "--splits.tune", "0.3"])
    written = write_config(config, tmp_path)
    assert yaml.safe_load(written.read_text())["layers"] == [4, 5]
    assert line.parse(["--config", str(written)]) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--out o --max-new-token 3", "unknown option --max-new-token; did you mean --max-new-tokens?"),
        ("--out o --pair.drafer x", "unknown option --pair.drafer; did you mean --pair.drafter?"),
        ("--out o --zzzzz 3", "unknown option --zzzzz (speccascade sample --help lists them)"),
        ("--out o --max-new-tokens many", "--max-new-tokens: expected int, got 'many'"),
        ("--out o --kind mpl", "--kind: expected Literal['mlp', 'linear'], got 'mpl'"),
        ("--chat", "needed and not given: --out"),
        ("--config", "--config: expected a value, got nothing"),
    ],
)
def test_bad_flags_are_refused_on_one_line(line, words: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        line.parse(words.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_new_token: 3", "unknown key 'max_new_token'; did you mean 'max_new_tokens'?"),
        ("pair: {drafer: 3}", "unknown key 'pair.drafer'; did you mean 'pair.drafter'?"),
        ("- 1", "expected keys with values, got list"),
        ("a: [", "not valid YAML"),
        ("out: o\nmax_new_tokens: many", "--max-new-tokens: expected int, got 'many'"),
    ],
)
def test_bad_files_are_refused(line, tmp_path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        line.parse(["--config", _write(tmp_path, text)])
    assert message in str(caught.value)


def test_help_shows_flags_as_they_are_typed(line, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        line.parse(["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert "--max-new-tokens" in text
    assert "--max_new_tokens" not in text
    assert "--[no-]chat" in text
    assert "where to stop" in text
    assert text.rstrip().endswith("speccascade sample")


def test_leaves_of_nested_and_optional_dataclasses() -> None:
    @dataclass(frozen=True)
    class Outer:
        inner: Models | None = None
        number: int = 1

    globals()["Outer"] = Outer
    assert leaf_types(Outer) == {"inner.drafter": str, "inner.verifier": str, "number": int}


@pytest.mark.parametrize("text", ["1e3", "-2E5", ".5e-3", "1.5", "yes", "null", "1_0", "plain text", "e3", "1e3 eggs"])
def test_a_text_that_looks_like_something_else_is_read_back_as_text(text: str, tmp_path: Path) -> None:
    path = write_config({"system": text}, tmp_path)
    read = jsonargparse.ArgumentParser(exit_on_error=False)
    read.add_argument("--config", action="config")
    read.add_argument("--system", type=str)
    assert read.parse_args([f"--config={path}"]).system == text
