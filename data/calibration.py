"""How far a stated chance can be trusted: the expected calibration error, the one definition that the project uses.

Bins of equal width over [0, 1]; the error is the mean over positions of the distance, in their bin, between mean
confidence and how often it was right. Everything follows from three sums a bin, so pieces add up to the whole: trace
summaries, the offline evaluation and the validation of training all take it from here. (A router's gap runs from -1 to
1; for it `eval.metrics.equal_count_calibration_error` has bins of equal counts.)

Knows nothing of traces, models or rules. Shapes: ``N`` position, ``B`` bin.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BINS", "calibration_error", "calibration_sums", "error_of_sums"]

BINS = 15


def calibration_sums(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Tensor:
    """Add up positions, confidences and outcomes ``[N]`` in each bin: ``[3, B]`` float64; sums of pieces may be added.

    They are formed and kept on the CPU, since not every device has float64.

    A confidence at an inner edge belongs to the bin above it, and 1 (or what rounding lifts above it) to the last.
    """
    confidence, correct = confidence.cpu().double(), correct.cpu().double()
    index = (confidence * bins).long().clamp(0, bins - 1)
    rows = torch.stack([torch.ones_like(confidence), confidence, correct])
    return torch.zeros(3, bins, dtype=torch.float64).index_add_(1, index, rows)


def error_of_sums(sums: Tensor) -> Tensor:
    """Expected calibration error, a scalar, from sums ``[3, B]``; NaN where no position was counted."""
    count, confidence, correct = sums
    error: Tensor = (confidence - correct).abs().sum() / count.sum()
    return error


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> float:
    """Expected calibration error of confidences ``[N]`` in [0, 1] against outcomes ``[N]``; NaN for no position.

    >>> round(calibration_error(torch.tensor([0.8, 0.8, 0.8, 0.8]), torch.tensor([1.0, 1.0, 0.0, 0.0])), 6)
    0.3
    """
    return float(error_of_sums(calibration_sums(confidence, correct, bins)))
