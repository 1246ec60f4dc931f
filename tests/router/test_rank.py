"""Hidden states read along a few stored directions: in every kind of head, in its bundle, and as ONNX."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speccascade.router.bundle import load_bundle, save_bundle
from speccascade.router.config import RouterConfig
from speccascade.router.examples import Examples
from speccascade.router.export import PARITY_TOLERANCE, export_onnx
from speccascade.router.features import feature_width
from speccascade.router.head_base import DEVIATIONS_KEPT, Head, HeadSpec
from speccascade.router.heads import build_head

from ..conftest import pooled_spec

FEATURE_SET, SIZES, RANK = "verified+topk+hidden", (12, 20), 3
SCALARS = feature_width("verified+topk")
LINEAR = HeadSpec("linear", feature_set=FEATURE_SET, hidden_sizes=SIZES, rank=RANK)
SPECS = {
    "linear": LINEAR,
    "mlp": replace(LINEAR, kind="mlp", hidden=(8, 8)),
    "cost_sensitive": replace(LINEAR, kind="mlp", hidden=(8,), estimator="cost_sensitive"),
    "attention": replace(LINEAR, kind="attention", hidden=(8, 8), estimator="two_confidence", context=3),
    "pooled": pooled_spec(FEATURE_SET, (8,), top_k=4, hidden_sizes=SIZES, rank=RANK),
}


def turned(spec: HeadSpec, seed: int = 0) -> Head:
    """Random weights and normalisation, and random directions that stand at right angles."""
    head, generator = build_head(spec), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for values in head.parameters():
            values.copy_(torch.randn(values.shape, generator=generator) * 0.3)
    mean, std = torch.randn(head.width, generator=generator), torch.rand(head.width, generator=generator) + 0.5
    head.set_normalisation(mean, std)
    sides = [torch.randn(size, spec.rank, generator=generator) for size in spec.hidden_sizes]
    head.set_directions(*(torch.linalg.qr(side)[0] for side in sides))
    return head.eval()


def features_of(head: Head, count: int = 30) -> Tensor:
    features = torch.randn(count, head.width, generator=torch.Generator().manual_seed(1)) * 3
    features[::4, 5] = features[1::4, SCALARS + 2] = torch.nan
    features[2::4, -1] = 1e9
    return features


def inputs_of(head: Head, count: int = 30) -> tuple[Tensor, ...]:
    return head.arrange(features_of(head, count), torch.Generator().manual_seed(2))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_scalars_stay_as_they_are_and_states_become_plain_products(spec: HeadSpec) -> None:
    head = turned(spec)
    features = features_of(head)
    found = head.normalise(features)
    assert found.shape == (30, spec.columns) and spec.columns == SCALARS + 2 * RANK
    mean, std = head.feature_mean.tolist(), head.feature_std.tolist()
    for row, values in enumerate(features.tolist()):
        known = [mean[place] if value != value else value for place, value in enumerate(values)]
        away = [(value - mean[place]) / std[place] for place, value in enumerate(known)]
        away = [min(max(value, -DEVIATIONS_KEPT), DEVIATIONS_KEPT) for value in away]
        expected, start = away[:SCALARS], SCALARS
        for size, own in zip(SIZES, head.directions, strict=True):
            state = away[start : start + size]
            expected += [sum(a * b for a, b in zip(state, column, strict=True)) for column in own.T.tolist()]
            start += size
        assert found[row].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", ["mlp", "pooled"])
def test_all_directions_of_the_axes_read_what_a_head_without_any_reads(kind: str) -> None:
    """As many directions as numbers, each along one of them: nothing is left out."""
    spec = replace(SPECS[kind], hidden_sizes=(4, 4), rank=4)
    head, whole = turned(spec), build_head(replace(spec, rank=0)).eval()
    head.set_directions(torch.eye(4), torch.eye(4))
    own = {name: values for name, values in head.state_dict().items() if not name.startswith("directions")}
    whole.load_state_dict(own)
    features, *others = inputs_of(head)
    torch.testing.assert_close(head(features, *others), whole(features, *others), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["mlp", "pooled"])
def test_what_lies_across_the_directions_is_not_seen(kind: str) -> None:
    head = turned(SPECS[kind])
    features, *others = inputs_of(head)
    features = features.nan_to_num(0.0).clamp(-1, 1)
    directions = head.directions[1]
    across = torch.randn(SIZES[1], generator=torch.Generator().manual_seed(3))
    across -= directions @ (directions.T @ across)
    std = head.feature_std[-SIZES[1] :]
    along, away = features.clone(), features.clone()
    away[:, -SIZES[1] :] += 0.5 * std * across
    along[:, -SIZES[1] :] += 0.5 * std * directions[:, 0]
    torch.testing.assert_close(head(away, *others), head(features, *others), rtol=0, atol=1e-5)
    assert not torch.allclose(head(along, *others), head(features, *others), atol=1e-3)


@pytest.mark.parametrize("kind", ["mlp", "pooled"])
def test_directions_are_not_trained(kind: str) -> None:
    head = turned(SPECS[kind]).train()
    before = [values.clone() for values in head.directions]
    weights = [values.clone() for values in head.trunk.parameters()]  # type: ignore[union-attr]
    features, *others = inputs_of(head)
    candidates = others[0] if others else None
    truth = None if candidates is None else torch.zeros(len(features), dtype=torch.long)
    correctness = torch.rand(len(features), 2, 2)
    optimiser = torch.optim.AdamW(head.parameters(), lr=0.1, weight_decay=0.5)
    head.loss(Examples(features, correctness, torch.ones(len(features)), None, candidates, truth)).backward()
    optimiser.step()
    assert all(torch.equal(old, new) for old, new in zip(before, head.directions, strict=True))
    trained = head.trunk.parameters()  # type: ignore[union-attr]
    assert all(not torch.equal(old, new) for old, new in zip(weights, trained, strict=True))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_bundle_gives_back_the_same_head_in_both_backends(
    spec: HeadSpec, config: RouterConfig, tmp_path: Path
) -> None:
    head = turned(spec)
    stated = save_bundle(tmp_path, head, config)
    bundle = load_bundle(tmp_path)
    assert bundle.config == stated and stated.rank == RANK and stated.hidden_sizes == SIZES
    assert bundle.head().spec == head.spec
    for name, values in head.state_dict().items():
        assert torch.equal(values, bundle.head().state_dict()[name]), name
    assert "of each hidden state 3 directions" in (tmp_path / "README.md").read_text()
    for count in (1, 30):
        inputs = inputs_of(head, count)
        for backend in ("onnx", "torch"):
            found = bundle.runtime(backend)(*inputs)
            torch.testing.assert_close(found, head(*inputs).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": -1}, "rank: expected 0 to 12, got -1"),
        ({"rank": 13}, "rank: expected 0 to 12, got 13"),
        ({"feature_set": "verified", "hidden_sizes": ()}, "rank: expected 0 for features without hidden states, got 3"),
        ({"kind": "trees"}, "rank: expected 0 for trees, which read every number, got 3"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_head(replace(LINEAR, **change))


def test_directions_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"verifier: expected shape \[20, 3\], got \[12, 3\]"):
        build_head(LINEAR).set_directions(torch.zeros(12, 3), torch.zeros(12, 3))
    with pytest.raises(ValueError, match="directions: expected none for a head of rank 0"):
        build_head(replace(LINEAR, rank=0)).set_directions(torch.zeros(12, 3), torch.zeros(20, 3))


@pytest.mark.parametrize("kind", ["mlp", "pooled"])
def test_long_states_are_summed_alike_in_both_backends(kind: str, tmp_path: Path) -> None:
    head = turned(replace(SPECS[kind], hidden_sizes=(960, 2048), rank=16))
    assert export_onnx(head, tmp_path / "router.onnx") <= PARITY_TOLERANCE
