"""Resampling by document: the unit that is drawn, sums over it, and percentile bootstrap intervals.

Positions of one text share its luck, and so do the windows of one document: what is drawn with replacement is the
document. Knows no rule, head or loss; numbers in, numbers out.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13 (percentile intervals) and section 8
(resampling what is independent).

Shapes: ``N`` position, ``P`` unit (prompt or document), ``M`` mean, ``R`` bootstrap resample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .prompts import document_of, split_of

__all__ = [
    "Interval",
    "bootstrap_weights",
    "documents",
    "held_back",
    "interval",
    "resampled_means",
    "sum_by_prompt",
]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A measured value with the ends of its 95% bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def documents(prompt_ids: Sequence[str], prompt_index: ArrayLike) -> NDArray[np.int64]:
    """Number the document of every position ``[N]``, 0 to D - 1 in the order of ``prompt_ids``, without gaps.

    Windows of one document and repeats of one prompt, whose ids differ in a suffix '-1', '-2', are one document. A
    document without a position gets no number.

    Args:
        prompt_ids: ids of the prompts of a split.
        prompt_index: which of them each position belongs to, ``[N]``.

    >>> documents(["a", "b", "a-1"], [0, 0, 1, 2, 2]).tolist()
    [0, 0, 1, 0, 0]
    """
    numbers: dict[str, int] = {}
    by_prompt = [numbers.setdefault(document_of(prompt_id), len(numbers)) for prompt_id in prompt_ids]
    of_position = np.asarray(by_prompt, dtype=np.int64)[np.asarray(prompt_index, dtype=np.int64)]
    return np.unique(of_position, return_inverse=True)[1].reshape(-1)


def held_back(prompt_ids: Sequence[str], share: float) -> NDArray[np.bool_]:
    """Tell which prompts ``[P]`` stand in the ``share`` of documents that is held back from a split.

    It follows from a hash of the document's id alone, and not from the one that made the splits: whoever asks gets the
    same answer, so one may choose a checkpoint on the rest and bound its loss on what was held back. Where nothing
    would be left on either side, nothing is held back.

    >>> held_back(["red", "red-1", "green", "blue"], 0.5).tolist()
    [True, True, False, True]

    Raises:
        ValueError: a share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share: expected a number in [0, 1], got {share!r}")
    shares = {"back": share, "rest": 1 - share}
    back = [split_of(f"held back {document_of(name)}", shares) == "back" for name in prompt_ids]
    return np.array(back, dtype=bool) & (not all(back))


def sum_by_prompt(values: ArrayLike, prompt_index: NDArray[np.int64], num_prompts: int) -> Array:
    """Sum ``[..., N]`` values over the positions of each prompt: ``[P, ...]``."""
    flat = np.atleast_2d(np.asarray(values, dtype=np.float64))
    sums = [np.bincount(prompt_index, weights=row, minlength=num_prompts) for row in flat]
    return np.stack(sums, axis=-1)


def bootstrap_weights(num_prompts: int, resamples: int, seed: int) -> Array:
    """How often each prompt is drawn in each resample: ``[R, P]``, every row summing to P."""
    if num_prompts < 1:
        raise ValueError(f"num_prompts: expected at least 1, got {num_prompts}")
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(num_prompts, np.full(num_prompts, 1.0 / num_prompts), size=resamples)
    return counts.astype(np.float64)


def resampled_means(sums: Array, counts: Array, weights: Array) -> Array:
    """Mean per position in every resample, ``[R, M]``, from sums ``[P, M]`` and numbers of positions ``[P]``."""
    return np.asarray((weights @ sums) / (weights @ counts)[:, None], dtype=np.float64)


def interval(value: float, samples: ArrayLike, level: float = 0.95) -> Interval:
    """Percentile bootstrap interval; it is too narrow for very few prompts, which the reader is told elsewhere."""
    tail = (1 - level) / 2
    finite = np.asarray(samples, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if finite.size == 0:
        return Interval(float(value), float("nan"), float("nan"))
    low, high = np.quantile(finite, (tail, 1 - tail))
    return Interval(float(value), float(low), float(high))
