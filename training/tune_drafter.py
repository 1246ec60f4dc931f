"""Make a drafter of a few of the verifier's own layers, tuned on the task: for users who have no small model.

Layers are dropped greedily by least KL to the full model, or taken from a given list; the rest is tuned on the *tune*
split with references and distillation (`distil`). The result is an ordinary Hugging Face folder with the verifier's
tokenizer and a `provenance.json`: layers kept, figures before and after, cost ratio. Same seed, same weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..cascade.models import TransformersLM
from ..data.encoding import encode_example
from ..data.pairs import load_model, load_tokenizer, weight_digest
from ..data.progress import Progress, announce
from ..data.prompts import PromptConfig, load_examples
from .distil import Agreement, Batch, Distiller, TokenisedExample, batches_of, compare, shuffled_batches
from .layers import choose_layers, keep_layers, layer_stack

__all__ = ["PROVENANCE_FILE", "TuneDrafterConfig", "tune_drafter"]

PROVENANCE_FILE = "provenance.json"

_SHORT = 512
"""Tokens of the longest example up to which attention scores may stand in memory."""


@dataclass(frozen=True)
class TuneDrafterConfig:
    """What to make the drafter of, and how long to tune it.

    Args:
        out: folder for the drafter; written under a temporary name and renamed when complete.
        verifier: model to take layers from: `embedded:NAME`, a folder or a hub id.
        prompts: the task's prompts with references; only the split `tune_split` is learned from.
        layers: how many layers to keep (chosen greedily by least KL), or the list of layers to keep, from 0.
        steps: optimiser steps; fixed, so that the same seed gives the same drafter on any clock.
        batch_size: sequences a step.
        learning_rate: peak of AdamW's rate, after `warmup` steps; it falls to zero by a cosine.
        warmup: steps of linear rise.
        gold_weight: share of the reference token in the target, 0 to 1; the rest is the verifier's distribution.
        weight_decay: decoupled weight decay.
        max_tokens: longest prompt with reference that is used; longer ones are left out and counted.
        choice_examples: examples on which layers are chosen.
        check_examples: held-out examples on which the drafter is measured before and after.
        tune_split: split to learn from.
        check_split: split to measure on.
        dtype: of weights and activations: `bfloat16`, `float16`, `float32` or `auto`; the optimiser always works on
            float32 copies.
        device: `auto`, `cpu`, `cuda`, ...
        seed: of the order of examples.
        overwrite: replace a drafter made with other settings.
    """

    out: Path
    verifier: str = "embedded:smollm2-135m-instruct"
    prompts: PromptConfig = field(default_factory=PromptConfig)
    layers: int | list[int] = 22
    steps: int = 60
    batch_size: int = 8
    learning_rate: float = 2e-4
    warmup: int = 5
    gold_weight: float = 0.5
    weight_decay: float = 0.0
    max_tokens: int = 1024
    choice_examples: int = 8
    check_examples: int = 32
    tune_split: str = "tune"
    check_split: str = "validation"
    dtype: str = "bfloat16"
    device: str = "auto"
    seed: int = 0
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "max_tokens", "choice_examples", "check_examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 0 <= self.gold_weight <= 1:
            raise ValueError(f"gold_weight: expected a number from 0 to 1, got {self.gold_weight}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate: expected a positive number, got {self.learning_rate}")


def tune_drafter(config: TuneDrafterConfig) -> Path:
    """Make the drafter and return its folder; a folder made with the same settings of the same files is kept.

    Raises:
        ValueError: `out` holds something else, a split is empty, or the layers do not exist.
    """
    out = Path(config.out)
    made_of = _made_of(out, config)
    tokenizer = load_tokenizer(config.verifier)
    tune = _tokenise(config, tokenizer, config.tune_split)
    check = _tokenise(config, tokenizer, config.check_split)[: config.check_examples]
    if made_of is not None and _is_same(made_of, _sources(config, tune, check), out, config):
        announce(f"Drafter ready: {out} (made before with these settings)")
        return out
    started = time.monotonic()
    teacher = load_model(config.verifier, dtype=config.dtype, device=config.device).eval()
    held_out = batches_of(check, config.batch_size, teacher.device)
    kept = _layers_to_keep(config, teacher, tune)
    student = keep_layers(teacher, kept).to(teacher.device)
    announce(f"Keeping {len(kept)} of {len(layer_stack(teacher)[1])} layers: {_as_ranges(kept)}")
    before = compare(student, teacher, held_out)
    announce(_describe("before", before))
    losses, seen = _tune(config, teacher, student, kept, tune)
    after = compare(student, teacher, held_out)
    announce(_describe("after", after))
    ratio = _cost_ratio(student, teacher)
    provenance = {
        "made_by": f"speccascade {__version__} tune-drafter",
        "settings": _settings(config),
        "sources": _sources(config, tune, check),
        "layers_kept": kept,
        "layers_of_verifier": len(layer_stack(teacher)[1]),
        "measured_on": f"{config.check_split} split, teacher-forced at reference tokens, temperature 1",
        "before": asdict(before),
        "after": asdict(after),
        "loss_first": losses[0],
        "loss_last": sum(losses[-8:]) / len(losses[-8:]),
        "reference_tokens_seen": seen,
        "cost_ratio": ratio,
        "seconds": round(time.monotonic() - started, 1),
    }
    _write(out, student, tokenizer, provenance)
    announce(
        f"Drafter ready: {out} ({len(kept)} layers; one token costs {ratio['seconds']:.2f} of the verifier's time, "
        f"{ratio['parameters']:.2f} of its weights)"
    )
    return out


def _made_of(out: Path, config: TuneDrafterConfig) -> dict[str, Any] | None:
    """What the drafter in `out` was made of, if these settings made it; None if one is to be made.

    Raises:
        ValueError: it holds something else and `overwrite` is off.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        provenance = json.loads((out / PROVENANCE_FILE).read_text(encoding="utf-8"))
        settings, sources = dict(provenance["settings"]), dict(provenance.get("sources", {}))
    except (OSError, ValueError, KeyError, TypeError):
        if config.overwrite:
            raise ValueError(f"out: {out} holds no tuned drafter; it is not overwritten") from None
        raise ValueError(f"out: expected a new folder or a tuned drafter, got {out}") from None
    return sources if _is_same(settings, _settings(config), out, config) else None


