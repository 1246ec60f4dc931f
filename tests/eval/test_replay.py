"""Replay against a loop over positions that holds the full distributions, and the bounds on the tail."""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from speccascade.cascade.blocks import VerifyBlock
from speccascade.cascade.verify import rejection_probability
from speccascade.eval import replay as replay_module
from speccascade.eval.methods import ColderVerifier
from speccascade.eval.replay import Replay
from speccascade.router import rules

TINY = torch.finfo(torch.float32).tiny

POSITION_RULES = [
    rules.SpecDecode(), rules.Chow(0.4), rules.ChowLog(0.8), rules.Diff(0.1), rules.DiffLog(0.1), rules.OPT(0.4),
    rules.OPTLog(0.3), rules.BiLDStar(1.0), rules.VerifierGap(0.3), rules.ExpectedGain(0.3),
]  # fmt: skip
TOKEN_RULES = [rules.TokenV1(0.3), rules.TokenV2(0.2), rules.TokenV3(0.7), rules.Greedyward(0.15), rules.Lossy(0.3),
               rules.LearnedLossy(0.3), rules.LearnedLossy(1.4), rules.Ensemble(0.4)]  # fmt: skip


@pytest.fixture
def trace(build_trace):
    """Few enough positions for a loop."""
    return build_trace(prompts=8, length=15)


def brute_force(trace, rule, loss: str) -> tuple[np.ndarray, np.ndarray]:
    """Loss and rejection of every position, one by one, from the full distributions and the rule's own target."""
    losses, rejections = [], []
    for index in range(len(trace)):
        confidence = [probs[index].view(1, 1, -1) for probs in (trace.draft_probs, trace.verifier_probs)]
        probs = confidence
        if loss == "greedy":
            probs = [torch.nn.functional.one_hot(one.argmax(-1), one.shape[-1]).float() for one in confidence]
        target = rule.target(VerifyBlock.from_probs(*probs, *confidence))[0, 0]
        rejections.append(float(rejection_probability(target, probs[0][0, 0])))
        label = int(trace.label[index])
        at_label = float(target[label])
        by_loss = {"zero_one": float(int(target.argmax()) != label), "log": -math.log(max(at_label, TINY))}
        losses.append(by_loss.get(loss, 1 - at_label))
    return np.array(losses), np.array(rejections)


@pytest.mark.parametrize("loss", ["zero_one", "sampled", "log", "greedy"])
@pytest.mark.parametrize("rule", [*POSITION_RULES, *TOKEN_RULES], ids=repr)
def test_replay_equals_brute_force(rule, loss, trace):
    outcome = Replay(trace, None).outcome(rule, loss)
    losses, rejections = brute_force(trace, rule, loss)
    # A logarithm of what is all but nothing magnifies its rounding.
    np.testing.assert_allclose(outcome.loss, losses, atol=2e-6, rtol=2e-4 if loss == "log" else 0)
    np.testing.assert_allclose(outcome.rejection, rejections, atol=2e-6)
    np.testing.assert_allclose(outcome.rejection_high, rejections, atol=2e-6)


