"""Cascades token by token emit q or p as their rule says, ask the verifier only where they defer, and count truly."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import LlamaForCausalLM

from speccascade import rules
from speccascade.cascade import (
    ModelDrafter,
    SingleModel,
    SpeculativeCascade,
    VerifyBlock,
    early_exit,
    logits_to_probs,
)
from speccascade.cascade.distributions import Sampling, draw
from speccascade.cascade.executions import OracleCascade, SequentialCascade
from speccascade.cascade.generation import GenerationLoop

from ..conftest import Check, RecordingLM, TableLM

Build = Callable[..., LlamaForCausalLM]
PROMPT = torch.tensor([[3, 14, 15, 9, 26]])
TABLE_PROMPT = torch.tensor([[1, 3, 2]])
LENGTH, VOCAB, DRAWS = 3, 4, 6000
CHOW = rules.Chow(alpha=0.4)
FLAT = rules.Chow(alpha=0.88)  # the tiny models are seldom surer than 0.12
SAMPLINGS = [Sampling(1.0), Sampling(0.6, top_k=3)]


class Halfway:
    """A target of its own: neither model's distribution, and different at every position."""

    def target(self, block: VerifyBlock) -> torch.Tensor:
        weight = (block.positions % 3).unsqueeze(-1) / 2
        return block.draft_probs * (1 - weight) + block.verifier_probs * weight


def count_sequences(runner: GenerationLoop, sampling: Sampling, batch: int = 50) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(0, DRAWS, batch):
        out = runner.generate(
            TABLE_PROMPT.expand(batch, -1),
            max_new_tokens=LENGTH,
            seed=seed,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
        )
        counts.update(tuple(row) for row in out.sequences[:, -LENGTH:].tolist())
    return counts


def chain(law_after: Callable[[list[int]], torch.Tensor]) -> dict[tuple[int, ...], float]:
    """The law of sequences whose every token follows ``law_after`` its prefix."""
    law = {}
    for sequence in product(range(VOCAB), repeat=LENGTH):
        prefixes = [[*TABLE_PROMPT[0].tolist(), *sequence[:end]] for end in range(LENGTH)]
        law[sequence] = float(
            torch.stack([law_after(prefix)[token] for prefix, token in zip(prefixes, sequence, strict=True)]).prod()
        )
    return law


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "T=0.6, top-k 3"])
def test_a_sequential_cascade_emits_q_or_p_as_the_drafter_is_sure_or_not(
    sampling: Sampling, check_follows: Check
) -> None:
    drafter, verifier = TableLM(1, VOCAB), TableLM(2, VOCAB)
    unsure = []

    def law_after(prefix: list[int]) -> torch.Tensor:
        unsure.append(bool(drafter.logits_after(prefix).softmax(-1).max() < 0.6))
        return logits_to_probs((verifier if unsure[-1] else drafter).logits_after(prefix), sampling).double()

    law = chain(law_after)
    assert 0.2 < sum(unsure) / len(unsure) < 0.8, "the rule must decide both ways"
    check_follows(count_sequences(SequentialCascade(ModelDrafter(drafter), verifier, CHOW), sampling), law, DRAWS)


def test_a_cascade_drafts_for_a_sequential_cascade(check_follows: Check) -> None:
    small, middle, large = (TableLM(seed, VOCAB) for seed in (1, 2, 3))
    drafter = SpeculativeCascade(ModelDrafter(small), middle, Halfway(), gamma=2, bonus="target")

    def law_after(prefix: list[int]) -> torch.Tensor:
        q, m, p = (model.logits_after(prefix).softmax(-1) for model in (small, middle, large))
        drafted = Halfway().target(
            VerifyBlock.from_probs(q.view(1, 1, -1), m.view(1, 1, -1), positions=torch.tensor([[len(prefix)]]))
        )[0, 0]
        return (p if drafted.max() < 0.6 else drafted).double()

    check_follows(
        count_sequences(SequentialCascade(drafter, large, CHOW), Sampling(), batch=200),
        chain(law_after),
        DRAWS,
    )


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "T=0.6, top-k 3"])
def test_an_oracle_cascade_emits_the_target_at_every_position(sampling: Sampling, check_follows: Check) -> None:
    drafter, verifier = TableLM(3, VOCAB), TableLM(4, VOCAB)

    def law_after(prefix: list[int]) -> torch.Tensor:
        q, p = (logits_to_probs(m.logits_after(prefix), sampling).view(1, 1, -1) for m in (drafter, verifier))
        block = VerifyBlock.from_probs(q, p, positions=torch.tensor([[len(prefix)]]))
        return Halfway().target(block)[0, 0].double()

    oracle = OracleCascade(ModelDrafter(drafter), verifier, Halfway())
    check_follows(count_sequences(oracle, sampling), chain(law_after), DRAWS)


