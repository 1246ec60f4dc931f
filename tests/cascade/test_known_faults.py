"""What has gone wrong elsewhere in systems of this kind, each kind of fault kept out by a test named after it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccascade import rules
from speccascade.cascade import (
    ModelDrafter,
    SingleModel,
    SpeculativeCascade,
    early_exit,
    logits_to_probs,
)
from speccascade.cascade.blocks import TargetRule, VerifyBlock
from speccascade.cascade.checks import check_count, check_number
from speccascade.cascade.distributions import Sampling
from speccascade.cascade.drafters import DraftRequest
from speccascade.cascade.processing import process_logits
from speccascade.cascade.targets import check_rule

from .conftest import RecordingLM, TableLM

Build = Callable[..., LlamaForCausalLM]
PROMPT = torch.tensor([[3, 14, 15, 9, 26]])
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.6, "bad_words_ids": [[7], [9, 26]], "suppress_tokens": [4]}


def pair(tiny_llama: Build) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A verifier and its own first layers: drafts are accepted as well as rejected."""
    verifier = tiny_llama(seed=0, layers=4)
    return early_exit(verifier, 3), verifier


def test_a_drafted_token_has_the_probability_that_it_was_drawn_with() -> None:
    """A greedy draft under a sampled q, or a draft at another temperature, breaks the law without a sign."""
    model, rows, sampling = TableLM(1, 6), 4000, Sampling(0.5, top_k=4)
    state = ModelDrafter(model).start([[1, 2]] * rows)
    uniforms = torch.rand(rows, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draft = state.propose(DraftRequest([[1, 2]] * rows, [1] * rows, uniforms, sampling))
    expected = logits_to_probs(model.table[1, 2], sampling)
    torch.testing.assert_close(draft.law.dense[0, 0], expected)
    torch.testing.assert_close(draft.tokens[:, 0].bincount(minlength=6) / rows, expected, atol=0.03, rtol=0)


def test_the_temperature_reaches_drafter_and_verifier_alike(tiny_llama: Build) -> None:
    """Two equal models never disagree under one temperature; with two they would."""
    model = tiny_llama(seed=0)
    cascade = SpeculativeCascade(tiny_llama(seed=0), model, rules.SpecDecode(), gamma=4)
    for settings in ({"temperature": 0.3}, {"temperature": 1.7, "top_k": 9}, {"temperature": 0.9, "top_p": 0.5}):
        out = cascade.generate(PROMPT.expand(8, -1), max_new_tokens=40, seed=0, **settings)
        assert out.stats.rejected == 0
        assert out.stats.accepted > 0
        assert len({tuple(row) for row in out.sequences.tolist()}) > 1, "sampling must not turn greedy"
        ledger = cascade.generate(PROMPT, max_new_tokens=40, seed=0, ledger=True, **settings).ledger or ((),)
        assert max(entry.tv for entry in ledger[0] if entry.tv is not None) < 1e-5


def test_a_seed_gives_the_same_tokens_whatever_else_ran(tiny_llama: Build) -> None:
    """Not the global generator, not the calls before, not the other rows, and not the place in the batch."""
    cascade = SpeculativeCascade(*pair(tiny_llama), rules.OPT(0.2), gamma=3)
    settings: dict[str, Any] = {"max_new_tokens": 25, "temperature": 1.0}
    first = cascade.generate(PROMPT, seed=7, **settings).sequences
    torch.manual_seed(3)
    before = torch.get_rng_state()
    cascade.generate(PROMPT.expand(3, -1), seed=5, **settings)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is the user's own"
    among = cascade.generate(PROMPT.expand(4, -1), seed=[1, 2, 7, 3], **settings).sequences
    assert torch.equal(cascade.generate(PROMPT, seed=7, **settings).sequences, first)
    assert torch.equal(among[2:3], first)
    assert not torch.equal(among[0:1], first)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", ["drafter", "verifier"])
def test_non_finite_logits_name_the_model_and_position(side: str, bad: float, temperature: float) -> None:
    """A NaN in the middle of a block passes every comparison, so it must be looked for."""
    models = {"drafter": TableLM(1, 8), "verifier": TableLM(1, 8)}
    greedy = SingleModel(models["verifier"]).generate(torch.tensor([[1, 2], [5, 6]]), max_new_tokens=4).sequences
    broken = models[side]
    # The second row's third position: after the prompt and two drafts, which both models agree on at temperature 0.
    first, second = greedy[1, 2:4].tolist()
    if temperature == 0:
        broken.table = broken.table.clone()
        broken.table[first, second, 3] = bad
    else:
        broken.table = torch.full((8, 8, 8), -1e4)
        broken.table[5, 6, first] = broken.table[6, first, second] = broken.table[1, 2, 0] = broken.table[2, 0, 0] = 0.0
        broken.table[0, 0, 0] = 0.0
        broken.table[first, second, 3] = bad
        models["drafter"].table = broken.table
        if side == "verifier":
            models["drafter"].table = broken.table.nan_to_num(posinf=0.0)
    cascade = SpeculativeCascade(ModelDrafter(models["drafter"]), models["verifier"], rules.SpecDecode(), gamma=4)
    place = r"\(1, 0\)" if side == "drafter" else r"\(1, 2\)"  # a drafter reads one position at a time
    with pytest.raises(ValueError, match=f"logits of the {side} table 1: .*row {place}"):
        cascade.generate(torch.tensor([[1, 2], [5, 6]]), max_new_tokens=4, temperature=temperature, seed=0)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_ensemble_weight_acts_alike_greedy_and_sampled(weight: float) -> None:
    """π = (1 − w)·q + w·p of probabilities, at temperature 0 as at any other: a draw between the two argmaxes."""
    draft, verify = torch.tensor([0.0, 2.0, -1.0, 0.5]), torch.tensor([1.0, -2.0, 0.7, 0.2])
    drafter, verifier = TableLM(0, 4), TableLM(0, 4)
    drafter.table, verifier.table = draft.expand(4, 4, 4), verify.expand(4, 4, 4)
    cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, rules.Ensemble(weight), gamma=2, bonus="target")
    for temperature in (0.0, 0.01, 1.0):
        sampling, draws = Sampling(temperature), 1500
        target = (1 - weight) * logits_to_probs(draft, sampling) + weight * logits_to_probs(verify, sampling)
        out = cascade.generate(
            torch.zeros(draws, 1, dtype=torch.long), max_new_tokens=3, temperature=temperature, seed=0
        )
        found = out.sequences[:, 1:].flatten().bincount(minlength=4) / (3 * draws)
        torch.testing.assert_close(found, target, atol=0.03, rtol=0)  # over four standard deviations


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("larger", ["drafter", "verifier"])
def test_one_vocabulary_of_two_sizes_never_emits_padding_rows(
    tiny_llama: Build, larger: str, temperature: float
) -> None:
    """Heads of 64 and 70 rows over one tokenizer: the common ids count, and what is left out changes no law."""
    small = tiny_llama(seed=1 if larger == "verifier" else 0, vocab=64)
    large = tiny_llama(seed=0 if larger == "verifier" else 1, vocab=70)
    drafter, verifier = (small, large) if larger == "verifier" else (large, small)
    with torch.no_grad():
        large.lm_head.weight[64:] *= 100  # padding rows that would win nearly always
    cascade = SpeculativeCascade(drafter, verifier, rules.SpecDecode(), gamma=3)
    assert cascade.vocab_size == 64
    settings: dict[str, Any] = {"max_new_tokens": 30, "temperature": temperature, "seed": 0}
    out = cascade.generate(PROMPT.expand(4, -1), **settings)
    assert int(out.sequences.max()) < 64
    if temperature == 0:
        alone = SingleModel(verifier, vocab_size=64).generate(PROMPT.expand(4, -1), **settings)
        assert torch.equal(out.sequences, alone.sequences)
    with pytest.raises(ValueError, match="input_ids: expected token ids from 0 to 63, got 3 to 66"):
        cascade.generate(torch.tensor([[3, 66]]))


