"""Layers of a model as parts of a smaller one: what is kept runs as it did, and the choice is the greedy one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from speccascade.training.layers import choose_layers, keep_layers, layer_stack, only_layers

FAMILIES = ("llama", "gpt2", "gemma3")


@pytest.fixture
def build(tiny_llama: Callable[..., Any]) -> Callable[[str], Any]:
    """A model with six or seven layers, far from uniform, in one of three families."""

    def make(family: str) -> Any:
        if family == "llama":
            return tiny_llama(layers=6)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if family == "gpt2":
                config = GPT2Config(
                    vocab_size=64, n_embd=32, n_layer=6, n_head=4, initializer_range=0.2, bos_token_id=1, eos_token_id=2
                )
                return GPT2LMHeadModel(config).eval()
            gemma = Gemma3TextConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=7, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, sliding_window=4, final_logit_softcapping=3.0, initializer_range=0.2,
            )  # fmt: skip
            return Gemma3ForCausalLM(gemma).eval()

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_model_runs_as_the_skipped_one(family: str, build: Callable[[str], Any]) -> None:
    model, kept = build(family), [0, 2, 3, 5]
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    stack = layer_stack(model)[1]
    small = keep_layers(model, kept)
    with torch.inference_mode(), only_layers(model, [stack[index] for index in kept], kept):
        skipped = model(input_ids=ids, use_cache=False).logits
    with torch.inference_mode():
        torch.testing.assert_close(small(input_ids=ids).logits, skipped)
        assert not torch.allclose(model(input_ids=ids).logits, skipped), "the full model must be whole again"
    numbers = [layer.self_attn.layer_idx for layer in layer_stack(small)[1] if hasattr(layer, "self_attn")]
    assert numbers in ([], [0, 1, 2, 3])
    assert small.config.num_hidden_layers == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_model_shares_no_weight_but_keeps_the_ties(family: str, build: Callable[[str], Any]) -> None:
    model = build(family)
    small = keep_layers(model, [0, 1])
    own, copied = ({weight.data_ptr() for weight in one.parameters()} for one in (model, small))
    assert not own & copied
    tied = [one.get_input_embeddings().weight is one.get_output_embeddings().weight for one in (model, small)]
    assert tied[0] == tied[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_choice_is_the_greedy_one(family: str, build: Callable[[str], Any]) -> None:
    """Against a plain search that runs every candidate from the first layer on."""
    model = build(family)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids, dtype=torch.bool)
    stack = layer_stack(model)[1]
    kept, plain = list(range(len(stack))), []
    with torch.inference_mode():
        full = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        while len(kept) > 3:
            divergences = []
            for place in range(len(kept)):
                rest = kept[:place] + kept[place + 1 :]
                with only_layers(model, [stack[index] for index in rest], rest):
                    logits = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
                divergences.append(
                    float(functional.kl_div(logits, full, reduction="sum", log_target=True)) / ids.numel()
                )
            best = min(range(len(kept)), key=divergences.__getitem__)
            plain.append((kept[best], divergences[best]))
            del kept[best]
    reported: list[tuple[int, float]] = []
    assert choose_layers(model, [(ids, mask)], 3, lambda layer, kl: reported.append((layer, kl))) == kept
    assert [layer for layer, _ in reported] == [layer for layer, _ in plain]
    assert [kl for _, kl in reported] == pytest.approx([kl for _, kl in plain], rel=1e-3)


def test_bad_layers_are_refused(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(layers=3)
    for layers in ([], [0, 0], [2, 1], [0, 3], [-1, 0]):
        with pytest.raises(ValueError, match="layers: expected increasing numbers from 0 to 2"):
            keep_layers(model, layers)
    with pytest.raises(ValueError, match="layers: expected 1 to 3, got 4"):
        choose_layers(model, [], 4)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(ValueError, match="expected a decoder-only model"):
        layer_stack(t5)
