"""What was answered survives a kill, and belongs to one run."""

import pytest

from speccascade.eval.journal import Journal


def answer(key: str, prompt_id: str = "a", repeat: int = 0, text: str = "x") -> dict:
    return {"key": key, "prompt_id": prompt_id, "repeat": repeat, "text": text}


def test_answers_come_back(tmp_path):
    journal = Journal(tmp_path / "answers.jsonl", {"gamma": 4})
    journal.add(answer("opt@0.1", text="two\nlines, a   sign and ü"))
    again = Journal(tmp_path / "answers.jsonl", {"gamma": 4})
    assert ("opt@0.1", "a", 0) in again and ("opt@0.1", "a", 1) not in again
    assert again.answers[("opt@0.1", "a", 0)]["text"] == "two\nlines, a   sign and ü"


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_last_line_is_answered_again(tmp_path, cut):
    path = tmp_path / "answers.jsonl"
    journal = Journal(path, {"gamma": 4})
    journal.add(answer("a"))
    journal.add(answer("b"))
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path, {"gamma": 4})
    assert ("a", "a", 0) in again and ("b", "a", 0) not in again
    again.add(answer("b"))
    assert len(Journal(path, {"gamma": 4}).answers) == 2


def test_another_run_is_refused_by_its_first_difference(tmp_path):
    Journal(tmp_path / "answers.jsonl", {"gamma": 4, "seed": 0})
    with pytest.raises(ValueError, match=r"holds a run with gamma=4, this one has 5; give another folder"):
        Journal(tmp_path / "answers.jsonl", {"gamma": 5, "seed": 0})


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("{not json}\n{}\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl is damaged"):
        Journal(path, {})
