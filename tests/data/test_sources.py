"""Rows come one by one, as they stand, from every kind of source; what cannot be read is named with its place."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pandas as pd
import pytest

from speccascade.data import sources
from speccascade.data.prompts import PromptConfig, load_examples, read_examples
from speccascade.data.sources import EMBEDDED_TEXTS, find_value, read_rows

ROWS = [{"prompt": f"question {i}", "reference": f"reply {i}"} for i in range(5)]


def as_jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


CUT_OFF = gzip.compress(b'{"prompt": "no end"}\n', mtime=0)[:-9]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", as_jsonl(ROWS)),
        ("rows.jsonl", as_jsonl(ROWS).replace("\n", "\r\n\r\n")),
        ("rows.JSONL", "\ufeff" + as_jsonl(ROWS)),
        ("rows.json", json.dumps(ROWS, indent=1)),
        ("rows.csv", "\ufeff" + pd.DataFrame(ROWS).to_csv(index=False)),
        ("rows.tsv", pd.DataFrame(ROWS).to_csv(index=False, sep="\t")),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_text_files_give_their_rows(tmp_path: Path, name: str, text: str, packed: bool) -> None:
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert list(read_rows(str(path))) == ROWS


def test_line_ends_inside_cells_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b'prompt,reference\r\n"a\r\nb","c\nd"\r\n')
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a\r\nb", "reference": "c\nd"}))
    expected = [{"prompt": "a\r\nb", "reference": "c\nd"}]
    assert list(read_rows(str(tmp_path / "rows.csv"))) == list(read_rows(str(tmp_path / "rows.jsonl"))) == expected


def test_a_cell_longer_than_a_csv_reader_allows_by_itself_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,reference\na," + "x" * 200_000)
    assert len(next(read_rows(str(tmp_path / "rows.csv")))["reference"]) == 200_000


def test_a_pattern_reads_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(as_jsonl(ROWS[3:]))
    pd.DataFrame(ROWS[:3]).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "notes.md").write_text("no rows")
    assert list(read_rows(str(tmp_path / "[ab].*"))) == ROWS
    with pytest.raises(FileNotFoundError, match=r"source: no file matches .*c\*\.jsonl"):
        read_rows(str(tmp_path / "c*.jsonl"))
    with pytest.raises(ValueError, match=r"source: expected .* a file or folder of files \(\.jsonl.*got .*\*'"):
        read_rows(str(tmp_path / "*"))


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "rows[1].jsonl").write_text(as_jsonl(ROWS))
    assert list(read_rows(str(tmp_path / "rows[1].jsonl"))) == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path, name: str) -> None:
    text = as_jsonl(ROWS) if name == "rows.jsonl" else pd.DataFrame(ROWS).to_csv(index=False)
    (tmp_path / name).write_bytes(text.encode() + b"\n" * 200_000 + b"\xff broken")
    examples = read_examples(PromptConfig(str(tmp_path / name)))
    assert [next(examples).prompt for _ in range(3)] == ["question 0", "question 1", "question 2"]
    assert len(load_examples(PromptConfig(str(tmp_path / name), limit=5))) == 5
    with pytest.raises(ValueError, match=rf"source: .*{name} is not UTF-8: invalid start byte"):
        list(examples)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", b'{"data": []}', r"rows\.json: expected a list of objects, got \{'data': \[\]\}"),
        ("rows.json", b'[{"a": 1}, 3]', r"item 2 of .*rows\.json: expected an object with columns, got 3"),
        ("rows.json", b"[\n{]", r"line 2 of .*rows\.json is not JSON"),
        ("rows.jsonl", b'{"a": 1}\n[1]\n', r"line 2 of .*rows\.jsonl: expected an object with columns"),
        ("rows.jsonl.gz", b"no gzip", r"rows\.jsonl\.gz is not a readable gzip file"),
        ("rows.jsonl.gz", CUT_OFF, r"rows\.jsonl\.gz is not a readable gzip file"),
        ("rows.csv", b"a,b\n1,2,3,4\n", r"line 2 of .*rows\.csv: expected 2 cells, as in the first line, got 4"),
        ("rows.csv", b'a,b\n1,"2\n', r"line 2 of .*rows\.csv is not a table: unexpected end of data"),
    ],
)
def test_broken_files_are_named_with_their_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_rows(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["rows.md", "rows.parquet.gz", "rows"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("what")
    with pytest.raises(ValueError, match=r"files \(\.jsonl, .*, \.txt\) or a hub data set, got"):
        read_rows(str(tmp_path / name))


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("one line\n\nand another\n")
    assert list(read_rows(str(tmp_path / "rows.txt"))) == [{"text": "one line\n\nand another\n"}]


def test_a_folder_that_datasets_saved_gives_its_rows(tmp_path: Path) -> None:
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made.select([0]), "test": made}).save_to_disk(tmp_path / "many")
    assert list(read_rows(str(tmp_path / "one"))) == ROWS
    assert list(read_rows(str(tmp_path / "many"), hub_split="test")) == ROWS
    with pytest.raises(ValueError, match="hub_split: expected one of train, test, got 'tests'; did you mean 'test'"):
        list(read_rows(str(tmp_path / "many"), hub_split="tests"))
    (tmp_path / "one" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="source: folder '.*one' cannot be loaded"):
        list(read_rows(str(tmp_path / "one")))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_data_files_gives_its_rows(tmp_path: Path, own_cache: None, streaming: bool) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(as_jsonl(ROWS))
    assert list(read_rows(str(tmp_path / "data"), streaming=streaming)) == ROWS


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"source: data set '{tmp_path}' cannot be loaded"):
        list(read_rows(str(tmp_path)))


def test_a_hub_data_set_is_streamed_as_far_as_the_limit_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        assert (name, config, split, streaming) == ("some/data", None, "train", True)
        for number in range(1000):
            read.append(number)
            yield {"prompt": f"q{number}", "reference": "a"}
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load_examples(PromptConfig("some/data", limit=3))) == 3
    assert len(read) == 3
    with pytest.raises(FileNotFoundError, match="data set 'some/data' cannot be loaded: gone"):
        load_examples(PromptConfig("some/data", limit=2000))


NESTED = {"translation": {"en": "hello", "de": "hallo"}, "answers": {"text": ["yes", "no"]}, "a.b": "flat", "n": 3}


@pytest.mark.parametrize(
    ("column", "value"), [("translation.en", "hello"), ("answers.text.1", "no"), ("a.b", "flat"), ("n", 3)]
)
def test_columns_are_found_by_path(column: str, value: Any) -> None:
    assert find_value(NESTED, column, "prompt_column") == value


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("translatoin.en", r"^prompt_column: expected one of translation, .*got 'translatoin\.en'; did you mean 'tran"),
        (
            "translation.dee",
            r"^prompt_column: translation: expected one of en, de, got 'dee'; did you mean 'de'\? here",
        ),
        ("answers.text.2", r"^prompt_column: answers\.text: expected an index below 2, got '2' here$"),
        ("answers.text.first", r"^prompt_column: answers\.text: expected an index below 2, got 'first' here$"),
        ("n.0", r"^prompt_column: n: expected columns or a list to take '0' from, got 3 here$"),
        ("translation.en.0", r"expected columns or a list to take '0' from, got 'hello' here$"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(column: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_value(NESTED, column, "prompt_column", " here")


def test_embedded_texts_are_read_with_their_own_columns_and_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        "gsm8k": [{"question": "q", "answer": "a"}],
        "humaneval": [{"prompt": "q", "canonical_solution": "a"}],
        "xsum": [{"document": "", "summary": "nothing to go by"}, {"document": "q", "summary": "a"}],
        "nq-open": [{"question": "q", "answer": ["a", "b"]}],
        "django-de": [{"en": "q", "de": "a"}],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(as_jsonl(lines))
    monkeypatch.setattr(sources, "fetch_text", lambda name: tmp_path / f"{name}.jsonl")
    tasks = {}
    for name in rows:
        config = PromptConfig(f"embedded:{name}", instruction="{prompt}")
        assert [(example.prompt, example.reference) for example in load_examples(config)] == [("q", "a")]
        tasks[name] = config.task_name
    assert tasks == {
        "gsm8k": "maths", "humaneval": "code", "xsum": "summarisation", "nq-open": "qa", "django-de": "translation",
    }  # fmt: skip
    (example,) = load_examples(PromptConfig("embedded:django-de"))
    assert example.prompt.startswith("Translate this text from English into German.")
    assert {*EMBEDDED_TEXTS} == {*(f"embedded:{name}" for name in rows), "embedded:stdlib"}


def test_the_standard_library_is_read_in_order_without_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "b.py": "x = 1\r\n",
        "a/z.py": "# -*- coding: latin-1 -*-\ny = 'é'\n",
        "a/__init__.py": "",
        "a/tests/t.py": "t = 1\n",
        "site-packages/p.py": "p = 1\n",
        "_sysconfigdata__linux.py": "d = 1\n",
        "config-3/c.py": "c = 1\n",
        "n.txt": "n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(sources, "sysconfig", SimpleNamespace(get_path={"stdlib": str(tmp_path)}.get))
    assert list(read_rows("embedded:stdlib")) == [
        {"path": "a/z.py", "text": "# -*- coding: latin-1 -*-\ny = 'é'\n"},
        {"path": "b.py", "text": "x = 1\n"},
    ]


def test_the_running_standard_library_has_code_and_no_tests() -> None:
    rows = read_rows("embedded:stdlib")
    first = [next(rows) for _ in range(20)]
    assert [row["path"] for row in first] == sorted(row["path"] for row in first)
    assert any("def " in row["text"] for row in first)