def test_penalties_follow_kept_tokens_only() -> None:
    """Every position sees the tokens that were kept before it, and the drafts before it in its block: no others."""
    drafter, verifier = TableLM(1, 30), TableLM(2, 30)
    cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, rules.SpecDecode(), gamma=4)
    out = cascade.generate(PROMPT, max_new_tokens=40, **PENALTIES)
    assert out.stats.rejected > 5, "rejected drafts would have left their mark"
    sampling = Sampling(0.0, repetition_penalty=1.6, bad_words=((7,), (9, 26)), suppress_tokens=(4,))
    row: list[int] = PROMPT[0].tolist()
    for _ in range(40):
        logits = verifier.logits_after(row).clone()
        seen = torch.tensor(sorted(set(row)))
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * 1.6, logits[seen] / 1.6)
        logits[[4, 7]] = -torch.inf
        if row[-1] == 9:
            logits[26] = -torch.inf
        row.append(int(logits.argmax()))
    assert out.sequences[0].tolist() == row
    assert process_logits(torch.zeros(1, 1, 30), [row], sampling)[0, 0, 4] == -torch.inf


def test_each_call_starts_fresh(tiny_llama: Build) -> None:
    """Nothing of a call is seen by the next: no cache, no draft length, no penalty, no end token."""
    cascade = SpeculativeCascade(*pair(tiny_llama), rules.TokenV2(0.1), gamma=4)
    settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.8, "seed": 1}
    alone = cascade.generate(PROMPT, **settings)
    others = torch.randint(3, 64, (3, 11), generator=torch.Generator().manual_seed(0))
    cascade.generate(others, max_new_tokens=33, eos_token_id=[5, 6], temperature=1.3, top_k=3, **PENALTIES)
    with pytest.raises(ValueError, match="input_ids"):
        cascade.generate(torch.tensor([[99]]))
    again = cascade.generate(PROMPT, **settings)
    assert torch.equal(again.sequences, alone.sequences)
    assert (again.stats.rounds, again.stats.drafted) == (alone.stats.rounds, alone.stats.drafted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sequence_ends_at_its_first_end_token_inside_a_block(tiny_llama: Build, temperature: float) -> None:
    """Per row, and wherever in a block it falls: what was accepted behind it is dropped, and counted nowhere."""
    cascade = SpeculativeCascade(*pair(tiny_llama), rules.OPT(0.3), gamma=6)
    prompts = torch.randint(3, 64, (6, 4), generator=torch.Generator().manual_seed(2))
    settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": 3}
    free = cascade.generate(prompts, ledger=True, **settings)
    ends = sorted(set(free.sequences[:, 4:].flatten().tolist()))[::4]
    out = cascade.generate(prompts, eos_token_id=ends, pad_token_id=1, ledger=True, **settings)
    inside = 0
    for row in range(len(prompts)):
        tokens = free.sequences[row, 4:].tolist()
        length = next((place for place, token in enumerate(tokens, 1) if token in ends), len(tokens))
        stats = out.stats.per_sequence[row]
        assert out.sequences[row, 4 : 4 + length].tolist() == tokens[:length]
        assert (out.sequences[row, 4 + length :] == 1).all()
        assert stats.new_tokens == length == stats.accepted + stats.rejected + stats.bonus
        inside += (out.ledger or ())[row][-1].writer == "drafter"
    assert inside > 0, "some end token must have been a draft"


def test_nothing_after_the_first_rejection_is_kept() -> None:
    """A draft that agrees again behind a mismatch was drafted after another prefix."""
    drafter, verifier = TableLM(1, 5), TableLM(1, 5)
    drafter.table, verifier.table = (torch.full((5, 5, 5), -9.0) for _ in range(2))
    drafter.table[..., 1] = verifier.table[..., 1] = 0.0
    verifier.table[4, 1, 2] = 9.0  # of 1 1 1 1 1 after the prompt, the second alone is wrong
    cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, rules.SpecDecode(), gamma=5)
    out = cascade.generate(torch.tensor([[3, 4]]), max_new_tokens=8, ledger=True)
    assert out.sequences[0, 2:].tolist() == [1, 2, 1, 1, 1, 1, 1, 1]
    assert [entry.writer for entry in (out.ledger or ())[0]] == ["drafter", "residual", *["drafter"] * 5, "bonus"]


