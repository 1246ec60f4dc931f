"""A router that reads order: what it is told of the positions before a block, and who may ask it what."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speccascade.cascade import Stats, VerifyBlock
from speccascade.router.bundle import save_bundle
from speccascade.router.config import RouterConfig
from speccascade.router.features import build_features
from speccascade.router.heads import make_head
from speccascade.router.learned import LearnedRouter

CONTEXT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, config: RouterConfig, make_stats: Callable[..., Stats]) -> Path:
    head = make_head("attention", "gap", "verified", (8, 8), context=CONTEXT)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for values in head.parameters():
            values.copy_(torch.randn(values.shape, generator=generator) * 0.3)
    features = build_features(make_stats(seed=1, batch=50), "verified").flatten(end_dim=-2)
    head.set_normalisation(features.mean(dim=0), features.std(dim=0))
    target = tmp_path_factory.mktemp("context") / "router"
    save_bundle(target, head.eval(), config)
    return target


@pytest.fixture(scope="module")
def router(folder: Path) -> LearnedRouter:
    return LearnedRouter.from_pretrained(folder, alpha=0.1)


def split(router: LearnedRouter, block: VerifyBlock, at: int) -> tuple[Tensor, VerifyBlock]:
    """The decisions on a whole block [B, T], and its positions from ``at`` on as a block that remembers the others."""
    whole = router.gap(block.stats)
    sides = [side[:, at:] for side in (block.draft_probs, block.verifier_probs)]
    raw = [side[:, at:] for side in (block.draft_confidence, block.verifier_confidence)]
    later = VerifyBlock.from_probs(*sides, *raw)
    features = build_features(block.stats, "verified")
    recent = torch.full((len(features), CONTEXT - 1, features.shape[-1]), torch.nan)
    known = min(at, CONTEXT - 1)
    recent[:, CONTEXT - 1 - known :] = features[:, at - known : at]
    return whole, later.with_memory(recent, router.remember(later))


def test_the_bundle_states_its_context(router: LearnedRouter) -> None:
    assert router.context == router.config.context == CONTEXT and router.config.kind == "attention"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_a_block_with_its_memory_is_decided_as_in_the_whole(
    router: LearnedRouter, make_block: Callable[..., VerifyBlock], at: int, temperature: float
) -> None:
    block = make_block(seed=3, batch=6, length=8, temperature=temperature)
    whole, later = split(router, block, at)
    torch.testing.assert_close(router.gap(later.stats, later.memory), whole[:, at:], rtol=0, atol=1e-6)
    assert torch.equal(router.defer_mask(later), (whole > 0.1 * block.stats.tv)[:, at:])
    assert torch.equal(router.decide(later).deferred, router.defer_mask(later))
    forgetful = router.gap(later.stats)
    assert (at == 0) == torch.allclose(forgetful, whole[:, at:], atol=1e-5)


@pytest.mark.parametrize("at", [0, 3])
def test_views_of_a_block_are_decided_alike(
    router: LearnedRouter, make_block: Callable[..., VerifyBlock], at: int
) -> None:
    whole, later = split(router, make_block(seed=4, batch=3, length=7), at)
    places = torch.tensor([0, 3, 1])
    picked = later.pick(places)
    expected = whole[:, at:].gather(1, places.unsqueeze(1))
    torch.testing.assert_close(router.gap(picked.stats, picked.memory), expected, rtol=0, atol=1e-6)
    raw = later.raw()
    torch.testing.assert_close(router.gap(raw.stats, raw.memory), whole[:, at:], rtol=0, atol=1e-6)


def test_backends_agree(folder: Path, router: LearnedRouter, make_block: Callable[..., VerifyBlock]) -> None:
    _, later = split(router, make_block(seed=5, batch=4, length=9), 3)
    other = LearnedRouter.from_pretrained(folder, backend="torch")
    difference = other.gap(later.stats, later.memory) - router.gap(later.stats, later.memory)
    assert difference.abs().amax() < 1e-5


def test_the_answer_belongs_to_what_is_remembered(
    router: LearnedRouter, make_block: Callable[..., VerifyBlock]
) -> None:
    """One record of statistics with two memories: the head must be asked twice, and only twice."""
    _, later = split(router, make_block(seed=6, batch=3, length=8), 4)
    first = router.gap(later.stats, later.memory)
    forgetful = router.gap(later.stats)
    assert not torch.allclose(first, forgetful, atol=1e-4)
    assert torch.equal(router.gap(later.stats, later.memory), first)
    assert torch.equal(router.with_alpha(0.5).defer_mask(later), first > 0.5 * later.stats.tv)


def test_it_never_knows_beforehand(router: LearnedRouter, make_stats: Callable[..., Stats]) -> None:
    stats = make_stats()
    assert torch.equal(router.surely_kept(stats), torch.zeros(stats.shape, dtype=torch.bool))


def test_positions_without_an_order_are_refused(
    router: LearnedRouter, exported: Path, make_stats: Callable[..., Stats]
) -> None:
    flat = make_stats().select(0)
    for ask in (router.gap, router.defer):
        with pytest.raises(ValueError, match=r"stats: expected sequences \[B, T\].* reads 4 positions.*defer_in_order"):
            ask(flat)
    stats = make_stats()
    single = LearnedRouter.from_pretrained(exported, alpha=0.1)
    assert single.context == 0
    with pytest.raises(ValueError, match="memory: expected none for a router that reads one position"):
        single.defer(stats, build_features(stats, "verified"))
