"""Boosted trees as a head: fitted by scikit-learn, held as plain tensors, walked by torch or by one ONNX operator.

Nothing of scikit-learn is stored or needed to run one: a bundle holds numbers, no pickle. Every comparison is exact,
since float32 features meet thresholds that are rounded to the float32 below: x ≤ t is the same for both.

Source: histogram gradient boosting (Ke et al., LightGBM, NeurIPS 2017), as scikit-learn implements it.

Shapes: ``*batch`` positions, ``F`` feature, ``E`` tree, ``M`` node of any tree, ``C`` output.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from .examples import Examples
from .head_base import HeadSpec
from .position_head import CORRECTNESS_ROW, RouterHead, gap_labels, output_count

__all__ = ["Boosting", "TreeHead", "Trees"]

_BUFFERS = ("feature", "threshold", "branches", "value", "roots", "output", "base", "depth")


@dataclass(frozen=True)
class Boosting:
    """How trees are grown.

    Args:
        trees: most trees for each output.
        leaves: most leaves of a tree.
        learning_rate: share of each tree's correction that is kept.
        smallest_leaf: fewest positions in a leaf.
        shrinkage: L2 penalty of the values of leaves.
        patience: trees without a gain on the validation positions after which growing stops.
    """

    trees: int = 200
    leaves: int = 31
    learning_rate: float = 0.05
    smallest_leaf: int = 100
    shrinkage: float = 1.0
    patience: int = 10


class Grown(NamedTuple):
    """One output's fitted trees, each an array of scikit-learn's node records, and the constant below them."""

    trees: Sequence[Any]
    base: float


class Trees(nn.Module):
    """Sums of tree leaves: ``[*batch, F]`` without NaN to ``[*batch, C]``. Without trees, zeros.

    Buffers, loaded whatever their size: ``feature``, ``threshold``, ``value`` ``[M]`` and ``branches`` ``[M, 2]`` of
    every node (where x ≤ threshold, then where not; a leaf is its own child), ``roots`` and ``output`` ``[E]`` of every
    tree, ``base`` ``[C]``, and the ``depth`` of the deepest.
    """

    feature: Tensor
    threshold: Tensor
    branches: Tensor
    value: Tensor
    roots: Tensor
    output: Tensor
    base: Tensor
    depth: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__()
        empty = {"threshold": torch.empty(0), "value": torch.empty(0), "base": torch.zeros(outputs)}
        empty["branches"] = torch.empty(0, 2, dtype=torch.long)
        empty["depth"] = torch.tensor(0)
        for name in _BUFFERS:
            self.register_buffer(name, empty.get(name, torch.empty(0, dtype=torch.long)))

    def plant(self, grown: Sequence[Grown]) -> None:
        """Take over fitted trees, one entry an output."""
        nodes = [tree for one in grown for tree in one.trees]
        sizes = np.array([len(tree) for tree in nodes], dtype=np.int64)
        roots = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)[: len(nodes)]
        joined = [_as_arrays(tree, root) for tree, root in zip(nodes, roots.tolist(), strict=True)]
        for name in ("feature", "threshold", "branches", "value"):
            setattr(self, name, torch.from_numpy(np.concatenate([tree[name] for tree in joined])))
        self.roots = torch.from_numpy(roots)
        self.output = torch.tensor([index for index, one in enumerate(grown) for _ in one.trees])
        self.base = torch.tensor([one.base for one in grown], dtype=torch.float32)
        self.depth = torch.tensor(max((int(tree["depth"].max()) for tree in nodes), default=0))

    def forward(self, features: Float[Tensor, "*batch F"]) -> Float[Tensor, "*batch C"]:
        """Walk all trees at once, a level a step."""
        node = self.roots.expand(*features.shape[:-1], -1)
        for _ in range(int(self.depth)):
            right = features.gather(-1, self.feature[node]) > self.threshold[node]
            node = self.branches[node, right.long()]
        belongs = nn.functional.one_hot(self.output, len(self.base)).to(self.value.dtype)
        return self.base + self.value[node] @ belongs

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in _BUFFERS:
            stored = state_dict.get(prefix + name)
            if stored is not None and name != "base":
                setattr(self, name, torch.empty_like(stored, device=self.base.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class TreeHead(RouterHead):
    """Boosted trees in place of a trunk: fitted at once by ``fit``, not by steps of gradient.

    ``two_confidence`` fits each model's correctness by squared error, clamped to [0, 1]. Features are read as they are:
    trees ask for their order alone.

    Raises:
        ValueError: ``cost_sensitive``, which learns by gradient.
    """

    trunk: Trees

    def __init__(self, spec: HeadSpec) -> None:
        spec.refuse_context()
        if spec.estimator == "cost_sensitive":
            raise ValueError("estimator: trees learn 'gap' or 'two_confidence', got 'cost_sensitive'")
        if spec.rank:
            raise ValueError(f"rank: expected 0 for trees, which read every number, got {spec.rank}")
        super().__init__(replace(spec, hidden=()), Trees(output_count(spec)))

    def fit(
        self, examples: Examples, validation: Examples | None = None, seed: int = 0, config: Boosting | None = None
    ) -> None:
        """Grow the trees, and take the normalisation from the same positions.

        Positions of weight 0 are left out, and for ``gap`` those where the 0-1 gap is known to be zero.

        Args:
            examples: positions to learn from.
            validation: positions that tell when to stop; without them all trees are grown.
            seed: of scikit-learn's binning of many positions.
            config: how trees are grown.

        Raises:
            ValueError: shapes that do not fit, or no position to learn from.
        """
        self._check(examples)
        self.set_normalisation(*_moments(_flatten(examples.features), _weights(examples)))
        held_out = None if validation is None else self._tables(validation)
        tables = self._tables(examples)
        config = config or Boosting()
        self.trunk.plant(
            [_grow(table, None if held_out is None else held_out[i], seed, config) for i, table in enumerate(tables)]
        )

    def _tables(self, examples: Examples) -> "list[_Table]":
        """What each output learns from, in the order of the trunk's outputs."""
        self._check(examples)
        features = self.fill_missing(examples.features)
        ties = self._zero_one_ties(examples.features)
        if self.estimator == "gap":
            labels = gap_labels(examples.correctness, self.losses)
        else:
            rows = [CORRECTNESS_ROW[loss] for loss in self.losses]
            labels = examples.correctness[..., rows, :].transpose(-1, -2).flatten(start_dim=-2)
        tables = []
        for column in range(labels.shape[-1]):
            used = _weights(examples)
            if ties is not None and self.estimator == "gap":
                used = used * ~ties[..., column].flatten()
            rows_used = used > 0
            if not rows_used.any():
                raise ValueError("examples: expected a position with a weight, and where the argmaxes differ; got none")
            parts = (_flatten(features), labels[..., column].flatten(), used)
            tables.append(_Table(*(part[rows_used].double().cpu().numpy() for part in parts)))
        return tables

    def _read(self, features: Tensor) -> Tensor:
        return self.fill_missing(features)

    def _chances(self, outputs: Tensor) -> Tensor:
        return outputs.clamp(0.0, 1.0)

    def _chance_error(self, outputs: Tensor, correctness: Tensor) -> Tensor:
        return (self._chances(outputs) - correctness).square()


