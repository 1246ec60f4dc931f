"""What a rule is told of the positions before a block: the truth about the prefix, or NaN, however blocks fell."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from speccascade import rules
from speccascade.cascade import AdaptiveGamma, ModelDrafter, SpeculativeCascade, VerifyBlock
from speccascade.cascade.distributions import Sampling
from speccascade.cascade.drafters import DraftRequest
from speccascade.cascade.engine import Round
from speccascade.cascade.executions import OracleCascade
from speccascade.cascade.memory import Memory, context_of

from .conftest import Check, TableLM

PROMPT = [1, 3, 2]
PRIORS = torch.tensor([0.5, 0.2, 0.3])


@dataclass(frozen=True)
class Trailing:
    """Leans to the verifier by how sure the drafter is at the last three positions, unknown ones counting as 0."""

    context: int = 3

    def remember(self, block: VerifyBlock) -> Tensor:
        return block.stats.draft_max.unsqueeze(-1)

    def weights(self, block: VerifyBlock) -> Tensor:
        memory = block.memory
        if memory is None:
            own = self.remember(block)
            memory = torch.cat([torch.full_like(own[:, :1], torch.nan).expand(-1, self.context - 1, -1), own], dim=1)
        return lean(memory[..., 0].unfold(1, self.context, 1))

    def target(self, block: VerifyBlock) -> Tensor:
        weight = self.weights(block).unsqueeze(-1)
        return block.draft_probs * (1 - weight) + block.verifier_probs * weight


def lean(window: Tensor) -> Tensor:
    return (window.nan_to_num(0.0) * PRIORS[-window.shape[-1] :]).sum(dim=-1)


@dataclass(frozen=True)
class Lossless(Trailing):
    """Remembers, and decides nothing by it: the tokens are the same whatever γ is."""

    def target(self, block: VerifyBlock) -> Tensor:
        return block.verifier_probs.clone()


def after(model: TableLM, prefix: list[int]) -> Tensor:
    return model.logits_after(prefix).softmax(dim=-1)


class Windows:
    """Collects the memory of every position that was decided on and kept: (prompt, position) to its window."""

    def __init__(self, context: int = 3) -> None:
        self.context, self.at = context, dict[tuple[int, int], Tensor]()

    def observe(self, round_: Round, rows: Sequence[int], kept: Sequence[int]) -> None:
        assert round_.block.memory is not None and round_.block.recent is not None
        assert round_.block.recent.shape[1] == self.context - 1
        windows = round_.block.memory[..., 0].unfold(1, self.context, 1)
        for row, prompt in enumerate(rows):
            for place in range(min(round_.accepted[row] + 1, round_.lengths[row])):
                self.at[prompt, int(round_.block.positions[row, place])] = windows[row, place]


def expected_law(
    drafter: TableLM, verifier: TableLM, gamma: int, length: int, bonus: str, span: int = 3
) -> dict[tuple[int, ...], float]:
    """The law of sequences by all ways in which blocks can fall: what is known of a position is part of the state."""
    law: Counter[tuple[int, ...]] = Counter()

    def walk(written: list[int], memory: list[float], drafted: int, ends: int, mass: float) -> None:
        if len(written) == length:
            law[tuple(written)] += mass
            return
        q, p = after(drafter, PROMPT + written), after(verifier, PROMPT + written)
        own = float(q.max())
        weight = float(lean(torch.tensor([*memory, own][-span:])))
        pi = q * (1 - weight) + p * weight
        fresh = min(gamma, length - len(written) - 1)
        for token in range(drafter.vocab_size):
            if drafted == ends:
                end = p if bonus == "verifier" else pi
                known = torch.nan if bonus == "verifier" else own
                walk([*written, token], [*memory, known], 0, fresh, mass * float(end[token]))
                continue
            kept = float(min(q[token], pi[token]))
            walk([*written, token], [*memory, own], drafted + 1, ends, mass * kept)
            walk([*written, token], [*memory, own], 0, fresh, mass * float((pi[token] - q[token]).clamp_min(0)))

    walk([], [], 0, min(gamma, length), 1.0)
    return dict(law)


@pytest.mark.parametrize(("gamma", "bonus"), list(product([1, 2], ["verifier", "target"])))
def test_sequences_follow_the_target_of_what_is_remembered(gamma: int, bonus: Any, check_follows: Check) -> None:
    drafter, verifier, draws = TableLM(1, 4), TableLM(2, 4), 6000
    cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, Trailing(), gamma=gamma, bonus=bonus)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(0, draws, 100):
        out = cascade.generate(torch.tensor([PROMPT]).expand(100, -1), max_new_tokens=4, seed=seed, temperature=1.0)
        counts.update(tuple(row) for row in out.sequences[:, 3:].tolist())
    law = expected_law(drafter, verifier, gamma, 4, bonus)
    check_follows(counts, law, draws)
    forgetful = expected_law(drafter, verifier, gamma, 4, bonus, span=1)
    assert sum(abs(law[one] - forgetful[one]) for one in law) > 0.03, "what is remembered must matter"


def test_a_context_drafter_in_a_cascade_follows_the_composed_target(check_follows: Check) -> None:
    """All bonus tokens follow the target, so every position is known and the law reads the prefix alone."""
    small, middle, large, draws = TableLM(1, 3), TableLM(2, 3), TableLM(3, 3), 3600
    inner = SpeculativeCascade(ModelDrafter(small), middle, Trailing(), gamma=2, bonus="target")
    cascade = SpeculativeCascade(inner, large, rules.TokenV2(0.15), gamma=3, bonus="target")
    counts: Counter[tuple[int, ...]] = Counter()
    start = [1, 0, 2]
    for seed in range(0, draws, 300):
        out = cascade.generate(torch.tensor([start]).expand(300, -1), max_new_tokens=4, seed=seed, temperature=1.0)
        counts.update(tuple(row) for row in out.sequences[:, 3:].tolist())
    law: dict[tuple[int, ...], float] = {}
    for sequence in product(range(3), repeat=4):
        mass, memory = 1.0, list[float]()
        for place, token in enumerate(sequence):
            prefix = [*start, *sequence[:place]]
            q, m, p = (after(model, prefix) for model in (small, middle, large))
            memory.append(float(q.max()))
            weight = float(lean(torch.tensor(memory[-3:])))
            drafted = (q * (1 - weight) + m * weight).view(1, 1, -1)
            block = VerifyBlock.from_probs(drafted, p.view(1, 1, -1))
            mass *= float(rules.TokenV2(0.15).target(block)[0, 0, token])
        law[sequence] = mass
    check_follows(counts, law, draws)


@pytest.mark.parametrize("gamma", [1, 2, 5, AdaptiveGamma(0.1, maximum=6)], ids=str)
@pytest.mark.parametrize("bonus", ["verifier", "target"])
def test_what_is_remembered_is_the_truth_about_the_prefix(gamma: Any, bonus: Any) -> None:
    """Rows of several lengths that end at different times; every window is that of a plain loop, or NaN at a bonus."""
    drafter, verifier = TableLM(1, 12, spread=1.0), TableLM(2, 12, spread=1.0)
    ids = torch.tensor([[0, 0, 1, 3, 2], [0, 3, 3, 1, 1], [2, 2, 4, 1, 3], [0, 0, 0, 2, 2]])
    mask = (ids.cumsum(dim=1) > 0).long()
    checked, lengths = 0, set[int]()
    for seed in range(0, 60, 10):
        seen = Windows()
        cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, Trailing(), gamma, bonus, observer=seen)
        out = cascade.generate(ids, mask, max_new_tokens=30, seed=seed, temperature=1.0, eos_token_id=4, ledger=True)
        assert out.ledger is not None
        for row, entries in enumerate(out.ledger):
            prefix, truth = ids[row][mask[row] == 1].tolist(), [torch.nan, torch.nan]
            lengths.add(len(entries))
            for entry in entries:
                known = entry.writer != "bonus" or bonus == "target"
                truth.append(float(after(drafter, prefix).max()) if known else torch.nan)
                if entry.writer != "bonus":
                    expected = torch.tensor(truth[-3:])
                    torch.testing.assert_close(seen.at[row, len(prefix)], expected, equal_nan=True, rtol=0, atol=1e-6)
                    checked += 1
                prefix.append(entry.token)
    assert checked > 60 and len(lengths) > 5, (checked, lengths)


@pytest.mark.parametrize("bonus", ["verifier", "target"])
def test_where_blocks_began_does_not_matter(bonus: Any) -> None:
    drafter, verifier, seen = TableLM(1, 16, spread=2.5), TableLM(2, 16), list[Windows]()
    verifier.table = drafter.table + 0.8 * verifier.table
    outs = list[Tensor]()
    for gamma in (2, 5):
        seen.append(Windows(8))
        cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, Lossless(8), gamma, bonus, observer=seen[-1])
        outs.append(cascade.generate(torch.tensor([PROMPT]), max_new_tokens=60, temperature=0.0).sequences)
    assert torch.equal(*outs)
    common = sorted(seen[0].at.keys() & seen[1].at.keys())
    assert len(common) > 25
    for place in common:
        short, long = seen[0].at[place], seen[1].at[place]
        known = ~(short.isnan() | long.isnan())
        assert torch.equal(short[known], long[known])
        assert known[-1] and (bonus == "verifier" or int(known.sum()) == min(8, place[1] - 2))
    assert bonus == "target" or any(seen[0].at[place].isnan()[-3:].any() for place in common[8:])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    drafter, verifier, large = TableLM(1, 6), TableLM(2, 6), TableLM(3, 6)
    inner = SpeculativeCascade(ModelDrafter(drafter), verifier, Trailing(), gamma=2)
    both = [
        SpeculativeCascade(ModelDrafter(drafter), verifier, Trailing(), gamma=3),
        SpeculativeCascade(inner, large, Trailing(2), gamma=4),
        SpeculativeCascade(inner, large, rules.TokenV2(0.1), gamma=4, bonus="target"),
    ]
    ids = torch.tensor([[1, 3, 2], [5, 1, 1], [2, 4, 4], [3, 3, 5]])
    for cascade in both:
        options = {"max_new_tokens": 40, "temperature": 1.0, "eos_token_id": 0, "pad_token_id": 0}
        together = cascade.generate(ids, seed=5, **options).sequences
        for row in range(len(ids)):
            alone = cascade.generate(ids[row : row + 1], seed=5 + row, **options).sequences[0]
            assert torch.equal(together[row, : len(alone)], alone)


def draft_in_part(cascade: SpeculativeCascade, prompts: list[list[int]], seeds: list[int]) -> list[list[Any]]:
    """Let a cascade draft: keep some of each draft and one random token; of each row its tokens and what it recalls."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    session, rows, story = cascade.start(prompts), prompts, list[list[Any]]([] for _ in prompts)
    assert session._memory is not None
    for _ in range(100):
        limits = [int(torch.randint(1, 6, (), generator=one)) for one in generators]
        uniforms = torch.stack([torch.rand(5, generator=one) for one in generators])
        drafts = session.propose(DraftRequest(rows, limits, uniforms, Sampling())).tokens.tolist()
        spared = [int(torch.randint(0, 5, (), generator=one)) for one in generators]
        kept = [max(limit - less, 0) for limit, less in zip(limits, spared, strict=True)]
        rows = [[*row, *draft[:count]] for row, draft, count in zip(rows, drafts, kept, strict=True)]
        session.rollback([len(row) for row in rows])
        rows = [[*row, int(torch.randint(0, 6, (), generator=one))] for row, one in zip(rows, generators, strict=True)]
        starts = torch.tensor([len(row) for row in rows])
        recent = session._memory._recall(starts, torch.empty(len(rows), 1, 1))[..., 0].tolist()
        for part, row, values in zip(story, rows, recent, strict=True):
            part.append((row, values))
    return story


