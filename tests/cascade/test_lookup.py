"""Prompt look-up drafts what stood there before, and never changes the law."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from transformers import LlamaForCausalLM

from speccascade import rules
from speccascade.cascade import SingleModel, SpeculativeCascade, logits_to_probs
from speccascade.cascade.lookup import PromptLookupDrafter

Check = Callable[[Counter[tuple[int, ...]], dict[tuple[int, ...], float], int], None]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([5, 6, 7, 8, 1, 5, 6], [7, 8, 1]),
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2]),  # the latest occurrence
        ([4, 3, 4], [3, 4, 4]),  # runs out: repeats
        ([1, 2, 3], [3, 3, 3]),  # nothing to copy
        ([7], [7, 7, 7]),
    ],
)
def test_it_continues_as_before(row: list[int], expected: list[int]) -> None:
    assert PromptLookupDrafter(10).continue_row(row, 3) == expected


def test_greedy_lossless_equals_the_verifier_alone(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama(seed=0)
    prompts = torch.tensor([[3, 4, 5, 3, 4, 5], [9, 9, 1, 2, 9, 9]])
    cascade = SpeculativeCascade(PromptLookupDrafter(64), model, rules.SpecDecode(), gamma=4)
    out = cascade.generate(prompts, max_new_tokens=80)
    assert torch.equal(out.sequences, SingleModel(model).generate(prompts, max_new_tokens=80).sequences)
    assert out.stats.drafter_calls == 0
    assert out.stats.accepted > 0, "greedy decoding of a tiny model repeats itself, so copying must pay"


def test_sampling_follows_the_verifier(tiny_llama: Callable[..., LlamaForCausalLM], check_follows: Check) -> None:
    model = tiny_llama(seed=0, vocab=5)
    prompt, draws, batch = torch.tensor([[1, 4, 2, 1]]), 4000, 100
    cascade = SpeculativeCascade(PromptLookupDrafter(5), model, rules.OPT(0.1), gamma=2)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(0, draws, batch):
        out = cascade.generate(prompt.expand(batch, -1), max_new_tokens=2, seed=seed, temperature=1.0)
        counts.update(tuple(row) for row in out.sequences[:, 4:].tolist())

    def probs(prefix: list[int]) -> list[float]:
        with torch.no_grad():
            values: list[float] = logits_to_probs(model(torch.tensor([prefix])).logits[0, -1]).tolist()
        return values

    law = {(a, b): x * y for a, x in enumerate(probs([1, 4, 2, 1])) for b, y in enumerate(probs([1, 4, 2, 1, a]))}
    check_follows(counts, law, draws)  # OPT mistrusts a drafter without confidence, so it defers throughout


def test_banned_tokens_are_never_drafted(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    """A rule that never defers emits what was drafted, so a ban must hold for the look-up too."""
    prompt = torch.tensor([[3, 4, 5, 6, 3, 4, 5, 6, 3]])
    cascade = SpeculativeCascade(PromptLookupDrafter(64), tiny_llama(seed=0), rules.Chow(1), gamma=4)
    assert 4 in cascade.generate(prompt, max_new_tokens=20).sequences[0, 9:]
    banned = cascade.generate(prompt, max_new_tokens=20, suppress_tokens=[4], bad_words_ids=[[5, 6]])
    tokens = banned.sequences[0].tolist()
    assert 4 not in tokens[9:]
    assert all(pair != (5, 6) for pair in pairwise(tokens[8:]))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        PromptLookupDrafter(0)
    with pytest.raises(ValueError, match="longest"):
        PromptLookupDrafter(10, longest=0)
