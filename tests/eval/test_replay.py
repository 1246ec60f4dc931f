"""Replay against a loop over positions that holds the full distributions, and the bounds on the tail."""

import numpy as np
import pytest
import torch

from speccascade.cascade.blocks import VerifyBlock
from speccascade.cascade.verify import rejection_probability
from speccascade.eval.replay import Replay
from speccascade.router import rules

POSITION_RULES = [
    rules.SpecDecode(), rules.Chow(0.4), rules.ChowLog(0.8), rules.Diff(0.1), rules.DiffLog(0.1), rules.OPT(0.4),
    rules.OPTLog(0.3), rules.BiLDStar(1.0), rules.VerifierGap(0.3),
]  # fmt: skip
TOKEN_RULES = [rules.TokenV1(0.3), rules.TokenV2(0.2), rules.TokenV3(0.7), rules.Greedyward(0.15), rules.Lossy(0.3),
               rules.Ensemble(0.4)]  # fmt: skip


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
        losses.append(float(int(target.argmax()) != label) if loss == "zero_one" else 1 - float(target[label]))
    return np.array(losses), np.array(rejections)


@pytest.mark.parametrize("loss", ["zero_one", "sampled", "greedy"])
@pytest.mark.parametrize("rule", [*POSITION_RULES, *TOKEN_RULES], ids=repr)
def test_replay_equals_brute_force(rule, loss, trace):
    outcome = Replay(trace, None).outcome(rule, loss)
    losses, rejections = brute_force(trace, rule, loss)
    np.testing.assert_allclose(outcome.loss, losses, atol=2e-6)
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
    assert (outcome.rejection <= rejections + 2e-6).all()
    assert (outcome.rejection_high >= rejections - 2e-6).all()


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