def test_a_drafter_that_is_rolled_back_remembers_kept_prefixes_alone() -> None:
    """What is left is the truth about the row, or nothing, and the same whatever the neighbours asked for."""
    drafter, verifier = TableLM(1, 6), TableLM(2, 6)
    verifier.table = drafter.table + 0.5 * verifier.table
    cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, Lossless(9), gamma=2)
    prompts, known, unknown = [[1, 3, 2], [5, 1, 1, 4], [2, 4]], 0, 0
    together = draft_in_part(cascade, prompts, [0, 1, 2])
    for seed, part in enumerate(together):
        assert repr(part) == repr(draft_in_part(cascade, [prompts[seed]], [seed])[0])
        for row, values in part:
            for back, value in enumerate(reversed(values), start=1):
                known, unknown = known + (value == value), unknown + (value != value)
                if value == value:
                    assert value == pytest.approx(float(after(drafter, row[:-back]).max()), abs=1e-6)
    assert known > 1000 and unknown > 100


def joined(context: int, batch: int = 3, length: int = 4) -> VerifyBlock:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(2, batch, length, 5, generator=generator).softmax(dim=-1)
    raw = torch.randn(2, batch, length, 5, generator=generator).softmax(dim=-1)
    block = VerifyBlock.from_probs(*probs, *raw)
    recent = torch.rand(batch, context - 1, 1, generator=generator)
    return block.with_memory(recent, Trailing(context).remember(block))


