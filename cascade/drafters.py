"""Who drafts: a model of its own, or the verifier's own first layers.

A drafter hands over each token together with the very distribution it was drawn from: that pair is what makes
verification exact.

Shapes: ``B`` sequence, ``L`` tokens so far, ``T`` drafted tokens, ``V`` token.
"""

import copy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from .distributions import Sampling, draw, logits_to_probs
from .models import CausalLM, PrefixState

__all__ = ["Draft", "DraftState", "Drafter", "ModelDrafter", "early_exit"]


@dataclass(frozen=True)
class Draft:
    """Drafted tokens and the distributions behind them.

    ``tokens`` ``[B, T]``; ``probs`` (q) and ``confidence`` (q°) are ``[B, T, V]``, or ``[B, T + 1, V]`` when the
    position after the last drafted token was asked for too.
    """

    tokens: Int[Tensor, "B T"]
    probs: Float[Tensor, "B D V"]
    confidence: Float[Tensor, "B D V"]


@runtime_checkable
class DraftState(Protocol):
    """A drafter's view of one call of ``generate``."""

    @property
    def calls(self) -> int:
        """Number of forward passes so far."""
        ...

    def propose(
        self, sequence: Int[Tensor, "B L"], gamma: int, sampling: Sampling, generator: torch.Generator, peek: bool
    ) -> Draft:
        """Draft ``gamma`` tokens after ``sequence``; with ``peek``, also give q at the position after them."""
        ...

    def rollback(self, length: int) -> None:
        """Forget all but at most the first ``length`` tokens."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Anything that starts a fresh `DraftState` for each call."""

    name: str
    vocab_size: int

    def start(self) -> DraftState:
        """Begin with an empty prefix."""
        ...


class ModelDrafter:
    """Draft token by token with a language model."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.name = model.name
        self.vocab_size = model.vocab_size

    def start(self) -> "ModelDraftState":
        """Begin with an empty prefix."""
        return ModelDraftState(self.name, self.model.start())


class ModelDraftState:
    """The drafting model's cached prefix. After a full acceptance it still owes its own last token."""

    def __init__(self, name: str, state: PrefixState) -> None:
        self._source = f"the drafter {name}"
        self._state = state

    @property
    def calls(self) -> int:
        """Number of forward passes so far."""
        return self._state.calls

    def propose(
        self, sequence: Int[Tensor, "B L"], gamma: int, sampling: Sampling, generator: torch.Generator, peek: bool
    ) -> Draft:
        """Draft ``gamma`` tokens after ``sequence``; with ``peek``, also give q at the position after them."""
        unread = sequence[:, self._state.length :]
        tokens, probs, confidence = [], [], []
        for step in range(gamma + peek):
            logits = self._state.extend(unread, keep=1)[:, 0]
            probs.append(logits_to_probs(logits, sampling, self._source))
            confidence.append(probs[-1] if sampling.is_plain else logits_to_probs(logits))
            if step < gamma:
                tokens.append(draw(probs[-1], generator))
                unread = tokens[-1].unsqueeze(1)
        return Draft(torch.stack(tokens, dim=1), torch.stack(probs, dim=1), torch.stack(confidence, dim=1))

    def rollback(self, length: int) -> None:
        """Forget all but at most the first ``length`` tokens."""
        self._state.rollback(min(length, self._state.length))


def early_exit(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a view of ``model`` that stops after its first ``layers`` layers; every weight is shared.

    Raises:
        ValueError: ``layers`` out of range, or a model whose stack of layers cannot be found.
    """
    backbone = getattr(model, model.base_model_prefix, None)
    stack_name = next(
        (name for name in ("layers", "h") if isinstance(getattr(backbone, name, None), nn.ModuleList)), None
    )
    if backbone is None or stack_name is None:
        raise ValueError(f"model: expected a decoder with a list of layers, got {type(model).__name__}")
    stack = getattr(backbone, stack_name)
    if not 0 < layers < len(stack):
        raise ValueError(f"layers: expected 1 to {len(stack) - 1} of the model's {len(stack)}, got {layers}")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    config.name_or_path = f"{config.name_or_path} (first {layers} layers)"
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    view, view_backbone = _share(model, config), _share(backbone, config)
    setattr(view_backbone, stack_name, nn.ModuleList(list(stack)[:layers]))
    setattr(view, model.base_model_prefix, view_backbone)
    return view


def _share(module: PreTrainedModel, config: Any) -> PreTrainedModel:
    shared = copy.copy(module)
    shared._modules = dict(
        module._modules
    )  # its own table of children, so that replacing one leaves the original whole
    shared.config = config
    return shared
