"""Chi-square of whole sequences through the engine, against the law worked out by hand."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch
from scipy.stats import chi2
from transformers import LlamaForCausalLM

from speccascade.cascade import ModelDrafter, SpeculativeCascade, VerifyBlock, logits_to_probs
from speccascade.cascade.distributions import Sampling

PROMPT = torch.tensor([[1, 3, 2]])
LENGTH = 3


class Halfway:
    """A target of its own: neither model's distribution, and different at every position."""

    def target(self, block: VerifyBlock) -> torch.Tensor:
        weight = (block.positions % 3).unsqueeze(-1) / 2
        return block.draft_probs * (1 - weight) + block.verifier_probs * weight


class TableLM:
    """A language model of known odds: the logits follow from the last two tokens by a table."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.name = f"table {seed}"
        self.vocab_size = vocab_size
        self.table = torch.randn((vocab_size,) * 3, generator=torch.Generator().manual_seed(seed)) * 1.5
        self.device = torch.device("cpu")

    def start(self) -> "TableState":
        return TableState(self)

    def logits_after(self, prefix: list[int]) -> torch.Tensor:
        return self.table[prefix[-2], prefix[-1]] if len(prefix) > 1 else self.table[0, prefix[-1]]


class TableState:
    def __init__(self, model: TableLM) -> None:
        self.model, self.prefix, self.calls = model, list[int](), 0

    @property
    def length(self) -> int:
        return len(self.prefix)

    def extend(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        self.calls += 1
        self.prefix += tokens[0].tolist()
        ends = range(len(self.prefix) - keep + 1, len(self.prefix) + 1)
        return torch.stack([self.model.logits_after(self.prefix[:end]) for end in ends]).unsqueeze(0)

    def rollback(self, length: int) -> None:
        del self.prefix[length:]


Logits = Callable[[list[int]], torch.Tensor]


def sequence_law(
    draft: Logits, verify: Logits, vocab: int, sampling: Sampling, bonus: str
) -> dict[tuple[int, ...], float]:
    """The law of three tokens with γ = 2: positions 0 and 1 follow π; position 2 is a bonus with the probability that
    both drafts were accepted, else it follows π."""

    def at(prefix: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, p = (logits_to_probs(logits(prefix), sampling).view(1, 1, -1) for logits in (draft, verify))
        block = VerifyBlock.from_probs(q, p, positions=torch.tensor([[len(prefix)]]))
        return q[0, 0].double(), p[0, 0].double(), Halfway().target(block)[0, 0].double()

    law, start = {}, PROMPT[0].tolist()
    q0, _, pi0 = at(start)
    for a in range(vocab):
        q1, _, pi1 = at([*start, a])
        for b in range(vocab):
            _, p2, pi2 = at([*start, a, b])
            both_accepted = float(min(q0[a], pi0[a]) * min(q1[b], pi1[b]))
            otherwise = float(pi0[a] * pi1[b]) - both_accepted
            after = p2 if bonus == "verifier" else pi2
            for c in range(vocab):
                law[a, b, c] = both_accepted * float(after[c]) + otherwise * float(pi2[c])
    return law


def check_follows(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float], draws: int) -> None:
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    assert set(counts) <= {sequence for sequence, mass in law.items() if mass > 0}, "an impossible sequence came out"
    common = [sequence for sequence, mass in law.items() if mass * draws >= 5]
    expected = [law[sequence] * draws for sequence in common]
    observed = [counts[sequence] for sequence in common]
    rest = draws - sum(expected)
    if rest > 5:
        expected, observed = [*expected, rest], [*observed, draws - sum(observed)]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    limit = chi2.ppf(1 - 1e-6, df=len(expected) - 1)
    assert statistic < limit, f"chi-square {statistic:.1f} over {limit:.1f}: odds of a false alarm are 1e-6"


SAMPLINGS = [Sampling(1.0), Sampling(0.6, top_k=3), Sampling(1.3, top_p=0.8)]


@pytest.mark.parametrize(("sampling", "bonus"), list(product(SAMPLINGS, ["verifier", "target"])))
def test_sequences_follow_the_target(sampling: Sampling, bonus: str) -> None:
    drafter, verifier, draws = TableLM(1, 4), TableLM(2, 4), 1500
    cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, Halfway(), gamma=2, bonus=bonus)  # type: ignore[arg-type]
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        out = cascade.generate(
            PROMPT, max_new_tokens=LENGTH, seed=seed,
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
        )  # fmt: skip
        counts[tuple(out.sequences[0, -LENGTH:].tolist())] += 1
    check_follows(counts, sequence_law(drafter.logits_after, verifier.logits_after, 4, sampling, bonus), draws)


def test_sequences_of_transformers_models_follow_the_target(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    drafter, verifier, draws = tiny_llama(seed=1, vocab=4), tiny_llama(seed=0, layers=3, vocab=4), 800

    def logits(model: LlamaForCausalLM) -> Logits:
        return lambda prefix: model(torch.tensor([prefix])).logits[0, -1].detach()

    cascade = SpeculativeCascade(drafter, verifier, Halfway(), gamma=2)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        out = cascade.generate(PROMPT, max_new_tokens=LENGTH, seed=seed, temperature=1.0)
        counts[tuple(out.sequences[0, -LENGTH:].tolist())] += 1
    check_follows(counts, sequence_law(logits(drafter), logits(verifier), 4, Sampling(), "verifier"), draws)
