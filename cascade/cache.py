"""Key-value caches that can be rolled back exactly, and the refusal of those that cannot.

A plain `DynamicCache` keeps every position of every layer, sliding windows included: it crops exactly, at the price of
memory that a windowed cache would save. Recurrent layers fold the past into one state and cannot forget a token.
"""

from typing import Any

from transformers import DynamicCache, PreTrainedModel

__all__ = ["new_cache", "refuse_unsupported", "roll_back"]

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise for a model that this engine cannot run exactly.

    Raises:
        ValueError: an encoder-decoder or a model with recurrent layers; the message names the model and why.
    """
    name = model.config.name_or_path or type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name}: expected a decoder-only model, got an encoder-decoder ({type(model).__name__})")
    layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    recurrent = sorted(layer_types - _ATTENTION_LAYERS)
    if model._is_stateful or recurrent:
        kinds = f" ({', '.join(recurrent)})" if recurrent else ""
        raise ValueError(f"{name}: recurrent layers{kinds} cannot be rolled back after a rejected draft")


def new_cache() -> DynamicCache:
    """Return an empty cache that keeps every position."""
    return DynamicCache()


def roll_back(cache: Any, tokens_to_remove: int) -> None:
    """Forget the last ``tokens_to_remove`` tokens."""
    if tokens_to_remove > 0:
        cache.crop(-tokens_to_remove)
