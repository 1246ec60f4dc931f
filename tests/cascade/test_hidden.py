"""A rule that asks for hidden states sees those of a plain forward; for any other rule nothing is looked at."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

from speccascade import rules
from speccascade.cascade import (
    AdaptiveGamma,
    PromptLookupDrafter,
    SpeculativeCascade,
    VerifyBlock,
    early_exit,
)
from speccascade.cascade.engine import Round
from speccascade.cascade.executions.oracle import OracleCascade
from speccascade.cascade.executions.sequential import SequentialCascade
from speccascade.cascade.models import TransformersLM, TransformersState

Build = Callable[..., LlamaForCausalLM]
LENGTHS = (4, 9, 6)
NEW = 24


class Asking:
    """Some positions deferred, by the hidden states themselves, so that rounds end everywhere."""

    needs_hidden = True

    def target(self, block: VerifyBlock) -> torch.Tensor:
        draft, verifier = block.stats.hidden
        deferred = draft.sum(dim=-1) > verifier.sum(dim=-1)
        return torch.where(deferred.unsqueeze(-1), block.verifier_probs, block.draft_probs)


class Watcher:
    """Keeps every round with the prompts that its rows belong to."""

    def __init__(self) -> None:
        self.rounds = list[tuple[Round, list[int]]]()

    def observe(self, round_: Round, rows: Sequence[int], kept: Sequence[int]) -> None:
        self.rounds.append((round_, list(rows)))


def ragged_prompts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, mask = (torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long) for _ in range(2))
    for row, length in enumerate(LENGTHS):
        ids[row, -length:] = torch.randint(3, 64, (length,), generator=generator)
        mask[row, -length:] = 1
    return ids, mask


def run(cascade: SpeculativeCascade, temperature: float = 1.0) -> torch.Tensor:
    ids, mask = ragged_prompts()
    sequences: torch.Tensor = cascade.generate(
        ids, mask, max_new_tokens=NEW, temperature=temperature, seed=3, eos_token_id=[5, 17], pad_token_id=0
    ).sequences
    return sequences


def final_rows(sequences: torch.Tensor) -> list[list[int]]:
    """Each row without its padding on the left."""
    return [row[max(LENGTHS) - length :].tolist() for row, length in zip(sequences, LENGTHS, strict=True)]


def plain_states(model: PreTrainedModel, row: list[int], tokens: list[int], **prompt: Any) -> torch.Tensor:
    """The last hidden state at each position that predicts one of ``tokens`` after ``row``, and the one after them."""
    sequence = torch.tensor([[*row, *tokens]])
    with torch.inference_mode():
        if prompt:
            out = model(decoder_input_ids=sequence, output_hidden_states=True, **prompt).decoder_hidden_states[-1]
        else:
            out = model(sequence, output_hidden_states=True).hidden_states[-1]
    return out[0, len(row) - 1 :]


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("bonus", ["verifier", "target"])
@pytest.mark.parametrize("gamma", [1, 4, AdaptiveGamma(0.3, maximum=5)], ids=repr)
@pytest.mark.parametrize("drafter", ["own model", "early exit"])
def test_states_seen_live_are_those_of_a_plain_forward(
    tiny_llama: Build, drafter: str, gamma: Any, bonus: Any, temperature: float
) -> None:
    verifier = tiny_llama(seed=0, layers=3)
    small = early_exit(verifier, 2) if drafter == "early exit" else tiny_llama(seed=0, layers=1, hidden=16)
    watcher = Watcher()
    cascade = SpeculativeCascade(small, verifier, Asking(), gamma, bonus, observer=watcher)
    rows = final_rows(run(cascade, temperature))
    assert len(watcher.rounds) > 3
    for round_, prompts in watcher.rounds:
        block, after = round_.block, round_.after
        assert (after.draft_hidden is not None) == (bonus == "target")
        for place, prompt in enumerate(prompts):
            start, count = int(block.positions[place, 0]), round_.lengths[place]
            prefix, tokens = rows[prompt][:start], block.tokens[place, :count].tolist()
            for model, states, behind in (
                (small, block.draft_hidden, after.draft_hidden),
                (verifier, block.verifier_hidden, after.verifier_hidden),
            ):
                expected = plain_states(model, prefix, tokens)
                assert states is not None and states.dtype == torch.float32
                torch.testing.assert_close(states[place, :count], expected[:count], atol=1e-4, rtol=1e-4)
                if behind is not None:
                    torch.testing.assert_close(behind[place, 0], expected[count], atol=1e-4, rtol=1e-4)
    assert not any(model.get_output_embeddings()._forward_pre_hooks for model in (small, verifier))


def test_states_of_an_encoder_decoder_are_those_of_a_plain_forward() -> None:
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    torch.manual_seed(0)
    drafter, verifier = (T5ForConditionalGeneration(config).eval() for _ in range(2))
    watcher, (ids, mask) = Watcher(), ragged_prompts()
    cascade = SpeculativeCascade(drafter, verifier, Asking(), gamma=3, observer=watcher)
    written = cascade.generate(ids, mask, max_new_tokens=NEW, temperature=1.0, eos_token_id=[5, 17], pad_token_id=0)
    # What the head reads is scaled where its weights are those of the embedding.
    scale = config.d_model**-0.5 if verifier.config.tie_word_embeddings else 1.0
    for round_, prompts in watcher.rounds:
        for place, prompt in enumerate(prompts):
            start = int(round_.block.positions[place, 0])
            prefix = written.sequences[prompt, :start].tolist()
            tokens = round_.block.tokens[place].tolist()
            source = {"input_ids": ids[prompt : prompt + 1], "attention_mask": mask[prompt : prompt + 1]}
            sides = (drafter, round_.block.draft_hidden), (verifier, round_.block.verifier_hidden)
            for model, states in sides:
                assert states is not None
                expected = plain_states(model, prefix, tokens, **source)[:-1] * scale
                torch.testing.assert_close(states[place], expected, atol=1e-4, rtol=1e-4)
    assert len(watcher.rounds) > 3


def test_without_a_rule_that_asks_nothing_is_looked_at(tiny_llama: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, verifier = tiny_llama(seed=1, layers=1), tiny_llama(seed=0, layers=2)
    watcher = Watcher()

    def refuse(*_: Any) -> Any:
        raise AssertionError("hidden states were read for a rule that does not ask")

    asked = rules.OPT(0.2)
    object.__setattr__(asked, "needs_hidden", True)
    watched = run(SpeculativeCascade(drafter, verifier, asked, gamma=3))
    monkeypatch.setattr(TransformersState, "extend_with_hidden", refuse)
    assert torch.equal(watched, run(SpeculativeCascade(drafter, verifier, rules.OPT(0.2), gamma=3, observer=watcher)))
    for round_, _ in watcher.rounds:
        assert round_.block.draft_hidden is None and round_.after.verifier_hidden is None
        with pytest.raises(ValueError, match="hidden: expected positions with the hidden states of both models"):
            _ = round_.block.stats.hidden
    with pytest.raises(AssertionError, match="does not ask"):
        run(SpeculativeCascade(drafter, verifier, Asking(), gamma=3))


def test_states_follow_their_positions_through_views_of_a_block(tiny_llama: Build) -> None:
    watcher = Watcher()
    run(SpeculativeCascade(tiny_llama(seed=1, layers=1), tiny_llama(), Asking(), 4, observer=watcher), temperature=0.7)
    block = watcher.rounds[0][0].block
    picked = block.pick(torch.tensor([2, 0, 1]))
    assert picked.draft_hidden is not None and block.draft_hidden is not None
    for row, place in enumerate((2, 0, 1)):
        assert torch.equal(picked.draft_hidden[row, 0], block.draft_hidden[row, place])
        assert torch.equal(picked.stats.hidden[1][row, 0], block.stats.hidden[1][row, place])
    assert torch.equal(block.raw().stats.hidden[0], block.draft_hidden)


def test_a_cascade_inside_another_may_ask_for_the_states_of_its_own_pair(tiny_llama: Build) -> None:
    large = tiny_llama(seed=0, layers=4)
    inner = SpeculativeCascade(early_exit(large, 2), early_exit(large, 3), Asking(), gamma=2, bonus="target")
    for temperature in (0.0, 0.7, 1.0):
        sequences = run(SpeculativeCascade(inner, large, rules.OPT(0.2), gamma=3), temperature)
        assert sequences.shape[1] > max(LENGTHS)


def test_drafters_without_one_hidden_state_are_refused(tiny_llama: Build) -> None:
    large = tiny_llama(seed=0, layers=4)
    inner = SpeculativeCascade(early_exit(large, 2), early_exit(large, 3), rules.TokenV2(0.1), gamma=2)
    with pytest.raises(ValueError, match=r"drafter .* → .*: expected a single language model, whose hidden states"):
        SpeculativeCascade(inner, large, Asking())
    with pytest.raises(ValueError, match="drafter prompt look-up: expected a single language model"):
        SpeculativeCascade(PromptLookupDrafter(64), large, Asking())


def test_executions_that_collect_no_states_refuse_such_a_rule(tiny_llama: Build) -> None:
    drafter, verifier = tiny_llama(seed=1, layers=1), tiny_llama()
    with pytest.raises(ValueError, match="expected one that reads no hidden states, which an oracle does not collect"):
        OracleCascade(drafter, verifier, Asking())

    class Deciding:
        def defer(self, stats: Any) -> torch.Tensor:
            return stats.hidden[0].sum(dim=-1) > 0

    class Counting:
        def defer(self, stats: Any) -> torch.Tensor:
            return stats.leading(3).draft_top[..., 0] > 0.5

    for rule, name in ((Deciding(), "hidden"), (Counting(), "leading")):
        with pytest.raises(ValueError, match=f"reads {name}, which a sequential cascade does not know"):
            SequentialCascade(drafter, verifier, rule).generate(ragged_prompts()[0], max_new_tokens=2)


def test_a_model_that_does_not_call_its_head_is_named(tiny_llama: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    elsewhere = torch.nn.Linear(32, 64)
    monkeypatch.setattr(model, "get_output_embeddings", lambda: elsewhere)
    state = TransformersLM(model).start([[3, 4]])
    with pytest.raises(ValueError, match="LlamaForCausalLM: expected a model that calls its output head once"):
        state.extend_with_hidden(torch.tensor([[3, 4]]), [2], keep=1)
    assert not elsewhere._forward_pre_hooks
