"""Every rule through the whole engine: what comes out follows the law that its formula gives by hand.

Each chi-square has odds of 1e-6 of a false alarm (`check_follows`), and the seeds are fixed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache

import jaxtyping
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from speccascade import rules
from speccascade.cascade import ModelDrafter, SpeculativeCascade, logits_to_probs
from speccascade.cascade.distributions import Sampling

from .conftest import Check, Logits, TableLM, sequence_law
from .plain_rules import CASES, Formula, Position

VOCAB, GAMMA, LENGTH, DRAWS = 4, 2, 3, 2500
PROMPT = torch.tensor([[1, 3, 2]])
SAMPLINGS = {
    "T=1": Sampling(),
    "T=0.5": Sampling(0.5),
    "top-k": Sampling(0.8, top_k=3),
    "top-p": Sampling(1.2, top_p=0.8),
}


def beside(small: TableLM, seed: int) -> TableLM:
    """A model that is near enough for many a block to be accepted whole, and far enough for every rule to matter."""
    model = TableLM(seed, VOCAB, spread=0.4)
    model.table += 0.7 * small.table
    return model


SMALL = TableLM(11, VOCAB, spread=1.0)
MIDDLE, LARGE = beside(SMALL, 3), beside(SMALL, 5)


@pytest.fixture(autouse=True, scope="module")
def unchecked_shapes() -> Iterator[None]:
    """Half a million rows go by here: their shapes are checked by every other test, and here only take time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def sample(cascade: SpeculativeCascade, sampling: Sampling, draws: int = DRAWS) -> Counter[tuple[int, ...]]:
    settings = {name: value for name, value in asdict(sampling).items() if name in ("temperature", "top_k", "top_p")}
    out = cascade.generate(PROMPT.expand(draws, -1), max_new_tokens=LENGTH, seed=0, **settings)
    return Counter(tuple(row) for row in out.sequences[:, -LENGTH:].tolist())


def position(draft: Logits, verify: Logits, sampling: Sampling, prefix: list[int]) -> Position:
    logits = [model(prefix) for model in (draft, verify)]
    q, p, q0, p0 = (logits_to_probs(x, s).double() for s in (sampling, Sampling()) for x in logits)
    return Position(q / q.sum(), p / p.sum(), q0 / q0.sum(), p0 / p0.sum())


