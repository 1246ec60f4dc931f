"""An encoder-decoder as the engine needs it: the encoder reads each prompt once, the decoder's rows grow and roll back.

Knows no tokenizer, no rule and no sampling. Supported are the families whose decoder places tokens by relative
distance alone (T5). Their bias is one table for the whole batch, from a single length of what was read before, so rows
of different lengths must end at the same column when a pass begins: what they hold is moved to the right until they
do, and the mask hides the columns left of a row. A bias that depends on key − query alone is then right in every row.

Shapes: ``B`` row, ``L`` prompt token, ``N`` tokens read at once, ``S`` columns held, ``V`` token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .cache import RaggedCache, refuse_attention, visible_keys
from .drafters import pad_unread
from .models import as_mask, check_vocab_size, find_cache_argument, hidden_size_of, keep_last, reveal_hidden

__all__ = ["EncoderDecoderLM"]

_FAMILIES = ("longt5", "mt5", "t5", "umt5")


class EncoderDecoderLM:
    """A Hugging Face model of the T5 family (T5, Flan-T5, ByT5, mT5, UMT5, LongT5).

    Args:
        model: the model; it is put in evaluation mode.
        vocab_size: number of real token ids; logits beyond (padding rows) are cut off. Default: all rows of the head.

    Raises:
        ValueError: a model of another family or without a decoder start token, or a ``vocab_size`` larger than the
            head.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None) -> None:
        self.name = model.config.name_or_path or type(model).__name__
        family = model.config.model_type
        if family not in _FAMILIES:
            raise ValueError(
                f"{self.name}: expected a decoder-only model or an encoder-decoder with relative positions "
                f"({', '.join(_FAMILIES)}), got the encoder-decoder {family} ({type(model).__name__})"
            )
        refuse_attention(model)
        self.vocab_size = check_vocab_size(model, vocab_size)
        self.hidden_size = hidden_size_of(model)
        self.model = model.eval()
        self.decoder_start = _find_decoder_start(model, self.vocab_size)
        self.max_length: int | None = None  # relative distances have no end
        self.cache_argument = find_cache_argument(model)

    @property
    def device(self) -> torch.device:
        """Where the embeddings lie."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def start(self, prompts: Sequence[Sequence[int]]) -> "EncoderDecoderState":
        """Run the encoder over the prompts; begin with a row for each, whose first token is ``decoder_start``."""
        tokens, counts = pad_unread(prompts, [0] * len(prompts), self.device)
        real = torch.arange(tokens.shape[1]) < torch.tensor(counts).unsqueeze(1)
        mask = real.long().to(self.device)  # LongT5 does sums with it
        encoded = self.model.get_encoder()(input_ids=tokens, attention_mask=mask).last_hidden_state
        return EncoderDecoderState(self, encoded, mask)


class EncoderDecoderState:
    """What the decoder has read of each row, beside the encoded prompts."""

    def __init__(self, owner: EncoderDecoderLM, encoded: Float[Tensor, "B L W"], mask: Int[Tensor, "B L"]) -> None:
        self._owner = owner
        self._encoded, self._mask = encoded, mask
        self._own, self._cross = RaggedCache(), DynamicCache()
        self._cache = EncoderDecoderCache(self._own, self._cross)
        self._lengths = [0] * len(encoded)
        self._offsets = [0] * len(encoded)  # the column of each row's first token

    @property
    def lengths(self) -> list[int]:
        """Number of decoder tokens read and kept, a row."""
        return self._lengths

    def extend(self, tokens: Int[Tensor, "B N"], counts: Sequence[int], keep: int) -> Float[Tensor, "B keep V"]:
        """Read the first ``counts[i]`` tokens of row i; return the logits after each of the last ``keep`` of them."""
        owner, width = self._owner, tokens.shape[1]
        begin = self._align_ends()
        positions = self._own.place([begin] * len(counts), width, owner.device)
        columns = torch.arange(begin + width, device=owner.device)
        first = torch.tensor(self._offsets, device=owner.device)[:, None, None, None]
        arguments: dict[str, Any] = {owner.cache_argument: self._cache, "use_cache": True}
        logits: Tensor = owner.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self._encoded),
            attention_mask=self._mask,
            decoder_input_ids=tokens.to(owner.device),
            decoder_attention_mask=as_mask(owner.model, visible_keys(positions, begin + width) & (columns >= first)),
            **arguments,
        ).logits[..., : owner.vocab_size]
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        return keep_last(logits, [width - count for count in counts], keep)

    def extend_with_hidden(
        self, tokens: Int[Tensor, "B N"], counts: Sequence[int], keep: int
    ) -> tuple[Float[Tensor, "B keep V"], Float[Tensor, "B keep H"]]:
        """Do as `extend`; return the same logits, and what the output head read for each of them."""
        return reveal_hidden(self._owner.model, self, tokens, counts, keep)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[i]`` decoder tokens of row i."""
        kept = zip(lengths, self._lengths, strict=True)
        assert all(0 <= new <= old for new, old in kept), f"cannot roll back from {self._lengths} to {lengths} tokens"
        self._lengths = list(lengths)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        index = torch.tensor(rows)
        self._encoded, self._mask = self._encoded[index], self._mask[index]
        self._own.select_rows(rows)
        self._cross.batch_select_indices(index)
        self._lengths = [self._lengths[row] for row in rows]
        self._offsets = [self._offsets[row] for row in rows]

    def _align_ends(self) -> int:
        """Let what every row holds end at the same column, the first free one, and return it."""
        end = max(self._lengths)
        offsets = [end - length for length in self._lengths]
        if offsets != self._offsets:
            shifts = [new - old for new, old in zip(offsets, self._offsets, strict=True)]
            self._own.shift_rows(shifts, end)
            self._offsets = offsets
        return end


def _find_decoder_start(model: PreTrainedModel, vocab_size: int) -> int:
    """The token that transformers would begin with."""
    name = model.config.name_or_path or type(model).__name__
    start = getattr(model.generation_config, "decoder_start_token_id", None)
    if start is None:
        start = getattr(model.config, "decoder_start_token_id", None)
    if not isinstance(start, int) or not 0 <= start < vocab_size:
        raise ValueError(f"{name}: decoder_start_token_id: expected one token id below {vocab_size}, got {start!r}")
    return start
