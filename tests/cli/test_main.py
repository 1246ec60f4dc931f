"""The command line as a whole: instant help, unknown commands, exit codes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from speccascade import __version__
from speccascade.cli import COMMANDS, main, shell


def test_help_names_every_command(capsys) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)


def test_help_is_instant_and_loads_no_framework() -> None:
    code = (
        "import sys; from speccascade.cli import main; main(['--help']); "
        "sys.exit(len({'torch', 'transformers', 'jsonargparse'} & set(sys.modules)))"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        times.append(time.perf_counter() - start)
        assert done.returncode == 0, "showing the help loads torch, transformers or jsonargparse"
    assert min(times) < 1.0, f"speccascade --help took {times} s"


def test_version(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"speccascade {__version__}\n"


def test_no_command_shows_help_and_fails(capsys) -> None:
    assert main([]) == 2
    assert "usage: speccascade" in capsys.readouterr().out


def test_unknown_command_is_answered_with_the_nearest(capsys) -> None:
    assert main(["colect"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("speccascade: error: unknown command 'colect'; did you mean 'collect'?")
    assert message.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: speccascade {command}" in text
    assert "--config" in text
    assert "example:" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_an_unknown_option_on_one_line(command: str, capsys) -> None:
    assert main([command, "--confg", "x.yaml"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"speccascade {command}: error: ")
    assert "--config" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_missing_config_file(command: str, capsys) -> None:
    assert main([command, "--config", "configs/nowhere/else.yaml"]) == 2
    message = capsys.readouterr().err
    assert "no such file: 'configs/nowhere/else.yaml'" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_an_unknown_key_in_its_file(command: str, tmp_path, capsys) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("no_such_key: 1\n")
    assert main([command, "--config", str(path)]) == 2
    message = capsys.readouterr().err
    assert "no_such_key" in message
    assert message.count("\n") == 1


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("gamma: expected\n  1, got 0"), 2, "x: error: gamma: expected 1, got 0\n"),
        (FileNotFoundError("no model at 'm'"), 2, "x: error: no model at 'm'\n"),
        (ImportError("needs gguf"), 2, "x: error: needs gguf\n"),
        (KeyError("k"), 1, "x: internal error: KeyError: 'k' (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "\nx: interrupted\n"),
    ],
)
def test_errors_become_one_line_and_a_code(error, code, text, capsys) -> None:
    assert shell.guard("x", lambda: _raise(error)) == code
    assert capsys.readouterr().err == text


def test_debug_lets_the_traceback_through() -> None:
    with pytest.raises(ValueError, match="gamma"):
        shell.guard("x", lambda: _raise(ValueError("gamma")), debug=True)


def test_a_reader_who_leaves_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m speccascade generate --help | head -n 1",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("usage: speccascade generate")
    assert done.stderr == ""


def test_packaged_configs_are_found_from_anywhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = shell.find_config("configs/train/demo.yaml")
    assert found.is_absolute()
    assert found.is_file()
    with pytest.raises(shell.UsageError, match=r"did you mean 'configs/train/demo\.yaml'"):
        shell.find_config("configs/train/dmo.yaml")


def test_train_router_is_the_train_command() -> None:
    root = Path(shell.__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "train_router.py", "--model.knd", "mlp"], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "unknown option --model.knd; did you mean --model.kind?" in done.stderr
