"""Packed weights give the same products, and leave the model that they came from as it was."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from speccascade import rules
from speccascade.cascade import SpeculativeCascade, early_exit, pack_weights
from speccascade.cascade.packing import PackedLinear, can_pack

Build = Callable[..., LlamaForCausalLM]
PROMPT = torch.tensor([[3, 14, 15, 9, 26]])


@pytest.fixture
def model(tiny_llama: Build) -> LlamaForCausalLM:
    built = tiny_llama(seed=0, layers=3, hidden=64).to(torch.bfloat16)
    if not can_pack(built):
        pytest.skip("this CPU has no bfloat16 kernels with a layout of their own")
    return built


@pytest.mark.parametrize("positions", [1, 2, 6, 40])
def test_logits_are_the_same_to_the_bit(model: LlamaForCausalLM, positions: int) -> None:
    ids = torch.randint(3, 64, (2, positions), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(pack_weights(model)(ids).logits, model(ids).logits)


def test_the_original_stays_as_it_was(model: LlamaForCausalLM) -> None:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    packed = pack_weights(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert not any(type(module) is nn.Linear for module in packed.modules())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    calls = []
    packed.register_forward_hook(lambda *_: calls.append(1))
    model(PROMPT)
    assert not calls, "a hook on the view must not reach the original"


def test_a_packed_pair_generates_what_the_pair_generates(model: LlamaForCausalLM) -> None:
    plain = SpeculativeCascade(early_exit(model, 2), model, rules.OPT(0.2))
    packed = SpeculativeCascade(early_exit(pack_weights(model), 2), pack_weights(model), rules.OPT(0.2))
    for temperature in (0.0, 1.0):
        outs = [c.generate(PROMPT, max_new_tokens=30, temperature=temperature, seed=1) for c in (plain, packed)]
        assert torch.equal(outs[0].sequences, outs[1].sequences)


def test_an_encoder_decoder_packs_too(model: LlamaForCausalLM) -> None:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    t5 = T5ForConditionalGeneration(config).to(torch.bfloat16).eval()
    inputs = {"input_ids": PROMPT, "decoder_input_ids": PROMPT}
    with torch.inference_mode():
        assert torch.equal(pack_weights(t5)(**inputs).logits, t5(**inputs).logits)


def test_other_weights_are_refused(tiny_llama: Build) -> None:
    with pytest.raises(ValueError, match=r"model: expected bfloat16 weights on a CPU.*got float32 on cpu"):
        pack_weights(tiny_llama())
