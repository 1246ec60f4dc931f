"""Chi-square of whole sequences through the engine, against the law worked out by hand."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch
from transformers import LlamaForCausalLM

from speccascade.cascade import ModelDrafter, SpeculativeCascade, VerifyBlock, logits_to_probs
from speccascade.cascade.distributions import Sampling

from .conftest import Check, Logits, TableLM, sequence_law

PROMPT = torch.tensor([[1, 3, 2]])
LENGTH = 3


class Halfway:
    """A target of its own: neither model's distribution, and different at every position."""

    def target(self, block: VerifyBlock) -> torch.Tensor:
        weight = (block.positions % 3).unsqueeze(-1) / 2
        return block.draft_probs * (1 - weight) + block.verifier_probs * weight


def law_of(draft: Logits, verify: Logits, vocab: int, sampling: Sampling, bonus: str) -> dict[tuple[int, ...], float]:
    def at(prefix: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, p = (logits_to_probs(logits(prefix), sampling).view(1, 1, -1) for logits in (draft, verify))
        block = VerifyBlock.from_probs(q, p, positions=torch.tensor([[len(prefix)]]))
        return q[0, 0].double(), p[0, 0].double(), Halfway().target(block)[0, 0].double()

    return sequence_law(at, PROMPT[0].tolist(), vocab, bonus)


SAMPLINGS = [Sampling(1.0), Sampling(0.6, top_k=3), Sampling(1.3, top_p=0.8)]


def count_sequences(
    cascade: SpeculativeCascade, sampling: Sampling, draws: int, batch: int
) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(0, draws, batch):
        out = cascade.generate(
            PROMPT.expand(batch, -1),
            max_new_tokens=LENGTH,
            seed=seed,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        counts.update(tuple(row) for row in out.sequences[:, -LENGTH:].tolist())
    return counts


@pytest.mark.parametrize("batch", [1, 50])
def test_sequences_follow_the_target(batch: int, check_follows: Check) -> None:
    drafter, verifier, draws = TableLM(1, 4), TableLM(2, 4), 1000 if batch == 1 else 6000
    cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, Halfway(), gamma=2)
    law = law_of(drafter.logits_after, verifier.logits_after, 4, Sampling(), "verifier")
    check_follows(count_sequences(cascade, Sampling(), draws, batch), law, draws)


@pytest.mark.parametrize(("sampling", "bonus"), list(product(SAMPLINGS, ["verifier", "target"])))
def test_sampling_settings_and_bonus_keep_the_law(sampling: Sampling, bonus: str, check_follows: Check) -> None:
    drafter, verifier, draws = TableLM(3, 4), TableLM(4, 4), 6000
    cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, Halfway(), gamma=2, bonus=bonus)  # type: ignore[arg-type]
    law = law_of(drafter.logits_after, verifier.logits_after, 4, sampling, bonus)
    check_follows(count_sequences(cascade, sampling, draws, 50), law, draws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_of_transformers_models_follow_the_target(
    tiny_llama: Callable[..., LlamaForCausalLM], dtype: torch.dtype, check_follows: Check
) -> None:
    drafter, verifier = tiny_llama(seed=1, vocab=4).to(dtype), tiny_llama(seed=0, layers=3, vocab=4).to(dtype)
    draws = 4000

    def logits(model: LlamaForCausalLM) -> Logits:
        return lambda prefix: model(torch.tensor([prefix])).logits[0, -1].detach()

    cascade = SpeculativeCascade(drafter, verifier, Halfway(), gamma=2)
    law = law_of(logits(drafter), logits(verifier), 4, Sampling(), "verifier")
    check_follows(count_sequences(cascade, Sampling(), draws, 50), law, draws)
