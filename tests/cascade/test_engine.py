"""The engine emits the rule's law, keeps its caches in step and refuses what it cannot do."""

from collections.abc import Callable

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    TextStreamer,
)

from speccascade.cascade import SingleModel, SpeculativeCascade, VerifyBlock, early_exit
from speccascade.cascade.models import TransformersLM

Build = Callable[..., LlamaForCausalLM]
PROMPT = torch.tensor([[3, 14, 15, 9, 26]])


class Lossless:
    def target(self, block: VerifyBlock) -> torch.Tensor:
        return block.verifier_probs


class Halfway:
    """A target of its own: neither model's distribution, and different at every position."""

    def target(self, block: VerifyBlock) -> torch.Tensor:
        weight = (block.positions % 3).unsqueeze(-1) / 2
        return block.draft_probs * (1 - weight) + block.verifier_probs * weight


def gpt2(seed: int, layers: int = 2) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=64, n_positions=256, n_embd=32, n_layer=layers, n_head=2, initializer_range=0.4)
    return GPT2LMHeadModel(config).eval()


def pairs(tiny_llama: Build) -> dict[str, tuple[PreTrainedModel, PreTrainedModel]]:
    verifier = tiny_llama(seed=0, layers=4)
    return {
        "another model": (tiny_llama(seed=1), verifier),
        "early exit": (early_exit(verifier, 3), verifier),
        "itself": (verifier, verifier),
        "gpt2": (gpt2(1), gpt2(0)),
        "gpt2 early exit": (early_exit(gpt2(0, layers=3), 2), gpt2(0, layers=3)),
    }


