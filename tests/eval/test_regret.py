"""Regret on hand-made positions whose parts are known, and that the parts add up."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from speccascade.eval.frontier import FrontierConfig
from speccascade.eval.methods import Method, plug_in_methods
from speccascade.eval.regret import PARTS, PLUG_INS, measure_regret, recalibrate, scored_methods, split_regret
from speccascade.eval.replay import Replay
from speccascade.router import rules

DOCUMENTS, LENGTH = 40, 25
INDEX = np.repeat(np.arange(DOCUMENTS), LENGTH)


@pytest.fixture
def made():
    """Gains, distances and prices that no rounding puts on an edge."""
    generator = np.random.default_rng(0)
    gain = generator.normal(0, 0.4, INDEX.size)
    return gain, generator.uniform(0.2, 1.0, INDEX.size), generator


def mean_parts(gain, distance, gap, alpha=0.2, by_distance=True):
    return split_regret(gain, distance, gap, recalibrate(gap, gain, INDEX), alpha, by_distance).mean(axis=1)


def test_a_score_that_is_the_gain_has_no_regret(made):
    gain, distance, _ = made
    assert mean_parts(gain, distance, gain) == pytest.approx([0, 0, 0], abs=2e-3)
    assert mean_parts(gain, distance, gain)[0] == 0


def test_a_shifted_score_that_ranks_perfectly_lacks_threshold_and_calibration(made):
    gain, distance, _ = made
    threshold, calibration, ranking = mean_parts(gain, distance, gain + 0.3)
    assert threshold > 0.005 and calibration > 0.005
    assert abs(ranking) < 0.05 * (threshold + calibration)


def test_where_all_distances_are_equal_a_shift_is_all_threshold(made):
    gain, _, _ = made
    threshold, calibration, ranking = mean_parts(gain, np.full_like(gain, 0.5), gain + 0.3)
    assert threshold > 0.01
    assert calibration == pytest.approx(0, abs=1e-3) and ranking == pytest.approx(0, abs=1e-3)


def test_random_scores_lack_ranking(made):
    gain, distance, generator = made
    threshold, calibration, ranking = mean_parts(gain, distance, generator.normal(-9, 1e-3, INDEX.size))
    assert ranking > 10 * (abs(threshold) + abs(calibration))


def test_the_parts_add_up_to_the_regret(made):
    gain, distance, generator = made
    gap = gain + generator.normal(0.1, 0.3, INDEX.size)
    for alpha in (0.0, 0.3, 1.0):
        worth = gain - alpha * distance
        for by_distance, deferred in ((True, gap > alpha * distance), (False, gap > alpha)):
            parts = mean_parts(gain, distance, gap, alpha, by_distance)
            assert parts.sum() == pytest.approx(np.maximum(worth, 0).mean() - (worth * deferred).mean(), abs=1e-12)
            assert parts[0] >= 0


def test_the_best_threshold_is_the_best_of_all(made):
    gain, distance, generator = made
    gap = gain + generator.normal(0.2, 0.4, INDEX.size).round(1)
    gap = gap.round(1)  # many equal scores, which no threshold tells apart
    worth = gain - 0.2 * distance
    own = (worth * (gap > 0.2)).mean()
    best = max((worth * (gap > bar)).mean() for bar in [*np.unique(gap), -np.inf])
    assert mean_parts(gain, distance, gap, by_distance=False)[0] == pytest.approx(best - own, abs=1e-12)


def test_recalibration_learns_from_other_documents():
    # Each document's gain is its own number: what others say about it is nothing.
    gain = np.repeat(np.random.default_rng(1).normal(size=DOCUMENTS), LENGTH)
    inside = np.corrcoef(recalibrate(gain, gain, np.zeros_like(INDEX)), gain)[0, 1]
    assert inside == pytest.approx(1)
    noise = np.random.default_rng(2).normal(size=INDEX.size)
    assert abs(np.corrcoef(recalibrate(noise, gain, INDEX), gain)[0, 1]) < 0.3


@pytest.mark.parametrize("name", list(PLUG_INS))
@pytest.mark.parametrize("alpha", [0.0, 0.15, 0.6])
def test_scores_of_plug_ins_decide_as_the_rules_do(name, alpha, trace):
    scored = PLUG_INS[name]
    gap, bar = scored.gap(trace.stats, "sampled"), alpha * trace.stats.tv if scored.by_distance else alpha
    decided = rules.get(name, alpha=alpha).defer(trace.stats)
    assert (decided == (gap > bar)).float().mean() > 0.995  # Diff adds where this subtracts: rounding


@pytest.fixture(scope="module")
def regret(build_trace):
    replay = Replay(build_trace(prompts=60), None)
    config = FrontierConfig()
    losses = ("zero_one", "sampled", "log", "greedy")
    return replay, measure_regret(scored_methods(plug_in_methods()), replay, losses, config.prices, resamples=50)


def test_the_table_holds_what_rules_really_pay(regret):
    replay, table = regret
    assert set(table.loc[table["loss"] == "log", "method"]) == {"opt_log", "diff_log"}
    for _, row in table.iterrows():
        outcome = replay.outcome(rules.get(row["method"], alpha=row["alpha"]), row["loss"])
        paid = outcome.loss.mean() + row["alpha"] * outcome.rejection.mean()
        assert row["objective"] == pytest.approx(paid, abs=2e-4)
        assert row["regret"] == pytest.approx(row["objective"] - row["oracle"], abs=1e-9)
        assert row["regret"] == pytest.approx(sum(row[part] for part in PARTS), abs=1e-9)
        assert row["regret_low"] <= row["regret"] <= row["regret_high"]
        assert row["noise"] >= 0


def test_the_noise_is_the_regret_of_one_who_knows_p_where_labels_follow_it(build_trace):
    import torch

    trace = build_trace(prompts=600)
    label = torch.multinomial(trace.verifier_probs, 1, generator=torch.Generator().manual_seed(3)).squeeze(-1)
    at_label = [
        probs.gather(-1, label.unsqueeze(-1)).squeeze(-1) for probs in (trace.draft_probs, trace.verifier_probs)
    ]
    drawn = type(trace)(**{**trace.__dict__, "label": label, "q_label": at_label[0], "p_label": at_label[1]})
    table = measure_regret(
        scored_methods(plug_in_methods(["verifier_gap"])), Replay(drawn, None), ("zero_one",), (0.2,)
    )
    (row,) = table.to_dict(orient="records")
    # VerifierGap is optimal there.
    assert row["regret_low"] <= row["noise"] <= row["regret_high"]
    assert row["threshold"] + row["calibration"] < 0.1 * row["ranking"]


def test_a_router_that_reads_the_order_of_positions_has_no_score_of_one():
    ordered = SimpleNamespace(gap=lambda stats: stats.tv, context=8)
    method = Method("o", "O", "router", -math.inf, math.inf, lambda alpha, loss: ordered)
    assert scored_methods([method]) == []
    ordered.context = 0
    assert [scored.name for scored in scored_methods([method])] == ["o"]


def test_a_router_without_a_gap_has_no_score():
    token = Method("t", "T", "router", 0.0, 1.0, lambda alpha, loss: rules.Greedyward(alpha))
    assert scored_methods([token, *plug_in_methods(["chow", "opt"])]) == [PLUG_INS["opt"]]
    assert math.isinf(plug_in_methods(["opt"])[0].low)
