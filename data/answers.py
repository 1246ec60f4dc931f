"""Let an engine answer prompts that are at hand as token ids. Knows no rule, no file and no text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cascade.generation import GenerationLoop

__all__ = ["generate_answers"]


def generate_answers(
    engine: GenerationLoop,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: Sequence[int],
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
) -> list[list[int]]:
    """Let an engine go on after each prompt; return the tokens that it wrote, without padding."""
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = engine.generate(
        input_ids,
        mask,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        eos_token_id=list(ends),
        seed=0 if seeds is None else list(seeds),
    )
    written: list[list[int]] = out.sequences[:, longest:].tolist()
    counts = [part.new_tokens for part in out.stats.per_sequence]
    return [tokens[:count] for tokens, count in zip(written, counts, strict=True)]
