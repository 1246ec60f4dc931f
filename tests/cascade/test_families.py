"""Every family of models, past its sliding window, in ragged batches: equal to plain decoding token for token."""

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import speccascade
from speccascade.cascade import SingleModel, SpeculativeCascade, VerifyBlock

WINDOW, NEW = 9, 215  # every row ends more than 200 tokens past the window
VOCAB = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": VOCAB, "n_positions": 256, "n_embd": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", COMMON),
    "mistral, sliding": ("Mistral", COMMON | {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", COMMON),
    "qwen2, sliding": (
        "Qwen2",
        COMMON | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", COMMON | {"head_dim": 8}),
    "gemma": ("Gemma", COMMON | {"head_dim": 8}),
    "gemma2, sliding, eager": (
        "Gemma2",
        COMMON | {"head_dim": 8, "sliding_window": WINDOW, "tie_word_embeddings": False},
    ),
    "gemma3, sliding": (
        "Gemma3",
        COMMON
        | {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "smollm3": ("SmolLM3", COMMON),
    "phi3, sliding": ("Phi3", COMMON | {"sliding_window": WINDOW}),
    "gpt-neox": ("GPTNeoX", COMMON),
    "gpt2": ("GPT2", GPT2 | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),
}

NOISE = {"gemma2, sliding, eager": 0.1, "gemma3, sliding": 0.1}  # bounded logits move less


class Lossless:
    def target(self, block: VerifyBlock) -> torch.Tensor:
        return block.verifier_probs


def build_pair(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A verifier, and a drafter that is the verifier with a little noise: it agrees often, but not always."""
    name, settings = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    model_class = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        verifier, drafter = (model_class(config_class(**settings)).eval() for _ in range(2))
        for mine, theirs in zip(drafter.parameters(), verifier.parameters(), strict=True):
            mine.data.copy_(theirs.data + NOISE.get(family, 0.03) * torch.randn_like(mine))
    return drafter, verifier


def ragged_prompts() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator) for length in (5, 12, 1)]
    ids = torch.zeros(len(prompts), 12, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, 12 - len(prompt) :] = prompt
        mask[row, 12 - len(prompt) :] = 1
    return prompts, ids, mask


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches_equal_plain_decoding(family: str) -> None:
    drafter, verifier = build_pair(family)
    prompts, ids, mask = ragged_prompts()
    cascade = SpeculativeCascade(drafter, verifier, Lossless(), gamma=4).generate(ids, mask, max_new_tokens=NEW)
    alone = SingleModel(verifier).generate(ids, mask, max_new_tokens=NEW)
    for row, prompt in enumerate(prompts):
        plain = verifier.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )[0, len(prompt) :]  # fmt: skip
        assert torch.equal(cascade.sequences[row, 12:], plain)
        assert torch.equal(alone.sequences[row, 12:], plain)
    assert 0 < cascade.stats.acceptance_rate < 1, "both acceptance and roll-back must occur"


@pytest.mark.parametrize("family", ["llama", "gemma3, sliding"])
def test_a_row_does_not_depend_on_its_neighbours(family: str) -> None:
    drafter, verifier = build_pair(family)
    prompts, ids, mask = ragged_prompts()
    cascade = SpeculativeCascade(drafter, verifier, Lossless(), gamma=3)
    settings: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.8, "eos_token_id": list(range(7, 60, 6))}
    together = cascade.generate(ids, mask, seed=[21, 22, 23], **settings)
    for row, prompt in enumerate(prompts):
        single = cascade.generate(prompt[None], seed=21 + row, **settings)
        length = together.stats.per_sequence[row].new_tokens
        assert together.sequences[row, 12 : 12 + length].tolist() == single.sequences[0, len(prompt) :].tolist()
        assert single.stats.accepted == together.stats.per_sequence[row].accepted
    assert len({part.new_tokens for part in together.stats.per_sequence}) > 1, "rows must end at different times"


@pytest.mark.parametrize("family", ["gemma2, sliding, eager", "gemma3, sliding", "gpt2"])
def test_what_transformers_prepares_for_a_family_is_taken_from_it(family: str) -> None:
    drafter, verifier = build_pair(family)
    _, ids, mask = ragged_prompts()
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    ours = verifier.generate(ids, **settings, drafter=drafter, custom_generate=speccascade.generate)
    assert torch.equal(ours, verifier.generate(ids, **settings))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_counts_of_a_row_are_those_of_the_row_alone(temperature: float) -> None:
    """Rows that end at different times draft no more than each would alone, though the batch drafts on for others."""
    drafter, verifier = build_pair("llama")
    prompts, ids, mask = ragged_prompts()
    cascade = SpeculativeCascade(drafter, verifier, Lossless(), gamma=5)
    settings: dict[str, Any] = {"max_new_tokens": 13, "temperature": temperature, "eos_token_id": [9, 27, 40]}
    together = cascade.generate(ids, mask, seed=[5, 6, 7], **settings)
    for row, prompt in enumerate(prompts):
        alone = cascade.generate(prompt[None], seed=5 + row, **settings).stats
        mine = together.stats.per_sequence[row]
        for count in ("rounds", "drafted", "accepted", "rejected", "bonus", "verifier_calls", "drafter_calls"):
            assert getattr(mine, count) == getattr(alone, count), count


def test_models_without_position_ids_are_refused_by_name() -> None:
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)
    bloom = transformers.BloomForCausalLM(config)
    with pytest.raises(ValueError, match=r"BloomForCausalLM.*position_ids"):
        SingleModel(bloom)


def test_a_model_that_keeps_a_window_of_its_own_is_refused() -> None:
    settings = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
    local, world = (
        transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(attention_types=[[kinds, 1]], **settings))
        for kinds in (["global", "local"], ["global", "global"])
    )
    with pytest.raises(ValueError, match="GPTNeoForCausalLM keeps an attention window of its own"):
        SingleModel(local)
    assert SingleModel(world).vocab_size == VOCAB
