"""Token rules read off hand-made frontiers at equal rejections, alone and in pairs."""

import math

import numpy as np
import pytest

from speccascade.eval.ledger import Measured
from speccascade.eval.methods import Method
from speccascade.eval.rates import compare_at_rates, pair_rules


def make_method(name: str, kind: str = "token", twin: str = "") -> Method:
    return Method(name, name.upper(), kind, 0.0, math.inf, lambda alpha, loss: None, twin=twin)


GREEDYWARD, V2, BELIEF = make_method("greedyward"), make_method("token_v2"), make_method("b", "router", "greedyward")
COLD, POSITION, LOSSY = make_method("verifier_t0.5"), make_method("router", "router"), make_method("lossy")
# Columns: drafter (0), lossless (1), two settings of Greedyward (2, 3), one of V2 (4), one of the belief (5).
LOSS = np.array([0.8, 0.5, 0.6, 0.4, 0.7, 0.5])
REJECTION = np.array([0.0, 0.26, 0.1, 0.2, 0.1, 0.1])
PATHS = {"greedyward": [0, 2, 3], "token_v2": [0, 4], "b": [0, 5], "router": [0, 1]}


def measure(noise: np.ndarray) -> Measured:
    """Resamples that move every loss by the same amount: what is paired does not see it."""
    rest = np.stack([REJECTION, REJECTION, np.zeros(6), 2 * LOSS, LOSS / 2], axis=1)
    means = np.concatenate([LOSS[:, None], rest], axis=1)
    losses = LOSS + noise[:, None]
    return Measured(means, losses, np.tile(REJECTION, (len(noise), 1)), drafter=0, lossless=1)


@pytest.fixture
def table():
    methods = [GREEDYWARD, V2, BELIEF, POSITION]
    return compare_at_rates(methods, PATHS, measure(np.linspace(-0.05, 0.05, 101)), (0.05, 0.15, 0.25, 0.3))


def read(table, rate, method, against=""):
    found = table[(table["rate"] == rate) & (table["method"] == method) & (table["against"] == against)]
    assert len(found) == 1
    return found.iloc[0]


def test_between_two_settings_they_are_mixed(table):
    row = read(table, 0.15, "greedyward")
    assert row["right"] == pytest.approx(0.5)  # halfway between 0.4 and 0.6
    assert row["entropy"] == pytest.approx(2 * 0.5) and row["distinctness"] == pytest.approx(0.5 / 2)
    assert (row["low"], row["high"]) == pytest.approx((0.5 - 0.0475, 0.5 + 0.0475))
    assert read(table, 0.05, "token_v2")["right"] == pytest.approx(0.25)  # mixed with the drafter


def test_a_rule_that_rejects_less_says_so(table):
    row = read(table, 0.25, "token_v2")
    assert (row["right"], row["spent"]) == pytest.approx((0.3, 0.1))


def test_rates_beyond_lossless_decoding_are_left_out(table):
    assert list(dict.fromkeys(table["rate"])) == [0.05, 0.15, 0.25]


def test_differences_are_paired(table):
    row = read(table, 0.15, "greedyward", "token_v2")
    assert (row["right"], row["low"], row["high"]) == pytest.approx((0.2, 0.2, 0.2))
    assert row["entropy"] == pytest.approx(2 * (0.5 - 0.7))
    assert row["label"] == "GREEDYWARD" and row["against_label"] == "TOKEN_V2"
    assert read(table, 0.05, "b", "greedyward")["right"] == pytest.approx(0.35 - 0.3)


def test_only_rules_of_tokens_are_read(table):
    assert "router" not in set(table["method"])


def test_a_belief_meets_its_twin_and_greedyward_all_rivals():
    pairs = [(one.name, other.name) for one, other in pair_rules([GREEDYWARD, V2, LOSSY, COLD, BELIEF, POSITION])]
    rivals = ("token_v2", "lossy", "verifier_t0.5")
    assert pairs == [("b", "greedyward"), *(("greedyward", one) for one in rivals), *(("b", one) for one in rivals)]
    assert pair_rules([V2, BELIEF]) == [(BELIEF, V2)]  # a twin that took no part


def test_without_a_method_the_table_is_empty():
    assert compare_at_rates([], {}, measure(np.zeros(3))).empty