def _is_same(made: dict[str, Any], mine: dict[str, Any], out: Path, config: TuneDrafterConfig) -> bool:
    """Whether what made the drafter in `out` is what would make it now; a difference is refused or overwritten."""
    if made == mine or config.overwrite:
        return made == mine
    other = [name for name in mine if made.get(name) != mine[name]]
    raise ValueError(
        f"out: {out} holds a drafter made with another {', '.join(other) or 'set of options'}; "
        "choose another folder or give --overwrite"
    )


def _sources(
    config: TuneDrafterConfig, tune: Sequence[TokenisedExample], check: Sequence[TokenisedExample]
) -> dict[str, str]:
    """SHA-256 of what the settings only name: the verifier's weights, and the examples as the models read them."""
    examples = json.dumps([[[example.prompt, example.reference] for example in split] for split in (tune, check)])
    return {
        "verifier_weights": weight_digest(config.verifier),
        "examples": hashlib.sha256(examples.encode()).hexdigest(),
    }


def _settings(config: TuneDrafterConfig) -> dict[str, Any]:
    """What decides the weights, as JSON."""
    plain = json.loads(json.dumps(asdict(config), default=str))
    return {name: value for name, value in plain.items() if name not in ("out", "overwrite", "device")}


def _tokenise(config: TuneDrafterConfig, tokenizer: PreTrainedTokenizerBase, split: str) -> list[TokenisedExample]:
    examples = load_examples(config.prompts, split)
    encoded = [TokenisedExample(*encode_example(example, tokenizer, config.prompts)) for example in examples]
    short = [example for example in encoded if len(example) <= config.max_tokens and example.reference]
    if len(short) < len(encoded):
        long = len(encoded) - len(short)
        announce(f"{long} of {len(encoded)} {split} examples are over {config.max_tokens} tokens: left out")
    if not short:
        raise ValueError(f"prompts: expected at least one example in the split {split!r}, got none")
    return short