def decode_plainly(
    drafter: LlamaForCausalLM, verifier: LlamaForCausalLM, temperature: float, seed: int, length: int
) -> tuple[list[int], list[bool]]:
    """The token cascade as it is written down: no cache, no batch."""
    generator, tokens, deferred = torch.Generator().manual_seed(seed), PROMPT[0].tolist(), list[bool]()
    for _ in range(length):
        with torch.no_grad():
            logits = drafter(torch.tensor([tokens])).logits[0, -1]
            deferred.append(bool(logits.softmax(-1).max() < 1 - FLAT.alpha))
            if deferred[-1]:
                logits = verifier(torch.tensor([tokens])).logits[0, -1]
        luck = torch.rand(1, generator=generator, dtype=torch.float64)
        tokens.append(int(draw(logits_to_probs(logits, Sampling(temperature)).unsqueeze(0), luck)))
    return tokens, deferred


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_sequential_cascade_equals_the_plain_loop(tiny_llama: Build, temperature: float) -> None:
    drafter, verifier = tiny_llama(seed=1), tiny_llama(seed=0, layers=3)
    expected, deferred = decode_plainly(drafter, verifier, temperature, seed=5, length=40)
    cascade = SequentialCascade(drafter, verifier, FLAT)
    out = cascade.generate(PROMPT, max_new_tokens=40, temperature=temperature, seed=5, ledger=True)
    assert out.sequences[0].tolist() == expected
    (entries,), stats = out.ledger or ((),), out.stats
    assert [entry.deferred for entry in entries] == deferred and 0 < sum(deferred) < 40
    assert [entry.writer for entry in entries] == ["verifier" if defer else "drafter" for defer in deferred]
    assert all((entry.tv is not None) == entry.deferred for entry in entries)
    assert stats.verifier_calls == stats.deferred == stats.verifier_tokens == sum(deferred)
    assert stats.drafter_calls == stats.drafted == stats.rounds == stats.decided == stats.new_tokens == 40
    assert stats.new_tokens == stats.accepted + stats.verifier_tokens and stats.rejected == stats.bonus == 0
    assert stats.deferral_rate == sum(deferred) / 40


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_ends_of_the_dial_are_the_two_models_alone(tiny_llama: Build, temperature: float) -> None:
    drafter, verifier = tiny_llama(seed=1), tiny_llama(seed=0)
    settings = {"max_new_tokens": 30, "temperature": temperature, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2}

    def run(runner: GenerationLoop) -> list[int]:
        return runner.generate(PROMPT, **settings).sequences[0].tolist()  # type: ignore[arg-type]

    never, always = rules.Chow(alpha=1.0), rules.Chow(alpha=0.0)
    alone = run(SingleModel(drafter, "drafter")), run(SingleModel(verifier))
    assert run(SequentialCascade(drafter, verifier, never)) == run(OracleCascade(drafter, verifier, never)) == alone[0]
    assert run(SequentialCascade(drafter, verifier, always)) == alone[1] != alone[0]
    assert run(OracleCascade(drafter, verifier, rules.SpecDecode())) == alone[1]


