"""The accept/reject step emits the target, exactly."""

import pytest
import torch
from scipy.stats import chi2

from speccascade.cascade.distributions import logits_to_probs
from speccascade.cascade.verify import acceptance_probability, emission_law, rejection_probability, verify_block


def random_probs(*shape: int, seed: int, scale: float = 2.0) -> torch.Tensor:
    return logits_to_probs(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale)


def test_accepted_mass_plus_residual_is_the_target() -> None:
    q, target = random_probs(200, 17, seed=0), random_probs(200, 17, seed=1)
    torch.testing.assert_close(emission_law(target, q), target, atol=1e-6, rtol=0)
    torch.testing.assert_close(rejection_probability(target, q), 0.5 * (target - q).abs().sum(-1), atol=1e-6, rtol=0)


def test_disjoint_supports_and_equal_distributions() -> None:
    q = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    target = torch.tensor([[0.0, 0.0, 0.3, 0.7]])
    assert torch.equal(emission_law(target, q), target)
    assert torch.equal(emission_law(q, q), q)
    assert acceptance_probability(q[None], q[None], torch.tensor([[0]])) == 1


def test_nothing_is_rejected_that_could_not_be_replaced() -> None:
    # A target a rounding error below q everywhere leaves no residual to draw from.
    q = torch.tensor([[[0.25, 0.75]]])
    target = q * (1 - 1e-6)
    assert acceptance_probability(target, q, torch.tensor([[1]])) == 1


def test_everything_after_the_first_rejection_is_dropped() -> None:
    # Position 0 keeps its token for sure, position 1 rejects for sure, position 2 would keep.
    q = torch.eye(3)[None, [0, 1, 2]]
    target = torch.eye(3)[None, [0, 2, 2]]
    verdict = verify_block(target, q, torch.tensor([[0, 1, 2]]), torch.rand(1, 4))
    assert verdict.accepted.tolist() == [1]
    assert verdict.replacement.tolist() == [2]


def test_full_acceptance_has_no_replacement() -> None:
    q = torch.eye(3)[None, [0, 1]]
    verdict = verify_block(q, q, torch.tensor([[0, 1]]), torch.rand(1, 3))
    assert verdict.accepted.tolist() == [2]
    assert verdict.replacement.tolist() == [-1]


@pytest.mark.parametrize("seed", range(3))
def test_first_position_follows_the_target_in_many_rows(seed: int) -> None:
    rows, vocab = 60_000, 7
    q, target = random_probs(1, 1, vocab, seed=10 + seed), random_probs(1, 1, vocab, seed=20 + seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(q[0, 0], rows, replacement=True, generator=generator).unsqueeze(1)
    verdict = verify_block(
        target.expand(rows, -1, -1), q.expand(rows, -1, -1), tokens, torch.rand(rows, 2, generator=generator)
    )
    emitted = torch.where(verdict.accepted == 1, tokens[:, 0], verdict.replacement)
    expected = target[0, 0].double() * rows
    statistic = float(((emitted.bincount(minlength=vocab) - expected) ** 2 / expected).sum())
    assert statistic < chi2.ppf(1 - 1e-6, df=vocab - 1), f"chi-square {statistic:.1f}: odds of a false alarm are 1e-6"
