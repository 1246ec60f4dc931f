"""A causal language model as the engine needs it: read tokens, give logits, forget tokens.

Knows no tokenizer, no rule and no sampling. `TransformersLM` adapts any decoder-only Hugging Face model; anything with
the same two protocols will do.

Shapes: ``B`` sequence, ``N`` tokens read at once, ``V`` token.
"""

import inspect
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from .cache import new_cache, refuse_unsupported, roll_back

__all__ = ["CausalLM", "PrefixState", "TransformersLM", "vocab_rows"]


@runtime_checkable
class PrefixState(Protocol):
    """A model's cached view of the tokens it has read so far, for one call of ``generate``."""

    @property
    def length(self) -> int:
        """Number of tokens read and kept."""
        ...

    @property
    def calls(self) -> int:
        """Number of forward passes so far."""
        ...

    def extend(self, tokens: Int[Tensor, "B N"], keep: int) -> Float[Tensor, "B keep V"]:
        """Read ``tokens`` after the prefix; return the logits that follow each of the last ``keep`` of them."""
        ...

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        ...


@runtime_checkable
class CausalLM(Protocol):
    """A model that starts a fresh `PrefixState` for each call, so that nothing leaks from one call into the next."""

    name: str
    vocab_size: int

    @property
    def device(self) -> torch.device:
        """Where tokens are expected and logits appear."""
        ...

    def start(self) -> PrefixState:
        """Begin with an empty prefix."""
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
        rows = vocab_rows(model)
        if vocab_size is not None and not 0 < vocab_size <= rows:
            raise ValueError(f"vocab_size: expected 1 to {rows} (rows of the head), got {vocab_size}")
        self.model = model.eval()
        self.vocab_size = vocab_size or rows
        self.name = model.config.name_or_path or type(model).__name__
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the argument; the old name goes away later.
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.keeps_logits = "logits_to_keep" in parameters

    @property
    def device(self) -> torch.device:
        """Where the embeddings lie."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def start(self) -> "TransformersState":
        """Begin with an empty prefix."""
        return TransformersState(self)


class TransformersState:
    """Tokens that a Hugging Face model has read, held in its key-value cache."""

    def __init__(self, owner: TransformersLM) -> None:
        self._owner = owner
        self._cache = new_cache()
        self._length = 0
        self._calls = 0

    @property
    def length(self) -> int:
        """Number of tokens read and kept."""
        return self._length

    @property
    def calls(self) -> int:
        """Number of forward passes so far."""
        return self._calls

    def extend(self, tokens: Int[Tensor, "B N"], keep: int) -> Float[Tensor, "B keep V"]:
        """Read ``tokens`` after the prefix; return the logits that follow each of the last ``keep`` of them."""
        owner = self._owner
        arguments: dict[str, Any] = {owner.cache_argument: self._cache, "use_cache": True}
        if owner.keeps_logits:
            arguments["logits_to_keep"] = keep
        logits: Tensor = owner.model(input_ids=tokens.to(owner.device), **arguments).logits
        self._length += tokens.shape[1]
        self._calls += 1
        return logits[:, -keep:, : owner.vocab_size]

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        assert 0 <= length <= self._length, f"cannot roll back from {self._length} to {length} tokens"
        roll_back(self._cache, self._length - length)
        self._length = length


def vocab_rows(model: PreTrainedModel) -> int:
    """Number of rows of the output head, padding rows included."""
    rows: int = model.get_output_embeddings().weight.shape[0]
    return rows
