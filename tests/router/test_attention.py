"""The head that reads order: what it sees, against a plain loop; what it can learn that no head of one position can."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from speccascade.router.attention import ATTENTION_HEADS, DEFAULT_CONTEXT, AttentionHead, AttentionTrunk
from speccascade.router.examples import Examples
from speccascade.router.export import PARITY_TOLERANCE, export_onnx, parity_error
from speccascade.router.features import feature_index
from speccascade.router.head_base import HeadSpec
from speccascade.router.heads import RouterHead, build_head, make_head
from speccascade.router.runtime import OnnxHead, TorchHead

AGREE = feature_index("verified", "argmax_agree")
ESTIMATORS = ("gap", "two_confidence", "cost_sensitive")


def random_head(
    estimator: str = "gap", context: int = 4, seed: int = 0, feature_set: str = "verified"
) -> AttentionHead:
    head = make_head("attention", estimator, feature_set, (16, 24), context=context)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for values in head.parameters():
            values.copy_(torch.randn(values.shape, generator=generator) * 0.4)
    mean, std = torch.randn(head.width, generator=generator), torch.rand(head.width, generator=generator) + 0.5
    head.set_normalisation(mean, std)
    assert isinstance(head, AttentionHead)
    return head.eval()


def sequences(batch: int, length: int, width: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


def ask(head: AttentionHead, features: Tensor, alpha: float = 0.3) -> Tensor:
    gap: Tensor = head(features, *((torch.full(features.shape[:-1], alpha),) if head.reads_alpha else ()))
    return gap


def plain_outputs(head: AttentionHead, sequence: Tensor, alpha: float = 0.3) -> Tensor:
    """One sequence [L, F] position by position, key by key."""
    trunk, outputs = head.trunk, []
    assert isinstance(trunk, AttentionTrunk)
    width = trunk.enter.out_features
    size = width // ATTENTION_HEADS
    entered = [trunk.enter(head.normalise(features)) for features in sequence]
    projected = [trunk.project(trunk.attention_norm(one)) for one in entered]
    for place, stream in enumerate(entered):
        mixed = []
        for attention in range(ATTENTION_HEADS):
            part = slice(attention * size, (attention + 1) * size)
            query = projected[place][:width][part]
            scores, values = [], []
            for distance in range(head.context):
                other = place - distance
                if other < 0 or (distance and bool(sequence[other].isnan().all())):
                    continue
                bias = trunk.distance_bias[head.context - 1 - distance, attention]
                scores.append(query @ projected[other][width : 2 * width][part] / size**0.5 + bias)
                values.append(projected[other][2 * width :][part])
            weights = torch.stack(scores).softmax(dim=0)
            mixed.append((weights.unsqueeze(-1) * torch.stack(values)).sum(dim=0))
        stream = stream + trunk.mix(torch.cat(mixed))
        dial = [torch.tensor([alpha / (1 + abs(alpha))])] if head.reads_alpha else []
        stream = stream + trunk.layer(torch.cat([trunk.layer_norm(stream), *dial]))
        outputs.append(trunk.last(trunk.last_norm(stream)))
    return torch.stack(outputs)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("context", [1, 2, 4])
def test_it_equals_a_plain_loop(estimator: str, context: int) -> None:
    head, features = random_head(estimator, context), sequences(2, 7)
    features[0, 2] = features[1, 0] = features[1, 5] = torch.nan
    features[0, 4, 3] = torch.nan
    alpha = torch.full((2, 7), 0.3) if head.reads_alpha else None
    expected = torch.stack([plain_outputs(head, one) for one in features])
    torch.testing.assert_close(head._outputs(features, alpha), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("context", [1, 3, 8])
def test_a_position_reads_itself_and_those_in_reach_and_no_other(estimator: str, context: int) -> None:
    head, features, place = random_head(estimator, context), sequences(1, 16), 10
    before = ask(head, features)[0, place]
    for changed in range(16):
        other = features.clone()
        other[0, changed] += 1.0
        same = torch.equal(ask(head, other)[0, place], before)
        assert same == (not place - context < changed <= place), changed


def test_what_comes_before_reach_may_be_cut_off() -> None:
    head, features = random_head(context=4), sequences(1, 12)
    whole = head(features)
    for end in range(1, 13):
        short = head(features[:, max(0, end - 4) : end])
        torch.testing.assert_close(short[:, -1], whole[:, end - 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_padding_on_either_side_changes_nothing(estimator: str) -> None:
    head, features = random_head(estimator), sequences(3, 6)
    alone = [ask(head, features[row : row + 1, : 4 + row])[0] for row in range(3)]
    padded = torch.full((3, 12, 16), torch.nan)
    for row in range(3):
        padded[row, row + 1 : row + 5 + row] = features[row, : 4 + row]
    together = ask(head, padded)
    for row in range(3):
        torch.testing.assert_close(together[row, row + 1 : row + 5 + row], alone[row], rtol=0, atol=1e-6)
    assert torch.isfinite(together).all(), "even padding itself must stay finite, or it would spoil the gradient"


def test_a_missing_value_counts_as_its_mean_and_a_missing_position_as_nothing() -> None:
    head, features = random_head(), sequences(1, 5)
    missing, at_mean = features.clone(), features.clone()
    missing[0, 3, 2], at_mean[0, 3, 2] = torch.nan, head.feature_mean[2]
    assert torch.equal(head(missing), head(at_mean))
    missing[0, 3], at_mean[0, 3] = torch.nan, head.feature_mean
    told = [head._outputs(features)[0, 4] for features in (missing, at_mean)]
    assert not torch.allclose(*told, atol=1e-3), "a position at the mean is a key, a missing one is none"


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_untrained_head_sees_no_gap(estimator: str) -> None:
    head = make_head("attention", estimator, "verified", (32, 32))
    assert head.context == DEFAULT_CONTEXT == 8
    features = sequences(2, 5)
    features[..., AGREE] = 0.0
    assert torch.equal(ask(head, features), torch.zeros(2, 5, 2))


def test_where_both_name_the_same_token_the_zero_one_gap_is_zero() -> None:
    head, features = random_head(), sequences(4, 6)
    features[..., AGREE] = (features[..., AGREE] > 0).float()
    agree = features[..., AGREE] == 1
    gap = head(features)
    assert agree.any() and (gap[agree][:, 0] == 0).all() and (gap[~agree][:, 0] != 0).all() and (gap[..., 1] != 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_padding_weighs_nothing_in_the_loss(estimator: str) -> None:
    head, features = random_head(estimator), sequences(2, 6)
    correctness, tv = torch.rand(2, 6, 2, 2), torch.rand(2, 6)
    whole = Examples(features[:1], correctness[:1], tv[:1], torch.ones(1, 6))
    features[1], correctness[1] = torch.nan, 0.0
    weight = torch.tensor([1.0, 0.0]).unsqueeze(1).expand(2, 6)
    torch.testing.assert_close(head.loss(Examples(features, correctness, tv, weight)), head.loss(whole))
    head.loss(Examples(features, correctness, tv, weight)).backward()
    assert all(values.grad is None or values.grad.isfinite().all() for values in head.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": (32,)}, r"hidden: expected two widths >= 1 for attention, .* got \(32,\)"),
        ({"hidden": (30, 32)}, r"the first a multiple of 4, got \(30, 32\)"),
        ({"hidden": (32, 0)}, r"hidden: expected two widths >= 1"),
        ({"context": -1}, r"context: expected a number >= 0, got -1"),
    ],
)
def test_what_it_cannot_be_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_head(HeadSpec("attention", **({"hidden": (32, 32)} | options)))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_it_exports_with_any_batch_and_length(estimator: str, tmp_path: Path) -> None:
    head = random_head(estimator, context=3)
    path = tmp_path / "router.onnx"
    assert export_onnx(head, path) <= PARITY_TOLERANCE and parity_error(head, path) <= PARITY_TOLERANCE
    runtime = OnnxHead(path)
    assert runtime.width == head.width
    for batch, length in [(1, 1), (1, 9), (3, 1), (5, 4), (2, 70)]:
        features = sequences(batch, length, seed=batch)
        features[0, length // 2] = torch.nan
        dial = (torch.full((batch, length), 0.3),) if head.reads_alpha else ()
        expected = TorchHead(head)(features, *dial)
        torch.testing.assert_close(runtime(features, *dial), expected, rtol=0, atol=PARITY_TOLERANCE)


def delayed_task(batch: int, length: int, seed: int) -> Examples:
    """Which model is right is decided by the first feature of two positions before; a fifth of all is padding."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, length, 5, generator=generator)
    lean = 0.4 * functional.pad(features[:, :-2, 0], (2, 0)).mul(2).tanh()
    verifier, draft = 0.5 + lean, 0.5 - lean
    chances = torch.stack([draft, verifier], dim=-1)
    right = (torch.rand(batch, length, 2, generator=generator) < chances).float()
    weight = (torch.arange(length) < 0.8 * length).float().expand(batch, length).clone()
    features[weight == 0] = torch.nan
    return Examples(features, torch.stack([right, chances], dim=2), torch.ones(batch, length), weight)


def trained(head: RouterHead, examples: Examples) -> RouterHead:
    optimiser = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(200):
        optimiser.zero_grad()
        head.loss(examples).backward()
        optimiser.step()
    return head


@pytest.mark.parametrize("estimator", ["gap", "two_confidence"])
def test_it_learns_what_lies_two_positions_back_and_one_position_alone_cannot(estimator: str) -> None:
    learn, held_out = delayed_task(64, 20, seed=0), delayed_task(32, 20, seed=1)
    counts = held_out.weight > 0  # type: ignore[operator]
    truth = (held_out.correctness[..., 1, 1] - held_out.correctness[..., 1, 0])[counts]

    def error(kind: str, hidden: tuple[int, ...], context: int) -> float:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            head = trained(make_head(kind, estimator, "draft_only", hidden, context=context), learn)
        with torch.no_grad():
            return float((head(held_out.features)[..., 1][counts] - truth).square().mean())

    order, alone = error("attention", (16, 16), 4), error("mlp", (32, 32), 0)
    blank = float(truth.var())
    assert order < 0.25 * blank, (order, blank)
    assert alone > 0.9 * blank, (alone, blank)
