"""A trace folder in numbers: how good the two models are, where they differ, how far their confidence can be trusted.

Shapes: ``N`` position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .traces import Traces, TraceSplit

__all__ = ["calibration_error", "describe", "summarise"]


def summarise(split: TraceSplit) -> dict[str, float]:
    """Numbers of one split: counts, accuracies of the argmax, disagreement, mean TV and calibration errors."""
    right_q, right_p = split.correctness[:, 0, 0], split.correctness[:, 0, 1]
    differ = split.stats.argmax_agree == 0
    return {
        "prompts": float(len(split.prompt_ids)),
        "positions": float(len(split)),
        "draft_accuracy": float(right_q.mean()),
        "verifier_accuracy": float(right_p.mean()),
        "disagreement": float(differ.float().mean()),
        "draft_only_right": float((right_q * differ).mean()),
        "verifier_only_right": float((right_p * differ).mean()),
        "mean_tv": float(split.stats.tv.mean()),
        "draft_calibration_error": calibration_error(split.stats.draft_max, right_q),
        "verifier_calibration_error": calibration_error(split.stats.verifier_max, right_p),
    }


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """Expected calibration error of confidences ``[N]`` against outcomes ``[N]``, over bins of equal width.

    >>> calibration_error(torch.tensor([0.8, 0.8, 0.8, 0.8]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    0.30000001192092896
    """
    index = (confidence * bins).long().clamp(0, bins - 1)
    gaps = torch.zeros(bins).index_add_(0, index, correct - confidence)
    return float(gaps.abs().sum() / len(confidence))


def describe(traces: Traces) -> str:
    """Say what a trace folder holds, as lines of text for a terminal or a log."""
    plan = traces.manifest.plan
    lines = [
        f"Traces in {traces.folder}: {traces.manifest.rows:,} positions, {len(traces.manifest.shards)} shards",
        f"  drafter {plan.drafter}, verifier {plan.verifier}, {plan.dtype}, temperature {plan.temperature:g}",
        f"  {'split':<12}{'prompts':>9}{'positions':>11}{'acc q':>8}{'acc p':>8}{'differ':>8}"
        f"{'q only':>8}{'p only':>8}{'TV':>8}{'ECE q':>8}{'ECE p':>8}",
    ]
    for name in traces.splits:
        row = summarise(traces.split(name))
        prompts, positions, *shares = row.values()
        lines.append(f"  {name:<12}{prompts:>9,.0f}{positions:>11,.0f}" + "".join(f"{share:>8.3f}" for share in shares))
    return "\n".join(lines)
