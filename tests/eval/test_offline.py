"""Which methods and losses take part offline, what is said of drift and diversity, and the table at the end."""

import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from speccascade.eval.config import DEFAULT_METHODS
from speccascade.eval.diversity import pick_settings
from speccascade.eval.frontier import FrontierConfig, as_quality, measure_frontiers
from speccascade.eval.methods import Method, colder_methods, plug_in_methods
from speccascade.eval.offline import _add_learned_losses, _plug_ins, measure_drift, needs_hidden
from speccascade.eval.replay import Replay
from speccascade.eval.terminal import render_distances
from speccascade.router import rules


def make_router(losses, bundle="somewhere", **attributes):
    """A router that decides as OPT does."""

    def build(alpha, loss):
        assert loss in losses, f"asked for the loss {loss}, which it has not learned"
        rule = rules.OPT(alpha)
        return SimpleNamespace(defer=rule.defer, target=rule.target, **attributes)

    return Method("router", "Router", "router", -math.inf, math.inf, build, losses, bundle)


def test_every_plug_in_takes_part_unless_some_are_named():
    every = [method.name for method in _plug_ins(DEFAULT_METHODS)]
    assert every == [method.name for method in [*plug_in_methods(), *colder_methods()]]
    named = [method.name for method in _plug_ins(("chow", "verifier_t0.5", "specdecode", "router"))]
    assert named == ["chow", "opt", "verifier_t0.5"]
    with pytest.raises(ValueError, match="methods"):
        _plug_ins(("shouw",))


def test_log_loss_comes_with_a_router_that_learned_it():
    plain, learned = make_router(("zero_one", "sampled", "greedy")), make_router(("zero_one", "log"))
    assert _add_learned_losses(FrontierConfig(), [plain]).losses == ("zero_one", "sampled", "greedy")
    assert _add_learned_losses(FrontierConfig(), [plain, learned]).losses[-1] == "log"
    assert _add_learned_losses(FrontierConfig(losses=("sampled",)), [learned]).losses == ("sampled",)


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="loss: expected one of zero_one, sampled, log, greedy, got 'square'"):
        FrontierConfig(losses=("square",))


@pytest.fixture(scope="module")
def measured(build_trace):
    replays = [Replay(build_trace(prompts=30, seed=seed), None) for seed in (1, 2)]
    methods = [*plug_in_methods(["opt", "greedyward"]), *colder_methods([0.5]), make_router(("sampled",))]
    config = FrontierConfig(points=5, resamples=20, losses=("sampled", "log"))
    return replays[1], methods, measure_frontiers(methods, *replays, config)


def test_a_router_stands_only_in_the_tables_of_its_losses(measured):
    points = measured[2].points
    assert "router" in set(points.loc[points["loss"] == "sampled", "method"])
    assert "router" not in set(points.loc[points["loss"] == "log", "method"])
    assert measured[2].summary["log"]["comparisons"] == []


def test_the_ends_of_the_log_loss_are_the_models_own(measured):
    replay, _, frontiers = measured
    for name, probs in (("drafter_loss", replay.source.q_label), ("verifier_loss", replay.source.p_label)):
        assert frontiers.summary["log"][name]["value"] == pytest.approx(float(-probs.log().mean()), rel=1e-4)
    points = frontiers.points[frontiers.points["loss"] == "log"]
    assert points["quality"].to_numpy() == pytest.approx(-points["mean_loss"].to_numpy())


def test_quality_turns_an_interval_round():
    spread = as_quality("sampled", as_quality("sampled", SimpleNamespace(value=0.3, low=0.2, high=0.5)))
    assert (spread.value, spread.low, spread.high) == pytest.approx((0.3, 0.2, 0.5))


def test_a_colder_verifier_is_mixed_with_the_drafter(measured):
    summary = measured[2].summary["sampled"]
    points = measured[2].points[measured[2].points["loss"] == "sampled"].groupby("method").first()
    cold, drafter = points.loc["verifier_t0.5"], points.loc["drafter"]
    share = 0.25 * summary["rejection_of_lossless"]["value"] / cold["rejection"]
    mixed = (1 - share) * drafter["mean_loss"] + share * cold["mean_loss"]
    assert summary["loss_at_budgets"]["verifier_t0.5"][0]["value"] == pytest.approx(mixed, abs=1e-9)


def test_diversity_lists_the_setting_nearest_to_each_budget(measured):
    points = measured[2].points
    rows = pick_settings(points, (0.5,), ["router"])
    assert [row["method"] for row in rows] == ["drafter", "specdecode", "greedyward", "verifier_t0.5", "router"]
    greedyward = points[(points["loss"] == "sampled") & (points["method"] == "greedyward")]
    half = 0.5 * rows[1]["rejection"]
    assert abs(rows[2]["rejection"] - half) == (greedyward["rejection"] - half).abs().min()
    assert rows[3]["entropy"] < rows[1]["entropy"]
    assert pick_settings(points[points["loss"] == "log"], (0.5,), []) == []


def test_the_table_holds_a_row_a_method_and_a_column_a_loss(measured):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_distances(measured[2].summary, measured[1]))
    text = console.export_text()
    for method in measured[1]:
        assert method.label in text
    assert "100 (100–100)" in text and "–" in text  # OPT is the unit; the router has no log loss


def test_drift_is_warned_of_and_recorded(measured, capsys):
    def drift(stats):
        return SimpleNamespace(drifted=True, describe=lambda: f"{len(stats.tv)} positions look new")

    found = measure_drift(measured[0], [make_router(("sampled",), drift=drift)])
    assert found == {"router": {"drifted": True, "said": f"{len(measured[0])} positions look new"}}
    assert "warning: Router: " in capsys.readouterr().err


def test_hidden_states_are_loaded_only_for_routers_that_read_them():
    sets = [SimpleNamespace(feature_set=name) for name in ("verified+topk", "verified+hidden")]
    routers = [make_router(("sampled",), config=config) for config in sets]
    assert not needs_hidden(routers[:1]) and needs_hidden(routers)
