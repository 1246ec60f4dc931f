"""The pooled estimate: p° before training, a distribution always, and the truth's own pool after."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speccascade.router.examples import Examples
from speccascade.router.export import PARITY_TOLERANCE, export_onnx
from speccascade.router.heads import build_head
from speccascade.router.pooled import LARGEST_WEIGHT, LOG_NOTHING, PooledEstimator

from ..conftest import opinionated_pooled, pooled_spec

N, V, K = 64, 30, 12


def random_pairs(seed: int = 0, count: int = N, kept: int = K) -> tuple[Tensor, Tensor]:
    """q and p whole ``[N, V, 2]``, and their first tokens as candidates ``[N, K, 2]``."""
    generator = torch.Generator().manual_seed(seed)
    pairs = (torch.randn(count, V, 2, generator=generator) * 2).softmax(dim=1)
    return pairs, pairs[:, :kept]


def shaken() -> PooledEstimator:
    """A head with opinions of its own."""
    return opinionated_pooled(pooled_spec(hidden=(8,)), spread=0.3)


def test_untrained_it_is_p_itself() -> None:
    _, candidates = random_pairs()
    head = PooledEstimator(pooled_spec())
    belief = head(torch.randn(N, head.width), candidates).exp()
    torch.testing.assert_close(belief[:, :-1], candidates[..., 1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(belief[:, -1], 1 - candidates[..., 1].sum(dim=1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("features", [0.0, 3.0, float("nan"), float("inf"), -1e30])
def test_it_is_a_distribution_whatever_it_reads(features: float) -> None:
    head, pairs = shaken(), random_pairs()[1]
    edges = torch.zeros(4, K, 2)
    edges[1, 0], edges[2, 0, 0], edges[2, 1, 1], edges[3, :, 0] = 1.0, 1.0, 1.0, 1 / K
    candidates = torch.cat([pairs, edges])
    log_belief = head(torch.full((len(candidates), head.width), features), candidates)
    assert torch.isfinite(log_belief).all()
    torch.testing.assert_close(log_belief.exp().sum(dim=-1), torch.ones(len(candidates)))


def test_padding_gets_no_mass_and_changes_nothing() -> None:
    head, (_, candidates) = shaken(), random_pairs()
    features = torch.randn(N, head.width)
    padded = torch.cat([candidates[:, :5], torch.zeros(N, 3, 2), candidates[:, 5:]], dim=1)
    plain, longer = head(features, candidates), head(features, padded)
    assert (longer[:, 5:8] == LOG_NOTHING).all() and math.exp(LOG_NOTHING) < 1e-8
    torch.testing.assert_close(torch.cat([longer[:, :5], longer[:, 8:]], dim=1), plain)


def test_the_order_of_candidates_does_not_matter() -> None:
    head, (_, candidates) = shaken(), random_pairs()
    features, order = torch.randn(N, head.width), torch.randperm(K, generator=torch.Generator().manual_seed(1))
    expected = head(features, candidates)
    torch.testing.assert_close(head(features, candidates[:, order])[:, :-1], expected[:, :-1][:, order])


def test_the_pool_is_the_formula() -> None:
    """One position by hand: a·log q + b·log p + c·f, the tail with d on top."""
    head = PooledEstimator(pooled_spec("draft_only", hidden=()))
    wanted = torch.tensor([0.4, 0.7, 0.3, -0.2, 0.1, 0.25, -0.5])  # a, b, four c, d
    with torch.no_grad():
        head.trunk[-1].bias.copy_(LARGEST_WEIGHT * torch.atanh(wanted / LARGEST_WEIGHT))
    q, p = [0.5, 0.2, 0.1], [0.1, 0.6, 0.0]
    found = head(torch.zeros(1, head.width), torch.tensor([q, p]).T.unsqueeze(0))[0].detach().exp().tolist()
    masses = [
        (*pair, mine, theirs) for pair, mine, theirs in zip(zip(q, p, strict=True), (1, 0, 0), (0, 1, 0), strict=True)
    ]
    scores = []
    for x, y, mine, theirs in [*masses, (1 - sum(q), 1 - sum(p), 0, 0)]:
        log_q, log_p = math.log(max(x, 1e-8)), math.log(max(y, 1e-8))
        both = math.log((max(x, 1e-8) + max(y, 1e-8)) / 2)
        scores.append(0.4 * log_q + 0.7 * log_p + 0.3 * mine - 0.2 * theirs + 0.1 * min(log_q, log_p) + 0.25 * both)
    scores[-1] -= 0.5
    total = sum(math.exp(score) for score in scores)
    assert found == pytest.approx([math.exp(score) / total for score in scores], rel=1e-4)


def test_the_loss_is_the_log_loss_of_the_truth_and_knows_weights() -> None:
    head, (_, candidates) = shaken(), random_pairs()
    features, truth = torch.randn(N, head.width), torch.randint(K + 1, (N,))
    examples = Examples(features, torch.zeros(N, 2, 2), torch.zeros(N), None, candidates, truth)
    found = head(features, candidates).detach()
    each = torch.tensor([-float(row[place]) for row, place in zip(found, truth, strict=True)])
    torch.testing.assert_close(head.loss(examples).detach(), each.mean())
    weight = torch.rand(N)
    torch.testing.assert_close(
        head.loss(examples._replace(weight=weight)).detach(), (each * weight).sum() / weight.sum()
    )


def test_both_gaps_of_one_p_hat_equal_a_plain_loop() -> None:
    """P̂(argmax p) − P̂(argmax q), and Σ P̂·(p − q) over the candidates; padding and the tail have no say."""
    head, (_, candidates) = shaken(), random_pairs()
    candidates = candidates.masked_fill(torch.arange(K).view(1, K, 1) >= 9, 0.0)
    candidates[:8, :, 0] = candidates[:8, :, 1]  # where both name the same token there is nothing to gain
    features = torch.randn(N, head.width)
    examples = Examples(features, torch.zeros(N, 2, 2), torch.zeros(N), None, candidates)
    found = head.estimate(examples).detach()
    assert head.gap_losses == ("zero_one", "sampled") and found.shape == (N, 2)
    for row in range(N):
        belief = head(features[row : row + 1], candidates[row : row + 1])[0].detach().exp().tolist()
        q, p = candidates[row].T.tolist()
        zero_one = belief[p.index(max(p))] - belief[q.index(max(q))]
        sampled = sum(chance * (b - a) for chance, a, b in zip(belief[:-1], q, p, strict=True))
        assert found[row].tolist() == pytest.approx([zero_one, sampled], abs=1e-6)
    assert (found[:8] == 0).all() and (found[8:, 1] != 0).all() and (found[:, 0] < 0).any()
    with pytest.raises(ValueError, match="candidates: expected them for a pooled head"):
        head.estimate(examples._replace(candidates=None))


def test_missing_features_count_as_their_mean_and_never_reach_the_gradient() -> None:
    head, (_, candidates) = shaken(), random_pairs()
    head.set_normalisation(torch.full((head.width,), 0.3), torch.ones(head.width))
    missing = torch.full((N, head.width), torch.nan)
    torch.testing.assert_close(head(missing, candidates), head(torch.full_like(missing, 0.3), candidates))
    weight = torch.ones(N)
    weight[0] = 0
    truth = torch.zeros(N, dtype=torch.long)
    head.loss(Examples(missing, torch.zeros(N, 2, 2), torch.zeros(N), weight, candidates, truth)).backward()
    assert all(torch.isfinite(values.grad).all() for values in head.parameters() if values.grad is not None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": None}, "candidates, truth: expected both for a pooled head"),
        ({"truth": None}, "candidates, truth: expected both for a pooled head"),
        ({"truth": torch.zeros(3, dtype=torch.long)}, r"truth: expected shape \[64\], got \[3\]"),
        ({"weight": torch.ones(3)}, r"weight: expected shape \[64\], got \[3\]"),
    ],
)
def test_examples_that_do_not_fit_are_refused(change: dict[str, Tensor | None], message: str) -> None:
    head, (_, candidates) = shaken(), random_pairs()
    truth = torch.zeros(N, dtype=torch.long)
    examples = Examples(torch.zeros(N, head.width), torch.zeros(N, 2, 2), torch.zeros(N), None, candidates, truth)
    with pytest.raises(ValueError, match=message):
        head.loss(examples._replace(**change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 1}, "top_k: expected a number in"),
        ({"hidden": (8, 0)}, "hidden: expected widths >= 1"),
        ({"feature_set": "verifid"}, "feature_set: .*did you mean 'verified'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_head(pooled_spec(**arguments))  # type: ignore[arg-type]


def test_onnx_and_torch_agree(tmp_path: Path) -> None:
    assert export_onnx(shaken(), tmp_path / "pooled.onnx") <= PARITY_TOLERANCE


def test_training_finds_the_pool_that_the_truth_follows() -> None:
    """P ∝ p^0.6 q^0.3: the verifier is overconfident and the drafter knows something of its own."""
    kept, generator = V, torch.Generator().manual_seed(5)
    pairs, candidates = random_pairs(seed=3, count=4000, kept=kept)
    truth_law = (0.3 * pairs[..., 0].log() + 0.6 * pairs[..., 1].log()).softmax(dim=-1)
    truth = torch.multinomial(truth_law, 1, generator=generator)[:, 0]
    head = PooledEstimator(pooled_spec("draft_only", hidden=()))
    features = torch.randn(len(truth), head.width, generator=generator)
    examples = Examples(features, torch.zeros(len(truth), 2, 2), torch.zeros(len(truth)), None, candidates, truth)

    def expected_loss() -> float:
        return float(-(truth_law * head(features, candidates)[:, :-1]).sum(dim=-1).mean().detach())

    plug_in, entropy = expected_loss(), float(-(truth_law * truth_law.log()).sum(dim=-1).mean())
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        head.loss(examples).backward()
        optimizer.step()
    assert expected_loss() - entropy < 0.02
    assert plug_in - expected_loss() > 0.1