@pytest.mark.parametrize("rule", POSITION_RULES, ids=repr)
def test_rejection_of_a_position_rule_is_deferral_times_distance(rule, trace):
    outcome = Replay(trace, None).outcome(rule, "sampled")
    np.testing.assert_allclose(outcome.rejection, outcome.deferral * trace.stats.tv.numpy(), atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("rule", TOKEN_RULES, ids=repr)
def test_the_truth_lies_between_the_bounds_when_most_tokens_are_unlogged(rule, k, build_trace):
    trace = build_trace(prompts=8, vocabulary=24, k=k, seed=k)
    outcome = Replay(trace, k).outcome(rule, "sampled")
    _, rejections = brute_force(trace, rule, "sampled")
    # What a rule of masses rejects under other splits of the tail may leave the ends by a share of it.
    tails = (2 - trace.topk_q.sum(dim=-1) - trace.topk_p.sum(dim=-1)).numpy()
    slack = 2e-6 + 0.1 * getattr(rule, "reads_masses", False) * tails
    assert (outcome.rejection <= rejections + slack).all()
    assert (outcome.rejection_high >= rejections - slack).all()


def test_the_bounds_close_as_more_tokens_are_logged(build_trace):
    gaps = []
    for k in (1, 4, 16):
        outcome = Replay(build_trace(vocabulary=24, k=k), k).outcome(rules.TokenV2(0.2), "sampled")
        gaps.append(float((outcome.rejection_high - outcome.rejection).mean()))
    assert gaps[0] > gaps[1] > gaps[2] >= 0
    assert gaps[2] < 0.005


@pytest.mark.parametrize("k", [1, 3])
def test_greedy_replay_of_token_rules_is_exact_with_few_logged_tokens(k, build_trace):
    trace = build_trace(prompts=8, vocabulary=24, k=k)
    for rule in TOKEN_RULES:
        outcome = Replay(trace, k).outcome(rule, "greedy")
        losses, rejections = brute_force(trace, rule, "greedy")
        np.testing.assert_allclose(outcome.rejection, rejections, atol=2e-6)
        np.testing.assert_allclose(outcome.loss, losses, atol=2e-6)


def test_a_lossless_token_rule_rejects_exactly_the_distance_whatever_is_logged(build_trace):
    trace = build_trace(vocabulary=24, k=2)
    outcome = Replay(trace, 2).outcome(rules.TokenV2(-1.0), "sampled")
    np.testing.assert_allclose(outcome.rejection, trace.stats.tv.numpy(), atol=2e-6)
    np.testing.assert_allclose(outcome.rejection_high, trace.stats.tv.numpy(), atol=2e-6)


def test_an_unknown_loss_is_refused(trace):
    with pytest.raises(ValueError, match="loss: expected one of zero_one, sampled, log, greedy, got 'square'"):
        Replay(trace, None).outcome(rules.OPT(0.1), "square")


@pytest.mark.parametrize("rule", [rules.OPT(0.4), *TOKEN_RULES], ids=repr)
def test_diversity_is_that_of_the_emitted_law(rule, trace):
    outcome = Replay(trace, None).outcome(rule, "sampled")
    confidence = [probs.unsqueeze(0) for probs in (trace.draft_probs, trace.verifier_probs)]
    law = rule.target(VerifyBlock.from_probs(*confidence))[0].double()
    np.testing.assert_allclose(outcome.entropy, torch.special.entr(law).sum(dim=-1), atol=1e-5)
    np.testing.assert_allclose(outcome.distinctness, 1 - law.square().sum(dim=-1), atol=1e-5)
    assert np.isnan(Replay(trace, None).outcome(rule, "greedy").entropy).all()


def test_the_unlogged_tail_counts_as_one_token_in_diversity(build_trace):
    trace = build_trace(prompts=8, vocabulary=24, k=2)
    outcome = Replay(trace, 2).outcome(rules.SpecDecode(), "sampled")
    whole = torch.special.entr(trace.verifier_probs).sum(dim=-1).numpy()
    assert (outcome.entropy <= whole + 1e-5).all() and (outcome.entropy < whole - 0.01).any()


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0])
def test_a_colder_verifier_is_p_to_the_power(temperature, trace):
    outcome = Replay(trace, None).outcome(ColderVerifier(temperature), "sampled")
    colder = (trace.verifier_probs.double().log() / temperature).softmax(dim=-1)
    distance = (trace.draft_probs - colder).clamp_min(0).sum(dim=-1)
    at_label = colder.gather(-1, trace.label.unsqueeze(-1)).squeeze(-1)
    np.testing.assert_allclose(outcome.rejection, distance, atol=1e-5)
    np.testing.assert_allclose(outcome.loss, 1 - at_label, atol=1e-5)


