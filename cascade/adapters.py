"""From what a user hands over to what the engine runs: Hugging Face models become language models and drafters.

Refuses by name what does not fit together: two vocabularies, or an encoder-decoder beside a decoder-only model.
"""

from typing import Any

from transformers import PreTrainedModel

from .drafters import Drafter, ModelDrafter
from .models import CausalLM, TransformersLM, vocab_rows
from .seq2seq import EncoderDecoderLM

__all__ = ["as_drafter", "as_language_model", "check_decoder_start", "vocabulary_of"]


def as_language_model(model: PreTrainedModel | CausalLM, vocab_size: int) -> CausalLM:
    """Adapt a Hugging Face model; pass anything else on."""
    if isinstance(model, PreTrainedModel):
        adapt = EncoderDecoderLM if model.config.is_encoder_decoder else TransformersLM
        return adapt(model, vocab_size)
    if not isinstance(model, CausalLM):
        raise ValueError(f"verifier: expected a transformers model or a CausalLM, got {type(model).__name__}")
    _check_vocabulary(model, vocab_size)
    return model


def as_drafter(drafter: PreTrainedModel | Drafter, vocab_size: int) -> Drafter:
    """Let a Hugging Face model draft; pass anything else on."""
    if isinstance(drafter, PreTrainedModel):
        return ModelDrafter(as_language_model(drafter, vocab_size))
    if not isinstance(drafter, Drafter):
        raise ValueError(f"drafter: expected a transformers model or a Drafter, got {type(drafter).__name__}")
    _check_vocabulary(drafter, vocab_size)
    return drafter


def _check_vocabulary(model: CausalLM | Drafter, vocab_size: int) -> None:
    if model.vocab_size != vocab_size:
        raise ValueError(
            f"vocab_size: expected one vocabulary, {model.name} has {model.vocab_size} tokens, not {vocab_size}"
        )


def check_decoder_start(drafter: Drafter, verifier: CausalLM) -> None:
    """Refuse a drafter and a verifier that do not read the same prompt: both are encoder-decoders, or neither is."""
    wanted = getattr(verifier, "decoder_start", None)
    given = getattr(drafter, "decoder_start", wanted)  # who does not say, as a look-up, drafts from rows of any kind
    if given != wanted:
        expected, got = (
            "decoder-only" if start is None else f"encoder-decoder that starts with token {start}"
            for start in (wanted, given)
        )
        raise ValueError(f"drafter {drafter.name}: expected {expected} as the verifier {verifier.name}, got {got}")


def vocabulary_of(model: Any) -> int:
    """Return the number of token ids of a Hugging Face model, a `CausalLM` or a `Drafter`."""
    if isinstance(model, PreTrainedModel):
        return vocab_rows(model)
    if not hasattr(model, "vocab_size"):
        raise ValueError(f"model: expected a transformers model, a CausalLM or a Drafter, got {type(model).__name__}")
    return int(model.vocab_size)
