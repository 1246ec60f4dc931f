"""Weights laid out once for the CPU's bfloat16 kernels, instead of anew at every step.

On a CPU a bfloat16 matrix product copies its weight into the layout of the kernel each time it is called, which for the
few positions of a decoding step costs more than the product. `pack_weights` lays every weight out once; the products,
and so the distributions, are the same to the bit where the plain product runs on the same kernel (tested). oneDNN's
packed form cannot be trained or saved. Knows no cascade.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .views import view_module

__all__ = ["can_pack", "pack_weights"]

_POSITIONS = 6  # what the layout is chosen for: a verified block; it serves any number of positions


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _POSITIONS)
        # Models ask a weight for its shape and type; this one has both and no memory.
        self.register_buffer("weight", torch.empty_like(linear.weight, device="meta"), persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        """Return the layer's output."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(states.contiguous(), self.packed, self.bias, "none", [], "")
        return output


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the model's weights are bfloat16 on a CPU whose kernels take a layout of their own."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    has_ops = all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    on_cpu = model.dtype == torch.bfloat16 and model.device.type == "cpu"
    return on_cpu and has_ops and supported is not None and bool(supported())


def pack_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a view of ``model`` for inference whose linear layers are packed; all else is shared.

    The packed layers are a second copy of their weights: give up the original (``model = pack_weights(model)``) and its
    memory is free again. The view can be neither trained nor saved.

    Raises:
        ValueError: weights of another type than bfloat16, on another device, or a CPU without such kernels.
    """
    if not can_pack(model):
        got = f"{str(model.dtype).removeprefix('torch.')} on {model.device}"
        raise ValueError(f"model: expected bfloat16 weights on a CPU whose oneDNN kernels take bfloat16, got {got}")
    with torch.inference_mode():
        packed = _view(model, {})
    assert isinstance(packed, PreTrainedModel)
    packed.eval()
    return packed


def _view(module: nn.Module, seen: dict[int, nn.Module]) -> nn.Module:
    """Copy the tree of modules with packed leaves; parameters and buffers are shared, tables of children are not."""
    if id(module) not in seen:
        if type(module) is nn.Linear:
            seen[id(module)] = PackedLinear(module)
        else:
            view = seen[id(module)] = view_module(module)
            view._modules = {
                name: None if child is None else _view(child, seen) for name, child in module._modules.items()
            }
    return seen[id(module)]