class _Table(NamedTuple):
    features: Any
    label: Any
    weight: Any


def _grow(table: _Table, validation: _Table | None, seed: int, config: Boosting) -> Grown:
    from sklearn.ensemble import HistGradientBoostingRegressor  # slow to import, and not needed to run a head

    model = HistGradientBoostingRegressor(
        max_iter=config.trees,
        max_leaf_nodes=config.leaves,
        learning_rate=config.learning_rate,
        min_samples_leaf=config.smallest_leaf,
        l2_regularization=config.shrinkage,
        early_stopping=validation is not None,
        n_iter_no_change=config.patience,
        random_state=seed,
    )
    held_out: dict[str, Any] = {}
    if validation is not None:
        held_out = {"X_val": validation.features, "y_val": validation.label, "sample_weight_val": validation.weight}
    model.fit(table.features, table.label, sample_weight=table.weight, **held_out)
    return read_model(model)


def read_model(model: Any) -> Grown:
    """Take the trees out of a fitted ``HistGradientBoostingRegressor``."""
    # scikit-learn has no public way to them; a test compares the answers with its own `predict`.
    trees = [predictors[0].nodes for predictors in model._predictors]
    assert not any(tree["is_categorical"].any() for tree in trees), "features are numbers"
    return Grown(trees, float(np.asarray(model._baseline_prediction).item()))


def _as_arrays(tree: Any, root: int) -> dict[str, Any]:
    leaf = tree["is_leaf"].astype(bool)
    own = np.arange(len(tree))
    sides = [np.where(leaf, own, tree[side].astype(np.int64)) + root for side in ("left", "right")]
    return {
        "feature": np.where(leaf, 0, tree["feature_idx"]).astype(np.int64),
        "threshold": _round_down(np.where(leaf, 0.0, tree["num_threshold"])),
        "branches": np.stack(sides, axis=1),
        "value": np.where(leaf, tree["value"], 0.0).astype(np.float32),
        "depth": tree["depth"],
    }


def _round_down(threshold: Any) -> Any:
    """The largest float32 that is not above: for a float32 x, x ≤ t holds for both or for neither."""
    rounded = threshold.astype(np.float32)
    above = rounded.astype(np.float64) > threshold
    return np.where(above, np.nextafter(rounded, np.float32(-np.inf)), rounded)


def _flatten(features: Tensor) -> Tensor:
    return features.reshape(-1, features.shape[-1])


def _weights(examples: Examples) -> Tensor:
    return torch.ones_like(examples.tv).flatten() if examples.weight is None else examples.weight.flatten()


def _moments(features: Tensor, weight: Tensor) -> Iterator[Tensor]:
    """Weighted mean and deviation of every feature, missing values left out."""
    known = (~features.isnan()).double() * weight.double().unsqueeze(-1)
    total = known.sum(dim=0).clamp_min(1e-12)
    values = features.nan_to_num(0.0).double()
    mean = (values * known).sum(dim=0) / total
    yield mean.float()
    yield ((values - mean).square() * known).sum(dim=0).div(total).sqrt().float()
