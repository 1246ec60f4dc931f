"""A task states defaults and a user's word wins; plain text, solved examples and languages are what they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccascade.data.presets import PRESETS, REFERENCE_STRIPS, strip_around_code
from speccascade.data.prompts import PromptConfig, load_examples, split_of
from speccascade.data.scorers import SCORERS
from speccascade.data.windows import cut_windows


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    return write(tmp_path / "rows.jsonl", [{"prompt": f"ask {i}", "reference": f" reply {i}\n"} for i in range(6)])


@pytest.mark.parametrize("task", PRESETS)
def test_every_task_reads_a_file_and_names_a_scorer_that_exists(task: str, tmp_path: Path) -> None:
    rows = [{"prompt": "one two", "reference": "three", "text": "one two three"}]
    languages = {"source_language": "English", "target_language": "German"} if task == "translation" else {}
    config = PromptConfig(write(tmp_path / "rows.jsonl", rows), task, **languages)
    example = load_examples(config)[0]
    assert "one" in example.prompt
    assert "three" in example.reference
    assert config.preset.scorer is None or config.preset.scorer in SCORERS


def test_a_task_words_the_prompt_as_the_chat_or_the_text_asks(pairs: str) -> None:
    chat = load_examples(PromptConfig(pairs, "qa"))[0]
    plain = load_examples(PromptConfig(pairs, "qa", chat=False))[0]
    assert (chat.prompt, chat.separator, chat.reference) == (
        "Answer this question in a few words.\n\nask 0", "", "reply 0",
    )  # fmt: skip
    assert (plain.prompt, plain.separator, plain.reference) == ("Question: ask 0\nAnswer:", " ", "reply 0")


def test_what_is_set_wins_over_the_task(pairs: str) -> None:
    mine = {
        "instruction": "Q: {prompt}", "separator": "~", "shot_separator": "#", "reference_strip": "none",
        "reference_filter": "none", "prompt_column": "reference", "reference_column": "prompt",
    }  # fmt: skip
    config = PromptConfig(pairs, "maths", chat=False, **mine)
    example = load_examples(config)[1]
    assert (example.prompt, example.separator, example.reference) == ("Q:  reply 1\n", "", "ask 1")
    said = config.describe()
    assert {name: said[name] for name in mine} == mine
    assert PromptConfig(pairs, "maths").describe()["reference_filter"] == "gsm8k"


def test_the_separator_is_left_out_after_white_space(pairs: str) -> None:
    config = PromptConfig(pairs, "qa", chat=False, instruction="{prompt}\n")
    assert {example.separator for example in load_examples(config)} == {""}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "sumarisation"}, "task: expected one of translation, .*did you mean 'summarisation'"),
        ({"reference_strip": "left"}, "reference_strip: expected one of both, code, none, got 'left'"),
        ({"task": "translation"}, "source_language: expected a language for the task 'translation'.* got none"),
        ({"task": "translation", "source_language": "Thai"}, "target_language: expected a language for the task"),
        ({"task": "translation", "source_language": " ", "target_language": "x"}, "source_language: .*got ' '"),
        ({"target_language": "German"}, r"target_language: .*\{target_language\} in the instruction, got 'German'"),
        ({"few_shot": -1}, "few_shot: expected a number of examples, 0 for none, got -1"),
        ({"instruction": "{prompt"}, r"instruction: expected names in braces, such as \{prompt\}, got '\{prompt'"),
        ({"instruction": "no name"}, "instruction: expected names in braces"),
        ({"instruction": "{} {prompt}"}, "instruction: expected names in braces"),
        ({"instruction": "{prompt:d}"}, "instruction: expected names in braces"),
        ({"reference_column": "prompt"}, "reference_column: expected another column .*set task: text"),
        ({"task": "text", "reference_column": "reference"}, "reference_column: expected none for the task 'text'"),
        ({"task": "text", "instruction": "Go on: {prompt}"}, "instruction: expected none for the task 'text', got 'Go"),
        ({"task": "text", "few_shot": 2}, "few_shot: expected none for the task 'text', got 2"),
        ({"task": "text", "system": "Be brief."}, "system: expected none for the task 'text'"),
        ({"task": "text", "text_prompt": 0}, "text_prompt: expected at least 1 character, got 0"),
        ({"task": "text", "text_window": 401}, "text_window: expected at least 402 characters.* got 401"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptConfig(**{"source": "rows.jsonl", **changes})


def test_languages_stand_in_the_instruction(pairs: str) -> None:
    config = PromptConfig(pairs, "translation", chat=False, source_language="English", target_language="German")
    assert load_examples(config)[0].prompt == "English: ask 0\nGerman:"
    own = PromptConfig(pairs, instruction="In {target_language}: {prompt}", target_language="Thai")
    assert load_examples(own)[0].prompt == "In Thai: ask 0"


def test_an_instruction_takes_nested_columns_and_numbers_but_no_lists(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "reference": "r", "meta": {"n": 3, "tags": ["x", "{y}"], "none": None}}]
    source = write(tmp_path / "rows.jsonl", rows)
    config = PromptConfig(source, instruction="{{{meta.n}}} {meta.tags.1} {prompt}")
    assert load_examples(config)[0].prompt == "{3} {y} p"
    for name, shown in (("meta.tags", r"\['x', '\{y\}'\]"), ("meta.none", "None")):
        with pytest.raises(ValueError, match=rf"instruction: expected text in '{name}', got {shown} in row 1 of"):
            load_examples(PromptConfig(source, instruction=f"{{{name}}} {{prompt}}"))
    with pytest.raises(ValueError, match=r"instruction: meta: expected one of n, tags, none, got 'm'.* \(in row 1 of"):
        load_examples(PromptConfig(source, instruction="{meta.m} {prompt}"))


@pytest.mark.parametrize(
    ("value", "shown"), [([1, 2], r"\[1, 2\]"), (3.5, "3.5"), ({"x": 1}, r"\{'x': 1\}"), ("w" * 500 + " ", None)]
)
def test_what_is_not_text_is_named_by_row_column_and_value(tmp_path: Path, value: Any, shown: str | None) -> None:
    source = write(tmp_path / "rows.jsonl", [{"prompt": "p", "reference": "r"}, {"prompt": "q", "reference": value}])
    if shown is None:
        assert load_examples(PromptConfig(source))[1].reference == "w" * 500
        return
    with pytest.raises(ValueError, match=rf"expected text in column 'reference', got {shown} in row 2 of"):
        load_examples(PromptConfig(source))


@pytest.mark.parametrize("value", ["", " \r\n", None, ["x"]])
def test_an_empty_prompt_is_named_by_row_and_column(tmp_path: Path, value: Any) -> None:
    source = write(tmp_path / "rows.jsonl", [{"prompt": "p", "reference": "r"}, {"prompt": value, "reference": "r"}])
    with pytest.raises(ValueError, match="prompt_column: expected text in column 'prompt', got .* in row 2 of"):
        load_examples(PromptConfig(source))


def test_half_a_character_is_named_before_a_tokenizer_trips_over_it(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x\\ud800", "reference": "r"}\n')
    with pytest.raises(
        ValueError, match=r"prompt_column: expected whole characters, got half of one, '\\ud800', in .* row 1 of"
    ):
        load_examples(PromptConfig(str(tmp_path / "rows.jsonl")))


def test_solved_examples_are_the_first_rows_and_no_prompts(pairs: str) -> None:
    examples = load_examples(PromptConfig(pairs, few_shot=2, limit=3))
    assert [example.prompt for example in examples] == ["ask 2", "ask 3", "ask 4"]
    assert all([shot.prompt for shot in example.shots] == ["ask 0", "ask 1"] for example in examples)
    with pytest.raises(ValueError, match="expected at least one row beyond the 6 of few_shot"):
        load_examples(PromptConfig(pairs, few_shot=7))


def test_a_solved_example_that_comes_again_is_no_prompt_either(tmp_path: Path) -> None:
    rows = [{"prompt": name, "reference": "r"} for name in "abab"] + [{"prompt": "c", "reference": "r"}]
    source = write(tmp_path / "rows.jsonl", rows)
    assert [example.prompt for example in load_examples(PromptConfig(source, few_shot=2))] == ["c"]


CODE = "\n  \r\n\n    if x:\n        return 1\n\n  "


def test_code_keeps_its_indentation(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [{"prompt": "def f(x):", "reference": CODE}])
    (example,) = load_examples(PromptConfig(source, "code", chat=False))
    assert example.prompt + example.separator + example.reference == "def f(x):\n    if x:\n        return 1"


@given(st.text(alphabet=" \t\n\rx"))
def test_stripping_removes_white_space_and_nothing_else(text: str) -> None:
    assert {name: strip(text).split() for name, strip in REFERENCE_STRIPS.items()} == dict.fromkeys(
        REFERENCE_STRIPS, text.split()
    )
    kept = strip_around_code(text)
    assert kept == kept.rstrip()
    assert kept[:1] not in ("\n", "\r")
    assert not kept or text[: text.rindex(kept)].strip(" \t") == "" or text[: text.rindex(kept)][-1] in "\r\n"


DOCUMENTS = st.text(alphabet=" \n\r\tab-é", min_size=2, max_size=300)


@given(DOCUMENTS, st.integers(1, 12), st.integers(2, 40))
def test_windows_put_together_are_the_document(text: str, prompt: int, more: int) -> None:
    window = 2 * prompt + more
    pieces = list(cut_windows(text, window, prompt))
    assert "".join(head + tail for head, tail, _ in pieces) == text
    assert [ends for *_, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    for head, tail, _ in pieces:
        assert 1 <= len(head) <= prompt
        assert 1 <= len(tail) <= window - len(head)


def test_windows_are_cut_where_words_end() -> None:
    text = "some words of a text " * 50
    for head, tail, _ in cut_windows(text, 100, 20):
        assert (head + tail)[-1:].isspace() is False or text.endswith(tail)
        assert tail[0] == " "


@pytest.mark.parametrize(
    ("text", "most", "prompt"),
    [
        ("x = f(1)\n    y = 2\nz=30", 20, "x = f(1)\n    y = 2\n"),
        ("some = f(1)\n\n    y", 13, "some = f(1)"),
        ("words, and\r\n\tmore", 11, "words,"),
        ("onewordwithoutanyspaceatall", 13, "onewordwithou"),
    ],
)
def test_a_prompt_ends_where_a_token_does(text: str, most: int, prompt: str) -> None:
    ((found, *_),) = cut_windows(text + "~" * 2 * most, 1000, most)
    assert found == prompt


def test_windows_of_a_document_share_its_split_and_repeats_do_not_collide(tmp_path: Path) -> None:
    document = "  some words of a text\r\n" * 40
    rows = [{"text": document}, {"text": document[1:]}, {"text": document}]
    config = PromptConfig(write(tmp_path / "rows.jsonl", rows), "text", text_window=100, text_prompt=20)
    examples = load_examples(config)
    ids = [example.prompt_id for example in examples]
    assert len(set(ids)) == len(ids)
    bases = list(dict.fromkeys(prompt_id.partition("-")[0] for prompt_id in ids))
    assert len(bases) == 2
    assert "".join(example.prompt + example.reference for example in examples) == "".join(row["text"] for row in rows)
    assert sum(example.ends for example in examples) == 3
    of_first = [prompt_id for prompt_id in ids if prompt_id.startswith(bases[0])]
    assert of_first == [bases[0], *(f"{bases[0]}-{i}" for i in range(1, len(of_first)))]
    assert len({split_of(prompt_id, config.splits) for prompt_id in of_first}) == 1
    for split in config.splits:
        alone = [example.prompt_id for example in load_examples(config, split)]
        assert alone == [prompt_id for prompt_id in ids if split_of(prompt_id, config.splits) == split]


@pytest.mark.parametrize(
    ("text", "message"), [("x", "two characters"), (" \n ", "expected text"), (None, "expected text")]
)
def test_a_document_too_short_to_part_is_refused(tmp_path: Path, text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"prompt_column: .*{message}.* in row 1 of"):
        load_examples(PromptConfig(write(tmp_path / "rows.jsonl", [{"text": text}]), "text"))


def test_plain_text_takes_its_own_column_and_never_a_chat(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [{"body": "some words"}])
    config = PromptConfig(source, "text", prompt_column="body", reference_column="body")
    assert not config.preset.chat
    assert [(e.prompt, e.reference) for e in load_examples(config)] == [("some", " words")]
