"""Tree heads: against a plain walk of every tree, and against scikit-learn's own predictions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import Tensor

from speccascade.router import trees as module
from speccascade.router.examples import Examples
from speccascade.router.heads import RouterHead, make_head
from speccascade.router.trees import Boosting, Grown, TreeHead, Trees, read_model

SMALL = Boosting(trees=30, leaves=8, learning_rate=0.2, smallest_leaf=20)


def noisy_examples(count: int = 3000, seed: int = 0, feature_set_width: int = 5) -> tuple[Examples, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, feature_set_width, generator=generator)
    chances = torch.stack([(features[:, 0]).sigmoid(), (features[:, 1] * features[:, 2]).sigmoid()], dim=-1)
    zero_one = (torch.rand(count, 2, generator=generator) < chances).float()
    gap = chances[:, 1] - chances[:, 0]
    return Examples(features, torch.stack([zero_one, chances], dim=1), torch.ones(count)), gap


def fitted_models(monkeypatch: pytest.MonkeyPatch) -> list[HistGradientBoostingRegressor]:
    """The scikit-learn models behind a fit, in the order of the outputs."""
    models: list[HistGradientBoostingRegressor] = []
    read = module.read_model

    def keep(model: HistGradientBoostingRegressor) -> Grown:
        models.append(model)
        return read(model)

    monkeypatch.setattr(module, "read_model", keep)
    return models


def walk_plainly(grown: Grown, row: Any) -> float:
    total = grown.base
    for tree in grown.trees:
        node = tree[0]
        while not node["is_leaf"]:
            goes_left = float(row[node["feature_idx"]]) <= node["num_threshold"]
            node = tree[node["left"] if goes_left else node["right"]]
        total += node["value"]
    return float(total)


@pytest.mark.parametrize("estimator", ["gap", "two_confidence"])
def test_it_predicts_as_scikit_learn_does(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    examples, _ = noisy_examples()
    models = fitted_models(monkeypatch)
    head = make_head("trees", estimator, "draft_only")
    assert isinstance(head, TreeHead)
    head.fit(examples, config=SMALL)
    fresh = noisy_examples(seed=1)[0].features
    fresh[::7, 3] = torch.nan
    filled = torch.where(fresh.isnan(), head.feature_mean, fresh).double().numpy()
    own = torch.from_numpy(np.stack([model.predict(filled) for model in models], axis=1))
    outputs = head.trunk(head.fill_missing(fresh)).double()
    assert outputs.shape == (3000, 2 if estimator == "gap" else 4)
    torch.testing.assert_close(outputs, own, rtol=0, atol=1e-6)
    expected = own.clamp(-1, 1) if estimator == "gap" else own.clamp(0, 1)[:, 2:] - own.clamp(0, 1)[:, :2]
    torch.testing.assert_close(head(fresh).double(), expected, rtol=0, atol=1e-6)


def test_all_trees_at_once_equals_one_at_a_time_even_on_thresholds() -> None:
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(800, 4))
    models = [
        HistGradientBoostingRegressor(max_iter=6, max_leaf_nodes=leaves, min_samples_leaf=1, random_state=0).fit(
            inputs, np.sin(3 * inputs[:, column]) + generator.normal(size=800)
        )
        for column, leaves in ((0, 31), (1, 3))
    ]
    grown = [read_model(model) for model in models]
    trunk = Trees(2)
    trunk.plant(grown)
    thresholds = np.concatenate([tree["num_threshold"] for one in grown for tree in one.trees]).astype(np.float32)
    edges = np.stack([thresholds[:300], np.nextafter(thresholds[:300], np.float32(9)), *thresholds[None, :300]] * 2)
    rows = np.concatenate([edges[:4].T, inputs[:50].astype(np.float32), [[np.inf] * 4], [[-np.inf] * 4]])
    expected = [[walk_plainly(one, row) for one in grown] for row in rows]
    outputs = trunk(torch.from_numpy(rows.astype(np.float32)))
    torch.testing.assert_close(outputs.double(), torch.tensor(expected, dtype=torch.double), rtol=0, atol=1e-6)


@pytest.mark.parametrize("estimator", ["gap", "two_confidence"])
def test_it_learns_a_gap_that_no_line_fits(estimator: str) -> None:
    examples, _ = noisy_examples(20_000)
    fresh, gap = noisy_examples(2000, seed=1)
    head = make_head("trees", estimator, "draft_only")
    untrained = head.loss(fresh)
    head.fit(examples, config=dataclasses.replace(SMALL, trees=100, leaves=16))
    error = (head(fresh.features) - gap.unsqueeze(-1)).square().mean(dim=0).sqrt()
    assert error[0] < 0.12 and error[1] < 0.06, error
    assert head.loss(fresh) < untrained


def test_validation_positions_tell_when_to_stop() -> None:
    examples, _ = noisy_examples(400)
    held_out, _ = noisy_examples(400, seed=1)
    config = Boosting(trees=200, leaves=31, learning_rate=0.3, smallest_leaf=2, shrinkage=0.0)
    whole, stopped = (make_head("trees", "gap", "draft_only", losses=("zero_one",)) for _ in range(2))
    whole.fit(examples, config=config)
    stopped.fit(examples, held_out, config=config)
    assert len(whole.trunk.roots) == 200 and len(stopped.trunk.roots) < 50
    assert stopped.loss(held_out) < whole.loss(held_out)


def test_weights_count_positions() -> None:
    """A position of weight 0 might as well be missing, whatever it says; one of weight 2 counts twice."""
    examples, _ = noisy_examples(1200)
    half = Examples(*(values[:600] for values in examples[:3]))
    spoilt = Examples(
        torch.where(torch.arange(1200)[:, None] < 600, examples.features, torch.tensor(torch.nan)),
        examples.correctness,
        examples.tv,
        (torch.arange(1200) < 600).float(),
    )
    heads = [make_head("trees", "gap", "draft_only") for _ in range(3)]
    heads[0].fit(half, config=SMALL)
    heads[1].fit(spoilt, config=SMALL)
    heads[2].fit(half._replace(weight=torch.linspace(0.1, 5, 600)), config=SMALL)
    plain, same, other = (head(half.features) for head in heads)
    assert torch.equal(plain, same)
    assert torch.equal(heads[0].feature_mean, heads[1].feature_mean)
    assert (plain - other).abs().max() > 1e-3


def test_ties_are_silent_and_teach_nothing(weighted_head: Callable[..., RouterHead]) -> None:
    width = make_head("trees", "gap", "verified").width
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(800, width, generator=generator)
    features[:, 6] = (torch.arange(800) % 2).float()
    correctness = torch.rand(800, 2, 2, generator=generator)
    first, second = (make_head("trees", "gap", "verified", losses=("zero_one",)) for _ in range(2))
    first.fit(Examples(features, correctness, torch.ones(800)), config=SMALL)
    changed = correctness.clone()
    changed[1::2] = 0.5
    second.fit(Examples(features, changed, torch.ones(800)), config=SMALL)
    assert torch.equal(first(features), second(features))
    assert (first(features)[1::2] == 0).all() and (first(features)[::2] != 0).any()


def test_weights_of_any_size_are_loaded() -> None:
    examples, _ = noisy_examples(500)
    head = make_head("trees", "gap", "draft_only")
    head.fit(examples, config=SMALL)
    again = make_head("trees", "gap", "draft_only")
    again.load_state_dict(head.state_dict())
    assert torch.equal(again(examples.features), head(examples.features))
    assert not list(head.parameters())


def test_a_fit_is_repeatable() -> None:
    examples, _ = noisy_examples(500)
    heads = [make_head("trees", "gap", "draft_only") for _ in range(2)]
    for head in heads:
        head.fit(examples, seed=3, config=SMALL)
    for name, values in heads[0].state_dict().items():
        assert torch.equal(values, heads[1].state_dict()[name]), name


def test_nothing_to_learn_from_is_refused() -> None:
    examples, _ = noisy_examples(50)
    with pytest.raises(ValueError, match="examples: expected a position with a weight"):
        make_head("trees", "gap", "draft_only").fit(examples._replace(weight=torch.zeros(50)))
