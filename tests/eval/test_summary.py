"""What a live table says, on answers whose figures are known."""

import math

import pandas as pd
import pytest

from speccascade.eval.summary import drafter_cost_ratio, summarise_answers


def answers(key: str, kind: str, seconds: list[float], **counts) -> list[dict]:
    default = {"accepted": 0, "rejected": 0, "deferred": 0, "verifier_calls": 10, "alpha": math.nan, "quality": 0.5}
    return [
        {"key": key, "method": key, "label": key.title(), "kind": kind, "prompt_id": f"p{index}", "repeat": 0,
         "new_tokens": 10, "seconds": taken, "text": key, **default, **counts}
        for index, taken in enumerate(seconds)
    ]  # fmt: skip


@pytest.fixture
def summary() -> pd.DataFrame:
    rows = [
        *answers("verifier", "single", [1.0, 1.0, 1.0, 1.0, 1.0]),
        *answers("drafter", "single", [0.5, 0.5, 0.5, 0.5, 0.5], accepted=10, verifier_calls=0),
        *answers(
            "specdecode", "fixed", [2.0, 2.0, 2.0, 2.0, 90.0], accepted=6, rejected=2, deferred=8, text="verifier"
        ),
    ]
    return summarise_answers(pd.DataFrame(rows)).set_index("key")


def test_rates_are_per_examined_draft(summary):
    row = summary.loc["specdecode"]
    assert (row["rejection"], row["deferral"], row["acceptance"]) == (0.25, 1.0, 0.75)
    assert row["calls_per_token"] == 1.0


def test_a_model_alone_examines_nothing(summary):
    for key in ("verifier", "drafter"):
        assert summary.loc[key, ["rejection", "deferral", "acceptance"]].isna().all()


def test_one_hiccup_does_not_decide_the_speed(summary):
    row = summary.loc["specdecode"]
    assert row["tokens_per_second"] == 5.0 and row["speed_ratio"] == 0.5
    assert row["speed_ratio_high"] == 0.5


def test_settings_that_gave_the_same_texts_are_named(summary):
    assert summary["same_as"].isna().tolist() == [True, True, False]
    assert summary.loc["specdecode", "same_as"] == "Verifier"


def test_the_drafters_cost(summary):
    rows = pd.DataFrame(
        [*answers("verifier", "single", [1.0, 2.0, 4.0]), *answers("drafter", "single", [0.5, 1.0, 3.0])]
    )
    assert drafter_cost_ratio(rows) == 0.5
    assert drafter_cost_ratio(rows[rows["method"] == "verifier"]) is None


def test_the_verifier_is_not_needed(summary):
    alone = summarise_answers(pd.DataFrame(answers("drafter", "single", [0.5, 0.5])))
    assert math.isnan(alone["speed_ratio"].iat[0]) and alone["tokens_per_second"].iat[0] == 20.0
