"""A cascade that drafts for a larger model: three models, one law."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from speccascade import rules
from speccascade.cascade import SingleModel, SpeculativeCascade, VerifyBlock, early_exit, logits_to_probs
from speccascade.cascade.distributions import Sampling

Build = Callable[..., LlamaForCausalLM]
Check = Callable[[Counter[tuple[int, ...]], dict[tuple[int, ...], float], int], None]
PROMPT = torch.tensor([[3, 14, 15, 9, 26]])


def three(tiny_llama: Build, vocab: int = 64) -> tuple[LlamaForCausalLM, ...]:
    large = tiny_llama(seed=0, layers=4, vocab=vocab)
    return early_exit(large, 2), early_exit(large, 3), large


@pytest.mark.parametrize("inner", [rules.SpecDecode(), rules.OPT(0.2), rules.TokenV2(0.1), rules.Lossy(0.3, beta=1.0)])
def test_greedy_lossless_outer_equals_the_largest_model(tiny_llama: Build, inner: object) -> None:
    small, middle, large = three(tiny_llama)
    drafting = SpeculativeCascade(small, middle, inner, gamma=2)  # type: ignore[arg-type]
    cascade = SpeculativeCascade(drafting, large, rules.SpecDecode(), gamma=3)
    ids = torch.cat([torch.zeros_like(PROMPT[:, :2]), PROMPT], 1).expand(2, -1).clone()
    ids[1, :2] = torch.tensor([8, 33])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    out = cascade.generate(ids, mask, max_new_tokens=40)
    assert torch.equal(out.sequences, SingleModel(large).generate(ids, mask, max_new_tokens=40).sequences)
    assert 0 < out.stats.acceptance_rate < 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.6)], ids=["T=1", "T=0.6"])
def test_three_models_follow_the_composed_target(tiny_llama: Build, sampling: Sampling, check_follows: Check) -> None:
    """Bonus tokens follow the target in both cascades, so the law of every token is π(π(q, m), p)."""
    small, middle, large = three(tiny_llama, vocab=5)
    inner, outer = rules.OPT(0.3), rules.TokenV2(0.15)
    drafting = SpeculativeCascade(small, middle, inner, gamma=2, bonus="target")
    cascade = SpeculativeCascade(drafting, large, outer, gamma=2, bonus="target")
    prompt, draws, batch = torch.tensor([[1, 4, 2]]), 4000, 100
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(0, draws, batch):
        out = cascade.generate(prompt.expand(batch, -1), max_new_tokens=3, seed=seed, temperature=sampling.temperature)
        counts.update(tuple(row) for row in out.sequences[:, 3:].tolist())

    def target_after(prefix: list[int]) -> list[float]:
        with torch.no_grad():
            logits = [model(torch.tensor([prefix])).logits[:, -1:] for model in (small, middle, large)]
        (q, m, p), (q0, m0, p0) = ([logits_to_probs(x, s) for x in logits] for s in (sampling, Sampling()))
        drafted = inner.target(VerifyBlock.from_probs(q, m, q0, m0))
        confidence = inner.target(VerifyBlock.from_probs(q0, m0, q0, m0))
        probs: list[float] = outer.target(VerifyBlock.from_probs(drafted, p, confidence, p0))[0, 0].tolist()
        return probs

    law: dict[tuple[int, ...], float] = {}
    for a, mass_a in enumerate(target_after([1, 4, 2])):
        for b, mass_b in enumerate(target_after([1, 4, 2, a])):
            for c, mass_c in enumerate(target_after([1, 4, 2, a, b])):
                law[a, b, c] = mass_a * mass_b * mass_c
    check_follows(counts, law, draws)


def test_a_row_of_a_composed_batch_does_not_depend_on_its_neighbours(tiny_llama: Build) -> None:
    small, middle, large = three(tiny_llama)
    cascade = SpeculativeCascade(SpeculativeCascade(small, middle, rules.OPT(0.2), gamma=2), large, rules.TokenV2(0.1))
    ids = torch.randint(3, 64, (3, 6), generator=torch.Generator().manual_seed(1))
    together = cascade.generate(ids, max_new_tokens=25, temperature=0.9, seed=5)
    for row in range(3):
        alone = cascade.generate(ids[row : row + 1], max_new_tokens=25, temperature=0.9, seed=5 + row)
        assert torch.equal(alone.sequences[0], together.sequences[row])
