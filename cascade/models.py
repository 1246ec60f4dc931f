"""A causal language model as the engine needs it: read tokens, give logits, forget tokens, row by row.

Knows no tokenizer, no rule and no sampling. `TransformersLM` adapts any decoder-only Hugging Face model (`seq2seq.py`
adapts encoder-decoders); anything with the same two protocols will do.

Shapes: ``B`` row, ``N`` tokens read at once, ``V`` token, ``H`` hidden state.
"""

import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from .cache import RaggedCache, refuse_unsupported, visible_keys

__all__ = [
    "CausalLM",
    "PrefixState",
    "RevealingState",
    "TransformersLM",
    "as_mask",
    "check_vocab_size",
    "find_cache_argument",
    "hidden_size_of",
    "keep_last",
    "read_tokens",
    "reveal_hidden",
    "vocab_rows",
]


@runtime_checkable
class PrefixState(Protocol):
    """A model's cached view of what it has read of each row, for one call of ``generate``."""

    @property
    def lengths(self) -> list[int]:
        """Number of tokens read and kept, a row."""
        ...

    def extend(self, tokens: Int[Tensor, "B N"], counts: Sequence[int], keep: int) -> Float[Tensor, "B keep V"]:
        """Read the first ``counts[i]`` tokens of row i after its prefix (the rest is padding).

        Returns the logits that follow each of the last ``keep`` tokens read of every row.
        """
        ...

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[i]`` tokens of row i."""
        ...

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        ...


@runtime_checkable
class RevealingState(PrefixState, Protocol):
    """A state that also tells what the model's output head read: hidden states, for rules that ask for them."""

    def extend_with_hidden(
        self, tokens: Int[Tensor, "B N"], counts: Sequence[int], keep: int
    ) -> tuple[Float[Tensor, "B keep V"], Float[Tensor, "B keep H"]]:
        """Do as `extend`; return the same logits, and the float32 states that each of them follows from."""
        ...


@runtime_checkable
class CausalLM(Protocol):
    """A model that starts a fresh `PrefixState` for each call, so that nothing leaks from one call into the next.

    An encoder-decoder also has ``decoder_start``: `start` gives it the encoder's prompts, and the rows that its state
    reads begin with this one token instead. Without it (or with None) the rows begin with the prompts. One whose
    states are `RevealingState` says so by ``hidden_size``, the H of its hidden states.
    """

    name: str
    vocab_size: int

    @property
    def device(self) -> torch.device:
        """Where tokens are expected and logits appear."""
        ...

    def start(self, prompts: Sequence[Sequence[int]]) -> PrefixState:
        """Begin with a row for each prompt, nothing of it read yet."""
        ...


class TransformersLM:
    """A decoder-only Hugging Face model.

    Args:
        model: the model; it is put in evaluation mode.
        vocab_size: number of real token ids; logits beyond (padding rows) are cut off. Default: all rows of the head.

    Raises:
        ValueError: an encoder-decoder or recurrent model, or a ``vocab_size`` larger than the head.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None) -> None:
        refuse_unsupported(model)
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in parameters:
            raise ValueError(f"{type(model).__name__}: rows of different lengths need a model that takes position_ids")
        self.vocab_size = check_vocab_size(model, vocab_size)
        self.hidden_size = hidden_size_of(model)
        self.model = model.eval()
        self.max_length: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.name = model.config.name_or_path or type(model).__name__
        self.cache_argument = find_cache_argument(model)
        self.keeps_logits = "logits_to_keep" in parameters
        self.masks = _mask_kinds(model)

    @property
    def device(self) -> torch.device:
        """Where the embeddings lie."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def start(self, prompts: Sequence[Sequence[int]]) -> "TransformersState":
        """Begin with a row for each prompt."""
        return TransformersState(self, len(prompts))

    def attention_mask(self, positions: Int[Tensor, "B N"], end: int) -> Any:
        """The mask that the model's layers need: one tensor, or one for each kind of layer."""
        masks = {kind: as_mask(self.model, visible_keys(positions, end, window)) for kind, window in self.masks.items()}
        return masks.get("", masks)