def _layers_to_keep(config: TuneDrafterConfig, teacher: PreTrainedModel, tune: Sequence[TokenisedExample]) -> list[int]:
    if not isinstance(config.layers, int):
        return list(config.layers)
    depth = len(layer_stack(teacher)[1])
    if not 1 <= config.layers <= depth:
        raise ValueError(f"layers: expected 1 to {depth}, got {config.layers}")
    batches = batches_of(tune[: config.choice_examples], config.batch_size, teacher.device)
    announce(f"Choosing {config.layers} of {depth} layers by least KL to the full model")
    with Progress("layers dropped", depth - config.layers, unit="layers") as progress:

        def report(layer: int, kl: float) -> None:
            progress.advance(1)
            announce(f"  dropped layer {layer}: KL {kl:.3f} nats")

        return choose_layers(teacher, [_thinned(batch) for batch in batches], config.layers, report)


def _thinned(batch: Batch) -> tuple[Tensor, Tensor]:
    """Every fourth reference position: neighbours say much the same, and logits are half the cost of choosing."""
    order = batch.predicts.flatten().cumsum(0).reshape(batch.predicts.shape)
    return batch.ids, batch.predicts & (order % 4 == 0)


def _tune(
    config: TuneDrafterConfig,
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    kept: Sequence[int],
    tune: Sequence[TokenisedExample],
) -> tuple[list[float], int]:
    """Run the steps; return every step's loss and the number of reference tokens seen."""
    distiller = Distiller(teacher, student, kept, config.gold_weight, config.weight_decay)
    losses, seen = [], 0
    fused = student.config._attn_implementation
    if student.device.type == "cpu" and max(map(len, tune)) <= _SHORT:
        # Backwards, the fused kernel is slow on CPUs: a layer over 8 x 200 tokens takes 48 ms, as plain products 31.
        student.set_attn_implementation("eager")
    batches = shuffled_batches(tune, config.batch_size, config.seed, teacher.device)
    with Progress("tuning the drafter", config.steps, unit="steps") as progress:
        for step, batch in zip(range(config.steps), batches, strict=False):
            losses.append(distiller.step(batch, learning_rate_at(step, config)))
            seen += len(batch.labels)
            progress.advance(1)
    student.set_attn_implementation(fused)
    return losses, seen


def learning_rate_at(step: int, config: TuneDrafterConfig) -> float:
    """Linear rise over `warmup` steps under a cosine to zero."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return config.learning_rate * min(1.0, (step + 1) / max(config.warmup, 1)) * cosine


@torch.inference_mode()
def _cost_ratio(drafter: PreTrainedModel, verifier: PreTrainedModel) -> dict[str, float]:
    """Drafter over verifier: weights outside the embedding, and the time of one token after a short prefix."""
    ids = torch.arange(16)[None] % verifier.config.vocab_size
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(5):
        for model, times in zip((drafter, verifier), seconds, strict=True):
            state = TransformersLM(model).start([[]])
            state.extend(ids, counts=[16], keep=1)
            start = time.perf_counter()
            state.extend(ids[:, :1], counts=[1], keep=1)
            times.append(time.perf_counter() - start)
    weights = [sum(p.numel() for p in model.parameters()) for model in (drafter, verifier)]
    shared = sum(p.numel() for p in verifier.get_input_embeddings().parameters())
    return {
        "parameters": (weights[0] - shared) / (weights[1] - shared),
        "seconds": min(seconds[0]) / min(seconds[1]),
    }


def _write(out: Path, student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, provenance: dict[str, Any]) -> None:
    """Write everything under a temporary name, then rename: a killed run leaves no half-made drafter."""
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    student.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    (staging / PROVENANCE_FILE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    if out.exists():
        shutil.rmtree(out)
    staging.rename(out)


def _describe(when: str, measured: Agreement) -> str:
    return (
        f"{when:>6}: agreement {measured.agreement:.3f}, TV {measured.tv:.3f}, accuracy of the drafter "
        f"{measured.drafter_accuracy:.3f} and of the verifier {measured.verifier_accuracy:.3f}; right alone "
        f"{measured.drafter_right_alone:.3f} and {measured.verifier_right_alone:.3f} ({measured.positions} positions)"
    )


def _as_ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as '0-2, 5'."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
