"""Which methods and losses take part offline, what is said of drift and diversity, and the table at the end."""

import io
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from speccascade.data.merge import merge
from speccascade.eval import offline
from speccascade.eval.config import DEFAULT_METHODS, EvaluateConfig
from speccascade.eval.diversity import pick_settings
from speccascade.eval.frontier import FrontierConfig, as_quality, measure_frontiers
from speccascade.eval.methods import REPLAY_LOSSES, Method, _token_method, colder_methods, plug_in_methods
from speccascade.eval.offline import (
    _add_learned_losses,
    _plug_ins,
    _replayable,
    needs_hidden,
    open_routers,
    run_offline,
    warn_of_drift,
)  # fmt: skip
from speccascade.eval.replay import Replay
from speccascade.eval.report import report
from speccascade.eval.terminal import render_distances
from speccascade.router import rules

from ..data.made_traces import make_traces


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
    believing = replace(make_router(REPLAY_LOSSES), twin="learned_lossy")
    assert "log" not in _add_learned_losses(FrontierConfig(), [plain, believing]).losses


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

    found = warn_of_drift(measured[0], [make_router(("sampled",), drift=drift)])
    assert found == {"router": {"drifted": True, "said": f"{len(measured[0])} positions look new"}}
    assert "warning: Router: " in capsys.readouterr().err


def test_hidden_states_are_loaded_only_for_routers_that_read_them():
    sets = [SimpleNamespace(feature_set=name) for name in ("verified+topk", "verified+hidden")]
    routers = [make_router(("sampled",), config=config) for config in sets]
    assert not needs_hidden(routers[:1]) and needs_hidden(routers)


def test_the_smaller_the_distance_the_higher_and_the_best_of_each_loss_is_bold(measured):
    table = render_distances(measured[2].summary, measured[1])
    names = list(table.columns[0].cells)
    found = measured[2].summary["sampled"]["distance_percent"]
    values = [found[method.name]["value"] for label in names for method in measured[1] if method.label == label]
    assert values == sorted(values)
    bold = [cell.style == "bold" for cell in table.columns[1].cells]
    assert bold == [True] + [False] * (len(names) - 1)


def test_numbers_survive_a_narrow_terminal(measured):
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(render_distances(measured[2].summary, measured[1]))
    lines = console.export_text().splitlines()
    assert any("100 (100–100)" in line for line in lines) and "…(" not in "".join(lines)


@pytest.mark.parametrize(
    ("folders", "labels"),
    [
        (["runs/one/router"], ["Router"]),
        (["runs/one/router", "runs/two/router"], ["Router one", "Router two"]),
        (["runs/one/router", "elsewhere/plain"], ["Router one", "Router plain"]),
        (["a/one/router", "b/one"], ["Router one-router", "Router b-one"]),
    ],
)
def test_routers_go_by_the_shortest_name_that_tells_them_apart(folders, labels, monkeypatch):
    def describe(directory, name="router", label="Router"):
        return [Method(name, label, "router", 0.0, 1.0, lambda alpha, loss: None, bundle=directory)]

    monkeypatch.setattr(offline, "router_methods", describe)
    assert [method.label for method in open_routers(folders).values()] == labels
    assert [method.bundle for method in open_routers(folders).values()] == folders


def test_rules_of_a_belief_have_short_labels_and_know_their_twins():
    router = SimpleNamespace(with_rule=lambda rule, alpha: (rule, alpha))
    several = _token_method(router, "greedyward", "folder", "router-pooled_hidden", "Router pooled_hidden")
    assert (several.name, several.label) == ("router-pooled_hidden-greedyward", "Greedyward P̂ pooled_hidden")
    single = _token_method(router, "token_v2", "folder", "router", "Router")
    assert (single.label, single.twin, single.build(0.3, "sampled")) == ("TokenV2 P̂", "token_v2", ("token_v2", 0.3))


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    splits = {"validation": 0.5, "test": 0.5}
    for number, name in enumerate(("red", "blue")):
        prompts = {f"{name}{index}": index for index in range(8)}
        plan = {"prompts": {"source": name}, "splits": splits, "collected": list(splits)}
        make_traces(folder / name, prompts, seed=number, **plan)
    merge([folder / "red", folder / "blue"], folder / "both")
    return folder / "both"


def run_made(traces, out, **options):
    frontier = FrontierConfig(points=3, resamples=5, losses=("sampled", "greedy"))
    settings = {"methods": ("chow", "greedyward"), "frontier": frontier, **options}
    run_offline(EvaluateConfig(traces=str(traces), out=str(out), offline=True, **settings))
    return json.loads((out / "frontier.json").read_text())


def test_a_merged_set_is_reported_by_origin(merged, tmp_path):
    record = run_made(merged, tmp_path / "all", by_origin=True)
    assert list(record["origins"]) == ["red", "blue"]
    parts = [record["origins"][name]["sampled"]["positions"] for name in ("red", "blue")]
    assert sum(parts) == record["losses"]["sampled"]["positions"] and min(parts) > 0
    assert set(record["origins"]["red"]["greedy"]["distance_percent"]) == {"chow", "opt", "greedyward"}
    alone = run_made(merged, tmp_path / "red", origin="red")
    assert alone["origin"] == "red" and alone["origins"] == {}
    for loss in ("sampled", "greedy"):
        of_red = record["origins"]["red"][loss]["distance_percent"]
        assert alone["losses"][loss]["distance_percent"] == of_red
    page = report(tmp_path / "all").read_text(encoding="utf-8")
    assert "## By origin" in page and f"red ({parts[0]:,} positions)" in page
    assert "## Token rules at equal rejection" in page


def test_an_unknown_origin_is_refused(merged, tmp_path):
    with pytest.raises(ValueError, match="origin"):
        run_made(merged, tmp_path, origin="green")


def test_origins_are_for_offline_and_one_way_at_a_time():
    with pytest.raises(ValueError, match="by_origin: expected none without offline=true"):
        EvaluateConfig(by_origin=True)
    with pytest.raises(ValueError, match="by_origin: expected all sets, or origin alone, got both, origin 'red'"):
        EvaluateConfig(offline=True, by_origin=True, origin="red")


def test_at_another_temperature_what_reads_raw_probabilities_is_left_out():
    def kept(temperature):
        traces = SimpleNamespace(manifest=SimpleNamespace(plan=SimpleNamespace(temperature=temperature)))
        return [method.name for method in _replayable(plug_in_methods(["opt", "expected_gain", "token_v2"]), traces)]

    assert kept(1.0) == ["opt", "expected_gain", "token_v2"] and kept(0.7) == ["opt"]
