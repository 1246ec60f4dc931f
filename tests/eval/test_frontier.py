"""Frontiers of rules whose optimum is known, the clairvoyant bound, pairing, and the verdict in words."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from speccascade.eval.frontier import FrontierConfig, _distances, measure_frontiers
from speccascade.eval.methods import Method, plug_in_methods
from speccascade.eval.replay import Replay
from speccascade.eval.verdict import compare_frontiers, state_verdict


@dataclass(frozen=True)
class Oracle:
    """Knows the label: defers by gain per rejection. Its frontier is the clairvoyant's."""

    gain: torch.Tensor
    alpha: float

    def defer(self, stats):
        return self.gain > self.alpha * stats.tv if len(self.gain) == len(stats.tv) else stats.tv < 0


@dataclass(frozen=True)
class Gap:
    """A stand-in for a trained router."""

    alpha: float
    noise: float = 0.0

    def gap(self, stats):
        bend = self.noise * torch.sin(1e4 * stats.draft_entropy)
        return stats.verifier_max - stats.verifier_at_draft + bend

    def defer(self, stats):
        return self.gap(stats) > self.alpha * stats.tv


def router(noise: float = 0.0, name: str = "router") -> Method:
    return Method(name, "Router", "router", -math.inf, math.inf, lambda alpha, loss: Gap(alpha, noise))


@pytest.fixture(scope="module")
def splits(build_trace):
    return [Replay(build_trace(prompts=40, seed=seed), None) for seed in (1, 2)]


@pytest.fixture(scope="module")
def frontiers(splits):
    methods = [*plug_in_methods(["chow", "opt", "verifier_gap", "token_v2"]), router()]
    return measure_frontiers(methods, *splits, FrontierConfig(points=13, resamples=200))


def test_ends_are_the_models_own_losses(frontiers, splits):
    test = splits[1]
    correct = test.correctness.mean(dim=0)
    for row, loss in ((0, "zero_one"), (1, "sampled"), (0, "greedy")):
        found = frontiers.summary[loss]
        assert found["drafter_loss"]["value"] == pytest.approx(1 - float(correct[row, 0]), abs=1e-6)
        assert found["verifier_loss"]["value"] == pytest.approx(1 - float(correct[row, 1]), abs=1e-6)
        assert found["rejection_of_lossless"]["value"] == pytest.approx(float(test.stats(loss).tv.mean()), abs=1e-6)


@pytest.mark.parametrize("loss", ["zero_one", "sampled", "greedy"])
def test_no_position_rule_beats_the_clairvoyant_at_any_budget(frontiers, loss):
    curves = frontiers.curves[frontiers.curves["loss"] == loss].set_index("budget")
    bound = curves.loc[curves["kind"] == "bound", "quality"]
    for _, curve in curves[curves["kind"].isin(["position", "router"])].groupby("method"):
        assert (curve["quality"] <= bound + 2e-3).all()
    assert frontiers.summary[loss]["area"]["clairvoyant"]["value"] < frontiers.summary[loss]["area"]["opt"]["value"]


@pytest.mark.parametrize("loss", ["zero_one", "sampled"])
def test_one_who_knows_the_label_reaches_the_clairvoyant(splits, loss):
    replay = splits[1]
    draft_loss, verifier_loss = replay.model_losses(loss)
    gain = draft_loss - verifier_loss
    oracle = Method("oracle", "Oracle", "position", 0.0, math.inf, lambda alpha, _: Oracle(gain, alpha))
    config = FrontierConfig(points=41, resamples=20, losses=(loss,))
    area = measure_frontiers([oracle, *plug_in_methods(["opt"])], replay, replay, config).summary[loss]["area"]
    room = area["opt"]["value"] - area["clairvoyant"]["value"]
    assert area["oracle"]["value"] == pytest.approx(area["clairvoyant"]["value"], abs=0.02 * room)


def test_opt_is_its_own_unit(frontiers):
    for found in frontiers.summary.values():
        unit = found["distance_percent"]["opt"]
        assert unit["value"] == pytest.approx(100) and unit["low"] == pytest.approx(100)


def test_a_method_against_itself_ties_exactly(splits):
    twin = Method("twin", "Twin", "position", -math.inf, math.inf, lambda alpha, loss: Gap(alpha))
    config = FrontierConfig(points=9, resamples=100, losses=("sampled",))
    found = measure_frontiers([twin, router()], *splits, config).summary["sampled"]
    (row,) = found["comparisons"]
    assert row["outcome"] == "ties" and row["difference"] == row["low"] == row["high"] == 0
    assert "it loses to none; no difference is seen from Twin." in found["verdict"][0]