@pytest.mark.parametrize("kind", [SequentialCascade, OracleCascade])
def test_a_row_does_not_depend_on_its_neighbours(
    tiny_llama: Build, kind: type[SequentialCascade] | type[OracleCascade]
) -> None:
    verifier = tiny_llama(seed=0, layers=4)
    cascade = kind(early_exit(verifier, 3), verifier, FLAT)
    ids = torch.randint(3, 64, (3, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :2] = 0, 0
    settings = {"max_new_tokens": 25, "temperature": 0.9, "eos_token_id": [7, 20, 31], "pad_token_id": 0}
    together = cascade.generate(ids, mask, seed=5, ledger=True, **settings)  # type: ignore[arg-type]
    assert len({part.new_tokens for part in together.stats.per_sequence}) > 1, "rows must end at different times"
    assert 0 < together.stats.deferral_rate < 1, "the rule must decide both ways"
    for row in range(3):
        kept = mask[row].bool()
        alone = cascade.generate(ids[row : row + 1, kept], seed=5 + row, ledger=True, **settings)  # type: ignore[arg-type]
        (expected,), got = alone.ledger or ((),), (together.ledger or ())[row]
        assert [(e.token, e.writer, e.deferred) for e in got] == [(e.token, e.writer, e.deferred) for e in expected]
        counts = alone.stats.per_sequence[0]
        assert replace(together.stats.per_sequence[row], seconds=0) == replace(counts, seconds=0)


def test_the_verifier_reads_each_kept_token_once_and_only_when_asked() -> None:
    drafter, verifier = RecordingLM(1, VOCAB), RecordingLM(2, VOCAB)
    cascade = SequentialCascade(ModelDrafter(drafter), verifier, CHOW)
    out = cascade.generate(TABLE_PROMPT, max_new_tokens=30, temperature=1.0, seed=1, ledger=True)
    tokens, deferred = out.sequences[0].tolist(), [bool(e.deferred) for e in (out.ledger or ((),))[0]]
    asked = TABLE_PROMPT.shape[1] + max(i for i, defer in enumerate(deferred) if defer)
    assert drafter.state.rows == [tokens[:-1]] and drafter.state.read == len(tokens) - 1
    assert verifier.state.rows == [tokens[:asked]] and verifier.state.read == asked
    assert verifier.state.passes == out.stats.verifier_calls < 30

    together = cascade.generate(TABLE_PROMPT.expand(2, -1), max_new_tokens=30, temperature=1.0, seed=1)
    assert together.stats.per_sequence[0].verifier_calls == out.stats.verifier_calls
    assert verifier.state.passes <= together.stats.verifier_calls, "rows that defer together share a pass"
    for read, kept in zip(verifier.state.rows, together.sequences.tolist(), strict=True):
        assert read == kept[: len(read)]

    sure = SequentialCascade(ModelDrafter(drafter), verifier, rules.Chow(alpha=1.0))
    assert sure.generate(TABLE_PROMPT, max_new_tokens=9).stats.verifier_calls == verifier.state.passes == 0


def test_an_oracle_cascade_counts_both_models_at_every_token_and_states_the_rules_decisions(tiny_llama: Build) -> None:
    verifier = tiny_llama(seed=0, layers=4)
    out = OracleCascade(early_exit(verifier, 3), verifier, rules.Diff(alpha=0.0)).generate(
        PROMPT, max_new_tokens=30, temperature=1.0, seed=0, ledger=True
    )
    stats = out.stats
    assert stats.drafter_calls == stats.verifier_calls == stats.decided == stats.new_tokens == 30
    assert 0 < stats.deferred == stats.verifier_tokens < 30
    assert all(entry.tv is not None and 0 <= entry.tv <= 1 for entry in (out.ledger or ((),))[0])


class NoMask:
    def defer(self, stats: object) -> torch.Tensor:
        return torch.tensor([True])


class ReadsTv:
    def defer(self, stats: object) -> torch.Tensor:
        return stats.tv > 0  # type: ignore[attr-defined,no-any-return]


class NotCallable:
    defer = target = 0.5


def test_rules_that_cannot_serve_are_refused_by_name(tiny_llama: Build) -> None:
    drafter, verifier = tiny_llama(seed=1), tiny_llama(seed=0)
    message = r"rule OPT\(alpha=0.3.*\): reads verifier_max, which a sequential cascade does not know before it defers"
    with pytest.raises(ValueError, match=message):
        SequentialCascade(drafter, verifier, rules.OPT(alpha=0.3)).generate(PROMPT)
    with pytest.raises(ValueError, match="reads tv, which"):
        SequentialCascade(drafter, verifier, ReadsTv()).generate(PROMPT)
    with pytest.raises(ValueError, match=r"rule: expected an object with defer\(stats\), got NotCallable"):
        SequentialCascade(drafter, verifier, NotCallable())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected decisions of shape \(1, 1\) and type bool, got .* \(1,\)"):
        SequentialCascade(drafter, verifier, NoMask()).generate(PROMPT)
    with pytest.raises(ValueError, match=r"rule: expected an object with target\(block\), got NotCallable"):
        OracleCascade(drafter, verifier, NotCallable())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rule Lossy.*: expected a target that sums to one, got sums of 1"):
        OracleCascade(drafter, verifier, rules.Lossy(alpha=0.5, beta=1.0)).generate(PROMPT, temperature=1.0)
    with pytest.raises(ValueError, match="one vocabulary"):
        SequentialCascade(ModelDrafter(TableLM(1, 4)), TableLM(2, 5), CHOW)