@pytest.mark.parametrize("name", ["another model", "early exit", "itself", "gpt2", "gpt2 early exit"])
@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("bonus", ["verifier", "target"])
def test_greedy_lossless_equals_the_verifier_alone(tiny_llama: Build, name: str, gamma: int, bonus: str) -> None:
    drafter, verifier = pairs(tiny_llama)[name]
    cascade = SpeculativeCascade(drafter, verifier, Lossless(), gamma=gamma, bonus=bonus)  # type: ignore[arg-type]
    ours = cascade.generate(PROMPT, max_new_tokens=60)
    plain = verifier.generate(PROMPT, max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(ours.sequences, plain)
    assert torch.equal(SingleModel(verifier).generate(PROMPT, max_new_tokens=60).sequences, plain)


def test_same_seed_same_tokens_whatever_ran_before(tiny_llama: Build) -> None:
    cascade = SpeculativeCascade(tiny_llama(seed=1), tiny_llama(seed=0), Lossless())
    first = cascade.generate(PROMPT, max_new_tokens=30, temperature=1.0, seed=11)
    torch.rand(1000)
    cascade.generate(PROMPT, max_new_tokens=17, temperature=1.0, seed=12)
    again = cascade.generate(PROMPT, max_new_tokens=30, temperature=1.0, seed=11)
    assert torch.equal(first.sequences, again.sequences)
    unseeded = [cascade.generate(PROMPT, max_new_tokens=30, temperature=1.0).sequences for _ in range(2)]
    assert not torch.equal(*unseeded)


@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_both_caches_equal_the_kept_prefix_after_every_round(
    tiny_llama: Build, gamma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = tiny_llama(seed=0, layers=4)
    cascade = SpeculativeCascade(early_exit(verifier, 3), verifier, Lossless(), gamma=gamma)
    seen: list[tuple[int, int, int]] = []
    run_round = SpeculativeCascade.run_round

    def watched(self, rows, length, sampling, generators, draft_state, verify_state, *rest):  # type: ignore[no-untyped-def]
        lengths = [len(row) for row in rows]
        round_ = run_round(self, rows, length, sampling, generators, draft_state, verify_state, *rest)
        for index, (before, tokens) in enumerate(zip(lengths, round_.tokens(), strict=True)):
            seen.append((before + len(tokens), draft_state._state.lengths[index], verify_state.lengths[index]))
        return round_

    monkeypatch.setattr(SpeculativeCascade, "run_round", watched)
    cascade.generate(PROMPT.expand(3, -1), max_new_tokens=40, temperature=1.0, seed=4)
    assert len({kept - draft for kept, draft, _ in seen}) == 2, "both full acceptance and rejection must occur"
    for kept, draft, verify in seen:
        assert verify == kept - 1
        assert draft in (kept - 1, kept - 2)  # after a full acceptance the drafter still owes its last token


def test_counts_add_up_and_match_the_ledger(tiny_llama: Build) -> None:
    verifier = tiny_llama(seed=0, layers=4)
    cascade = SpeculativeCascade(early_exit(verifier, 3), verifier, Halfway(), gamma=4)
    out = cascade.generate(PROMPT, max_new_tokens=57, temperature=1.0, seed=2, ledger=True)
    stats, (entries,) = out.stats, out.ledger or ((),)
    assert [entry.token for entry in entries] == out.sequences[0, PROMPT.shape[1] :].tolist()
    assert stats.new_tokens == 57 == stats.accepted + stats.rejected + stats.bonus
    assert stats.rounds == stats.verifier_calls
    assert stats.drafter_calls == stats.drafted
    assert stats.examined == sum(entry.writer in ("drafter", "residual") for entry in entries)
    assert stats.deferred == sum(entry.deferred is True for entry in entries)
    assert stats.decided == stats.examined and stats.verifier_tokens == 0
    assert 0 < stats.deferral_rate < 1, "the rule defers at some positions only"
    assert stats.acceptance_rate + stats.rejection_rate == pytest.approx(1)
    assert all(0 <= entry.tv <= 1 for entry in entries if entry.tv is not None)
    assert all((entry.tv is None) == (entry.writer == "bonus") for entry in entries)
    assert stats.per_sequence[0].accepted == stats.accepted


def test_the_last_position_that_a_model_knows_can_be_reached() -> None:
    """GPT-2 has no position beyond its table; rows of different lengths draft up to its very end."""
    model = gpt2(0)
    limit = model.config.n_positions
    prompts = torch.randint(3, 64, (2, limit - 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompts)
    mask[1, :100] = 0
    out = SpeculativeCascade(gpt2(1), model, Lossless(), gamma=5).generate(prompts, mask, max_new_tokens=12)
    assert torch.equal(out.sequences, SingleModel(model).generate(prompts, mask, max_new_tokens=12).sequences)


def test_a_sequence_ends_at_an_end_token_inside_a_block(tiny_llama: Build) -> None:
    model = tiny_llama(seed=0)
    free = SingleModel(model).generate(PROMPT, max_new_tokens=30).sequences[0].tolist()
    eos = free[PROMPT.shape[1] + 6]
    expected = free[: free.index(eos, PROMPT.shape[1]) + 1]
    cascade = SpeculativeCascade(model, model, Lossless(), gamma=7)
    out = cascade.generate(PROMPT, max_new_tokens=30, eos_token_id=eos)
    assert out.sequences[0].tolist() == expected
    assert out.stats.new_tokens == len(expected) - PROMPT.shape[1]


def test_padding_rows_of_a_larger_head_are_never_emitted(tiny_llama: Build) -> None:
    drafter, verifier = tiny_llama(seed=1, vocab=64), tiny_llama(seed=0, vocab=72)
    with torch.no_grad():
        verifier.lm_head.weight[64:] *= 100  # the padding rows would win nearly always
    cascade = SpeculativeCascade(drafter, verifier, Lossless())
    out = cascade.generate(PROMPT, max_new_tokens=40, temperature=1.0, seed=0)
    assert int(out.sequences.max()) < 64


def test_left_padding_is_dropped(tiny_llama: Build) -> None:
    cascade = SpeculativeCascade(tiny_llama(seed=1), tiny_llama(seed=0), Lossless())
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    out = cascade.generate(padded, attention_mask=mask, max_new_tokens=20)
    assert out.sequences[0, :8].tolist() == padded[0].tolist()
    assert torch.equal(out.sequences[:, 3:], cascade.generate(PROMPT, max_new_tokens=20).sequences)


def test_a_streamer_sees_the_prompt_and_then_every_token(tiny_llama: Build) -> None:
    class Recorder:
        seen: list[int]
        ended = False

        def __init__(self) -> None:
            self.seen = []

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    for runner in (
        SpeculativeCascade(tiny_llama(seed=1), tiny_llama(seed=0), Lossless()),
        SingleModel(tiny_llama(seed=0)),
    ):
        recorder = Recorder()
        out = runner.generate(PROMPT, max_new_tokens=23, streamer=recorder)
        assert recorder.seen == out.sequences[0].tolist()
        assert recorder.ended


def test_bfloat16_models_run(tiny_llama: Build) -> None:
    verifier = tiny_llama(seed=0, layers=4).bfloat16()
    out = SpeculativeCascade(early_exit(verifier, 2), verifier, Lossless()).generate(
        PROMPT, max_new_tokens=20, temperature=1.0, seed=0
    )
    assert out.stats.new_tokens == 20


class WrongShape:
    def target(self, block: VerifyBlock) -> torch.Tensor:
        return block.verifier_probs[..., :-1]


class NotFinite:
    def target(self, block: VerifyBlock) -> torch.Tensor:
        return block.verifier_probs * torch.nan


@pytest.mark.parametrize(("rule", "message"), [(WrongShape(), "shape"), (NotFinite(), "finite")])
def test_a_wrong_target_is_refused(tiny_llama: Build, rule: WrongShape | NotFinite, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeCascade(tiny_llama(seed=1), tiny_llama(seed=0), rule).generate(PROMPT)


def test_wrong_arguments_are_named(tiny_llama: Build) -> None:
    drafter, verifier = tiny_llama(seed=1), tiny_llama(seed=0)
    cascade = SpeculativeCascade(drafter, verifier, Lossless())
    with pytest.raises(ValueError, match="gamma: expected an integer >= 1, got 0"):
        SpeculativeCascade(drafter, verifier, Lossless(), gamma=0)
    with pytest.raises(ValueError, match=r"input_ids: expected prompts \[B, L\]"):
        cascade.generate(torch.ones(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="seed: expected an integer or one for each of 1"):
        cascade.generate(PROMPT, seed=[1, 2])
    with pytest.raises(ValueError, match="streamer: expected one prompt"):
        cascade.generate(PROMPT.expand(2, -1), streamer=TextStreamer(None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attention_mask"):
        cascade.generate(PROMPT, attention_mask=torch.tensor([[1, 0, 1, 1, 1]]))
    with pytest.raises(ValueError, match="token ids from 0 to 63"):
        cascade.generate(torch.tensor([[1, 64]]))
    with pytest.raises(ValueError, match="max_new_tokens"):
        cascade.generate(PROMPT, max_new_tokens=0)
    with pytest.raises(ValueError, match="stop_strings"):
        cascade.generate(PROMPT, stop_strings=["x"])
    with pytest.raises(ValueError, match="at most 512 tokens, as the models know, got a prompt of 5 and 508"):
        cascade.generate(PROMPT, max_new_tokens=508)
    with pytest.raises(ValueError, match="one vocabulary, small has 64 tokens, not 60"):
        verifier.config.name_or_path = "small"
        SpeculativeCascade(drafter, TransformersLM(verifier), Lossless(), vocab_size=60)
    with pytest.raises(ValueError, match="vocab_size: expected 1 to 64"):
        SingleModel(verifier, vocab_size=0)
    with pytest.raises(ValueError, match="vocab_size"):
        TransformersLM(verifier, vocab_size=65)
    with pytest.raises(ValueError, match="layers: expected 1 to 1"):
        early_exit(verifier, 2)


def test_models_that_cannot_be_run_exactly_are_refused_by_name(tiny_llama: Build) -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="expected a decoder-only model, got an encoder-decoder"):
        TransformersLM(t5)
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="recurrent"):
        SpeculativeCascade(mamba, tiny_llama(), Lossless())


def test_non_finite_logits_name_the_model(tiny_llama: Build) -> None:
    broken = tiny_llama(seed=1)
    broken.config.name_or_path = "broken-135M"
    with torch.no_grad():
        broken.lm_head.weight[5] = torch.nan
    with pytest.raises(ValueError, match="the drafter broken-135M"):
        SpeculativeCascade(broken, tiny_llama(seed=0), Lossless()).generate(PROMPT)
