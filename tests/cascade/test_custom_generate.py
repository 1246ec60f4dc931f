"""The drop-in for transformers: its tokens where greedy, its law where it samples, and a refusal of all the rest."""

import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin

import speccascade
from speccascade.cascade import PromptLookupDrafter, SpeculativeCascade, VerifyBlock, early_exit, logits_to_probs
from speccascade.cascade.custom_generate import CascadeOutput
from speccascade.cascade.distributions import Sampling
from speccascade.cascade.generation_settings import HONOURED, IDLE, NEUTRAL, read_settings

PROMPT = torch.tensor([[3, 14, 15, 9, 26]])
PADDED = torch.tensor([[3, 14, 15, 9, 26], [0, 0, 5, 8, 7], [0, 30, 2, 12, 12]])
MASK = (torch.tensor([[0], [2], [1]]) <= torch.arange(5)).long()

Llama = Callable[..., LlamaForCausalLM]
Check = Callable[[Counter[tuple[int, ...]], dict[tuple[int, ...], float], int], None]


class Halfway:
    def target(self, block: VerifyBlock) -> torch.Tensor:
        return (block.draft_probs + block.verifier_probs) / 2


class Shift(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 1


class Never(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


def call(model: LlamaForCausalLM, **changes: Any) -> Any:
    if "drafter" not in changes:
        changes["drafter"] = early_exit(model, 1)
    settings = {"input_ids": PROMPT, "max_new_tokens": 6, "custom_generate": speccascade.generate, **changes}
    return model.generate(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.7},
        {"bad_words_ids": [[16], [60, 21]], "suppress_tokens": [18, 40]},
        {"repetition_penalty": 0.8, "renormalize_logits": True, "suppress_tokens": [1]},
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_transformers(tiny_llama: Llama, settings: dict[str, Any]) -> None:
    model = tiny_llama(seed=0, layers=4)
    settings = {**settings, "input_ids": PADDED, "attention_mask": MASK, "max_new_tokens": 24, "do_sample": False}
    free = model.generate(**settings, eos_token_id=None, pad_token_id=0)
    # Two tokens that end two rows early, so that the rest of both is filled; one of them is also a bad word, which
    # transformers then lets pass.
    ends = [int(free[0, 12]), int(free[1, 9])]
    settings |= {
        "eos_token_id": ends,
        "pad_token_id": 33,
        "bad_words_ids": [*settings.get("bad_words_ids", []), ends[:1]],
    }
    expected = model.generate(**settings)
    assert (expected == 33).any()
    for drafter in (early_exit(model, 3), tiny_llama(seed=1), PromptLookupDrafter(vocab_size=64)):
        ours = call(model, **settings, drafter=drafter, gamma=4)
        assert torch.equal(ours, expected), f"{drafter} changes what greedy decoding writes"


def test_rows_are_filled_with_the_first_end_token_where_there_is_no_pad_token(tiny_llama: Llama) -> None:
    model = tiny_llama(seed=0, layers=3)
    model.generation_config.pad_token_id = None
    settings = {"input_ids": PADDED, "attention_mask": MASK, "max_new_tokens": 24, "do_sample": False}
    free = model.generate(**settings, eos_token_id=63)
    settings["eos_token_id"] = [int(free[0, 12]), 5]
    expected = model.generate(**settings)
    assert torch.equal(call(model, **settings), expected)


@pytest.mark.parametrize("given", ["keywords", "config", "model", "direct"])
def test_settings_come_from_keywords_a_config_or_the_model(tiny_llama: Llama, given: str) -> None:
    model = tiny_llama(seed=0, layers=3)
    settings: dict[str, Any] = {
        "do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2,
        "max_length": 30, "eos_token_id": None,
    }  # fmt: skip
    model.generation_config = GenerationConfig(**(settings if given == "model" else {}))
    inputs = {"input_ids": PADDED, "attention_mask": MASK, "drafter": tiny_llama(seed=1), "rule": Halfway(), "seed": 7}
    if given == "direct":
        ours = speccascade.generate(model, **inputs, generation_config=GenerationConfig(**settings))
    else:
        asked = {"keywords": settings, "config": {"generation_config": GenerationConfig(**settings)}, "model": {}}[
            given
        ]
        ours = model.generate(**inputs, **asked, custom_generate=speccascade.generate)
    del settings["do_sample"], settings["max_length"]
    cascade = SpeculativeCascade(tiny_llama(seed=1), model, Halfway())
    expected = cascade.generate(PADDED, MASK, max_new_tokens=25, seed=7, **settings).sequences
    assert torch.equal(ours, expected)


def test_the_default_of_top_k_is_that_of_transformers(tiny_llama: Llama) -> None:
    model = tiny_llama(seed=0, layers=2)
    ours = call(model, do_sample=True, seed=3, max_new_tokens=40, eos_token_id=None)
    cascade = SpeculativeCascade(early_exit(model, 1), model, Lossless())
    by_top_k = {
        k: cascade.generate(PROMPT, max_new_tokens=40, temperature=1.0, top_k=k, seed=3).sequences for k in (0, 50)
    }
    assert torch.equal(ours, by_top_k[50])
    assert not torch.equal(ours, by_top_k[0])


class Lossless:
    def target(self, block: VerifyBlock) -> torch.Tensor:
        return block.verifier_probs


def test_sequences_follow_the_verifier_under_the_models_own_settings(tiny_llama: Llama, check_follows: Check) -> None:
    model, drafter, draws = tiny_llama(seed=0, layers=3, vocab=4), tiny_llama(seed=1, vocab=4), 4000
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_k=3)
    start, law = [1, 3, 2], {}
    for tokens in product(range(4), repeat=3):
        logits = model(torch.tensor([[*start, *tokens]])).logits[0, 2:5].detach()
        steps = logits_to_probs(logits, Sampling(0.6, top_k=3)).double()
        law[tokens] = float(steps[torch.arange(3), torch.tensor(tokens)].prod())
    counts: Counter[tuple[int, ...]] = Counter()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(draws // 400):
            out = call(
                model, input_ids=torch.tensor([start]), drafter=drafter, gamma=2, max_new_tokens=3,
                num_return_sequences=400,
            )  # fmt: skip
            counts.update(tuple(row) for row in out[:, 3:].tolist())
    check_follows(counts, law, draws)


def test_global_seed_repeats_sampling_and_greedy_decoding_leaves_it_alone(tiny_llama: Llama) -> None:
    model = tiny_llama(seed=0, layers=3)

    def sample() -> torch.Tensor:
        return call(model, do_sample=True, num_return_sequences=2, max_new_tokens=20, eos_token_id=None)

    with torch.random.fork_rng():
        torch.manual_seed(5)
        first, second = sample(), sample()
        torch.manual_seed(5)
        assert torch.equal(sample(), first)
        assert not torch.equal(first, second)
        assert not torch.equal(first[0], first[1]), "rows share their luck"
        before = torch.get_rng_state()
        call(model, do_sample=False)
        assert torch.equal(torch.get_rng_state(), before)


def test_output_holds_statistics_and_the_ledger(tiny_llama: Llama) -> None:
    out = call(tiny_llama(), return_dict_in_generate=True, ledger=True)
    assert isinstance(out, CascadeOutput)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert torch.equal(out["sequences"], call(tiny_llama()))
    assert out.stats.new_tokens == 6
    assert [entry.token for entry in out.ledger[0]] == out.sequences[0, 5:].tolist()
    assert call(tiny_llama(), return_dict_in_generate=True).ledger is None


def test_default_rule_defers_everywhere(tiny_llama: Llama) -> None:
    stats = call(tiny_llama(), return_dict_in_generate=True, max_new_tokens=30).stats
    assert stats.deferred == stats.examined > 0


def test_sequences_may_be_trained_on(tiny_llama: Llama) -> None:
    model = tiny_llama()
    sequences = call(model)
    model(sequences, labels=sequences).loss.backward()


def test_stop_strings_end_where_transformers_ends(tiny_llama: Llama, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_llama(seed=0, layers=3)
    settings = {"input_ids": PADDED, "attention_mask": MASK, "max_new_tokens": 30, "do_sample": False}
    free = model.generate(**settings, eos_token_id=None)
    text = [tiny_tokenizer.decode(row[5:]) for row in free]
    settings["stop_strings"] = [text[0][7:9], text[1][4]]
    expected = model.generate(**settings, tokenizer=tiny_tokenizer)
    assert expected.shape[1] < free.shape[1] or (expected != free).any()
    ours = call(model, **settings, custom_generate=partial(speccascade.generate, tokenizer=tiny_tokenizer))
    assert torch.equal(ours, expected)


def test_a_bound_streamer_gets_the_prompt_and_every_token(tiny_llama: Llama) -> None:
    class Collect:
        def __init__(self) -> None:
            self.tokens, self.ended = list[int](), False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Collect()
    out = call(tiny_llama(), custom_generate=partial(speccascade.generate, streamer=streamer), max_new_tokens=15)
    assert streamer.tokens == out[0].tolist()
    assert streamer.ended


def test_transformers_keeps_streamers_and_assistants_from_callables() -> None:
    """What the documentation says of transformers; where this changes, so do the words and the binding of arguments."""
    source = inspect.getsource(GenerationMixin._extract_generation_mode_kwargs)
    assert "generation_mode_kwargs = {k: kwargs.pop(k) for k in new_custom_keys if k in kwargs}" in source


def test_every_field_of_transformers_stands_in_one_table() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields <= HONOURED | IDLE | NEUTRAL.keys(), "decide about these fields of a new transformers release"
    assert not HONOURED & IDLE
    assert not NEUTRAL.keys() & (HONOURED | IDLE)


FOREIGN = {
    **dict.fromkeys(("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "assistant_confidence_threshold"), 0.77),
    **{name: True for name, neutral in NEUTRAL.items() if neutral == (False,)},
    "use_cache": False,
    "cache_implementation": "static",
    "num_assistant_tokens_schedule": "heuristic",
}


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_every_other_field_is_refused_by_name(name: str) -> None:
    config = GenerationConfig(max_length=20, do_sample=True)
    for neutral in (None, *NEUTRAL[name]):
        setattr(config, name, neutral)
        read_settings(config, 5)
    setattr(config, name, FOREIGN.get(name, 3))
    with pytest.raises(ValueError, match=f"^{name}: expected .*None, all that a cascade can do exactly, got"):
        read_settings(config, 5)


def test_fields_of_a_later_release_are_refused_unless_they_hold_its_default() -> None:
    class Later(GenerationConfig):
        @staticmethod
        def _get_default_generation_params() -> dict[str, Any]:
            return {"foresight": 0.5}

    config = Later(max_length=20, foresight=0.5)
    read_settings(config, 5)
    config.foresight = 0.6
    with pytest.raises(ValueError, match="^foresight: expected 0.5 or None, .* got 0.6"):
        read_settings(config, 5)
    config.foresight = [0.5]
    with pytest.raises(ValueError, match="^foresight"):
        read_settings(config, 5)


def test_settings_that_only_sampling_reads_do_not_stop_greedy_decoding(tiny_llama: Llama) -> None:
    model = tiny_llama(seed=0, layers=3)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, typical_p=0.5)
    settings = {"do_sample": False, "max_new_tokens": 10}
    assert torch.equal(call(model, **settings), model.generate(PROMPT, **settings))


def _cache(model: LlamaForCausalLM) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(PROMPT[:, :3], past_key_values=cache)
    return cache


def _processors(*processors: LogitsProcessor) -> dict[str, LogitsProcessorList]:
    return {"logits_processor": LogitsProcessorList(processors)}


REFUSED: dict[str, tuple[dict[str, Any] | Callable[[LlamaForCausalLM], dict[str, Any]], str]] = {
    "beams": ({"num_beams": 2}, "num_beams: .* got 2"),
    "n-grams": ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
    "typical": ({"do_sample": True, "typical_p": 0.9}, "typical_p"),
    "shortest": ({"min_new_tokens": 3}, "min_"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "no cache": ({"use_cache": False}, "use_cache"),
    "time": ({"max_time": 9.0}, "max_time"),
    "forced end": ({"forced_eos_token_id": 2}, "forced_eos_token_id"),
    "bias": ({"sequence_bias": [[[5], 2.0]]}, "sequence_bias"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation"),
    "look-up": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: .*PromptLookupDrafter"),
    "processor": (_processors(Shift()), "logits_processor: .* got Shift"),
    "other temperature": (
        {"do_sample": True, "temperature": 0.5, **_processors(TemperatureLogitsWarper(0.6))},
        "logits_processor: .* got TemperatureLogitsWarper",
    ),
    "unasked top-k": (_processors(TopKLogitsWarper(3)), "logits_processor: .* got TopKLogitsWarper"),
    "partial penalty": (
        {"repetition_penalty": 1.5, **_processors(RepetitionPenaltyLogitsProcessor(1.5, 5))},
        "logits_processor: .* got RepetitionPenaltyLogitsProcessor",
    ),
    "prefix function": ({"prefix_allowed_tokens_fn": lambda row, ids: [5]}, "got PrefixConstrainedLogitsProcessor"),
    "criterion": ({"stopping_criteria": StoppingCriteriaList([Never()])}, "stopping_criteria: .* got Never"),
    "other length": (
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(7)])},
        "stopping_criteria: .* got MaxLengthCriteria",
    ),
    "cache": (lambda model: {"past_key_values": _cache(model)}, "cache|past_key_values"),
    "empty cache": (lambda model: {"past_key_values": DynamicCache(config=model.config)}, "cache|past_key_values"),
    "positions": ({"position_ids": torch.arange(5)[None] + 2}, "position_ids"),
    "all logits": ({"logits_to_keep": 0}, "logits_to_keep"),
    "embeddings": (lambda model: {"inputs_embeds": model.model.embed_tokens(PROMPT)}, "inputs_embeds"),
    "right padding": ({"input_ids": PADDED.flip(1), "attention_mask": MASK.flip(1)}, "attention_mask"),
    "ledger alone": ({"ledger": True}, "ledger: .*return_dict_in_generate"),
    "stop strings": ({"stop_strings": "x"}, "stop_strings: .*partial"),
    "no drafter": ({"drafter": None}, "drafter: .* got none"),
    "assistant": (lambda model: {"drafter": None, "assistant_model": early_exit(model, 1)}, "drafter: .*assistant"),
    "synced": ({"custom_generate": partial(speccascade.generate, synced_gpus=True)}, "synced_gpus"),
    "gamma": ({"gamma": 0}, "gamma"),
    "length": ({"max_new_tokens": 600}, "max_new_tokens"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(tiny_llama: Llama, case: str) -> None:
    model = tiny_llama()
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as refusal:
        call(model, **(changes(model) if callable(changes) else changes))
    assert "\n" not in str(refusal.value)


def test_training_mode_is_refused(tiny_llama: Llama) -> None:
    with pytest.raises(ValueError, match="^model: expected evaluation mode"):
        call(tiny_llama().train())


def test_encoder_decoders_are_refused(tiny_llama: Llama) -> None:
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0, use_cache=True
    )
    with pytest.raises(ValueError, match=r"^model: expected a decoder-only model, got T5.*SpeculativeCascade"):
        call(T5ForConditionalGeneration(config).eval(), drafter=tiny_llama())
