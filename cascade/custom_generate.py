"""The drop-in for Hugging Face users: ``model.generate(..., custom_generate=speccascade.generate, drafter=small)``.

transformers prepares prompts, padding and settings as for its own decoding and then calls this function, which decodes
with a `SpeculativeCascade` instead. Knows no rule by name. What the engine cannot do exactly is refused by name
(`generation_settings`). transformers itself keeps ``assistant_model``, ``tokenizer`` and ``streamer`` from a callable;
the last two reach it when they are bound to it: ``functools.partial(speccascade.generate, streamer=streamer)``.

Shapes: ``B`` row, ``L`` tokens of a prompt, ``T`` position in the block, ``V`` token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .blocks import TargetRule, VerifyBlock
from .drafters import Drafter
from .engine import SpeculativeCascade
from .generation_settings import GenerationSettings, check_criteria, check_processors, read_settings
from .pace import AdaptiveGamma
from .requests import Streamer
from .results import GenerationStats, LedgerEntry
from .stopping import Decoder
from .targets import Switched

__all__ = ["CascadeOutput", "generate"]


@dataclass
class CascadeOutput(GenerateDecoderOnlyOutput):
    """What ``return_dict_in_generate=True`` returns: ``sequences`` as always, the counts, the ledger where asked for.

    The fields of scores, hidden states and caches stay empty.
    """

    stats: GenerationStats | None = None
    ledger: tuple[tuple[LedgerEntry, ...], ...] | None = None


@dataclass(frozen=True)
class FollowVerifier:
    """The target where no rule is given: the verifier's own distribution, so that nothing is lost."""

    def decide(self, block: VerifyBlock) -> Switched:
        """Return p as verification reads it."""
        return Switched(block, self.defer_mask(block))

    def target(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        """Return p."""
        return block.verifier_probs

    def defer_mask(self, block: VerifyBlock) -> Bool[Tensor, "B T"]:
        """Defer everywhere."""
        return torch.ones_like(block.tokens, dtype=torch.bool)


def generate(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B L"],
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool = False,
    streamer: Streamer | None = None,
    *,
    drafter: PreTrainedModel | Drafter | None = None,
    rule: TargetRule | None = None,
    gamma: int | AdaptiveGamma = 5,
    bonus: Literal["verifier", "target"] = "verifier",
    seed: int | Sequence[int] | None = None,
    ledger: bool = False,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Decoder | None = None,
    **model_kwargs: Any,
) -> CascadeOutput | Int[Tensor, "B N"]:
    """Decode a transformers call with a cascade whose verifier is ``model``.

    Args:
        model: the verifier; transformers passes the model whose ``generate`` was called.
        input_ids: the prompts ``[B, L]``.
        logits_processor: what transformers built from the settings; a processor of one's own is refused.
        stopping_criteria: likewise.
        generation_config: the settings, as transformers prepared them.
        synced_gpus: refused where true; transformers itself drops it before it calls.
        streamer: takes the prompt and then the tokens of each round; one prompt only.
        drafter: a Hugging Face model or any `Drafter`.
        rule: whose target each token follows; default: the verifier's own distribution.
        gamma: tokens drafted per block, or an `AdaptiveGamma`.
        bonus: where the token after a fully accepted block comes from, see `SpeculativeCascade`.
        seed: row i draws from ``seed + i``, or ``seed[i]``; default: seeds drawn from torch's global generator.
        ledger: whether to record who wrote each token; needs ``return_dict_in_generate=True``.
        stop_strings: texts that end a sequence; need ``tokenizer``.
        tokenizer: read for ``stop_strings`` only.
        model_kwargs: the attention mask, and what transformers adds for its own decoding.

    Returns:
        The sequences ``[B, N]``, prompts included, or a `CascadeOutput` with ``return_dict_in_generate=True``.

    Raises:
        ValueError: a setting, processor, criterion or model input that cannot be followed exactly; it is named.
    """
    ours: dict[str, Any] = {
        "drafter": drafter, "rule": rule, "gamma": gamma, "bonus": bonus, "seed": seed, "ledger": ledger,
        "stop_strings": stop_strings, "tokenizer": tokenizer, "synced_gpus": synced_gpus, "streamer": streamer,
    }  # fmt: skip
    if generation_config is None or logits_processor is None or stopping_criteria is None:
        # Not called by transformers, which passes all three: let it prepare the call.
        through_transformers: Any = model.generate
        prepared: CascadeOutput | Tensor = through_transformers(
            input_ids,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            custom_generate=partial(generate, **ours),
            **model_kwargs,
        )
        return prepared
    if drafter is None:
        raise ValueError(
            "drafter: expected a model or a Drafter, got none (transformers keeps assistant_model from custom_generate)"
        )
    _check_model(model, synced_gpus)
    _check_inputs(input_ids, model_kwargs)
    attention_mask: Tensor | None = model_kwargs.get("attention_mask")
    settings = read_settings(generation_config, input_ids.shape[1], stop_strings)
    check_processors(logits_processor, generation_config, settings, attention_mask)
    check_criteria(stopping_criteria, settings, input_ids.shape[1])
    _check_company(settings, tokenizer, ledger)
    if seed is None:
        # Even greedily a rule of one's own may mix two distributions, and then draws.
        draws = settings.temperature > 0 or rule is not None
        seed = _draw_seeds(input_ids.shape[0]) if draws else 0
    cascade = SpeculativeCascade(drafter, model, FollowVerifier() if rule is None else rule, gamma, bonus)
    result = cascade.generate(
        input_ids,
        attention_mask,
        seed=seed,
        streamer=streamer,
        ledger=ledger,
        tokenizer=tokenizer,
        **settings.as_arguments(),
    )
    # A copy made outside of inference mode may be trained on.
    sequences = result.sequences.clone()
    if not settings.return_dict:
        return sequences
    return CascadeOutput(sequences=cast(torch.LongTensor, sequences), stats=result.stats, ledger=result.ledger)


def _check_model(model: PreTrainedModel, synced_gpus: bool) -> None:
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"model: expected a decoder-only model, got {type(model).__name__}; "
            f"SpeculativeCascade(drafter, model, rule).generate(...) takes the others that are supported"
        )
    if model.training:
        raise ValueError("model: expected evaluation mode, got training mode; call model.eval() first")
    if synced_gpus:
        raise ValueError("synced_gpus: expected False, got True: each process ends its rounds on its own")


