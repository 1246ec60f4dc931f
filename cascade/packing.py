"""Weights in the layout in which the processor multiplies them, laid out once instead of at every call.

In bfloat16 on a CPU, oneDNN wants a blocked layout, and a plain linear layer makes it anew whenever it is called: for
the few tokens of a decoding step that takes as long as the product itself. A packed layer holds the blocked copy beside
its weight and gives the same bits. Other dtypes and devices are left as they are: in float32 the packed product rounds
differently. Knows no model family, no cache and no sampling.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["PackedLinear", "can_pack", "pack_linears"]

_ROWS_HINT = 6
"""Number of rows that the layout is chosen for; any number is multiplied correctly."""


class PackedWeight:
    """A blocked copy of one weight, and the means to tell whether the weight is still what was copied."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
        self._weight = weight
        self._state = (weight._version, weight.data_ptr())

    def is_of(self, weight: Tensor) -> bool:
        """Whether ``weight`` is the very weight that was packed, untouched since."""
        return weight is self._weight and (weight._version, weight.data_ptr()) == self._state

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedWeight":
        """A blocked tensor cannot be copied; a copied layer multiplies by its own weight until it is packed itself."""
        return self


class PackedLinear(nn.Module):
    """A linear layer with a packed copy of its weight; the parameters are those of the layer that it replaces."""

    def __init__(self, linear: nn.Linear, packed: PackedWeight) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = packed

    def forward(self, states: Float[Tensor, "*batch I"]) -> Float[Tensor, "*batch O"]:
        """Multiply; by the weight itself where a gradient is wanted or where it is not what was packed."""
        if torch.is_grad_enabled() or not self.packed.is_of(self.weight) or states.dtype != self.weight.dtype:
            return nn.functional.linear(states, self.weight, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            states.contiguous(), self.packed.blocked, self.bias, "none", [], ""
        )
        return product


def can_pack() -> bool:
    """Whether this build of torch and this processor have packed products in bfloat16."""
    operators: Any = getattr(torch.ops, "mkldnn", None)
    known = all(hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    return known and torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(*models: nn.Module) -> int:
    """Pack every bfloat16 linear layer of the models on a CPU, in place; return how many layers were packed.

    A weight that several layers share is packed once. Takes as much memory again as the weights packed.
    """
    if not can_pack():
        return 0
    packed: dict[int, PackedWeight] = {}
    count = 0
    for parent, name, linear in [found for model in models for found in _linears(model)]:
        if getattr(parent, name) is not linear:  # a parent that two models share was seen before
            continue
        weight = linear.weight
        if weight.dtype is not torch.bfloat16 or weight.device.type != "cpu" or weight.is_inference():
            continue  # an inference tensor does not tell when it is changed
        if id(weight) not in packed:
            packed[id(weight)] = PackedWeight(weight)
        setattr(parent, name, PackedLinear(linear, packed[id(weight)]))
        count += 1
    return count


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:  # a subclass may do more than multiply
                yield parent, name, child