def test_each_token_is_read_once_whatever_was_accepted() -> None:
    """Both caches hold the kept prefix and no more: after full acceptance, after a rejection, prompt and all."""
    for seed, temperature in ((1, 0.0), (2, 0.0), (1, 1.0), (2, 1.0)):  # the drafter is the verifier, or another
        drafter, verifier = RecordingLM(seed, 6), RecordingLM(1, 6)
        cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, rules.SpecDecode(), gamma=3)
        out = cascade.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=30, temperature=temperature, seed=0)
        written, stats = out.sequences[0].tolist(), out.stats
        assert written[: verifier.state.lengths[0]] == verifier.state.rows[0]
        assert written[: drafter.state.lengths[0]] == drafter.state.rows[0]
        # The prompt once, every draft once, and the last token of every round but the final one.
        assert verifier.state.read == 3 + stats.drafted + stats.rounds - 1
        assert (stats.rejected == 0) == (seed == 1)


def test_equal_models_never_reject_and_never_divide_by_nothing() -> None:
    """p = q leaves no residual: at any temperature, under top-k and top-p, greedy or sampled."""
    for rule in (rules.SpecDecode(), rules.OPT(0.0), rules.Lossy(0.3), rules.Lossy(0.3, beta=1.0), rules.Ensemble(0.5)):
        cascade = SpeculativeCascade(ModelDrafter(TableLM(1, 9)), TableLM(1, 9), rule, gamma=3)
        for settings in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.4, "top_k": 2}, {"top_p": 0.4}):
            out = cascade.generate(torch.tensor([[1, 2]] * 5), max_new_tokens=30, seed=0, **settings)  # type: ignore[arg-type]
            assert out.stats.rejected == 0
            assert out.stats.acceptance_rate == 1


