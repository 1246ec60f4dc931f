"""Settings entered one by one, averaged and resampled together: what makes differences between methods paired.

Knows no rule, no dial and no file. Shapes: ``D`` document, ``M`` setting, ``R`` resample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.resampling import Interval, bootstrap_weights, interval, resampled_means
from .metrics import curve_area, curve_at
from .replay import Outcome, Replay

__all__ = ["Ledger", "Measured", "end_points"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """All settings of one loss, measured together: means ``[M, 6]``, resampled losses and rejections ``[R, M]``."""

    means: Array
    losses: Array
    rejections: Array
    drafter: int
    lossless: int

    def loss(self, column: int) -> Interval:
        """Mean loss of one setting."""
        return interval(self.means[column, 0], self.losses[:, column])

    @property
    def limit(self) -> Interval:
        """Rejection of lossless decoding, the largest budget of interest."""
        return interval(self.means[self.lossless, 1], self.rejections[:, self.lossless])

    def area(self, path: list[int]) -> tuple[float, Array]:
        """Mean loss over all budgets of the curve through some settings, and in every resample."""
        return (
            float(curve_area(self.means[path, 1], self.means[path, 0], self.means[self.lossless, 1])),
            curve_area(self.rejections[:, path], self.losses[:, path], self.rejections[:, self.lossless]),
        )

    def at(self, path: list[int], share: float) -> tuple[float, Array]:
        """Loss of such a curve at a share of lossless decoding's rejection, and in every resample."""
        budget, budgets = share * self.means[self.lossless, 1], share * self.rejections[:, self.lossless]
        return (
            float(curve_at(self.means[path, 1], self.means[path, 0], budget)),
            curve_at(self.rejections[:, path], self.losses[:, path], budgets),
        )


class Ledger:
    """Sums by document of every setting measured, side by side, so that all of them are resampled together."""

    def __init__(self, replay: Replay, loss: str, resamples: int, seed: int) -> None:
        self.counts = replay.count()
        self.weights = bootstrap_weights(replay.num_documents, resamples, seed)
        self._sums: list[Array] = []
        self.drafter, self.lossless = (self.add(replay.sum_outcome(end)) for end in end_points(replay, loss))

    def add(self, sums: Array) -> int:
        """Enter one setting, ``[D, 6]``, and return its column."""
        self._sums.append(sums)
        return len(self._sums) - 1

    def close(self) -> Measured:
        """Average and resample."""
        sums = np.stack(self._sums, axis=1)
        losses, rejections = (resampled_means(sums[:, :, part], self.counts, self.weights) for part in (0, 1))
        return Measured(sums.sum(axis=0) / self.counts.sum(), losses, rejections, self.drafter, self.lossless)


def end_points(replay: Replay, loss: str) -> tuple[Outcome, Outcome]:
    """The drafter alone (never defer) and lossless speculative decoding (always defer)."""
    return tuple(  # type: ignore[return-value]  # two masks, two outcomes
        replay.choice(torch.full((len(replay),), defer), loss) for defer in (False, True)
    )
