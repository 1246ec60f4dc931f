"""Key-value caches whose rows have lengths of their own, and the refusal of models that cannot be rolled back.

Keys and values lie in preallocated buffers, each row from position 0 without holes; new ones are scattered to where a
row stands, and rolling back is a smaller number. What lies beyond a row's length is never visible: the mask allows key
j to the query at position t only if j ≤ t (and t − j is inside the window of a sliding layer).

Shapes: ``B`` row, ``H`` head, ``N`` new tokens, ``S`` positions held, ``D`` width of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel

__all__ = ["RaggedCache", "refuse_attention", "refuse_unsupported", "visible_keys"]

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_FIRST_CAPACITY = 256


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise for a decoder-only model that this engine cannot run exactly.

    Raises:
        ValueError: an encoder-decoder, or layers other than full and sliding attention; the message names them.
    """
    name = model.config.name_or_path or type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name}: expected a decoder-only model, got an encoder-decoder ({type(model).__name__})")
    layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    other = sorted(layer_types - _ATTENTION_LAYERS)
    if model._is_stateful or other:
        kinds = f" ({', '.join(other)})" if other else ""
        raise ValueError(
            f"{name}: recurrent or other special layers{kinds} cannot be rolled back after a rejected draft"
        )
    config = model.config.get_text_config()
    if "local" in (getattr(config, "attention_layers", None) or ()) or config.model_type == "moshi":
        raise ValueError(
            f"{name}: {type(model).__name__} keeps an attention window of its own beside the mask that it is given"
        )
    refuse_attention(model)


def refuse_attention(model: PreTrainedModel) -> None:
    """Raise for an implementation of attention that cannot hide what was rolled back.

    Raises:
        ValueError: neither ``sdpa`` nor ``eager``.
    """
    name = model.config.name_or_path or type(model).__name__
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"{name}: attn_implementation: expected 'sdpa' or 'eager', which take a mask, got {attention!r}"
        )


class RaggedCache(Cache):
    """A cache for rows of different lengths; `place` tells it where the next forward pass writes."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[Float[Tensor, "B H S D"]] = []
        self._values: list[Float[Tensor, "B H S D"]] = []
        self._positions = torch.empty((0, 0), dtype=torch.long)
        self._start: int | None = 0
        self._held = self._end = 0

    def place(self, starts: Sequence[int], count: int, device: torch.device) -> Int[Tensor, "B N"]:
        """Direct the next ``count`` tokens of each row to the positions after ``starts``; return these positions."""
        self._positions = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(count, device=device)
        self._start = starts[0] if len(set(starts)) == 1 else None
        self._held = max(starts)
        self._end = self._held + count
        return self._positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values ``[B, H, N, D]``; return all that it holds ``[B, H, S, D]``."""
        return (
            self._write(self._keys, layer_idx, key_states),
            self._write(self._values, layer_idx, value_states),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of positions that the longest row held before the tokens that `place` announced."""
        return self._held

    def shift_rows(self, shifts: Sequence[int], end: int) -> None:
        """Move what each row holds ``shifts[i]`` positions to the right, within the first ``end`` positions.

        What a row shows where nothing moved in is unspecified but finite: hide it by the mask.
        """
        source = torch.arange(end) - torch.tensor(shifts).unsqueeze(1)
        for buffer in (*self._keys, *self._values):
            index = source.clamp(0, buffer.shape[2] - 1).to(buffer.device)[:, None, :, None]
            shape = (-1, buffer.shape[1], -1, buffer.shape[3])
            buffer[:, :, :end] = buffer.gather(2, index.expand(shape))

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        for buffers in (self._keys, self._values):
            buffers[:] = [buffer[list(rows)] for buffer in buffers]

    def _write(self, buffers: list[Tensor], layer: int, states: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H S D"]:
        if len(buffers) == layer:
            buffers.append(_grow(states[:, :, :0], max(_FIRST_CAPACITY, self._end)))
        elif buffers[layer].shape[2] < self._end:
            buffers[layer] = _grow(buffers[layer], max(2 * buffers[layer].shape[2], self._end))
        buffer = buffers[layer]
        if self._start is not None:
            buffer[:, :, self._start : self._end] = states
        else:
            buffer.scatter_(2, self._positions.to(states.device)[:, None, :, None].expand_as(states), states)
        return buffer[:, :, : self._end]


def visible_keys(positions: Int[Tensor, "B N"], end: int, window: int | None = None) -> Bool[Tensor, "B 1 N S"]:
    """The mask of a causal (or, with ``window``, sliding) layer: which of ``end`` keys each query sees."""
    keys = torch.arange(end, device=positions.device)
    queries = positions[:, None, :, None]
    visible = keys <= queries
    return visible if window is None else visible & (queries - keys < window)


def _grow(buffer: Float[Tensor, "B H S D"], capacity: int) -> Float[Tensor, "B H C D"]:
    batch, heads, held, width = buffer.shape
    grown = buffer.new_zeros((batch, heads, capacity, width))  # zeros: a masked key must not be NaN
    grown[:, :, :held] = buffer
    return grown
