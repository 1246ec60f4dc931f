"""A pooled estimate of the truth: both models' opinions of the likeliest tokens, weighed by what a position looks like.

log P̂(v) = a(s)·log q°(v) + b(s)·log p°(v) + c(s)·f(v) + const over the union of both models' most probable tokens and
one more bucket, the *tail*, that stands for all other tokens; a, b, c are small functions of the position's features s.
Inside the tail P̂ follows p°. Untrained it is p° itself, so training can only move away from the plug-in.

Knows no rule, no token's identity and no file. Source: logarithmic opinion pools (Genest and Zidek, Statistical Science
1986); "Rules that believe a trained estimate" in docs/theory.md.

Shapes: ``N`` position, ``F`` feature, ``K`` candidate; the last axis of candidates is the model (q°, p°).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .checks import check_choice, check_range
from .examples import Examples
from .features import FEATURE_SETS
from .heads import DEVIATIONS_KEPT, _mlp

__all__ = ["LOG_NOTHING", "TAIL_FLOOR", "PooledEstimator"]

CANDIDATE_FLOOR = 1e-8
"""Logarithms of candidates are taken no lower: one model's zero is a strong opinion, not a veto."""

TAIL_FLOOR = 1e-6
"""The same for the tail, which is one minus a float32 sum and no more precise than that."""

LOG_NOTHING = -200.0
"""log P̂ of padding, and the least of any candidate: its exponential is zero in float32."""

OPINIONS = ("argmax of q", "argmax of p", "min(log q, log p)", "log((q + p) / 2)")
"""f(v): which token either model names, the more doubtful of both, and their even mixture."""


class PooledEstimator(nn.Module):
    """log P̂ over candidates and the tail.

    The tail is pooled like one more candidate of masses 1 − Σq° and 1 − Σp°, which no model names, plus d(s).

    Args:
        feature_set: a key of ``FEATURE_SETS``: what a, b, c and d read.
        hidden: widths of the layers that a, b, c and d share; none: they are linear in the features.
        top_k: how many of each model's most probable tokens are candidates, as the traces log them; at least 2.

    Raises:
        ValueError: an unknown feature set, a width below one, or a `top_k` below two.

    >>> head = PooledEstimator("draft_only", hidden=(8,))
    >>> belief = head(torch.zeros(1, head.width), torch.tensor([[[0.1, 0.7], [0.6, 0.2]]])).exp()
    >>> [round(value, 3) for value in belief[0].tolist()]
    [0.7, 0.2, 0.1]
    """

    feature_mean: Tensor
    feature_std: Tensor
    kind = estimator = "pooled"
    losses: tuple[str, ...] = ()

    def __init__(self, feature_set: str = "verified", hidden: Sequence[int] = (64, 64), top_k: int = 16) -> None:
        super().__init__()
        check_choice("feature_set", feature_set, FEATURE_SETS)
        check_range("top_k", top_k, 2, float("inf"))
        if hidden and min(hidden) < 1:
            raise ValueError(f"hidden: expected widths >= 1, got {tuple(hidden)}")
        self.feature_set, self.hidden, self.top_k = feature_set, tuple(hidden), top_k
        self.register_buffer("feature_mean", torch.zeros(self.width))
        self.register_buffer("feature_std", torch.ones(self.width))
        self.trunk = _mlp(self.width, self.hidden, len(OPINIONS) + 3)
        with torch.no_grad():
            self.trunk[-1].bias[1] = 1.0  # b = 1, all else 0: P̂ = p°

    @property
    def width(self) -> int:
        """Number of features F."""
        return len(FEATURE_SETS[self.feature_set])

    def set_normalisation(self, mean: Tensor, std: Tensor) -> None:
        """Store the training mean and deviation ``[F]`` of every feature; a constant feature is centred and not scaled.

        Raises:
            ValueError: a shape other than [F], or a value that is not finite, or a negative deviation.
        """
        for name, values in (("mean", mean), ("std", std)):
            if values.shape != (self.width,):
                raise ValueError(f"{name}: expected shape [{self.width}], got {list(values.shape)}")
            if not torch.isfinite(values).all():
                raise ValueError(f"{name}: expected finite values, got {values.tolist()}")
        if (std < 0).any():
            raise ValueError(f"std: expected values >= 0, got {std.tolist()}")
        self.feature_mean.copy_(mean)
        self.feature_std.copy_(torch.where(std > 1e-6, std, torch.ones_like(std)))

    def forward(self, features: Float[Tensor, "N F"], candidates: Float[Tensor, "N K 2"]) -> Float[Tensor, "N K+1"]:
        """Estimate log P̂ of every candidate and, last, of the tail.

        Args:
            features: as ``build_features`` returns them; NaN is replaced by the training mean.
            candidates: q° and p° of each; one that both hold impossible is padding and gets `LOG_NOTHING`.
        """
        logs, opinions = _opinions(candidates)
        weights = self._weights(features).unsqueeze(1)
        pooled = (weights[..., :2] * logs).sum(dim=-1) + (weights[..., 2:-1] * opinions).sum(dim=-1)
        real = candidates.amax(dim=-1) > 0
        scores = torch.where(real, pooled[:, :-1], LOG_NOTHING * 1e3)
        tail = pooled[:, -1:] + weights[..., -1]
        return torch.cat([scores, tail], dim=-1).log_softmax(dim=-1).clamp_min(LOG_NOTHING)

    def loss(self, examples: Examples) -> Float[Tensor, ""]:
        """Log loss −log P̂(truth), nats, averaged over positions.

        Where the truth is no candidate it counts as −log P̂(tail): how P̂ spreads inside the tail is p°'s and cannot
        be learned, so what is left out is constant.

        Raises:
            ValueError: examples without candidates, or a truth or weight of another shape.
        """
        features, candidates, truth = examples.features, examples.candidates, examples.truth
        if candidates is None or truth is None:
            raise ValueError("candidates, truth: expected both for a pooled head, got examples without them")
        for name, values in (("truth", truth), ("weight", examples.weight)):
            if values is not None and values.shape != (len(features),):
                raise ValueError(f"{name}: expected shape [{len(features)}], got {list(values.shape)}")
        error = -self(features, candidates).gather(-1, truth.unsqueeze(-1)).squeeze(-1)
        return error.mean() if examples.weight is None else (error * examples.weight).sum() / examples.weight.sum()

    def _weights(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N W"]:
        """A, b, c and d of each position."""
        known = torch.where(torch.isnan(features), self.feature_mean, features)
        deviations = (known - self.feature_mean) / self.feature_std
        weights: Tensor = self.trunk(deviations.clamp(-DEVIATIONS_KEPT, DEVIATIONS_KEPT))
        return weights


def _opinions(candidates: Float[Tensor, "N K 2"]) -> tuple[Float[Tensor, "N K+1 2"], Float[Tensor, "N K+1 4"]]:
    """log q° and log p°, and f, of every candidate and of the tail."""
    tail = (1 - candidates.sum(dim=1, keepdim=True)).clamp_min(TAIL_FLOOR)
    logs = torch.cat([candidates.clamp_min(CANDIDATE_FLOOR), tail], dim=1).log()
    named = (candidates == candidates.amax(dim=1, keepdim=True)) & (candidates > 0)
    named_by = torch.cat([named.float(), torch.zeros_like(tail)], dim=1)
    doubtful = logs.amin(dim=-1, keepdim=True)
    mixed = (logs.exp().mean(dim=-1, keepdim=True)).log()
    return logs, torch.cat([named_by, doubtful, mixed], dim=-1)
