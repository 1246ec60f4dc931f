"""The settings of one ``model.generate`` call of transformers, taken over exactly or refused by name.

Knows the fields of a `GenerationConfig` and the processors and stopping criteria that transformers builds from them;
knows neither models nor how tokens are generated. Three literal tables say which fields are honoured, which never act
here, and at which values the others change nothing; whatever stands in none of them is refused unless it is unset, so
that a field of a later transformers release is never passed over.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessor,
    MaxLengthCriteria,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

__all__ = ["GenerationSettings", "check_criteria", "check_processors", "read_settings"]

HONOURED = frozenset({
    "bad_words_ids", "do_sample", "eos_token_id", "max_length", "max_new_tokens", "min_p", "pad_token_id",
    "repetition_penalty", "return_dict_in_generate", "stop_strings", "suppress_tokens", "temperature", "top_k", "top_p",
})  # fmt: skip

# Read by beam search, by encoder-decoders or for speed only, applied before a callable is asked (the rows of
# num_return_sequences), or without effect on the law of the tokens.
IDLE = frozenset({
    "bos_token_id", "decoder_start_token_id", "disable_compile", "early_stopping", "length_penalty",
    "num_return_sequences", "renormalize_logits", "transformers_version",
})  # fmt: skip

# Read by transformers only when it samples.
SAMPLING_ONLY = frozenset({"epsilon_cutoff", "eta_cutoff", "top_h", "typical_p"})

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "assistant_confidence_threshold": (0.4,),
    "assistant_early_exit": (),
    "assistant_ensemble_weight": (),
    "assistant_lookbehind": (10,),
    "begin_suppress_tokens": (),
    "cache_config": (),
    "cache_implementation": ("dynamic",),
    "compile_config": (),
    "constraints": (),
    "continuous_batching_config": (),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "is_assistant": (False,),
    "low_memory": (False,),
    "max_cache_len": (),
    "max_matching_ngram_size": (),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_logits": (False,),
    "output_scores": (False,),
    "penalty_alpha": (0.0,),
    "prefill_chunk_size": (),
    "prompt_lookup_num_tokens": (),
    "remove_invalid_values": (False,),
    "sequence_bias": (),
    "speculation_type": (),
    "target_lookbehind": (10,),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1.0,),
    "use_cache": (True,),
    "use_mtp": (False,),
    "watermarking_config": (),
}

INSTEAD = {
    "assistant_early_exit": "drafter=early_exit(model, layers) drafts with the first layers",
    "num_assistant_tokens": "gamma= is the number of drafted tokens",
    "prompt_lookup_num_tokens": "drafter=PromptLookupDrafter(...) drafts from the prompt",
}


@dataclass(frozen=True)
class GenerationSettings:
    """What a call asks for, in the terms of ``SpeculativeCascade.generate``; ``return_dict`` is the caller's own."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    bad_words_ids: tuple[tuple[int, ...], ...]
    suppress_tokens: tuple[int, ...]
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None
    stop_strings: tuple[str, ...]
    return_dict: bool

    def as_arguments(self) -> dict[str, Any]:
        """Return the engine's settings as keyword arguments."""
        return {name: value for name, value in asdict(self).items() if name != "return_dict"}


def read_settings(
    config: GenerationConfig, prompt_length: int, stop_strings: str | Sequence[str] | None = None
) -> GenerationSettings:
    """Read the settings of a call whose prompts, padding included, are ``prompt_length`` tokens long.

    ``stop_strings`` given beside the configuration come before its own.

    Raises:
        ValueError: a field that is neither honoured nor at a value that changes nothing.
    """
    _refuse_others(config)
    if config.max_length is None:
        raise ValueError("max_length: expected the length that transformers works out before it calls, got none")
    eos_ids = tuple(_ids(config.eos_token_id))
    pad_ids = _ids(config.pad_token_id) or list(eos_ids)
    strings = config.stop_strings if stop_strings is None else stop_strings
    # transformers lets an end token end a sequence even where it is listed among the bad words.
    bad_words = [tuple(word) for word in config.bad_words_ids or ()]
    return GenerationSettings(
        max_new_tokens=config.max_length - prompt_length,
        temperature=(1.0 if config.temperature is None else config.temperature) if config.do_sample else 0.0,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else min(config.top_p, 1.0),
        min_p=config.min_p or 0.0,
        repetition_penalty=1.0 if config.repetition_penalty is None else config.repetition_penalty,
        bad_words_ids=tuple(word for word in bad_words if word not in {(token,) for token in eos_ids}),
        suppress_tokens=tuple(_ids(config.suppress_tokens)),
        eos_token_id=eos_ids,
        pad_token_id=pad_ids[0] if pad_ids else None,
        stop_strings=(strings,) if isinstance(strings, str) else tuple(strings or ()),
        return_dict=bool(config.return_dict_in_generate),
    )