@pytest.mark.parametrize("k", [2, 6])
def test_the_rejection_of_a_colder_verifier_lies_between_its_bounds(k, build_trace):
    trace = build_trace(prompts=8, vocabulary=24, k=k)
    outcome = Replay(trace, k).outcome(ColderVerifier(0.5), "sampled")
    _, rejections = brute_force(trace, ColderVerifier(0.5), "sampled")
    assert (outcome.rejection <= rejections + 1e-5).all() and (outcome.rejection_high >= rejections - 1e-5).all()


def test_a_verifier_of_no_temperature_is_refused():
    with pytest.raises(ValueError, match="temperature: expected more than 0, got 0"):
        ColderVerifier(0.0)


@pytest.mark.parametrize("rule", [rules.OPT(0.4), *TOKEN_RULES], ids=repr)
def test_chunks_give_what_the_whole_gives(rule, build_trace, monkeypatch):
    trace = build_trace(prompts=8, vocabulary=24, k=4)
    whole = Replay(trace, 4)
    expected = {loss: whole.sums_of_all([rule], loss)[0] for loss in ("sampled", "greedy")}
    monkeypatch.setattr(replay_module, "_CHUNK", 23)
    monkeypatch.setattr(replay_module, "_KEPT", 0)
    for loss, sums in expected.items():
        pieces = Replay(trace, 4)
        for _ in range(2):  # blocks are let go of in between
            np.testing.assert_allclose(pieces.sums_of_all([rule, rule], loss)[1], sums, atol=1e-4)
        np.testing.assert_allclose(pieces.outcome(rule, loss).loss, whole.outcome(rule, loss).loss)


def test_windows_of_one_document_are_summed_together(build_trace):
    trace = replace(build_trace(prompts=4, length=5), prompt_ids=("a", "b", "a-1", "c"))
    replay = Replay(trace, None)
    assert (replay.num_prompts, replay.num_documents) == (4, 3)
    assert replay.size == "20 positions of 4 prompts (3 documents)"
    assert sorted(replay.count()) == [5, 5, 10]


def test_a_rule_that_reads_the_order_is_shown_texts_in_order(trace):
    def defer(stats):
        before = torch.cat([torch.full_like(stats.tv[:, :1], torch.nan), stats.tv[:, :-1]], dim=1)
        return before > stats.tv  # nothing is known before the first position of a text

    outcome = Replay(trace, None).outcome(SimpleNamespace(defer=defer, context=2), "sampled")
    tv = trace.stats.tv.view(8, 15)
    expected = torch.cat([torch.zeros(8, 1, dtype=torch.bool), tv[:, :-1] > tv[:, 1:]], dim=1).flatten()
    assert (outcome.deferral == expected.numpy()).all()


@dataclass(frozen=True)
class NamedRule:
    """A rule that two routers can share."""

    target: Any


def as_it_is(verifier):
    return verifier


@dataclass(frozen=True, eq=False)
class Believer:
    """A token-level router whose belief is whatever ``opinion`` makes of p."""

    inner: Any
    opinion: Any = as_it_is
    runtime: object = field(default_factory=object)
    asked: list = field(default_factory=list)

    def belief_over(self, draft, verifier, tokens, stats):
        self.asked.append((draft, stats))
        belief = self.opinion(verifier)
        return belief, 1 - belief.sum(dim=-1)


@pytest.mark.parametrize("loss", ["zero_one", "sampled", "log", "greedy"])
@pytest.mark.parametrize("rule", [rules.OPT(0.4), rules.VerifierGap(0.3), *TOKEN_RULES], ids=repr)
@pytest.mark.parametrize("k", [3, 12])
def test_a_router_that_believes_p_replays_as_its_rule(rule, loss, k, build_trace):
    trace = build_trace(prompts=8, k=k)
    plain, believing = (Replay(trace, k).outcome(one, loss) for one in (rule, Believer(rule)))
    for name in ("loss", "rejection", "rejection_high", "deferral"):
        np.testing.assert_allclose(getattr(believing, name), getattr(plain, name), atol=2e-5, err_msg=name)


