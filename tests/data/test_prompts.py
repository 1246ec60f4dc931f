"""Prompts in, token ids out: special tokens once, splits by prompt, and every fault named."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from speccascade.data import sources
from speccascade.data.encoding import encode_example, encode_prompt, end_token_id, end_token_ids
from speccascade.data.prompts import Example, PromptConfig, load_examples, split_of

CHAT = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)
ROWS = [{"ask": f"question {i}", "answer": f"reply {i}", "hint": "{x}"} for i in range(5)]


@pytest.fixture
def tokenizer(tiny_tokenizer: Any) -> Any:
    """One that adds <s> by itself, as llama's does, and has a chat template that writes <s> too."""

    made = copy.deepcopy(tiny_tokenizer)
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.chat_template = CHAT
    return made


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    frame = pd.DataFrame(rows)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)
    return str(path)


def config_for(source: str, **changes: Any) -> PromptConfig:
    return PromptConfig(**{"source": source, "prompt_column": "ask", "reference_column": "answer", **changes})


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_every_file_kind_gives_the_same_examples(tmp_path: Path, kind: str) -> None:
    examples = load_examples(config_for(write(tmp_path / f"rows.{kind}", ROWS)))
    assert [(e.prompt, e.reference) for e in examples] == [(r["ask"], r["answer"]) for r in ROWS]
    assert examples[0].fields["hint"] == "{x}"


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    assert len(load_examples(config_for(write(tmp_path / "rows.jsonl", ROWS), limit=2))) == 2


def test_instruction_takes_columns_and_leaves_braces_in_values_alone(tmp_path: Path) -> None:
    config = config_for(write(tmp_path / "rows.jsonl", ROWS), instruction="Q: {prompt} ({hint})\nA:")
    assert load_examples(config)[0].prompt == "Q: question 0 ({x})\nA:"


def test_prompt_ids_follow_from_the_prompt_alone(tmp_path: Path) -> None:
    first = load_examples(config_for(write(tmp_path / "a.jsonl", ROWS)))
    second = load_examples(config_for(write(tmp_path / "b.jsonl", ROWS[::-1]), instruction="Q: {prompt}"))
    assert {e.prompt_id for e in first} == {e.prompt_id for e in second}


def test_a_repeated_prompt_has_its_own_id_and_the_same_split(tmp_path: Path) -> None:
    rows = [{"ask": "same", "answer": f"reply {i}"} for i in range(4)]
    config = config_for(write(tmp_path / "rows.jsonl", rows))
    ids = [example.prompt_id for example in load_examples(config)]
    assert ids == [ids[0], f"{ids[0]}-1", f"{ids[0]}-2", f"{ids[0]}-3"]
    assert len({split_of(prompt_id, config.splits) for prompt_id in ids}) == 1


@given(st.text(), st.lists(st.floats(0.01, 1), min_size=1, max_size=5))
def test_every_prompt_falls_into_one_known_split(prompt_id: str, shares: list[float]) -> None:
    splits = {f"s{i}": share / sum(shares) for i, share in enumerate(shares)}
    assert split_of(prompt_id, splits) in splits


def test_splits_take_their_shares() -> None:
    splits = {"a": 0.2, "none": 0.0, "b": 0.8}
    names = [split_of(str(i), splits) for i in range(4000)]
    assert names.count("none") == 0
    assert 0.17 < names.count("a") / 4000 < 0.23  # five standard errors: a false alarm in about a million


def test_one_split_holds_exactly_its_examples(tmp_path: Path) -> None:
    rows = [{"ask": f"q{i}", "answer": "a"} for i in range(50)]
    config = config_for(write(tmp_path / "rows.jsonl", rows), splits={"train": 0.5, "test": 0.5})
    parts = [load_examples(config, split=name) for name in config.splits]
    assert sorted(e.prompt_id for part in parts for e in part) == sorted(e.prompt_id for e in load_examples(config))
    assert not {e.prompt_id for e in parts[0]} & {e.prompt_id for e in parts[1]}


EXAMPLE = Example("id", "what", "that")


@pytest.mark.parametrize("chat", [True, False])
def test_special_tokens_stand_exactly_once(tokenizer: Any, chat: bool) -> None:
    prompt_ids, reference_ids = encode_example(EXAMPLE, tokenizer, PromptConfig(chat=chat))
    text = "<s>user: what</s><s>assistant: " if chat else "<s>what"
    assert tokenizer.decode(prompt_ids) == text
    assert tokenizer.decode(reference_ids) == "that</s>"


def test_a_prompt_that_brings_its_own_bos_gets_no_second_one(tokenizer: Any) -> None:
    assert encode_prompt("<s>what", tokenizer, PromptConfig(chat=False)) == encode_prompt(
        "what", tokenizer, PromptConfig(chat=False)
    )