def check_processors(
    processors: Iterable[LogitsProcessor],
    config: GenerationConfig,
    settings: GenerationSettings,
    attention_mask: Tensor | None,
) -> None:
    """Refuse every processor but those that the settings replay.

    Raises:
        ValueError: a processor of another kind, or one whose settings are not those of the configuration.
    """
    replayed = _replayed_processors(config, settings, attention_mask)
    for processor in processors:
        known = next((ours for ours in replayed if type(ours) is type(processor)), None)
        if known is None or not _set_alike(processor, known):
            raise ValueError(
                f"logits_processor: expected only what generation settings such as temperature or bad_words_ids build, "
                f"which both models can replay, got {type(processor).__name__}"
            )


def check_criteria(criteria: Iterable[StoppingCriteria], settings: GenerationSettings, prompt_length: int) -> None:
    """Refuse every stopping criterion but those that the settings replay.

    Raises:
        ValueError: a criterion of another kind, or one whose settings are not those of the configuration.
    """
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            known = criterion.max_length == prompt_length + settings.max_new_tokens
        elif type(criterion) is EosTokenCriteria:
            known = set(_ids(criterion.eos_token_id)) == set(settings.eos_token_id)
        else:
            known = type(criterion) is StopStringCriteria and set(criterion.stop_strings) == set(settings.stop_strings)
        if not known:
            raise ValueError(
                f"stopping_criteria: expected only what max_new_tokens, max_length, eos_token_id and stop_strings "
                f"build, got {type(criterion).__name__}"
            )


def _refuse_others(config: GenerationConfig) -> None:
    # transformers fills unset fields with these before it calls; a later release may bring fields of its own.
    defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    for name, value in vars(config).items():
        if value is None or name.startswith("_") or name in HONOURED or name in IDLE:
            continue
        if name in SAMPLING_ONLY and not config.do_sample:
            continue
        neutral = NEUTRAL.get(name, (defaults[name],) if name in defaults else ())
        if not (isinstance(value, (bool, int, float, str)) and value in neutral):
            expected = " or ".join([*map(repr, neutral), "None"])
            hint = f" ({INSTEAD[name]})" if name in INSTEAD else ""
            raise ValueError(f"{name}: expected {expected}, all that a cascade can do exactly, got {value!r}{hint}")


def _replayed_processors(
    config: GenerationConfig, settings: GenerationSettings, attention_mask: Tensor | None
) -> list[LogitsProcessor]:
    """Build what transformers builds from the settings in force."""
    replayed: list[LogitsProcessor] = [LogitNormalization()]
    if settings.repetition_penalty != 1:
        penalty = RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty))
        # Set afterwards: older constructors take one number only.
        penalty.prompt_ignore_length = None if attention_mask is None else (attention_mask == 0).sum(dim=1)
        replayed.append(penalty)
    if config.bad_words_ids:
        replayed.append(NoBadWordsLogitsProcessor(config.bad_words_ids, list(settings.eos_token_id)))
    if config.suppress_tokens is not None:
        replayed.append(SuppressTokensLogitsProcessor(settings.suppress_tokens))
    if settings.temperature == 0:
        return replayed
    if settings.temperature != 1:
        replayed.append(TemperatureLogitsWarper(float(settings.temperature)))
    if settings.top_k > 0:
        replayed.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        replayed.append(TopPLogitsWarper(settings.top_p))
    if config.min_p is not None:
        replayed.append(MinPLogitsWarper(settings.min_p))
    return replayed


def _set_alike(given: LogitsProcessor, ours: LogitsProcessor) -> bool:
    """Whether a processor's settings are ours. One that it leaves unset, such as padding to ignore, may be set here."""
    settings = {name: _plain(value) for name, value in vars(ours).items()}
    return all(
        value is None or (name in settings and _plain(value) == settings[name]) for name, value in vars(given).items()
    )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _ids(value: Any) -> list[int]:
    """Normalise token ids: none, one or several, in a tensor or not."""
    return [] if value is None else [int(token) for token in torch.as_tensor(value).flatten().tolist()]
