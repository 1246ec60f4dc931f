from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from speccascade.cascade import Stats
from speccascade.router.examples import Examples
from speccascade.router.features import build_features
from speccascade.router.heads import RouterHead, make_head
from speccascade.router.position_head import squash, unsquash

ALPHAS = (-0.3, 0.0, 0.2, 0.5, 1.0, 3.0)


def random_examples(count: int, seed: int = 0, width: int = 5) -> tuple[Examples, Tensor]:
    """Positions whose true gap and distance are known functions of two features, with noisy 0-1 labels."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, width, generator=generator)
    chances = torch.stack([(features[:, 0] - 0.3).sigmoid(), (features[:, 0] + features[:, 1]).sigmoid()], dim=-1)
    zero_one = (torch.rand(count, 2, generator=generator) < chances).float()
    tv = (0.7 * features[:, 2]).sigmoid()
    examples = Examples(features, torch.stack([zero_one, chances], dim=1), tv)
    return examples, chances[:, 1] - chances[:, 0]


def objective(defer: Tensor, gap: Tensor, tv: Tensor, alpha: float) -> float:
    """What the optimal rule minimises, up to the drafter's own loss."""
    return float((defer.float() * (alpha * tv - gap)).mean())


def test_its_decisions_approach_the_optimal_rule_at_every_alpha() -> None:
    """One head, several prices: what it loses to the optimal rule is little of what is to be had."""
    examples, _ = random_examples(20_000)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = make_head("mlp", "cost_sensitive", "draft_only", (32, 32))
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(300):
        rows = torch.randint(len(examples.tv), (4096,), generator=generator)
        batch = Examples(*(values[rows] for values in examples[:3]))
        optimiser.zero_grad()
        head.loss(batch, generator).backward()
        optimiser.step()
    fresh, gap = random_examples(20_000, seed=1)
    for alpha in ALPHAS:
        margin = head(fresh.features, torch.full_like(fresh.tv, alpha))
        best = objective(gap > alpha * fresh.tv, gap, fresh.tv, alpha)
        naive = min(0.0, objective(torch.ones_like(gap), gap, fresh.tv, alpha))
        for column, loss in enumerate(head.losses):
            regret = objective(margin[:, column] > 0, gap, fresh.tv, alpha) - best
            assert regret < 0.01, f"{loss} at alpha {alpha}: {regret:.4f} of {naive - best:.4f}"


def test_the_loss_is_its_definition(weighted_head: Callable[..., RouterHead]) -> None:
    head = weighted_head(estimator="cost_sensitive", feature_set="draft_only", losses=("zero_one", "sampled", "log"))
    examples, _ = random_examples(500)
    drawn = torch.rand(500, generator=torch.Generator().manual_seed(7)) * 2 - 1
    alpha = unsquash(drawn)
    expected = []
    for row in range(500):
        margin = head(examples.features[row : row + 1], alpha[row : row + 1])[0].detach()
        (hit_q, hit_p), (q, p) = examples.correctness[row].tolist()
        log_gap = float((torch.tensor(p).log() - torch.tensor(q).log()).clamp(-20, 20))
        for column, gap in enumerate((hit_p - hit_q, p - q, log_gap)):
            worth = gap - float(alpha[row] * examples.tv[row])
            sign = (worth > 0) - (worth < 0)
            cost = abs(worth) / (1 + abs(float(alpha[row])))
            expected.append(cost * float(torch.nn.functional.softplus(-sign * margin[column])))
    loss = head.loss(examples, torch.Generator().manual_seed(7)).detach()
    assert float(loss) == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_without_a_generator_alpha_is_spread_evenly_and_alike_each_time(
    weighted_head: Callable[..., RouterHead],
) -> None:
    head = weighted_head(estimator="cost_sensitive", feature_set="draft_only")
    examples, _ = random_examples(4000)
    assert torch.equal(head.loss(examples), head.loss(examples))
    drawn = [float(head.loss(examples, torch.Generator().manual_seed(seed)).detach()) for seed in range(5)]
    assert len(set(drawn)) == 5
    assert min(drawn) - 0.05 < float(head.loss(examples).detach()) < max(drawn) + 0.05


def test_draws_reach_every_price() -> None:
    alpha = unsquash(torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    assert torch.isfinite(alpha).all()
    assert abs(float((alpha.abs() < 1).float().mean()) - 0.5) < 0.01 and (alpha.abs() > 10).float().mean() > 0.05
    torch.testing.assert_close(squash(unsquash(torch.linspace(-0.99, 0.99, 11))), torch.linspace(-0.99, 0.99, 11))


def test_ties_are_decided_by_the_sign_of_alpha(
    weighted_head: Callable[..., RouterHead], make_stats: Callable[..., Stats]
) -> None:
    stats = make_stats(batch=40, vocab=4)
    features = build_features(stats, "verified").flatten(end_dim=-2)
    agree = stats.argmax_agree.flatten() == 1
    head = weighted_head(estimator="cost_sensitive")
    for alpha, decision in ((-0.2, True), (0.0, False), (0.4, False)):
        margin = head(features, torch.full((len(features),), alpha))
        assert ((margin[agree, 0] > 0) == decision).all()
        assert (margin[~agree, 0] > 0).any() and (margin[:, 1] != 0).all()


def test_alpha_is_asked_for_and_refused_by_name(weighted_head: Callable[..., RouterHead]) -> None:
    fed, plain = weighted_head(estimator="cost_sensitive"), weighted_head()
    features = torch.zeros(2, 16)
    with pytest.raises(ValueError, match="alpha: expected one value a position for estimator 'cost_sensitive', got no"):
        fed(features)
    with pytest.raises(ValueError, match="alpha: expected none for estimator 'gap', got some"):
        plain(features, torch.zeros(2))
    with pytest.raises(ValueError, match="set_calibration: expected a head that estimates a gap, got 'cost_sensitive'"):
        fed.set_calibration("sampled", torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    assert fed.reads_alpha and not plain.reads_alpha