class TransformersState:
    """What a Hugging Face model has read, held in its key-value cache."""

    def __init__(self, owner: TransformersLM, batch: int) -> None:
        self._owner = owner
        self._cache = RaggedCache()
        self._lengths = [0] * batch

    @property
    def lengths(self) -> list[int]:
        """Number of tokens read and kept, a row."""
        return self._lengths

    def extend(self, tokens: Int[Tensor, "B N"], counts: Sequence[int], keep: int) -> Float[Tensor, "B keep V"]:
        """Read the first ``counts[i]`` tokens of row i; return the logits after each of the last ``keep`` of them."""
        owner = self._owner
        positions = self._cache.place(self._lengths, tokens.shape[1], owner.device)
        padding = tokens.shape[1] - min(counts)
        arguments: dict[str, Any] = {owner.cache_argument: self._cache, "use_cache": True}
        if owner.keeps_logits:
            arguments["logits_to_keep"] = keep + padding
        # Padding takes the position of a row's last token, and what is drafted beyond the last position that the model
        # knows takes that one: both surely exist, and neither is ever kept.
        limit = owner.max_length or sys.maxsize
        last = torch.tensor([min(held + count, limit) - 1 for held, count in zip(self._lengths, counts, strict=True)])
        logits: Tensor = owner.model(
            input_ids=tokens.to(owner.device),
            attention_mask=owner.attention_mask(positions, max(self._lengths) + tokens.shape[1]),
            position_ids=torch.minimum(positions, last.to(owner.device).unsqueeze(1)),
            **arguments,
        ).logits[:, -(keep + padding) :, : owner.vocab_size]
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        return keep_last(logits, [tokens.shape[1] - count for count in counts], keep)

    def extend_with_hidden(
        self, tokens: Int[Tensor, "B N"], counts: Sequence[int], keep: int
    ) -> tuple[Float[Tensor, "B keep V"], Float[Tensor, "B keep H"]]:
        """Do as `extend`; return the same logits, and what the output head read for each of them."""
        return reveal_hidden(self._owner.model, self, tokens, counts, keep)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[i]`` tokens of row i."""
        kept = zip(lengths, self._lengths, strict=True)
        assert all(0 <= new <= old for new, old in kept), f"cannot roll back from {self._lengths} to {lengths} tokens"
        self._lengths = list(lengths)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._cache.select_rows(rows)
        self._lengths = [self._lengths[row] for row in rows]


def vocab_rows(model: PreTrainedModel) -> int:
    """Number of rows of the output head, padding rows included."""
    rows: int = model.get_output_embeddings().weight.shape[0]
    return rows


def hidden_size_of(model: PreTrainedModel) -> int:
    """Length of the states that the output head reads."""
    size: int = model.get_output_embeddings().weight.shape[1]
    return size


def read_tokens(
    state: PrefixState, tokens: Int[Tensor, "B N"], counts: Sequence[int], keep: int, hidden: bool
) -> tuple[Float[Tensor, "B keep V"], Float[Tensor, "B keep H"] | None]:
    """Extend a state; with ``hidden`` return also what its model's output head read."""
    if not hidden:
        return state.extend(tokens, counts, keep), None
    assert isinstance(state, RevealingState), f"expected a state that tells hidden states, got {type(state).__name__}"
    return state.extend_with_hidden(tokens, counts, keep)


def reveal_hidden(
    model: PreTrainedModel, state: PrefixState, tokens: Int[Tensor, "B N"], counts: Sequence[int], keep: int
) -> tuple[Float[Tensor, "B keep V"], Float[Tensor, "B keep H"]]:
    """Extend a state of ``model`` and look on while its output head reads.

    Raises:
        ValueError: a model that multiplies by its head's weights without calling the head.
    """
    with _watch_head(model) as seen:
        logits = state.extend(tokens, counts, keep)
    if len(seen) != 1:
        raise ValueError(
            f"{type(model).__name__}: expected a model that calls its output head once, where a rule reads hidden "
            f"states, got {len(seen)} calls"
        )
    return logits, keep_last(seen[0], [tokens.shape[1] - count for count in counts], keep).float()


@contextmanager
def _watch_head(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """While this lasts, collect what the output head is given in this thread; others may run the same model."""
    seen, thread = list[Tensor](), threading.get_ident()

    def look(module: Any, arguments: tuple[Any, ...]) -> None:
        if threading.get_ident() == thread:
            seen.append(arguments[0])

    hook = model.get_output_embeddings().register_forward_pre_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


def check_vocab_size(model: PreTrainedModel, vocab_size: int | None) -> int:
    """Return the number of real token ids: ``vocab_size``, or all rows of the head.

    Raises:
        ValueError: more than the head has, or less than one.
    """
    rows = vocab_rows(model)
    if vocab_size is not None and not 0 < vocab_size <= rows:
        raise ValueError(f"vocab_size: expected 1 to {rows} (rows of the head), got {vocab_size}")
    return rows if vocab_size is None else vocab_size


def find_cache_argument(model: PreTrainedModel) -> str:
    """Name of the argument that takes the cache: transformers 5.24 renamed it; the old name goes away later."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def as_mask(model: PreTrainedModel, visible: Bool[Tensor, "B 1 N S"]) -> Tensor:
    """The mask as the model's attention takes it: of truth values, or of numbers to add."""
    if model.config._attn_implementation == "sdpa":
        return visible
    return torch.where(visible, 0.0, torch.finfo(model.dtype).min).to(model.dtype)


def keep_last(logits: Float[Tensor, "B M V"], padding: Sequence[int], keep: int) -> Float[Tensor, "B keep V"]:
    """Logits or states at each row's last ``keep`` tokens, behind which ``padding[i]`` places of row i are padding."""
    width = logits.shape[1]
    if not any(padding):
        return logits[:, width - keep :]
    first = torch.tensor([width - count - keep for count in padding])
    return logits[torch.arange(len(padding)).unsqueeze(1), first.unsqueeze(1) + torch.arange(keep)]


def _mask_kinds(model: PreTrainedModel) -> dict[str, int | None]:
    """Kind of layer → its window (None: unlimited); a single kind, under "", where the model takes one mask."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds:
        return {"full_attention": None, "sliding_attention": window}
    return {"": None if kinds else window}
