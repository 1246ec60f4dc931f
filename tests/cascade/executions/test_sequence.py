"""A cascade of whole answers: kept where the drafter was sure of them, else the verifier's own."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccascade.cascade import ModelDrafter, SingleModel, early_exit
from speccascade.cascade.executions import SequenceCascade

from ..conftest import Check, RecordingLM, TableLM

Build = Callable[..., LlamaForCausalLM]
TABLE_PROMPT = torch.tensor([[1, 3, 2]])
LENGTH, VOCAB, END, DRAWS = 3, 4, 3, 6000


def answers_of(model: TableLM) -> dict[tuple[int, ...], float]:
    """Probability of every answer, which ends with its end token or at its length."""
    done, open_ = dict[tuple[int, ...], float](), {(): 1.0}
    while open_:
        answer, mass = open_.popitem()
        probs = model.logits_after([*TABLE_PROMPT[0].tolist(), *answer]).double().softmax(-1).tolist()
        for token, chance in enumerate(probs):
            longer = (*answer, token)
            (done if token == END or len(longer) == LENGTH else open_)[longer] = mass * chance
    return done


@pytest.mark.parametrize(("normalised", "alpha"), [(True, 0.6), (False, 0.9)])
def test_answers_follow_the_law_of_the_cascade(normalised: bool, alpha: float, check_follows: Check) -> None:
    drafter, verifier = TableLM(1, VOCAB), TableLM(2, VOCAB)
    drafts, others = answers_of(drafter), answers_of(verifier)
    kept = {a for a, mass in drafts.items() if mass ** (1 / len(a) if normalised else 1) >= 1 - alpha}
    deferred = sum(mass for answer, mass in drafts.items() if answer not in kept)
    assert 0.2 < deferred < 0.8, "the cascade must decide both ways"
    law = {a: drafts[a] * (a in kept) + others[a] * deferred for a in drafts}
    cascade = SequenceCascade(ModelDrafter(drafter), verifier, alpha, normalised)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(0, DRAWS, 50):
        out = cascade.generate(
            TABLE_PROMPT.expand(50, -1), max_new_tokens=LENGTH, temperature=1.0, seed=seed, eos_token_id=END
        )
        for row, part in zip(out.sequences[:, TABLE_PROMPT.shape[1] :].tolist(), out.stats.per_sequence, strict=True):
            counts[tuple(row[: part.new_tokens])] += 1
    check_follows(counts, law, DRAWS)


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :2] = 0, 0
    return ids, mask


def confidence_of(model: LlamaForCausalLM, prompt: list[int], answer: list[int]) -> float:
    with torch.no_grad():
        log_probs = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return math.exp(float(log_probs[torch.arange(len(answer)), answer].mean()))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_unsure_answers_are_the_verifiers_and_sure_ones_the_drafters(tiny_llama: Build, temperature: float) -> None:
    drafter, verifier = tiny_llama(seed=1), tiny_llama(seed=0)
    ids, mask = ragged()
    settings: dict[str, Any] = {"temperature": temperature, "eos_token_id": [7, 20], "pad_token_id": 0, "seed": 9}
    small = SingleModel(drafter, "drafter").generate(ids, mask, max_new_tokens=20, **settings)
    drafts = [
        row[ids.shape[1] :][: part.new_tokens]
        for row, part in zip(small.sequences.tolist(), small.stats.per_sequence, strict=True)
    ]
    prompts = [row[keep].tolist() for row, keep in zip(ids, mask.bool(), strict=True)]
    sure = [confidence_of(drafter, *pair) for pair in zip(prompts, drafts, strict=True)]
    alpha = 1 - sum(sorted(sure)[1:3]) / 2  # between the second and the third: two answers are kept, two deferred
    out = SequenceCascade(drafter, verifier, alpha).generate(ids, mask, max_new_tokens=20, ledger=True, **settings)
    large = SingleModel(verifier).generate(ids, mask, max_new_tokens=20, **settings)
    for i, part in enumerate(out.stats.per_sequence):
        entries = (out.ledger or ())[i]
        defers = sure[i] < 1 - alpha
        assert {(entry.writer, entry.deferred) for entry in entries} == {("verifier" if defers else "drafter", defers)}
        if not defers:
            assert [entry.token for entry in entries] == drafts[i]
        elif temperature == 0:
            assert part.new_tokens == large.stats.per_sequence[i].new_tokens
            assert [e.token for e in entries] == large.sequences[i, ids.shape[1] :].tolist()[: part.new_tokens]
        assert part.drafter_calls == part.drafted == len(drafts[i])
        assert part.verifier_calls == part.verifier_tokens == part.deferred == part.new_tokens * defers
        assert part.rounds == part.drafter_calls + part.verifier_calls
    stats = out.stats
    assert stats.new_tokens == stats.decided == stats.accepted + stats.verifier_tokens
    assert 0 < stats.deferral_rate == stats.deferred / stats.new_tokens < 1


def test_the_ends_of_the_dial_are_the_two_models_alone(tiny_llama: Build) -> None:
    drafter, verifier = tiny_llama(seed=1), tiny_llama(seed=0)
    ids, mask = ragged()
    never = SequenceCascade(drafter, verifier, alpha=1.0).generate(ids, mask, temperature=0.9, seed=2)
    small = SingleModel(drafter, "drafter").generate(ids, mask, temperature=0.9, seed=2)
    assert torch.equal(never.sequences, small.sequences) and never.stats.verifier_calls == 0
    always = SequenceCascade(drafter, verifier, alpha=0.0).generate(ids, mask)
    assert torch.equal(always.sequences, SingleModel(verifier).generate(ids, mask).sequences)
    processed = SequenceCascade(drafter, verifier, alpha=0.0, confidence="processed").generate(ids, mask)
    assert processed.stats.deferred == 0, "at temperature 0 the processed q is 1 at what it draws"


def test_a_row_does_not_depend_on_its_neighbours(tiny_llama: Build) -> None:
    verifier = tiny_llama(seed=0, layers=4)
    cascade = SequenceCascade(early_exit(verifier, 2), verifier, alpha=0.955)
    ids, mask = ragged()
    settings: dict[str, Any] = {"temperature": 0.9, "eos_token_id": [7, 20, 31], "pad_token_id": 0}
    together = cascade.generate(ids, mask, max_new_tokens=15, seed=5, **settings)
    assert 0 < together.stats.deferred < together.stats.new_tokens, "the cascade must decide both ways"
    for row, part in enumerate(together.stats.per_sequence):
        alone = cascade.generate(ids[row : row + 1, mask[row].bool()], max_new_tokens=15, seed=5 + row, **settings)
        got = together.sequences[row, ids.shape[1] :].tolist()[: part.new_tokens]
        assert alone.sequences[0].tolist()[-part.new_tokens :] == got
        assert replace(alone.stats.per_sequence[0], seconds=0) == replace(part, seconds=0)


def test_the_verifier_reads_a_deferred_prompt_afresh_and_no_other() -> None:
    drafter, verifier = RecordingLM(1, VOCAB), RecordingLM(2, VOCAB)
    out = SequenceCascade(ModelDrafter(drafter), verifier, alpha=0.0).generate(TABLE_PROMPT, max_new_tokens=9)
    tokens = out.sequences[0].tolist()
    assert verifier.state.rows == [tokens[:-1]] and verifier.state.read == len(tokens) - 1
    assert drafter.state.passes == verifier.state.passes == 9
    del verifier.state
    SequenceCascade(ModelDrafter(drafter), verifier, alpha=1.0).generate(TABLE_PROMPT, max_new_tokens=9)
    assert not hasattr(verifier, "state")


class Recorder:
    def __init__(self) -> None:
        self.seen = list[list[int]]()

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.flatten().tolist())

    def end(self) -> None:
        self.seen.append([])


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_streamer_gets_the_answer_that_was_decided_and_stop_strings_end_it(
    tiny_llama: Build, tiny_tokenizer: Any, alpha: float
) -> None:
    drafter, verifier = tiny_llama(seed=1), tiny_llama(seed=0)
    prompt, recorder = torch.tensor([[3, 14, 15, 9, 26]]), Recorder()
    alone = SingleModel(verifier if alpha == 0 else drafter)
    text = tiny_tokenizer.decode(alone.generate(prompt, max_new_tokens=40).sequences[0, 5:].tolist())
    settings: dict[str, Any] = {"max_new_tokens": 40, "stop_strings": [text[7:10]], "tokenizer": tiny_tokenizer}
    out = SequenceCascade(drafter, verifier, alpha).generate(prompt, streamer=recorder, **settings)
    assert torch.equal(out.sequences, alone.generate(prompt, **settings).sequences) and out.stats.new_tokens < 40
    assert recorder.seen == [prompt[0].tolist(), out.sequences[0, 5:].tolist(), []]


def test_wrong_arguments_are_named(tiny_llama: Build) -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"alpha: expected a number in \[0, 1\], got 1.5"):
        SequenceCascade(model, model, alpha=1.5)
    with pytest.raises(ValueError, match=r"alpha: expected a number in \[0, 1\], got nan"):
        SequenceCascade(model, model, alpha=math.nan)
