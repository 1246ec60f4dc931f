"""The calibration table of a router: what each α gives on held-out prompts, with intervals.

Two regimes: ``greedy`` (temperature 0: the 0-1 gap decides and a deferred position is rejected where the argmaxes
differ) and ``sampled`` (the sampled gap decides, rejection is D_TV at the temperature of the traces; Lemma 3). The grid
of α is adaptive: budgets of rejection are covered evenly, whatever the scale of the gap.

Shapes: ``N`` position, ``M`` setting, ``P`` prompt, ``R`` resample.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ..router.config import CalibrationRow
from ..router.heads import RouterHead
from .datamodule import TraceTensors

__all__ = ["CalibrationConfig", "alpha_grid", "calibrate", "calibrate_regime", "choose_alpha"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class CalibrationConfig:
    """How fine the table is.

    Args:
        points: settings of α a regime, spread evenly over rejection from none to lossless.
        resamples: bootstrap resamples of the prompts behind the intervals.
        seed: of the resampling.
    """

    points: int = 33
    resamples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.points < 2:
            raise ValueError(f"points: expected at least 2, got {self.points}")
        if self.resamples < 1:
            raise ValueError(f"resamples: expected at least 1, got {self.resamples}")


def calibrate(
    head: RouterHead, held_out: TraceTensors, config: CalibrationConfig | None = None
) -> dict[str, tuple[CalibrationRow, ...]]:
    """Measure both regimes on held-out positions.

    Raises:
        ValueError: the two models never differ there.
    """
    config = config or CalibrationConfig()
    with torch.inference_mode():
        gap = head.eval()(held_out.features)
    zero_one, sampled = head.losses.index("zero_one"), head.losses.index("sampled")
    prompts = held_out.prompt_index
    return {
        "greedy": calibrate_regime(
            gap[:, zero_one], 1 - held_out.agree, held_out.correctness[:, zero_one], prompts, config
        ),
        "sampled": calibrate_regime(gap[:, sampled], held_out.tv, held_out.correctness[:, sampled], prompts, config),
    }


def calibrate_regime(
    gap: Float[Tensor, "N"],
    tv: Float[Tensor, "N"],
    correctness: Float[Tensor, "N 2"],
    prompt_index: Tensor,
    config: CalibrationConfig,
) -> tuple[CalibrationRow, ...]:
    """Count deferral, rejection and quality at every α of an adaptive grid; rows in order of rising α.

    Raises:
        ValueError: the two models never differ.
    """
    alphas = alpha_grid(gap, tv, config.points)
    _, prompts = np.unique(prompt_index.numpy(), return_inverse=True)
    sums = np.stack([_sums_at(alpha, gap, tv, correctness, prompts) for alpha in alphas], axis=1)
    counts = np.bincount(prompts).astype(np.float64)
    draws = np.random.default_rng(config.seed).multinomial(
        len(counts), np.full(len(counts), 1 / len(counts)), size=config.resamples
    )
    means = sums.sum(axis=0) / counts.sum()
    resampled = np.einsum("rp,pmk->rmk", draws, sums) / (draws @ counts)[:, None, None]
    low, high = np.quantile(resampled, (0.025, 0.975), axis=0)
    return tuple(
        CalibrationRow(
            alpha=alpha,
            deferral=mean[0],
            rejection=mean[1],
            quality=mean[2],
            deferral_low=lower[0],
            deferral_high=upper[0],
            rejection_low=lower[1],
            rejection_high=upper[1],
            quality_low=lower[2],
            quality_high=upper[2],
        )
        for alpha, mean, lower, upper in zip(alphas, means.tolist(), low.tolist(), high.tolist(), strict=True)
    )


def alpha_grid(gap: Float[Tensor, "N"], tv: Float[Tensor, "N"], points: int) -> list[float]:
    """Rising values of α whose rejection rates cover none to lossless evenly, and 0, the α that ignores the cost.

    Raises:
        ValueError: the two models never differ.
    """
    differs = tv > 0
    if not differs.any():
        raise ValueError("traces: expected positions where the two models differ, got none; there is nothing to route")
    ratio, order = (gap[differs].double() / tv[differs].double()).sort(descending=True)
    spent = tv[differs].double()[order].cumsum(dim=0)
    places = torch.searchsorted(spent, torch.linspace(0, 1, points, dtype=torch.double)[1:-1] * spent[-1])
    # Between two neighbours, so that rounding decides nothing.
    following = ratio[(places + 1).clamp_max(len(ratio) - 1)]
    margin = 1e-3 * (1 + ratio.abs().max())
    inner = ((ratio[places.clamp_max(len(ratio) - 1)] + following) / 2).tolist()
    return sorted({float(ratio[0] + margin), *inner, 0.0, float(ratio[-1] - margin)})


def choose_alpha(rows: tuple[CalibrationRow, ...]) -> float:
    """The α that keeps the verifier's quality for the fewest rejections; the best quality where none keeps it.

    The verifier's quality is that of the row with the most rejections: the one that defers wherever the models differ.
    """
    lossless = max(rows, key=lambda row: row.rejection)
    as_good = [row for row in rows if row.quality >= lossless.quality]
    return min(as_good, key=lambda row: row.rejection).alpha


def _sums_at(alpha: float, gap: Tensor, tv: Tensor, correctness: Tensor, prompts: NDArray[np.int64]) -> Array:
    """Deferral, rejection and quality at one α, summed by prompt: ``[P, 3]``."""
    defer = gap > alpha * tv
    values = (defer.float(), torch.where(defer, tv, 0.0), torch.where(defer, correctness[:, 1], correctness[:, 0]))
    return np.stack([np.bincount(prompts, weights=value.double().numpy()) for value in values], axis=1)
