from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from speccascade.cascade import Stats
from speccascade.router.examples import Examples
from speccascade.router.export import PARITY_TOLERANCE, export_onnx
from speccascade.router.features import FEATURE_SETS, build_features, feature_index, feature_width, needs_hidden
from speccascade.router.heads import RouterHead, make_head
from speccascade.router.position_head import gap_labels
from speccascade.router.runtime import OnnxHead, TorchHead

AGREE = feature_index("verified", "argmax_agree")
GAP_ESTIMATORS = ("gap", "two_confidence")
KINDS = ("linear", "mlp", "trees")


def features_of(stats: Stats, feature_set: str = "verified") -> Tensor:
    return build_features(stats, feature_set).flatten(end_dim=-2)


def label(features: Tensor, correctness: Tensor, weight: Tensor | None = None) -> Examples:
    return Examples(features, correctness, torch.ones(len(features)), weight)


@pytest.mark.parametrize("feature_set", FEATURE_SETS)
@pytest.mark.parametrize("estimator", GAP_ESTIMATORS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_head_sees_no_gap(kind: str, estimator: str, feature_set: str) -> None:
    sizes = (3, 4) if needs_hidden(feature_set) else ()
    head = make_head(kind, estimator, feature_set, hidden_sizes=sizes)
    gap = head(torch.randn(5, feature_width(feature_set, sizes)))
    assert gap.shape == (5, 2)
    assert torch.equal(gap, torch.zeros_like(gap))


@pytest.mark.parametrize("estimator", GAP_ESTIMATORS)
@pytest.mark.parametrize("kind", KINDS)
def test_gaps_stay_probability_differences(kind: str, estimator: str, weighted_head: Callable[..., RouterHead]) -> None:
    head = weighted_head(kind, estimator)
    wild = torch.tensor([[0.0], [1e30], [-1e30], [torch.inf], [-torch.inf], [torch.nan]]).expand(-1, head.width)
    gap = head(wild)
    assert torch.isfinite(gap).all() and gap.abs().amax() <= 1


@pytest.mark.parametrize("estimator", GAP_ESTIMATORS)
def test_a_missing_feature_counts_as_its_mean(estimator: str, weighted_head: Callable[..., RouterHead]) -> None:
    head = weighted_head(estimator=estimator)
    features = torch.randn(20, head.width)
    column = 9
    at_mean = features.clone()
    at_mean[:, column] = head.feature_mean[column]
    features[:, column] = torch.nan
    assert torch.equal(head(features), head(at_mean))
    assert head(features).unique().numel() > 2


@pytest.mark.parametrize("estimator", GAP_ESTIMATORS)
def test_where_both_name_the_same_token_the_zero_one_gap_is_zero(
    estimator: str, weighted_head: Callable[..., RouterHead], make_stats: Callable[..., Stats]
) -> None:
    stats = make_stats(batch=40, vocab=4)
    agree = stats.argmax_agree.flatten() == 1
    gap = weighted_head(estimator=estimator)(features_of(stats))
    zero_one, sampled = gap.unbind(dim=-1)
    assert agree.any() and (~agree).any()
    assert (zero_one[agree] == 0).all() and (zero_one[~agree] != 0).all()
    assert (sampled != 0).all()


def test_confidences_differ_by_the_gap(
    weighted_head: Callable[..., RouterHead], make_stats: Callable[..., Stats]
) -> None:
    head = weighted_head(estimator="two_confidence")
    features = features_of(make_stats(batch=40, vocab=4))
    confidences = head.confidences(features)
    assert confidences.shape == (160, 2, 2)
    assert ((confidences >= 0) & (confidences <= 1)).all() and confidences.std() > 0.1
    torch.testing.assert_close(head(features), confidences[..., 1] - confidences[..., 0])


def test_a_gap_head_has_no_confidences(weighted_head: Callable[..., RouterHead]) -> None:
    with pytest.raises(ValueError, match="two_confidence"):
        weighted_head(estimator="gap").confidences(torch.zeros(1, 16))


@pytest.mark.parametrize("kind", ("linear", "mlp"))
def test_parameters_are_distinct(kind: str) -> None:
    """Layers that share one module look deep and are not."""
    hidden = (8, 8, 8)
    head = make_head(kind, "gap", "draft_only", hidden)
    widths = [5, *(hidden if kind == "mlp" else ()), 2]
    expected = sum(before * after + after for before, after in pairwise(widths))
    storages = {parameter.data_ptr() for parameter in head.parameters()}
    assert sum(parameter.numel() for parameter in head.parameters()) == expected
    assert len(storages) == len(list(head.parameters()))
    assert not any(name.startswith(("feature_", "tie_")) for name, _ in head.named_parameters())


@pytest.mark.parametrize("estimator", GAP_ESTIMATORS)
@pytest.mark.parametrize("kind", ("linear", "mlp"))
def test_training_recovers_the_expected_gap(kind: str, estimator: str) -> None:
    """Fisher consistency on a problem with a known answer: the gap depends on one feature, labels are noisy."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(8000, len(FEATURE_SETS["draft_only"]), generator=generator)
    draft_right, verifier_right = (features[:, 0] * 0.8).sigmoid(), (features[:, 1] * 0.8).sigmoid()
    chances = torch.stack([draft_right, verifier_right], dim=-1)
    zero_one = (torch.rand(8000, 2, generator=generator) < chances).float()
    correctness = torch.stack([zero_one, chances], dim=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = make_head(kind, estimator, "draft_only", (16,))
    optimiser = torch.optim.Adam(head.parameters(), lr=0.02)
    for _ in range(150):
        optimiser.zero_grad()
        head.loss(label(features, correctness)).backward()
        optimiser.step()
    error = (head(features) - (verifier_right - draft_right).unsqueeze(-1)).square().mean(dim=0).sqrt()
    assert error[0] < 0.06 and error[1] < 0.04, f"root mean square error of the gaps: {error.tolist()}"


@pytest.mark.parametrize("estimator", GAP_ESTIMATORS)
def test_weights_count_positions(estimator: str, weighted_head: Callable[..., RouterHead]) -> None:
    head = weighted_head(estimator=estimator)
    features, correctness = torch.randn(6, head.width), torch.rand(6, 2, 2)
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(
        head.loss(label(features, correctness, weight)), head.loss(label(features[:3], correctness[:3]))
    )
    torch.testing.assert_close(
        head.loss(label(features, correctness, torch.ones(6))), head.loss(label(features, correctness))
    )


def test_normalisation_is_part_of_the_graph() -> None:
    head = make_head("linear", "gap", "draft_only")
    with torch.no_grad():
        head.trunk[0].weight.fill_(0.01)
    mean, std = torch.arange(5.0), torch.tensor([1.0, 2.0, 4.0, 0.0, 1.0])
    head.set_normalisation(mean, std)
    assert torch.equal(head(mean.unsqueeze(0)), torch.zeros(1, 2))
    torch.testing.assert_close(head((mean + std).unsqueeze(0)), torch.full((1, 2), 0.04))
    assert {"feature_mean", "feature_std"} <= set(head.state_dict())


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        (torch.zeros(4), torch.ones(5), r"mean: expected shape \[5\], got \[4\]"),
        (torch.zeros(5), torch.full((5,), torch.nan), "std: expected finite values"),
        (torch.zeros(5), -torch.ones(5), "std: expected values >= 0"),
    ],
)
def test_a_bad_normalisation_is_refused(mean: Tensor, std: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head("linear", "gap", "draft_only").set_normalisation(mean, std)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "liner"}, "kind: .*did you mean 'linear'"),
        ({"estimator": "two_confidences"}, "estimator: .*did you mean 'two_confidence'"),
        ({"feature_set": "draft"}, "feature_set: .*got 'draft'"),
        ({"hidden": ()}, "hidden: expected at least one width"),
        ({"hidden": (16, 0)}, "hidden: expected at least one width"),
        ({"losses": ("zero_one", "logs")}, "losses: .*did you mean 'log'"),
        ({"losses": ()}, "losses: expected at least one, each once"),
        ({"losses": ("log", "log")}, "losses: expected at least one, each once"),
        ({"estimator": "two_confidence", "losses": ("log",)}, "two_confidence learns chances.*got 'log'"),
        ({"kind": "trees", "estimator": "cost_sensitive"}, "trees learn 'gap' or 'two_confidence'"),
        ({"kind": "linear", "context": 3}, "context: expected 0 for kind 'linear'"),
        ({"context": -1}, "context: expected a number >= 0"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(**arguments)


def test_correctness_of_another_shape_is_refused(weighted_head: Callable[..., RouterHead]) -> None:
    head = weighted_head()
    with pytest.raises(ValueError, match=r"correctness: expected shape \[3, 2, 2\], got \[4, 2, 2\]"):
        head.loss(label(torch.zeros(3, head.width), torch.zeros(4, 2, 2)))
    with pytest.raises(ValueError, match=r"tv: expected shape \[3\], got \[2\]"):
        head.loss(Examples(torch.zeros(3, head.width), torch.zeros(3, 2, 2), torch.zeros(2)))
    with pytest.raises(ValueError, match=r"weight: expected shape \[3\], got \[2\]"):
        head.loss(label(torch.zeros(3, head.width), torch.zeros(3, 2, 2), torch.ones(2)))


def test_a_log_gap_is_in_nats_and_cut() -> None:
    """Against the definition, in double precision; a chance of zero costs no more than 20 nats."""
    correctness = torch.zeros(4, 2, 2)
    correctness[:, 1] = torch.tensor([[0.5, 0.25], [1e-3, 0.9], [0.0, 1.0], [0.3, 0.0]])
    q, p = correctness[:, 1].double().clamp_min(1e-300).unbind(dim=-1)
    expected = (p.log() - q.log()).clamp(-20, 20).float()
    torch.testing.assert_close(gap_labels(correctness, ("log",))[:, 0], expected)
    assert expected[2:].tolist() == [20, -20]
    zero_one, sampled, log = gap_labels(correctness, ("zero_one", "sampled", "log")).unbind(dim=-1)
    torch.testing.assert_close(log, expected)
    torch.testing.assert_close(sampled, (p - q).float(), rtol=1e-6, atol=1e-6)
    assert (zero_one == 0).all()


def test_the_log_column_alone_may_pass_one_and_is_heard_at_ties(
    weighted_head: Callable[..., RouterHead], make_stats: Callable[..., Stats]
) -> None:
    head = weighted_head(losses=("log", "zero_one"))
    with torch.no_grad():
        head.trunk[-1].weight *= 8
    features = features_of(make_stats(batch=40, vocab=4))
    log, zero_one = head(features).unbind(dim=-1)
    assert 1 < log.abs().max() <= 20 and zero_one.abs().max() <= 1
    agree = features[:, AGREE] == 1
    assert (zero_one[agree] == 0).all() and (log[agree] != 0).all()


def test_training_recovers_a_log_gap() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(4000, 5, generator=generator)
    correctness = torch.zeros(4000, 2, 2)
    correctness[:, 1, 0] = 0.1
    correctness[:, 1, 1] = 0.1 * (2 * features[:, 0] + 0.3 * torch.randn(4000, generator=generator)).exp()
    head = make_head("linear", "gap", "draft_only", losses=("log",))
    optimiser = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(200):
        optimiser.zero_grad()
        head.loss(label(features, correctness)).backward()
        optimiser.step()
    assert (head(features)[:, 0] - 2 * features[:, 0]).abs().mean() < 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("estimator", GAP_ESTIMATORS)
def test_sequences_of_positions_are_positions(
    kind: str, estimator: str, weighted_head: Callable[..., RouterHead]
) -> None:
    """`[B, L]` gives what `[N]` gives; padding (weight 0, features NaN) changes no loss."""
    head = weighted_head(kind, estimator)
    features, correctness = torch.randn(6, head.width), torch.rand(6, 2, 2)
    torch.testing.assert_close(head(features.reshape(2, 3, -1)), head(features).reshape(2, 3, 2))
    padded = torch.full((2, 4, head.width), torch.nan)
    padded[:, :3] = features.reshape(2, 3, -1)
    known = torch.zeros(2, 4, 2, 2)
    known[:, :3] = correctness.reshape(2, 3, 2, 2)
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0]).expand(2, 4)
    sequences = head.loss(Examples(padded, known, torch.ones(2, 4), weight))
    torch.testing.assert_close(sequences, head.loss(label(features, correctness)))


def test_dropout_is_for_training_alone(weighted_head: Callable[..., RouterHead], tmp_path: Path) -> None:
    """Run in either backend, a head that was trained with dropout answers as one without."""
    head = weighted_head()
    features = torch.randn(50, head.width, generator=torch.Generator().manual_seed(0))
    expected = head(features).detach()
    layers = [layer for layer in head.modules() if isinstance(layer, nn.Dropout)]
    assert len(layers) == 2 and all(layer.p == 0 for layer in layers)
    for layer in layers:
        layer.p = 0.5
    assert not torch.allclose(head.train()(features), expected, atol=0.01)
    assert export_onnx(head, tmp_path / "router.onnx") <= PARITY_TOLERANCE
    torch.testing.assert_close(OnnxHead(tmp_path / "router.onnx")(features), expected, rtol=0, atol=1e-5)
    assert torch.equal(TorchHead(head)(features), expected)