def test_rates_stay_within_one_and_name_their_denominators() -> None:
    """Accepted and rejected per examined draft: no bonus token and no dropped draft among them."""
    cascade = SpeculativeCascade(ModelDrafter(TableLM(1, 9)), TableLM(1, 9), rules.SpecDecode(), gamma=3)
    stats = cascade.generate(torch.tensor([[1, 2]]), max_new_tokens=30).stats
    assert (stats.accepted, stats.bonus, stats.rejected) == (23, 7, 0)  # seven blocks of 3 + 1, one cut to two
    assert stats.acceptance_rate == 1
    assert stats.examined == 23
    assert stats.new_tokens == 30


@pytest.mark.parametrize("rule", [rules.Greedyward(0.05), rules.TokenV2(0.05), rules.OPT(0.2)])
def test_a_banned_token_is_never_emitted_whatever_the_rule(rule: TargetRule) -> None:
    """A rule may read the verifier's raw confidence, and still must not move mass to a token that is banned."""
    drafter, verifier = TableLM(1, 5), TableLM(2, 5)
    banned = int(verifier.logits_after([1, 3]).argmax())
    cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, rule, gamma=3)
    for temperature in (0.0, 1.0):
        out = cascade.generate(
            torch.tensor([[1, 3]]).expand(40, -1),
            max_new_tokens=6, temperature=temperature, seed=0, suppress_tokens=[banned],
        )  # fmt: skip
        assert banned not in out.sequences[:, 2:].flatten().tolist()


@pytest.mark.parametrize("setting", ["suppress_tokens", "bad_words_ids"])
@pytest.mark.parametrize("token", [-1, 5])
def test_banned_ids_outside_the_vocabulary_are_refused(setting: str, token: int) -> None:
    drafter, verifier = TableLM(1, 5), TableLM(2, 5)
    value = [token] if setting == "suppress_tokens" else [[1, token]]
    with pytest.raises(ValueError, match=rf"{setting}: expected token ids from 0 to 4, got"):
        SpeculativeCascade(ModelDrafter(drafter), verifier, rules.SpecDecode()).generate(
            torch.tensor([[1, 3]]),
            **{setting: value},  # type: ignore[arg-type]
        )


class AllZero:
    def target(self, block: VerifyBlock) -> torch.Tensor:
        return torch.zeros_like(block.verifier_probs)


def test_rules_that_say_nothing_are_refused(tiny_llama: Build) -> None:
    drafter, verifier = pair(tiny_llama)
    with pytest.raises(ValueError, match="not all zero at any position"):
        SpeculativeCascade(drafter, verifier, AllZero()).generate(PROMPT)
    with pytest.raises(ValueError, match=r"rule: expected an object such as OPT\(\.\.\.\), got the class OPT"):
        check_rule(rules.OPT)


@pytest.mark.parametrize("value", ["1", None, True, [1.0]])
def test_what_is_no_number_is_named(value: object) -> None:
    with pytest.raises(ValueError, match="temperature: expected a number, got"):
        check_number("temperature", value)
    with pytest.raises(ValueError, match="gamma: expected an integer >= 1, got"):
        check_count("gamma", value)
