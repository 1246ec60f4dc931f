"""Who looks on at a cascade sees every round, each row under its own prompt, and changes nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

from speccascade import rules
from speccascade.cascade import AdaptiveGamma, SpeculativeCascade, early_exit
from speccascade.cascade.engine import Round

Build = Callable[..., LlamaForCausalLM]
PROMPTS = torch.randint(3, 64, (5, 6), generator=torch.Generator().manual_seed(3))


class Recorder:
    """Puts the kept tokens of every prompt together, and counts what was accepted, rejected and deferred."""

    def __init__(self, prompts: int) -> None:
        self.tokens = [list[int]() for _ in range(prompts)]
        self.accepted, self.rejected, self.deferred = ([0] * prompts for _ in range(3))
        self.rounds = [0] * prompts
        self.together = list[int]()

    def observe(self, round_: Round, rows: Sequence[int], kept: Sequence[int]) -> None:
        self.together.append(len(rows))
        decided = round_.target.deferred.tolist()
        for place, (row, count) in enumerate(zip(rows, kept, strict=True)):
            starts = int(round_.block.positions[place, 0])
            self.rounds[row] += 1
            accepted, drafted = round_.accepted[place], round_.lengths[place]
            assert starts == PROMPTS.shape[1] + len(self.tokens[row]), "the row is another prompt's"
            self.tokens[row] += round_.tokens()[place][:count]
            self.accepted[row] += min(accepted, count)
            self.rejected[row] += accepted < min(count, drafted)
            self.deferred[row] += sum(decided[place][: min(count, drafted)])


def run(cascade: SpeculativeCascade, **options: Any) -> Any:
    return cascade.generate(PROMPTS, max_new_tokens=30, seed=7, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("gamma", [1, 4, AdaptiveGamma(0.2, maximum=6)], ids=repr)
@pytest.mark.parametrize("rule", [rules.OPT(0.2), rules.TokenV2(0.1)], ids=repr)
def test_every_round_is_seen_under_its_own_prompt_and_nothing_changes(
    tiny_llama: Build, rule: Any, gamma: Any, temperature: float
) -> None:
    verifier = tiny_llama(seed=0, layers=4)
    drafter = early_exit(verifier, 3)
    eos = [5, 17, 33, 40]
    options = {"temperature": temperature, "eos_token_id": eos, "pad_token_id": 0}
    plain = run(SpeculativeCascade(drafter, verifier, rule, gamma), **options)
    recorder = Recorder(len(PROMPTS))
    watched = run(SpeculativeCascade(drafter, verifier, rule, gamma, observer=recorder), **options)
    assert torch.equal(plain.sequences, watched.sequences)
    assert len(set(recorder.together)) > 1, "rows must leave the batch at different times"
    for row, counts in enumerate(watched.stats.per_sequence):
        start = PROMPTS.shape[1]
        assert recorder.tokens[row] == watched.sequences[row, start : start + counts.new_tokens].tolist()
        assert recorder.rounds[row] == counts.rounds
        assert recorder.accepted[row] == counts.accepted
        assert recorder.rejected[row] == counts.rejected
        assert recorder.deferred[row] == counts.deferred


def test_of_three_models_the_outer_rounds_are_seen_alone(tiny_llama: Build) -> None:
    large = tiny_llama(seed=0, layers=4)
    inner, outer = Recorder(len(PROMPTS)), Recorder(len(PROMPTS))
    small, middle = early_exit(large, 2), early_exit(large, 3)
    drafting = SpeculativeCascade(small, middle, rules.OPT(0.2), gamma=2, observer=inner)
    plain = run(SpeculativeCascade(drafting, large, rules.SpecDecode(), gamma=3), temperature=1.0)
    watched = run(SpeculativeCascade(drafting, large, rules.SpecDecode(), gamma=3, observer=outer), temperature=1.0)
    assert torch.equal(plain.sequences, watched.sequences)
    assert outer.tokens == watched.sequences[:, PROMPTS.shape[1] :].tolist()
    assert not inner.together


def test_an_encoder_decoder_is_seen_too() -> None:
    def build(seed: int) -> PreTrainedModel:
        config = T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return T5ForConditionalGeneration(config).eval()

    seen = list[tuple[list[int], list[int], list[list[int]]]]()

    class Watcher:
        def observe(self, round_: Round, rows: Sequence[int], kept: Sequence[int]) -> None:
            seen.append((list(rows), list(kept), round_.tokens()))

    cascade = SpeculativeCascade(build(1), build(0), rules.SpecDecode(), gamma=3, observer=Watcher())
    out = run(cascade, temperature=1.0)
    tokens = [list[int]() for _ in PROMPTS]
    for rows, kept, blocks in seen:
        for row, count, block in zip(rows, kept, blocks, strict=True):
            tokens[row] += block[:count]
    assert tokens == out.sequences[:, 1:].tolist()
