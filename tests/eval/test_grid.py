"""A dial is covered evenly in what it does, and a budget is hit."""

import numpy as np
import pytest

from speccascade.eval.grid import alpha_for_rejection, covering_grid, method_grid
from speccascade.eval.methods import DIALS, plug_in_methods
from speccascade.eval.replay import Replay
from speccascade.router import rules


def test_a_very_uneven_dial_is_covered_in_even_steps():
    # Everything happens within a thousandth of the dial.
    def rejection_at(u: float) -> float:
        return 0.25 * (1 - np.tanh((u - 0.7) * 1e4))

    settings = covering_grid(rejection_at, points=21, limit=0.5)
    values = sorted(rejection_at(u) for u in settings)
    assert max(np.diff(values)) < 0.5 / 20 * 2.1
    assert values[0] < 1e-6 and values[-1] > 0.5 - 1e-6


def test_a_dial_with_a_jump_ends_and_keeps_both_sides():
    settings = covering_grid(lambda u: 0.4 if u < 0.3 else 0.0, points=11, limit=0.4)
    assert {0.4, 0.0} == {0.4 if u < 0.3 else 0.0 for u in settings}


@pytest.mark.parametrize("name", [name for name in DIALS if name not in ("ensemble",)])
def test_every_rule_is_covered_over_its_own_range(name, trace):
    replay = Replay(trace, None)
    method = plug_in_methods([name])[0]
    limit = float(trace.stats.tv.mean())
    alphas = method_grid(method, replay, "sampled", 15, limit)
    values = np.array([replay.outcome(method.build(a, "sampled"), "sampled").rejection.mean() for a in alphas])
    assert values.max() <= limit * (1 + 1e-6)
    steps = np.diff(np.sort(values))
    # V3 leaps near 0 and VerifierGap never defers where the models agree; the rest of the range is even.
    assert steps.max() <= limit / 14 * 2.5
    assert values.min() < 0.02 * limit


BUDGETED = ["chow", "diff", "opt", "verifier_gap", "bild_star", "token_v2", "lossy"]


# At temperature 0 Lossy is exact matching at every alpha: it has no dial there.
@pytest.mark.parametrize(
    ("name", "loss"), [(name, loss) for name in BUDGETED for loss in ("sampled", "greedy")][: 2 * len(BUDGETED) - 1]
)
def test_the_alpha_for_a_budget_hits_it(name, loss, trace):
    replay = Replay(trace, None)
    lossless = float(replay.stats(loss).tv.mean())
    for share in (0.25, 0.5):
        alpha = alpha_for_rejection(name, trace, share * lossless, loss)
        parameter = {DIALS[name].argument: alpha}
        spent = float(replay.outcome(rules.get(name, **parameter), loss).rejection.mean())
        # One position more or less is the finest step there is: 1 of 600.
        assert spent == pytest.approx(share * lossless, abs=2 / len(trace))


def test_a_fixed_rule_has_no_alpha_for_a_budget(trace):
    with pytest.raises(ValueError, match="method: expected a rule with a dial, got 'specdecode'"):
        alpha_for_rejection("specdecode", trace, 0.1, "sampled")


def test_every_dial_names_an_argument_of_its_rule():
    for name, dial in DIALS.items():
        rules.get(name, **{dial.argument: 0.5})
