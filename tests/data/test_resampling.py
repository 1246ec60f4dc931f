"""Units of resampling are documents, and intervals cover as often as they say."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from speccascade.data.resampling import (
    bootstrap_weights,
    documents,
    held_back,
    interval,
    resampled_means,
    sum_by_prompt,
)


def _ids(count: int) -> list[str]:
    return [hashlib.sha256(str(index).encode()).hexdigest()[:16] for index in range(count)]


def test_windows_of_one_document_are_drawn_together():
    prompt_ids = ["b", "a", "b-1", "c", "a-1", "b-2"]
    assert documents(prompt_ids, [0, 0, 1, 2, 3, 4, 5]).tolist() == [0, 0, 1, 0, 2, 1, 0]


def test_documents_without_a_position_leave_no_gap():
    assert documents(["a", "b", "c"], [2, 0, 2]).tolist() == [1, 0, 1]
    assert documents([], []).tolist() == []


def test_whole_documents_are_held_back_whoever_else_is_there():
    """A share of 0.5 of 2,000 documents: 900 to 1,100 held back, beyond which the odds are below 1e-5."""
    names = _ids(2000)
    back = held_back(names, 0.5)
    assert 900 <= back.sum() <= 1100
    windows = held_back([f"{name}-{number}" for number in (1, 2) for name in names], 0.5)
    assert (windows == np.tile(back, 2)).all()
    assert (held_back(names[::7], 0.5) == back[::7]).all()
    assert held_back(names, 1.0).all() and not held_back(names, 0.0).any()
    assert (held_back(names, 0.7) >= back).all()


def test_what_is_held_back_does_not_follow_from_the_split():
    """Splits come from another hash of the id: of one split's documents about half are held back, not all or none."""
    from speccascade.data.prompts import split_of

    names = [name for name in _ids(20_000) if split_of(name, {"a": 0.76, "b": 0.08, "c": 0.16}) == "b"]
    assert 0.42 <= held_back(names, 0.5).mean() <= 0.58


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_one_is_refused(share):
    with pytest.raises(ValueError, match="share: expected a number in"):
        held_back(["a"], share)


def test_sums_by_prompt():
    sums = sum_by_prompt([[1, 2, 3], [4, 5, 6]], np.array([0, 1, 0]), 2)
    assert sums.tolist() == [[4, 10], [2, 5]]


def test_bootstrap_weights_draw_as_many_prompts_as_there_are_and_follow_the_seed():
    weights = bootstrap_weights(7, 50, seed=3)
    assert weights.shape == (50, 7) and (weights.sum(axis=1) == 7).all()
    assert (weights == bootstrap_weights(7, 50, seed=3)).all()
    assert (weights != bootstrap_weights(7, 50, seed=4)).any()


def test_the_prompt_bootstrap_covers_the_truth_as_often_as_it_says():
    """Positions of one prompt share its luck: 40 prompts x 25 positions, 200 experiments, a stated 95%.

    At a true coverage of 0.93 (percentile intervals are a little narrow), fewer than 171 hits have odds below 1e-4.
    A bootstrap over positions would cover about half of the time.
    """
    generator = np.random.default_rng(4)
    prompts, length, hits = 40, 25, 0
    index = np.arange(prompts).repeat(length)
    counts = np.full(prompts, float(length))
    for experiment in range(200):
        chance = generator.beta(2, 2, size=prompts)
        right = (generator.random(prompts * length) < chance[index]).astype(float)
        samples = resampled_means(
            sum_by_prompt(right, index, prompts), counts, bootstrap_weights(prompts, 300, experiment)
        )
        spread = interval(right.mean(), samples[:, 0])
        hits += spread.low <= 0.5 <= spread.high
    assert 171 <= hits <= 200, f"{hits} of 200 intervals hold the truth"