def test_a_tokenizer_that_closes_every_text_does_not_close_the_prompt(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    prompt_ids, reference_ids = encode_example(EXAMPLE, tokenizer, PromptConfig(chat=False))
    assert tokenizer.decode(prompt_ids) == "what"
    assert tokenizer.decode(reference_ids) == "that</s>"


def test_a_reference_that_ends_with_eos_gets_no_second_one(tokenizer: Any) -> None:
    closed = Example("id", "what", "that</s>")
    assert encode_example(closed, tokenizer, PromptConfig()) == encode_example(EXAMPLE, tokenizer, PromptConfig())


def test_an_answer_in_a_chat_ends_as_the_template_ends_it(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT.replace("'</s>'", "'<unk>\n'")
    assert end_token_id(tokenizer, PromptConfig()) == 3
    assert end_token_id(tokenizer, PromptConfig(chat=False)) == 2
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7, 3]))
    assert end_token_ids(tokenizer, PromptConfig(), model) == [3, 7]
    assert end_token_ids(tokenizer, PromptConfig(), SimpleNamespace()) == [3]
    assert encode_example(EXAMPLE, tokenizer, PromptConfig())[1][-1] == 3


def test_chat_without_a_template_is_refused(tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="chat: the tokenizer has no chat template; set chat to false"):
        encode_prompt("what", tiny_tokenizer, PromptConfig())


def test_no_end_token_is_refused(tokenizer: Any) -> None:
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="expected an end-of-text token"):
        encode_example(EXAMPLE, tokenizer, PromptConfig(chat=False))


@pytest.mark.parametrize("reference", ["</s>", ""])
def test_an_empty_reference_is_refused_by_its_prompt(tokenizer: Any, reference: str) -> None:
    with pytest.raises(ValueError, match="reference: expected text, got nothing in prompt id"):
        encode_example(Example("id", "what", reference), tokenizer, PromptConfig())


@pytest.mark.parametrize("value", ["", "  \n", None, 3])
def test_an_empty_cell_is_refused_by_row_and_column(tmp_path: Path, value: Any) -> None:
    source = write(tmp_path / "rows.jsonl", [*ROWS, {"ask": "x", "answer": value}])
    with pytest.raises(ValueError, match=r"reference_column: expected text in column 'answer', got .* in row 6 of"):
        load_examples(config_for(source))


def test_a_reference_of_nothing_but_notes_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [{"ask": "x", "answer": "<<1+1=2>>"}])
    with pytest.raises(ValueError, match="expected a reference with text, got an empty one in row 1"):
        load_examples(config_for(source, reference_filter="gsm8k"))


def test_a_missing_column_is_refused_with_the_nearest(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"expected one of ask, answer, hint, got 'answers'; did you mean 'answer'\?"):
        load_examples(config_for(source, reference_column="answers"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"splits": {"a": 0.5}}, "splits: expected shares that add up to 1"),
        ({"splits": {"a": 1.5, "b": -0.5}}, "splits: expected shares that add up to 1"),
        ({"limit": 0}, "limit: expected at least 1"),
        ({"reference_filter": "gsm"}, "did you mean 'gsm8k'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptConfig(**changes)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("missing.jsonl", FileNotFoundError, "source: no such file: missing.jsonl"),
        ("embedded:gsm", ValueError, "did you mean 'embedded:gsm8k'"),
        (
            "some where/else",
            ValueError,
            r"source: expected an embedded text, a file or folder of files \(\.jsonl, .*\) or a hub data set",
        ),
    ],
)
def test_a_source_that_cannot_be_read_is_named(source: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_examples(config_for(source))


def test_broken_files_are_named_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"ask": "a", "answer": "b"}\n{"ask": \n')
    with pytest.raises(ValueError, match=r"line 2 of .*rows\.jsonl is not JSON"):
        load_examples(config_for(str(tmp_path / "rows.jsonl")))
    (tmp_path / "rows.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(ValueError, match=r"rows\.parquet is not a readable Parquet file"):
        load_examples(config_for(str(tmp_path / "rows.parquet")))


def test_a_hub_data_set_is_read_by_its_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load_examples(config_for("some/data", hub_config="main", hub_split="test"))) == 5
    assert asked == [("some/data", "main", "test")]


def test_embedded_gsm8k_keeps_the_worked_answer_without_calculator_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "16 - 3 = <<16-3=13>>13 eggs.\n#### 13"}) + "\n")
    monkeypatch.setattr(sources, "fetch_text", lambda name: path)
    example = load_examples(PromptConfig())[0]
    assert (example.prompt, example.reference) == ("How many?", "16 - 3 = 13 eggs.\n#### 13")
    assert load_examples(PromptConfig(reference_filter="none"))[0].reference.startswith("16 - 3 = <<16-3=13>>13")


def test_embedded_humaneval_gives_the_function_and_its_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    row = {"task_id": "HumanEval/0", "prompt": "def one():\n", "canonical_solution": "    return 1\n", "test": "..."}
    path.write_bytes(gzip.compress((json.dumps(row) + "\n").encode()))
    monkeypatch.setattr(sources, "fetch_text", lambda name: path)
    (example,) = load_examples(PromptConfig("embedded:humaneval", instruction="Complete {task_id}:\n{prompt}"))
    assert (example.prompt, example.reference) == ("Complete HumanEval/0:\ndef one():\n", "    return 1")
