"""An adaptive γ drafts as long as it pays, and changes nothing about what is emitted."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from speccascade import rules
from speccascade.cascade import AdaptiveGamma, PromptLookupDrafter, SingleModel, SpeculativeCascade, early_exit
from speccascade.cascade.blocks import VerifyBlock
from speccascade.cascade.distributions import logits_to_probs
from speccascade.cascade.forms import Whole
from speccascade.cascade.pace import Pacer

Build = Callable[..., LlamaForCausalLM]
Check = Callable[[Counter[tuple[int, ...]], dict[tuple[int, ...], float], int], None]
PROMPT = torch.tensor([[3, 14, 15, 9, 26]])


def confident(share: float) -> Whole:
    return Whole(torch.tensor([[[share, 1 - share]]]))


def block_length(pacer: Pacer, share: float, most: int = 30) -> int:
    law = confident(share)
    return next((n for n in range(1, most) if not pacer.goes_on(law, law)[0]), most)


def test_a_confident_and_cheap_drafter_drafts_longer() -> None:
    lengths = {
        (cost, share): block_length(Pacer(AdaptiveGamma(cost), 1, None), share)
        for cost in (0.05, 0.5)
        for share in (0.55, 0.99)
    }
    assert lengths[0.05, 0.99] > lengths[0.05, 0.55] > lengths[0.5, 0.55] >= 1
    assert lengths[0.05, 0.99] > lengths[0.5, 0.99]


def test_rejections_shorten_and_acceptances_lengthen_a_block() -> None:
    trusted, doubted = (Pacer(AdaptiveGamma(0.1), 1, None) for _ in range(2))
    for _ in range(30):
        for pacer, kept in ((trusted, 1), (doubted, 0)):
            pacer.goes_on(confident(0.7), confident(0.7))
            pacer.learn([kept], [1])
    fresh = block_length(Pacer(AdaptiveGamma(0.1), 1, None), 0.7)
    assert block_length(trusted, 0.7) > fresh > block_length(doubted, 0.7)


def test_a_rule_that_will_not_defer_is_believed() -> None:
    lengths = [
        block_length(Pacer(AdaptiveGamma(0.2), 1, rule), 0.65) for rule in (None, rules.Chow(0.3), rules.Chow(0.5))
    ]
    assert lengths[0] == lengths[1] < lengths[2]


def test_greedy_output_is_the_verifiers_and_fewer_tokens_are_wasted(tiny_llama: Build) -> None:
    verifier = tiny_llama(seed=0, layers=4)
    prompts = torch.randint(3, 64, (4, 6), generator=torch.Generator().manual_seed(0))
    out = {
        name: SpeculativeCascade(early_exit(verifier, 2), verifier, rules.SpecDecode(), gamma=gamma).generate(
            prompts, max_new_tokens=60
        )
        for name, gamma in (("fixed", 8), ("adaptive", AdaptiveGamma(0.5, maximum=8)))
    }
    alone = SingleModel(verifier).generate(prompts, max_new_tokens=60)
    assert torch.equal(out["adaptive"].sequences, alone.sequences)
    assert out["adaptive"].stats.drafted < out["fixed"].stats.drafted
    assert out["adaptive"].stats.new_tokens == out["fixed"].stats.new_tokens
    stats = out["adaptive"].stats
    assert stats.new_tokens == stats.accepted + stats.rejected + stats.bonus


def test_a_row_does_not_depend_on_its_neighbours(tiny_llama: Build) -> None:
    verifier = tiny_llama(seed=0, layers=4)
    cascade = SpeculativeCascade(early_exit(verifier, 3), verifier, rules.OPT(0.2), gamma=AdaptiveGamma(0.3, maximum=6))
    prompts = torch.randint(3, 64, (3, 6), generator=torch.Generator().manual_seed(1))
    together = cascade.generate(prompts, max_new_tokens=30, temperature=0.9, seed=5)
    for row in range(3):
        alone = cascade.generate(prompts[row : row + 1], max_new_tokens=30, temperature=0.9, seed=5 + row)
        assert torch.equal(alone.sequences[0], together.sequences[row])
        mine = together.stats.per_sequence[row]
        assert (alone.stats.drafted, alone.stats.drafter_calls) == (mine.drafted, mine.drafter_calls)


def test_sequences_follow_the_target(tiny_llama: Build, check_follows: Check) -> None:
    """With bonus tokens from the target, every position follows π however long its block was."""
    drafter, verifier = tiny_llama(seed=1, vocab=5), tiny_llama(seed=0, layers=3, vocab=5)
    rule, prompt, draws, batch = rules.OPT(0.3), torch.tensor([[1, 4, 2]]), 4000, 100
    cascade = SpeculativeCascade(drafter, verifier, rule, gamma=AdaptiveGamma(0.15, maximum=3), bonus="target")
    counts: Counter[tuple[int, ...]] = Counter()
    drafted = set()
    for seed in range(0, draws, batch):
        out = cascade.generate(prompt.expand(batch, -1), max_new_tokens=3, seed=seed, temperature=1.0)
        counts.update(tuple(row) for row in out.sequences[:, 3:].tolist())
        drafted |= {part.drafted for part in out.stats.per_sequence}
    assert len(drafted) > 1, "blocks of several lengths must occur"

    def target_after(prefix: list[int]) -> list[float]:
        with torch.no_grad():
            q, p = (logits_to_probs(model(torch.tensor([prefix])).logits[:, -1:]) for model in (drafter, verifier))
        probs: list[float] = rule.target(VerifyBlock.from_probs(q, p))[0, 0].tolist()
        return probs

    law: dict[tuple[int, ...], float] = {}
    for a, mass_a in enumerate(target_after([1, 4, 2])):
        for b, mass_b in enumerate(target_after([1, 4, 2, a])):
            for c, mass_c in enumerate(target_after([1, 4, 2, a, b])):
                law[a, b, c] = mass_a * mass_b * mass_c
    check_follows(counts, law, draws)


@pytest.mark.parametrize(
    ("cost", "maximum", "named"), [(0, 5, "cost_ratio"), (1.5, 5, "cost_ratio"), (0.2, 0, "maximum")]
)
def test_settings_out_of_range_are_named(cost: float, maximum: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AdaptiveGamma(cost, maximum)


def test_a_cascade_that_drafts_keeps_to_a_fixed_length(tiny_llama: Build) -> None:
    inner = SpeculativeCascade(tiny_llama(seed=1), tiny_llama(seed=2), rules.OPT(0.2), gamma=AdaptiveGamma(0.3))
    cascade = SpeculativeCascade(inner, tiny_llama(seed=0, layers=3), rules.SpecDecode())
    with pytest.raises(
        ValueError, match=r"drafter .*: expected a fixed gamma where a cascade drafts, got AdaptiveGamma"
    ):
        cascade.generate(PROMPT)


def test_a_drafter_that_does_not_go_token_by_token_is_refused(tiny_llama: Build) -> None:
    with pytest.raises(ValueError, match=r"gamma: AdaptiveGamma needs a model.*prompt look-up"):
        SpeculativeCascade(PromptLookupDrafter(64), tiny_llama(), rules.SpecDecode(), gamma=AdaptiveGamma(0.2))
