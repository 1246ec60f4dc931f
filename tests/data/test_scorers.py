"""Scorers on answers as models write them."""

import pytest
from rouge_score.rouge_scorer import RougeScorer

from speccascade.data.scorers import SCORERS, exact_match, final_answer, find_scorer, register_scorer, rouge_l, token_f1


@pytest.mark.parametrize(
    ("prediction", "right"),
    [
        ("#### 1,200", 1),
        ("She has 3 * 400 = 1200 dollars.", 1),
        ("#### 1200\n#### 7", 1),
        ("#### $1200.00", 1),
        ("The answer is 1200.", 1),
        ("12000", 0),
        ("-1200", 0),
        ("I do not know", 0),
        ("", 0),
        ("1200, or rather 5", 0),
    ],
)
def test_the_final_number_counts(prediction, right):
    assert final_answer(prediction, "3 * 400 = 1200\n#### 1200") == right


def test_a_reference_without_a_number_is_never_matched():
    assert final_answer("no", "no") == 0


def test_rouge_is_the_librarys_own():
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    for prediction, reference in (("the cats sat", "the cat sat down"), ("", "x"), ("a b c", "c b a")):
        assert rouge_l(prediction, reference) == scorer.score(reference, prediction)["rougeL"].fmeasure


@pytest.mark.parametrize(
    ("prediction", "reference", "quality"),
    [
        ("The Beatles!", "beatles", 1),
        ("John Paul Jones", "Paul Jones of Leeds", 2 * 2 / 7),
        ("no no no", "no", 2 * 1 / 4),
        ("Rome", "Paris", 0),
        ("the", "a", 1),
        ("", "Paris", 0),
    ],
)
def test_token_f1_counts_words_as_squad_does(prediction, reference, quality):
    assert token_f1(prediction, reference) == pytest.approx(quality)


def test_exact_match_ignores_case_and_space():
    assert exact_match(" New\nYork ", "new york") == 1 and exact_match("newyork", "new york") == 0


def test_a_scorer_of_ones_own_by_name_and_by_path(monkeypatch):
    monkeypatch.setattr("speccascade.data.scorers.SCORERS", dict(SCORERS))
    register_scorer("length", lambda prediction, reference: float(len(prediction) == len(reference)))
    assert find_scorer("length")("ab", "cd") == 1
    assert find_scorer("speccascade.data.scorers:exact_match") is exact_match


@pytest.mark.parametrize("name", ["rouge-l", "nowhere.at_all:f", "speccascade.data.scorers:nothing", "math:pi"])
def test_an_unknown_scorer_is_refused(name):
    with pytest.raises(ValueError, match="scorer:"):
        find_scorer(name)