@pytest.mark.parametrize("loss", ["zero_one", "sampled", "greedy"])
def test_a_router_that_believes_p_expects_the_gain_that_p_does(loss, trace):
    rule = rules.ExpectedGain(0.2)  # what it expects of unlogged tokens is not known: here every token is logged
    plain, believing = (Replay(trace, None).outcome(one, loss) for one in (rule, Believer(rule)))
    assert 0 < plain.deferral.mean() < 1
    np.testing.assert_array_equal(believing.deferral, plain.deferral)
    np.testing.assert_allclose(believing.loss, plain.loss)


def test_a_belief_decides_and_p_is_emitted(build_trace):
    trace = build_trace(prompts=8)

    def second_best(verifier):
        return torch.where(verifier == verifier.amax(dim=-1, keepdim=True), 0.0, verifier) / 2 + 0.5 * (
            verifier == verifier.topk(2, dim=-1).values[:, 1:]
        )

    router = Believer(rules.Greedyward(0.0), second_best)
    outcome = Replay(trace, None).outcome(router, "zero_one")
    runner_up = trace.verifier_probs.topk(2, dim=-1).indices[:, 1]
    assert (outcome.loss == (runner_up != trace.label).numpy()).all()
    # Lossy reads q and p alone: what is believed cannot move it.
    rule = rules.Lossy(0.3)
    lossy, plain = (Replay(trace, None).outcome(one, "sampled") for one in (Believer(rule, second_best), rule))
    np.testing.assert_allclose(lossy.loss, plain.loss, atol=1e-6)


def test_a_belief_never_sees_a_label_that_was_not_logged(build_trace):
    trace = build_trace(prompts=8, vocabulary=24, k=2)
    router = Believer(rules.TokenV2(0.2))
    Replay(trace, 2).outcome(router, "sampled")
    assert torch.equal(torch.cat([draft for draft, _ in router.asked]), trace.topk_q)


def test_the_head_of_a_router_is_asked_once_for_all_settings(build_trace):
    router = Believer(rules.TokenV2(0.2))
    settings = [replace(router, inner=rules.TokenV2(alpha)) for alpha in (0.1, 0.3, 0.5)]
    replay = Replay(build_trace(prompts=8), None)
    for loss in ("sampled", "zero_one", "greedy"):
        replay.sums_of_all(settings, loss)
    assert len(router.asked) == 1


def test_a_setting_of_a_router_is_replayed_once_for_all_losses(build_trace):
    replay, head, seen = Replay(build_trace(prompts=8), None), object(), []

    def target(block):
        seen.append(block)
        return block.verifier_probs

    inner = NamedRule(target)
    for loss in ("zero_one", "sampled", "log"):
        replay.sums_of_all([Believer(inner, runtime=head)], loss, bounds=False)
    assert len(seen) == 1
    replay.sums_of_all([Believer(inner, runtime=object())], "sampled", bounds=False)
    assert len(seen) == 2


@pytest.mark.parametrize("rule", [rules.Lossy(0.3), rules.Ensemble(0.4)], ids=repr)
def test_a_rule_that_reads_no_confidence_is_not_widened(rule, build_trace, monkeypatch):
    trace = build_trace(prompts=8, vocabulary=24, k=3)
    quick = Replay(trace, 3).outcome(rule, "sampled")
    monkeypatch.setattr(type(rule), "reads_confidence", True)
    plain = Replay(trace, 3).outcome(rule, "sampled")
    for name in ("loss", "rejection", "rejection_high"):
        np.testing.assert_array_equal(getattr(quick, name), getattr(plain, name))


def test_a_rule_that_reads_masses_is_shown_masses(build_trace):
    trace = build_trace(prompts=8, vocabulary=24, k=3)
    seen = []

    def target(block):
        seen.append(block.verifier_raw.dense.sum(dim=-1))
        return block.verifier_probs

    rule = SimpleNamespace(target=target, reads_masses=True)
    for one in (rule, Believer(rule, lambda verifier: 0.8 * verifier)):
        Replay(trace, 3).outcome(one, "sampled")
    for mass in seen:
        torch.testing.assert_close(mass, torch.ones_like(mass), atol=1e-5, rtol=0)