def test_a_bad_router_loses_and_the_verdict_says_so(splits):
    config = FrontierConfig(points=13, resamples=200, losses=("zero_one",))
    methods = [*plug_in_methods(["verifier_gap"]), router(noise=3.0)]
    found = measure_frontiers(methods, *splits, config).summary["zero_one"]
    assert found["comparisons"][0]["outcome"] == "loses"
    assert "LOSES beyond its interval to VerifierGap" in found["verdict"][0]


def test_token_rules_with_a_belief_share_one_sentence():
    kinds = {"opt": "position", "token_v2": "token", "greedyward": "token", "token_v3": "token"}
    twins = {f"router-{name}": name for name in ("greedyward", "token_v2", "token_v3", "lossy")}
    kinds |= dict.fromkeys(["router", *twins], "router")
    labels = {name: name.upper() for name in kinds}
    differences = {"router-greedyward": 1.0, "router-token_v2": -1.0, "router-token_v3": 0.0}
    spread = np.array([-0.1, 0.1])
    areas = {name: (differences.get(name, 0.0), differences.get(name, 0.0) + spread * (name in differences))
             for name in kinds}  # fmt: skip
    comparisons = compare_frontiers(areas, {name: [] for name in kinds}, kinds, [])
    own, token = state_verdict("sampled", comparisons, kinds, labels, twins)
    assert own.startswith("ROUTER, sampled-token loss. Against position-level plug-in rules")
    assert token == (
        "Token rules with P̂, each against itself with p°, sampled-token loss: "
        "LOSES: ROUTER-GREEDYWARD; wins: ROUTER-TOKEN_V2; ties: ROUTER-TOKEN_V3."
    )


def test_paired_differences_are_narrower_than_independent_ones(frontiers):
    found = frontiers.summary["sampled"]
    widths = {name: area["high"] - area["low"] for name, area in found["area"].items()}
    row = next(row for row in found["comparisons"] if row["rule"] == "opt")
    assert row["high"] - row["low"] < 0.7 * np.hypot(widths["router"], widths["opt"])


def test_the_seed_decides_the_intervals_and_nothing_else(splits, frontiers):
    methods = [*plug_in_methods(["chow", "opt", "verifier_gap", "token_v2"]), router()]
    again = measure_frontiers(methods, *splits, FrontierConfig(points=13, resamples=200))
    other = measure_frontiers(methods, *splits, FrontierConfig(points=13, resamples=200, seed=1))
    assert again.points.equals(frontiers.points)
    fixed = ["loss", "method", "alpha", "rejection", "quality", "chosen"]
    assert other.points[fixed].equals(frontiers.points[fixed])
    assert not other.points["quality_low"].equals(frontiers.points["quality_low"])


def test_a_resample_without_a_differing_prompt_only_leaves_the_interval(build_trace):
    made = build_trace(prompts=3)
    made.stats.tv[made.prompt_index > 0] = 0.0
    replay = Replay(made, None)
    config = FrontierConfig(points=5, resamples=60, losses=("sampled",))
    area = measure_frontiers(plug_in_methods(["opt"]), replay, replay, config).summary["sampled"]["area"]["opt"]
    assert area["low"] <= area["value"] <= area["high"]


@pytest.mark.parametrize("change", [{"points": 1}, {"resamples": 0}])
def test_a_config_that_cannot_be_drawn_is_refused(change):
    with pytest.raises(ValueError, match=rf"frontier\.{next(iter(change))}: expected at least"):
        FrontierConfig(**change)


@pytest.mark.parametrize(
    "change", [{"seed": -1}, {"losses": ()}, {"budgets": (0.5, 2.0)}, {"prices": (-0.1,)}, {"prices": (math.inf,)}]
)
def test_odd_numbers_and_no_losses_are_refused_by_name(change):
    with pytest.raises(ValueError, match=rf"frontier\.{next(iter(change))}: expected"):
        FrontierConfig(**change)


def test_models_that_never_differ_are_refused(build_trace):
    made = build_trace(prompts=4)
    same = type(made)(**{**made.__dict__, "stats": made.stats.greedy()})
    same.stats.tv.zero_()
    replay = Replay(same, None)
    with pytest.raises(ValueError, match="the two models never differ"):
        measure_frontiers(plug_in_methods(["opt"]), replay, replay, FrontierConfig(losses=("sampled",)))


def test_where_opt_leaves_nothing_to_gain_no_distance_is_stated() -> None:
    same = (0.4, np.full(5, 0.4))
    assert _distances({"opt": same, "clairvoyant": same, "chow": (0.5, np.full(5, 0.5))}) == {}
    assert _distances({"clairvoyant": same, "chow": same}) == {}
    better = (0.3, np.full(5, 0.3))
    assert _distances({"opt": same, "clairvoyant": better, "chow": (0.5, np.full(5, 0.5))})["chow"][
        "value"
    ] == pytest.approx(200)