@pytest.mark.parametrize("context", [1, 2, 3])
def test_views_of_a_block_keep_what_is_remembered(context: int) -> None:
    block, rule = joined(context), Trailing(context)
    weights = rule.weights(block)
    assert block.recent is not None and block.recent.shape == (3, context - 1, 1)
    places = torch.tensor([0, 3, 2])
    picked = block.pick(places)
    assert torch.equal(rule.weights(picked), weights.gather(1, places.unsqueeze(1)))
    assert picked.recent is not None and picked.recent.shape == (3, context - 1, 1)
    assert torch.equal(rule.weights(block.raw()), weights)
    assert "stats" in vars(block) and replace(block, memory=None).pick(places).recent is None


def test_other_executions_remember_nothing() -> None:
    out = OracleCascade(ModelDrafter(TableLM(1, 4)), TableLM(2, 4), Trailing()).generate(torch.tensor([PROMPT]))
    assert out.stats.new_tokens == 128


@dataclass(frozen=True)
class Odd:
    context: Any
    answer: Any = None

    def target(self, block: VerifyBlock) -> Tensor:
        return block.verifier_probs


@dataclass(frozen=True)
class OddlyRemembering(Odd):
    def remember(self, block: VerifyBlock) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Odd(-1), "expected a context that is an integer >= 0, got -1"),
        (Odd(True), "expected a context that is an integer >= 0, got True"),
        (Odd(2.0), "expected a context that is an integer >= 0, got 2.0"),
        (Odd(2), r"expected remember\(block\) beside a context of 2, got none"),
    ],
)
def test_a_context_that_says_nothing_is_refused(rule: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"rule Odd\(.*\): {message}"):
        SpeculativeCascade(ModelDrafter(TableLM(1, 4)), TableLM(2, 4), rule)


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (None, "NoneType"),
        (torch.zeros(1, 5), r"torch.float32 \(1, 5\)"),
        (torch.zeros(1, 4, 2), r"torch.float32 \(1, 4, 2\)"),
        (torch.zeros(1, 5, 2).long(), r"torch.int64 \(1, 5, 2\)"),
    ],
    ids=str,
)
def test_a_memory_of_another_shape_is_refused(answer: Any, got: str) -> None:
    cascade = SpeculativeCascade(ModelDrafter(TableLM(1, 4)), TableLM(2, 4), OddlyRemembering(3, answer))
    with pytest.raises(ValueError, match=rf"expected to remember floating-point \(1, 5, 'M'\), got {got}"):
        cascade.generate(torch.tensor([PROMPT]))


def test_a_rule_without_context_costs_no_memory() -> None:
    assert context_of(rules.OPT(0.1)) == 0 and context_of(Trailing()) == 3
    session = SpeculativeCascade(ModelDrafter(TableLM(1, 4)), TableLM(2, 4), rules.OPT(0.1)).start([PROMPT])
    assert session._memory is None
    remembering = SpeculativeCascade(ModelDrafter(TableLM(1, 4)), TableLM(2, 4), Trailing()).start([PROMPT])
    assert isinstance(remembering._memory, Memory)
