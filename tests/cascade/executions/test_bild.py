"""The big little decoder falls back, rolls back and counts as written down; its rows keep to themselves."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from speccascade.cascade import ModelDrafter, SingleModel, early_exit
from speccascade.cascade.executions import BiLD

from ..conftest import RecordingLM

Build = Callable[..., LlamaForCausalLM]
PROMPT = torch.tensor([[3, 14, 15, 9, 26]])
THRESHOLDS = [(0.08, 2.5, 4), (0.1, 2.2, 10), (0.0, 2.0, 3), (0.1, math.inf, 5), (0.0, math.inf, 2)]


def pair(tiny_llama: Build) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    verifier = tiny_llama(seed=0, layers=4)
    return early_exit(verifier, 3), verifier


def decode_plainly(
    drafter: LlamaForCausalLM, verifier: LlamaForCausalLM, fallback: float, rollback: float, gamma: int, length: int
) -> tuple[list[int], list[str], dict[str, int]]:
    """BiLD as it is written down: no cache, no batch, one token checked after the other."""
    tokens, writers, counts = PROMPT[0].tolist(), list[str](), {"drafter_calls": 0, "verifier_calls": 0, "drafted": 0}

    def after(model: LlamaForCausalLM, prefix: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([prefix])).logits[0, -1].softmax(-1)

    while len(writers) < length:
        window, unsure = list[int](), False
        while len(window) < min(gamma, length - len(writers)) and not unsure:
            believed = after(drafter, [*tokens, *window])
            counts["drafter_calls"] += 1
            unsure = bool(believed.max() < fallback)
            if not unsure:
                window.append(int(believed.argmax()))
        counts["verifier_calls"] += 1
        counts["drafted"] += len(window)
        writer = "verifier" if unsure else "bonus"
        for draft in window:
            if -math.log(float(after(verifier, tokens)[draft])) > rollback:
                writer = "residual"
                break
            tokens.append(draft)
            writers.append("drafter")
        tokens.append(int(after(verifier, tokens).argmax()))
        writers.append(writer)
    return tokens[: PROMPT.shape[1] + length], writers[:length], counts


@pytest.mark.parametrize(("fallback", "rollback", "gamma"), THRESHOLDS)
def test_it_equals_the_plain_loop(tiny_llama: Build, fallback: float, rollback: float, gamma: int) -> None:
    drafter, verifier = pair(tiny_llama)
    tokens, writers, counts = decode_plainly(drafter, verifier, fallback, rollback, gamma, length=50)
    out = BiLD(drafter, verifier, fallback, rollback, gamma).generate(PROMPT, max_new_tokens=50, ledger=True)
    assert out.sequences[0].tolist() == tokens
    (entries,), stats = out.ledger or ((),), out.stats
    assert [entry.writer for entry in entries] == writers
    assert {name: getattr(stats, name) for name in counts} == counts and stats.rounds == stats.verifier_calls
    deferred = {"drafter": False, "residual": True, "verifier": True, "bonus": None}
    assert [entry.deferred for entry in entries] == [deferred[writer] for writer in writers]
    assert all((entry.tv is None) == (entry.writer == "bonus") for entry in entries)
    assert all(entry.tv in (None, 0.0, 1.0) for entry in entries), "at temperature 0 the argmaxes agree or differ"
    assert stats.new_tokens == 50 == stats.accepted + stats.rejected + stats.bonus + stats.verifier_tokens
    assert stats.decided == 50 - stats.bonus and stats.deferred == stats.rejected + stats.verifier_tokens


def test_every_way_a_window_can_end_occurs_in_these_tests(tiny_llama: Build) -> None:
    seen = set[str]()
    for thresholds in THRESHOLDS[:3]:
        seen |= set(decode_plainly(*pair(tiny_llama), *thresholds, length=50)[1])
    assert seen == {"drafter", "residual", "verifier", "bonus"}


@pytest.mark.parametrize(("fallback", "rollback"), [(1.0, 3.0), (1.0, math.inf), (0.0, 0.0), (0.1, 0.0)])
def test_doubt_at_every_token_leaves_the_verifier_alone(tiny_llama: Build, fallback: float, rollback: float) -> None:
    drafter, verifier = pair(tiny_llama)
    settings = {"max_new_tokens": 30, "repetition_penalty": 1.3, "suppress_tokens": [5, 9], "bad_words_ids": [[11, 4]]}
    out = BiLD(drafter, verifier, fallback, rollback).generate(PROMPT, **settings)  # type: ignore[arg-type]
    assert torch.equal(out.sequences, SingleModel(verifier).generate(PROMPT, **settings).sequences)  # type: ignore[arg-type]
    assert out.stats.verifier_calls == 30 == out.stats.deferred


def test_no_doubt_at_all_leaves_the_drafter_and_a_bonus_a_window(tiny_llama: Build) -> None:
    drafter, verifier = pair(tiny_llama)
    out = BiLD(drafter, verifier, fallback=0.0, rollback=math.inf, gamma=29).generate(PROMPT, max_new_tokens=30)
    alone = SingleModel(drafter, "drafter").generate(PROMPT, max_new_tokens=29)
    assert torch.equal(out.sequences[:, :-1], alone.sequences)
    assert (out.stats.drafter_calls, out.stats.verifier_calls, out.stats.bonus) == (29, 1, 1)


@pytest.mark.parametrize(("fallback", "rollback", "gamma"), THRESHOLDS[:3])
def test_a_row_does_not_depend_on_its_neighbours(
    tiny_llama: Build, fallback: float, rollback: float, gamma: int
) -> None:
    cascade = BiLD(*pair(tiny_llama), fallback, rollback, gamma)
    ids = torch.randint(3, 64, (3, 8), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :2] = 0, 0
    free = cascade.generate(ids, mask, max_new_tokens=25).sequences
    ends = [int(free[0, -14]), int(free[1, -6])]
    settings = {"max_new_tokens": 25, "eos_token_id": ends, "pad_token_id": 0, "ledger": True}
    together = cascade.generate(ids, mask, **settings)  # type: ignore[arg-type]
    assert len({part.new_tokens for part in together.stats.per_sequence}) > 1, "rows must end at different times"
    assert len({part.drafter_calls for part in together.stats.per_sequence}) > 1, "rows must draft differently"
    for row in range(3):
        alone = cascade.generate(ids[row : row + 1, mask[row].bool()], **settings)  # type: ignore[arg-type]
        assert (together.ledger or ())[row] == (alone.ledger or ())[0]
        assert replace(together.stats.per_sequence[row], seconds=0) == replace(alone.stats.per_sequence[0], seconds=0)


def test_both_caches_hold_kept_tokens_only() -> None:
    drafter, verifier = RecordingLM(1, 6), RecordingLM(2, 6)
    prompts = torch.tensor([[1, 3, 2], [5, 0, 4]])
    cascade = BiLD(ModelDrafter(drafter), verifier, fallback=0.35, rollback=2.0, gamma=2)
    out = cascade.generate(prompts, max_new_tokens=31)
    stats = out.stats
    assert min(stats.accepted, stats.rejected, stats.verifier_tokens, stats.bonus) > 0, "every outcome must occur"
    for row, (drafted, verified) in enumerate(zip(drafter.state.rows, verifier.state.rows, strict=True)):
        tokens = out.sequences[row].tolist()
        assert verified[: len(tokens)] == tokens[: len(verified)] and drafted[: len(tokens)] == tokens[: len(drafted)]
    assert verifier.state.passes == max(part.verifier_calls for part in stats.per_sequence)


def test_what_it_cannot_do_is_refused_by_name(tiny_llama: Build) -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match="temperature: expected 0, as BiLD is greedy, got 0.7"):
        BiLD(model, model).generate(PROMPT, temperature=0.7)
    with pytest.raises(ValueError, match=r"fallback: expected a probability in \[0, 1\], got 60"):
        BiLD(model, model, fallback=60)
    with pytest.raises(ValueError, match="rollback: expected a number of nats >= 0, got nan"):
        BiLD(model, model, rollback=math.nan)
    with pytest.raises(ValueError, match="gamma: expected an integer >= 1, got 0"):
        BiLD(model, model, gamma=0)
