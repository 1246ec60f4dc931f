"""What a rule decides from a trace must be what it decided in the run, at every position, with its own code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from speccascade import rules
from speccascade.cascade import VerifyBlock
from speccascade.data.cascaded import build_rule
from speccascade.data.collect import collect
from speccascade.data.config import CollectConfig
from speccascade.data.decisions import agreement, defer_in_order, logged_decisions
from speccascade.data.pairs import Pair
from speccascade.data.traces import Traces, TraceSplit
from speccascade.eval.replay import Replay

OPTIONS: dict[str, dict[str, float]] = {
    "specdecode": {},
    "chow": {"alpha": 0.8},
    "chow_log": {"alpha": 3.5},
    "diff": {"alpha": 0.02},
    "diff_log": {"alpha": 0.02},
    "opt": {"alpha": 0.05},
    "opt_log": {"alpha": 0.2},
    "bild_star": {"alpha": 2.0},
    "verifier_gap": {"alpha": 0.1},
    "expected_gain": {"alpha": 0.1},
    "token_v1": {"alpha": 0.1},
    "token_v2": {"alpha": 0.1},
    "token_v3": {"alpha": 0.5},
    "greedyward": {"alpha": 0.1},
    "lossy": {"alpha": 0.3},
    "learned_lossy": {"alpha": 0.5},
    "ensemble": {"weight": 0.5},
    "typical": {"epsilon": 0.3, "delta": 0.6},
    "top_k": {"k": 3},
}
ONE_ANSWER = {"specdecode", "ensemble"}
TEMPERATURES = [0.0, 0.7, 1.0]


def collect_split(config: CollectConfig, pair: Pair, **settings: Any) -> TraceSplit:
    config = replace(config, cascade=replace(config.cascade, batch_size=4, **settings))
    collect(config, pair)
    return Traces.open(config.out).split("train")


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_rule_decides_from_the_trace_as_in_the_run(
    cascade_config: CollectConfig, cascade_pair: Pair, name: str, temperature: float
) -> None:
    config = replace(cascade_config, temperature=temperature)
    split = collect_split(config, cascade_pair, rule=name, rule_options=OPTIONS[name])
    rule = rules.get(name, **OPTIONS[name])
    if name == "top_k" and temperature != 1:
        with pytest.raises(ValueError, match=rf"rule TopK\(k=3\): cannot be replayed, .* at temperature {temperature}"):
            logged_decisions(rule, split)
        return
    if name == "learned_lossy":
        with pytest.raises(ValueError, match=r"rule LearnedLossy.*: cannot be replayed, since a trace does not hold"):
            logged_decisions(rule, split)
        return
    assert agreement(rule, split) == (len(split), len(split))
    assert split.deferred is not None
    assert len(split.deferred.unique()) == (1 if name in ONE_ANSWER else 2), "the rule must have something to decide"


def test_no_rule_is_left_out() -> None:
    assert set(OPTIONS) == set(rules.RULES)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_trained_router_decides_from_the_trace_as_in_the_run(
    cascade_config: CollectConfig, cascade_pair: Pair, save_router: Callable[..., str], temperature: float
) -> None:
    router = save_router(cascade_pair.identity)
    config = replace(cascade_config, temperature=temperature)
    split = collect_split(config, cascade_pair, router=router, alpha=0.05)
    settings = replace(config.cascade, router=router, alpha=0.05)
    assert agreement(build_rule(settings, cascade_pair.identity), split) == (len(split), len(split))
    assert split.deferred is not None and len(split.deferred.unique()) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_router_that_reads_order_decides_from_the_trace_as_in_the_run(
    cascade_config: CollectConfig, cascade_pair: Pair, save_router: Callable[..., str], temperature: float
) -> None:
    router = save_router(cascade_pair.identity, "attention", (8, 8), context=4)
    config = replace(cascade_config, temperature=temperature)
    split = collect_split(config, cascade_pair, router=router, alpha=0.05)
    rule: Any = build_rule(replace(config.cascade, router=router, alpha=0.05), cascade_pair.identity)
    assert agreement(rule, split) == (len(split), len(split))
    index = split.sequences()
    assert split.deferred is not None and len(split.deferred.unique()) == 2
    assert (index[:, :-1] < 0)[index[:, 1:] >= 0].any(), "bonus tokens must leave holes"
    gaps = rule.gap(split.stats.arrange(index))[index >= 0]
    alone = rule.gap(split.stats.arrange(torch.arange(len(split)).unsqueeze(1)))[:, 0]
    assert (gaps - alone).abs().amax() > 0.01, "what came before must matter"
    for length in (1, 2, 5, 7):
        assert torch.equal(defer_in_order(rule, split.stats, index, length), split.deferred)


class Trailing:
    """Defers where the mean distance of the last positions is large; an unknown one counts as 0."""

    def __init__(self, context: int) -> None:
        self.context = context

    def defer(self, stats: Any) -> torch.Tensor:
        padded = torch.nn.functional.pad(stats.tv.nan_to_num(0.0), (self.context - 1, 0))
        decided: torch.Tensor = padded.unfold(1, self.context, 1).mean(dim=-1) > 0.15
        return decided


@pytest.mark.parametrize("context", [1, 3, 8])
def test_pieces_of_long_answers_decide_as_the_whole(split: TraceSplit, context: int) -> None:
    rule, index = Trailing(context), split.sequences()
    plain = torch.zeros(len(split), dtype=torch.bool)
    for row in index:
        for place, which in enumerate(row.tolist()):
            if which >= 0:
                before = [split.stats.tv[i] if i >= 0 else 0.0 for i in row[max(0, place - context + 1) : place + 1]]
                plain[which] = float(sum(before)) / context > 0.15
    assert len(plain.unique()) == 2
    for length in (1, 3, 4, 1000):
        assert torch.equal(defer_in_order(rule, split.stats, index, length), plain)
    assert torch.equal(logged_decisions(rule, split), plain)


def test_an_order_that_leaves_positions_out_is_refused(split: TraceSplit) -> None:
    index = split.sequences()
    for wrong in (index[1:], torch.cat([index, index[:1]]), index.clamp_min(0)):
        with pytest.raises(ValueError, match=rf"index: expected each of {len(split)} positions once"):
            defer_in_order(Trailing(2), split.stats, wrong)
    with pytest.raises(ValueError, match="length: expected an integer >= 1, got 0"):
        defer_in_order(Trailing(2), split.stats, index, 0)


def test_another_dial_disagrees_where_it_should(cascade_config: CollectConfig, cascade_pair: Pair) -> None:
    split = collect_split(cascade_config, cascade_pair, rule="token_v2", alpha=0.1)
    assert split.deferred is not None and split.p_token_raw is not None
    strict = logged_decisions(rules.TokenV2(0.02), split)
    assert torch.equal(strict, split.p_token_raw < split.stats.verifier_max - 0.02)
    assert agreement(rules.TokenV2(0.02), split) == (int((strict == split.deferred).sum()), len(split))
    assert int((strict != split.deferred).sum()) > 0


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("rule", [rules.TokenV1(0.1, "processed"), rules.TokenV3(0.5, "processed")], ids=repr)
def test_rules_that_read_the_processed_side_are_replayed(
    cascade_config: CollectConfig, cascade_pair: Pair, rule: Any, temperature: float
) -> None:
    split = collect_split(replace(cascade_config, temperature=temperature), cascade_pair)
    assert split.q_token is not None and split.p_token is not None
    top = split.stats.verifier_max_processed
    expected = split.q_token < top - 0.1 if isinstance(rule, rules.TokenV1) else split.p_token < (1 - 0.5) * top
    assert torch.equal(logged_decisions(rule, split), expected)


@pytest.fixture
def split(cascade_config: CollectConfig, cascade_pair: Pair) -> TraceSplit:
    return collect_split(cascade_config, cascade_pair)


@dataclass(frozen=True)
class Mixture:
    """Says what the target is, and nothing of its decisions."""

    def target(self, block: VerifyBlock) -> torch.Tensor:
        return block.verifier_probs


@dataclass(frozen=True)
class Asking:
    """Reads one thing of the verifier."""

    what: str

    def defer_mask(self, block: VerifyBlock) -> torch.Tensor:
        side = block.verifier_raw
        asked = {
            "whole distributions": lambda: side.dense,
            "the most probable token": lambda: side.argmax,
            "the margin": lambda: side.margin,
            "probabilities of other tokens": lambda: side.at(torch.zeros_like(block.tokens)),
            "blocks that can be cut": lambda: block.pick(torch.tensor([0])),
        }
        return asked[self.what]()  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (rules.TopK(5), r"rule TopK\(k=5\): .* more than the 4 most probable tokens"),
        (Mixture(), r"rule .*Mixture.*: .* a rule that states no decisions \(defer_mask\)"),
        *((Asking(what), rf"rule Asking.*does not hold {what}") for what in (
            "whole distributions", "the most probable token", "the margin", "probabilities of other tokens",
            "blocks that can be cut",
        )),
    ],
    ids=repr,
)  # fmt: skip
def test_what_no_column_holds_is_refused_by_name(split: TraceSplit, rule: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logged_decisions(rule, split)


def test_a_decision_of_another_shape_is_refused(split: TraceSplit) -> None:
    class Short:
        def defer(self, stats: Any) -> torch.Tensor:
            return stats.tv[:2] > 0

    with pytest.raises(ValueError, match=rf"expected a decision a position \({len(split)},\), got \(2,\)"):
        logged_decisions(Short(), split)


def test_positions_of_references_serve_rules_that_read_statistics_alone(collect_config: CollectConfig) -> None:
    collect(collect_config)
    split = Traces.open(collect_config.out).split("train")
    rule = rules.OPT(0.05)
    assert torch.equal(logged_decisions(rule, split), rule.defer(split.stats))
    with pytest.raises(ValueError, match="expected positions of source 'cascade', got some that hold no drafted"):
        logged_decisions(rules.TokenV2(0.1), split)
    with pytest.raises(ValueError, match="split: expected positions of source 'cascade', got some that hold no decis"):
        agreement(rule, split)


def test_a_replay_takes_such_a_split_whole_and_thinned(split: TraceSplit) -> None:
    replay = Replay(split, 4)
    thinned = replay.thin(len(split) // 3)
    assert torch.equal(thinned.source.accepted, split.accepted[::3])  # type: ignore[index]
    assert thinned.source.outcomes is None
    outcome = thinned.outcome(rules.OPT(0.05), "zero_one")
    assert outcome.loss.tolist() == replay.outcome(rules.OPT(0.05), "zero_one").loss[::3].tolist()