def law_of(
    draft: Logits, verify: Logits, formula: Formula, sampling: Sampling, bonus: str = "target"
) -> dict[tuple[int, ...], float]:
    def at(prefix: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        x = position(draft, verify, sampling, prefix)
        return x.q, x.p, formula(x)

    return sequence_law(at, PROMPT[0].tolist(), VOCAB, bonus)


def distance(one: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    return sum(abs(one[key] - other[key]) for key in one) / 2


def test_every_rule_has_a_formula() -> None:
    assert {name.split(",")[0] for name in CASES} == set(rules.RULES)
    assert all(type(rule) is rules.RULES[name.split(",")[0]] for name, (rule, _) in CASES.items())


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", CASES)
def test_sequences_follow_the_formula(name: str, sampling: Sampling, check_follows: Check) -> None:
    rule, formula = CASES[name]
    cascade = SpeculativeCascade(ModelDrafter(SMALL), LARGE, rule, gamma=GAMMA, bonus="target")
    models = SMALL.logits_after, LARGE.logits_after
    law = law_of(*models, formula, sampling)
    alone = {side: law_of(*models, lambda x, side=side: getattr(x, side), sampling) for side in ("q", "p")}  # type: ignore[misc]
    assert distance(law, alone["q"]) > 0.05, "a rule that keeps every draft shows nothing"
    assert name == "specdecode" or distance(law, alone["p"]) > 0.05, "a rule that is lossless here shows nothing"
    check_follows(sample(cascade, sampling), law, DRAWS)


@pytest.mark.parametrize(
    "name", ["opt", "token_v2", "token_v3, cold", "greedyward", "lossy", "lossy, beta=1", "ensemble"]
)
def test_a_bonus_of_the_verifier_follows_p(name: str, check_follows: Check) -> None:
    rule, formula = CASES[name]
    sampling = Sampling(0.7)
    cascade = SpeculativeCascade(ModelDrafter(SMALL), LARGE, rule, gamma=GAMMA, bonus="verifier")
    models = SMALL.logits_after, LARGE.logits_after
    law = law_of(*models, formula, sampling, "verifier")
    assert distance(law, law_of(*models, formula, sampling)) > 0.02, "a bonus that follows π here would go unseen"
    check_follows(sample(cascade, sampling), law, DRAWS)


@pytest.mark.parametrize("name", CASES)
def test_a_cascade_of_any_rule_hands_over_the_law_of_its_tokens(name: str, check_follows: Check) -> None:
    """Three models, lossless outside: the largest one's own law, which only exact laws of the drafts can give."""
    drafting = SpeculativeCascade(ModelDrafter(SMALL), MIDDLE, CASES[name][0], gamma=1, bonus="verifier")
    cascade = SpeculativeCascade(drafting, LARGE, rules.SpecDecode(), gamma=GAMMA, bonus="target")
    law = law_of(SMALL.logits_after, LARGE.logits_after, lambda x: x.p, Sampling())
    check_follows(sample(cascade, Sampling(), 1200), law, 1200)


@pytest.mark.parametrize("name", CASES)
def test_a_cascade_of_any_rule_is_the_drafter_of_a_token_rule(name: str, check_follows: Check) -> None:
    """π(π(q, m), p), processed and at temperature 1."""
    sampling, (inner, formula) = Sampling(0.6), CASES[name]
    outer, outer_formula = CASES["token_v1"]
    drafting = SpeculativeCascade(ModelDrafter(SMALL), MIDDLE, inner, gamma=1, bonus="target")
    cascade = SpeculativeCascade(drafting, LARGE, outer, gamma=GAMMA, bonus="target")

    def at(prefix: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        drafted = position(SMALL.logits_after, MIDDLE.logits_after, sampling, prefix)
        raw = Position(drafted.q0, drafted.p0, drafted.q0, drafted.p0)
        large = position(LARGE.logits_after, LARGE.logits_after, sampling, prefix)
        x = Position(formula(drafted), large.p, formula(raw), large.p0)
        return x.q, x.p, outer_formula(x)

    law = sequence_law(at, PROMPT[0].tolist(), VOCAB, "target")
    check_follows(sample(cascade, sampling, 1500), law, 1500)


@pytest.fixture(scope="module")
def bfloat16_pair(tiny_llama: Callable[..., LlamaForCausalLM]) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    return tiny_llama(seed=1, vocab=VOCAB).bfloat16(), tiny_llama(seed=0, layers=3, vocab=VOCAB).bfloat16()


@pytest.fixture(scope="module")
def bfloat16_logits(bfloat16_pair: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> tuple[Logits, Logits]:
    def logits(model: LlamaForCausalLM) -> Logits:
        @cache
        def after(prefix: tuple[int, ...]) -> Tensor:
            return model(torch.tensor([prefix])).logits[0, -1].detach()

        return lambda prefix: after(tuple(prefix))

    return logits(bfloat16_pair[0]), logits(bfloat16_pair[1])


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_models_follow_the_formula(
    name: str,
    bfloat16_pair: tuple[LlamaForCausalLM, LlamaForCausalLM],
    bfloat16_logits: tuple[Logits, Logits],
    check_follows: Check,
) -> None:
    rule, formula = CASES[name]
    cascade = SpeculativeCascade(*bfloat16_pair, rule, gamma=GAMMA, bonus="target")
    check_follows(sample(cascade, Sampling(), 1500), law_of(*bfloat16_logits, formula, Sampling()), 1500)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("ensemble", "learned_lossy")])
def test_greedy_tokens_are_the_most_probable_of_the_formula(name: str) -> None:
    """At temperature 0 every target is one-hot, but for two rules that mix; the engine is a plain loop of argmaxes."""
    drafter, verifier, new, greedy = TableLM(1, 12), TableLM(2, 12), 15, Sampling(0.0)
    rule, formula = CASES[name]
    cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, rule, gamma=3, bonus="target")
    pairs = torch.cartesian_prod(torch.arange(12), torch.arange(12))
    out = cascade.generate(pairs, max_new_tokens=new)

    def decode(law: Formula) -> list[list[int]]:
        targets = {
            tuple(pair): law(position(drafter.logits_after, verifier.logits_after, greedy, pair))
            for pair in pairs.tolist()
        }
        assert all(target.max() == 1 for target in targets.values())
        rows: list[list[int]] = pairs.tolist()
        for _ in range(new):
            rows = [[*row, int(targets[row[-2], row[-1]].argmax())] for row in rows]
        return rows

    assert out.sequences.tolist() == decode(formula)
    assert out.sequences.tolist() != decode(lambda x: x.q), "a rule that keeps every draft shows nothing"