def _check_company(settings: GenerationSettings, tokenizer: Decoder | None, ledger: bool) -> None:
    """Refuse what needs another argument beside it."""
    if settings.stop_strings and tokenizer is None:
        raise ValueError(
            "stop_strings: expected a tokenizer bound by "
            "custom_generate=functools.partial(speccascade.generate, tokenizer=tokenizer), got none "
            "(transformers keeps tokenizer= from custom_generate)"
        )
    if ledger and not settings.return_dict:
        raise ValueError("ledger: expected return_dict_in_generate=True beside it, got a call that returns tokens only")


def _check_inputs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse model inputs beyond the tokens; transformers' own preparations for its decoding are not needed."""
    given = {name: value for name, value in model_kwargs.items() if value is not None}
    mask = given.pop("attention_mask", torch.ones_like(input_ids))
    given.pop("use_cache", None)
    for name in ("cache", "past_key_values"):
        cache = given.pop(name, None)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
            raise ValueError(f"{name}: expected none, since a cascade keeps caches of its own, got a cache")
    if (kept := given.pop("logits_to_keep", 1)) != 1:
        raise ValueError(f"logits_to_keep: expected 1 or none, got {kept!r}")
    positions: Tensor | None = given.pop("position_ids", None)
    if positions is not None and not _counts_tokens(positions, mask):
        raise ValueError("position_ids: expected none, or each row's tokens counted from 0, got others")
    if given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name}: expected none, since both models read token ids alone, got {type(value).__name__}")


def _counts_tokens(positions: Tensor, mask: Tensor) -> bool:
    counted = mask.long().cumsum(dim=-1) - 1
    if positions.dim() != 2 or positions.shape[-1] != counted.shape[-1]:
        return False
    return bool((positions == counted).logical_or(mask == 0).all())


def _draw_seeds(count: int) -> list[int]:
    """One seed a row from torch's global generator, so that ``torch.manual_seed`` makes sampling repeatable."""
    seeds: list[int] = torch.randint(2**63 - 1, (count,)).tolist()
    return seeds
