"""Who drafts: a model of its own, or the verifier's own first layers.

A drafter hands over each token together with the very distribution it was drawn from: that pair is what makes
verification exact.

Shapes: ``B`` row, ``N`` unread tokens, ``T`` drafted tokens, ``V`` token, ``H`` hidden state.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from .distribute import distribute, join
from .distributions import Sampling
from .forms import Distribution, FromLogits, view_sides
from .models import CausalLM, PrefixState, read_tokens
from .pace import Pacer
from .processing import process_logits
from .views import view_module

__all__ = ["Draft", "DraftRequest", "DraftState", "Drafter", "ModelDrafter", "early_exit", "pad_unread"]


@dataclass(frozen=True)
class Draft:
    """Drafted tokens and the distributions behind them.

    Args:
        tokens: ``[B, T]``.
        law: q at ``[B, T]`` positions, or ``[B, T + 1]`` when the one after the last drafted token was asked for too.
        raw: q°, likewise; the same object where it is the same distribution.
        calls: forward passes of the drafter that each row asked for.
        lengths: how many tokens of each row count, at least one; the rest is padding.
        hidden: what the drafter's output head read at the positions of ``law``, ``[B, T or T + 1, H]`` float32, if the
            request asked for it.
    """

    tokens: Int[Tensor, "B T"]
    law: Distribution
    raw: Distribution
    calls: Sequence[int]
    lengths: Sequence[int]
    hidden: Float[Tensor, "B D H"] | None = None

    def to(self, device: torch.device) -> "Draft":
        """Return it on a device."""
        law, raw = view_sides(self.law, self.raw, lambda side: side.to(device))
        hidden = None if self.hidden is None else self.hidden.to(device)
        return replace(self, tokens=self.tokens.to(device), law=law, raw=raw, hidden=hidden)


@dataclass(frozen=True)
class DraftRequest:
    """What the engine asks of a drafter in one round.

    Args:
        rows: every row's tokens so far, prompt included.
        limits: most tokens to draft for each row; T is the largest of them.
        uniforms: one uniform in [0, 1) for each row and drafted token ``[B, U]``, U ≥ T.
        sampling: how tokens are drawn.
        peek: whether to give q at the position after the drafted tokens too.
        pacer: tells when a row's block is long enough; default: at its limit.
        hidden: whether to give the drafter's hidden states too; asked only of one with a ``hidden_size``.
    """

    rows: Sequence[Sequence[int]]
    limits: Sequence[int]
    uniforms: Float[Tensor, "B U"]
    sampling: Sampling
    peek: bool = False
    pacer: Pacer | None = None
    hidden: bool = False

    @property
    def length(self) -> int:
        """Tokens of the longest block, T."""
        return max(self.limits)


@runtime_checkable
class DraftState(Protocol):
    """A drafter's view of one call of ``generate``."""

    def propose(self, request: DraftRequest) -> Draft:
        """Draft a block after every row."""
        ...

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget all but at most the first ``lengths[i]`` tokens of row i."""
        ...

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Anything that starts a fresh `DraftState` for each call.

    One with a ``decoder_start`` (None for decoder-only) is taken only beside a verifier with the same; one without the
    attribute drafts from rows of any kind. One that can give hidden states has a ``hidden_size``, their length H.
    """

    name: str
    vocab_size: int

    def start(self, prompts: Sequence[Sequence[int]]) -> DraftState:
        """Begin with a row for each prompt, nothing of it read yet."""
        ...


class ModelDrafter:
    """Draft token by token with a language model."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.name = model.name
        self.vocab_size = model.vocab_size
        self.hidden_size: int | None = getattr(model, "hidden_size", None)
        self.max_length: int | None = getattr(model, "max_length", None)
        self.decoder_start: int | None = getattr(model, "decoder_start", None)

    def start(self, prompts: Sequence[Sequence[int]]) -> "ModelDraftState":
        """Begin with a row for each prompt."""
        return ModelDraftState(self.name, self.model.start(prompts), self.model.device)


class ModelDraftState:
    """The drafting model's cached rows. After a full acceptance a row still owes its own last token."""

    def __init__(self, name: str, state: PrefixState, device: torch.device) -> None:
        self._source = f"the drafter {name}"
        self._state = state
        self._device = device

    def propose(self, request: DraftRequest) -> Draft:
        """Draft a block after every row."""
        tokens, probs, logits, states = list[Tensor](), list[Distribution](), list[Tensor](), list[Tensor]()
        sampling, histories = request.sampling, request.rows
        unread, counts = pad_unread(request.rows, self._state.lengths, self._device)
        lengths = list(request.limits)
        step = 0
        while step < max(lengths) + request.peek:
            after, state = read_tokens(self._state, unread, counts, 1, request.hidden)
            logits.append(after)
            if state is not None:
                states.append(state)
            probs.append(distribute(process_logits(after, histories, sampling), sampling, self._source))
            if step < max(lengths):
                unread, counts = probs[-1].sample(request.uniforms[:, step : step + 1]), [1] * len(counts)
                tokens.append(unread)
                if sampling.reads_history:
                    histories = [[*row, token] for row, token in zip(histories, unread[:, 0].tolist(), strict=True)]
                if request.pacer is not None:
                    raw = probs[-1] if sampling.is_plain else FromLogits(after)
                    goes_on = request.pacer.goes_on(probs[-1], raw)
                    lengths = [n if on else min(n, step + 1) for n, on in zip(lengths, goes_on, strict=True)]
            step += 1
        law = join(probs)
        raw = law if sampling.is_plain else FromLogits(torch.cat(logits, dim=1))
        calls = [length + request.peek for length in lengths]
        return Draft(torch.cat(tokens, dim=1), law, raw, calls, lengths, torch.cat(states, dim=1) if states else None)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget all but at most the first ``lengths[i]`` tokens of row i."""
        self._state.rollback([min(pair) for pair in zip(lengths, self._state.lengths, strict=True)])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._state.select_rows(rows)


def pad_unread(
    rows: Sequence[Sequence[int]], read: Sequence[int], device: torch.device
) -> tuple[Int[Tensor, "B N"], list[int]]:
    """Gather what each row holds beyond its first ``read[i]`` tokens, right-padded, and how many that is."""
    unread = [list(row[start:]) for row, start in zip(rows, read, strict=True)]
    counts = [len(tokens) for tokens in unread]
    longest = max(counts)
    return torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in unread], device=device), counts


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
    shared = view_module(module)
    shared.config = config
    return shared
