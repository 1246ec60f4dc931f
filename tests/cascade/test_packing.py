"""Packed layers: the same bits, and the plain weight whenever the packed copy would be wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from speccascade.cascade import SingleModel
from speccascade.cascade.drafters import early_exit
from speccascade.cascade.packing import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(not can_pack(), reason="this processor has no packed products in bfloat16")


def make_model(dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attention_bias=True, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (3, 2), (1, 40)])
def test_packed_layers_give_the_same_bits(shape: tuple[int, int], tied: bool) -> None:
    plain, packed = make_model(tied=tied), make_model(tied=tied)
    assert pack_linears(packed) == 2 * 7 + 1
    assert not [module for module in packed.modules() if type(module) is nn.Linear]
    ids = torch.randint(67, shape)
    with torch.inference_mode():
        assert torch.equal(packed(ids).logits, plain(ids).logits)


def test_generation_is_the_same_and_so_are_the_names_of_the_weights() -> None:
    plain, packed = make_model(), make_model()
    pack_linears(packed)
    prompt = torch.tensor([[1, 2, 3]])
    written = [SingleModel(model).generate(prompt, max_new_tokens=12).sequences for model in (plain, packed)]
    assert torch.equal(*written)
    assert packed.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(packed.state_dict()[name], weight) for name, weight in plain.state_dict().items())


def test_float32_is_left_alone() -> None:
    model = make_model(torch.float32)
    assert pack_linears(model) == 0
    assert not [module for module in model.modules() if isinstance(module, PackedLinear)]


def test_an_early_exit_shares_its_packed_layers_and_head() -> None:
    model = make_model()
    drafter = early_exit(model, 1)
    assert pack_linears(drafter, model) == 2 * 7 + 2
    assert drafter.lm_head.packed is model.lm_head.packed
    assert drafter.model.layers[0] is model.model.layers[0]
    assert pack_linears(drafter, model) == 0


def test_gradients_flow_and_a_changed_weight_is_used() -> None:
    linear = nn.Linear(8, 4).bfloat16()
    holder = nn.Sequential(linear)
    pack_linears(holder)
    states = torch.randn(2, 8).bfloat16()
    holder(states).sum().backward()
    assert linear.weight.grad is not None
    with torch.no_grad():
        before = holder(states)
        linear.weight.mul_(2)
        assert torch.equal(holder(states), linear(states))
        assert not torch.equal(holder(states), before)


def test_it_is_the_packed_copy_that_is_multiplied() -> None:
    holder = nn.Sequential(nn.Linear(8, 4, bias=False).bfloat16())
    pack_linears(holder)
    holder[0].packed.blocked = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(4, 8).bfloat16(), 1)
    states = torch.randn(2, 8).bfloat16()
    with torch.inference_mode():
        assert not holder(states).any()
    assert holder(states).any()


def test_another_dtype_after_packing_is_used() -> None:
    holder = nn.Sequential(nn.Linear(8, 4).bfloat16())
    pack_linears(holder)
    with torch.no_grad():
        assert holder.float()(torch.randn(2, 8)).dtype is torch.float32


def test_a_copy_of_a_packed_model_goes_by_its_own_weights() -> None:
    model = make_model()
    pack_linears(model)
    ids = torch.tensor([[1, 2, 3]])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(ids).logits, model(ids).logits)
        copied.lm_head.weight.zero_()
        assert not copied(ids).logits.any()
        assert model(ids).logits.any()
