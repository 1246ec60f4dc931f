"""A model's own layers as the parts of a smaller one: which to keep, and the model made of them.

Works on any decoder-only Hugging Face model whose layers stand in one list. Knows no text, no tuning and no file.

Shapes: ``B`` sequence, ``L`` token, ``D`` width, ``N`` position, ``V`` token of the vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["Given", "backbone_of", "choose_layers", "head_logits", "keep_layers", "layer_stack", "only_layers"]


class Given(nn.Module):
    """Stands in for leading layers whose output is already known: returns it, whatever comes in."""

    def __init__(self, hidden: Float[Tensor, "B L D"]) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the known output."""
        return self.hidden


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head."""
    return cast(PreTrainedModel, getattr(model, model.base_model_prefix))


def layer_stack(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Qualified name and list of the model's layers.

    Raises:
        ValueError: the model has no single list of ``num_hidden_layers`` layers.
    """
    depth = getattr(model.config, "num_hidden_layers", None)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth and name.count(".") <= 2
    ]
    if depth is None or len(found) != 1 or model.config.is_encoder_decoder:
        raise ValueError(
            f"verifier: expected a decoder-only model with one list of {depth} layers, "
            f"got {type(model).__name__} with {[name for name, _ in found]}"
        )
    return found[0]


@contextmanager
def only_layers(model: PreTrainedModel, modules: Sequence[nn.Module], kept: Sequence[int]) -> Iterator[None]:
    """Within the block the model runs `modules` in place of its layers; `kept` says which layer each stands for."""
    name, stack = layer_stack(model)
    parent_name, _, attribute = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    depth, kinds = model.config.num_hidden_layers, getattr(model.config, "layer_types", None)
    setattr(parent, attribute, nn.ModuleList(modules))
    model.config.num_hidden_layers = len(modules)
    if kinds is not None:
        model.config.layer_types = [kinds[index] for index in kept]
    try:
        yield
    finally:
        setattr(parent, attribute, stack)
        model.config.num_hidden_layers = depth
        if kinds is not None:
            model.config.layer_types = kinds


def keep_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Copy `model` with only `layers`, renumbered from zero: an ordinary model of its class, in the model's dtype.

    Embedding, final norm and head are copies of the model's own, tied if it ties them.

    Raises:
        ValueError: a layer that does not exist, a repeated or unsorted list, an empty list.
    """
    name, stack = layer_stack(model)
    kept = list(layers)
    if not kept or kept != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= len(stack):
        raise ValueError(f"layers: expected increasing numbers from 0 to {len(stack) - 1}, got {kept}")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    small = cast(PreTrainedModel, type(model)._from_config(config, dtype=model.dtype))
    renamed = {f"{name}.{old}.": f"{name}.{new}." for new, old in enumerate(kept)}
    weights = {}
    for key, value in model.state_dict().items():
        layer = ".".join(key.split(".")[: name.count(".") + 2]) + "."
        if key.startswith(f"{name}."):
            if layer not in renamed:
                continue
            key = renamed[layer] + key[len(layer) :]
        weights[key] = value
    small.load_state_dict(weights, strict=True)
    small.tie_weights()
    small.eval()
    return small


def head_logits(model: PreTrainedModel, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
    """Logits of final hidden states in float32, soft-capped where the model does so."""
    logits: Tensor = model.get_output_embeddings()(hidden).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.inference_mode()
def choose_layers(
    model: PreTrainedModel,
    batches: Sequence[tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]],
    count: int,
    on_step: Callable[[int, float], None] | None = None,
) -> list[int]:
    """Drop layers one by one until `count` are left, each time the one whose loss costs the least KL to the full model.

    Args:
        model: the full model.
        batches: token ids and the mask of positions whose next-token distribution counts.
        count: number of layers to keep.
        on_step: called after each drop with the layer's number and the mean KL (nats) that is then reached.

    Raises:
        ValueError: `count` is not from 1 to the number of layers.
    """
    _, stack = layer_stack(model)
    if not 1 <= count <= len(stack):
        raise ValueError(f"layers: expected 1 to {len(stack)}, got {count}")
    layers = list(stack)
    references = [head_logits(model, _final_hidden(model, ids, mask)).softmax(dim=-1) for ids, mask in batches]
    entropy = sum(float(torch.special.entr(reference).sum()) for reference in references)
    positions = sum(int(mask.sum()) for _, mask in batches)
    kept = list(range(len(layers)))
    while len(kept) > count:
        costs = torch.zeros(len(kept))
        for (ids, mask), reference in zip(batches, references, strict=True):
            costs += _costs_of_dropping(model, layers, kept, ids, mask, reference)
        place = int(costs.argmin())
        if on_step is not None:
            on_step(kept[place], (float(costs[place]) - entropy) / positions)
        del kept[place]
    return kept


def _costs_of_dropping(
    model: PreTrainedModel, layers: list[nn.Module], kept: list[int], ids: Tensor, mask: Tensor, reference: Tensor
) -> Tensor:
    """Summed cross-entropy to the full model after dropping each kept layer; what stands before it is computed once."""
    outputs: list[Tensor] = []
    hooks = [
        layers[index].register_forward_hook(lambda module, args, output: outputs.append(_hidden_of(output)))
        for index in kept[:-1]
    ]
    with only_layers(model, [layers[index] for index in kept], kept):
        backbone_of(model)(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    costs = []
    for place in range(len(kept)):
        rest = kept[:place] + kept[place + 1 :]
        modules = [layers[index] for index in rest]
        if place > 0:
            modules = [Given(outputs[place - 1]), *(layers[index] for index in kept[place + 1 :])]
            rest = kept[place - 1 : place] + kept[place + 1 :]
        with only_layers(model, modules, rest):
            costs.append(_costs_from(reference, model, ids, mask))
    return torch.stack(costs)


def _costs_from(reference: Tensor, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy of the model as it runs now against the reference distributions, summed over positions."""
    logits = head_logits(model, _final_hidden(model, ids, mask))
    return logits.logsumexp(dim=-1).sum() - torch.dot(reference.view(-1), logits.view(-1))


def _final_hidden(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    return cast(Tensor, backbone_of(model)(input_ids=ids, use_cache=False)[0][mask])


def _hidden_of(output: Any) -> Tensor:
    return cast(Tensor, output[0] if isinstance(output, tuple) else output)
