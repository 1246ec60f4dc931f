"""Heads: features of a position to the expected gain in quality if the verifier writes it instead of the drafter.

The optimal rule defers iff the gap E[ℓ(v, q)] − E[ℓ(v, p)] exceeds α · D_TV(p, q) ("The optimal rule,
and learning it" in docs/theory.md). The distance is known at verify time, so only the gap is learned, and one head
serves every α.

What is known exactly is not learned: normalisation and the treatment of missing values are part of the graph, a gap
of two probabilities stays in [−1, 1], and where both argmaxes agree the 0-1 gap is zero whatever the truth.

Shapes: ``N`` position, ``F`` feature; the axes of length two are the losses (``LOSSES``) and the models (q, p).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from .checks import check_choice
from .examples import Examples
from .features import FEATURE_SETS, feature_index

__all__ = ["ESTIMATORS", "HEAD_KINDS", "LOSSES", "RouterHead", "make_head"]

LOSSES = ("zero_one", "sampled")
"""zero_one: 1 where the argmax misses the label. sampled: 1 − q(label), the expected 0-1 loss of a sampled token."""

ESTIMATORS = ("gap", "two_confidence")
HEAD_KINDS = ("linear", "mlp")

DEVIATIONS_KEPT = 8.0
"""Features further from their mean than this many deviations are clamped: never seen in training, never trusted."""


class RouterHead(nn.Module):
    """In-graph normalisation, a trunk and one of two estimators; build it with ``make_head``.

    ``gap`` regresses ℓ(v, q) − ℓ(v, p) by squared loss. ``two_confidence`` fits how often each model is right by
    cross-entropy with soft targets, and subtracts. Both are Fisher-consistent for the gap.
    """

    feature_mean: Tensor
    feature_std: Tensor
    tie_threshold: Tensor

    def __init__(self, kind: str, estimator: str, feature_set: str, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.kind, self.estimator, self.feature_set, self.hidden = kind, estimator, feature_set, hidden
        self.losses, self.context = LOSSES, 0
        width = len(FEATURE_SETS[feature_set])
        self.register_buffer("feature_mean", torch.zeros(width))
        self.register_buffer("feature_std", torch.ones(width))
        outputs = len(LOSSES) * (1 if estimator == "gap" else 2)
        self.trunk = _mlp(width, hidden, outputs)
        self._agree_index = feature_index(feature_set, "argmax_agree")
        self.register_buffer("tie_threshold", torch.tensor([0.5, torch.inf]), persistent=False)

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

    def forward(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N 2"]:
        """Estimate the gap under each loss: how much likelier the verifier is right than the drafter, in [−1, 1]."""
        outputs = self._outputs(features)
        if self.estimator == "two_confidence":
            draft, verifier = outputs.sigmoid().chunk(2, dim=-1)
            return self._silence_ties(features, verifier - draft)
        return self._silence_ties(features, outputs.clamp(-1.0, 1.0))

    def confidences(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N 2 2"]:
        """Estimate how often each model is right, per loss and per model (q, p).

        Raises:
            ValueError: the estimator is ``gap``, which learns a difference and no confidences.
        """
        if self.estimator != "two_confidence":
            raise ValueError(f"confidences: expected a head with estimator 'two_confidence', got {self.estimator!r}")
        return self._confidence_logits(features).sigmoid()

    def loss(self, examples: Examples) -> Float[Tensor, ""]:
        """Training loss, averaged over positions and losses: squared for ``gap``, cross-entropy for ``two_confidence``.

        Raises:
            ValueError: shapes that do not fit.
        """
        features, correctness, weight = examples.features, examples.correctness, examples.weight
        if correctness.shape != (len(features), len(LOSSES), 2):
            expected = [len(features), len(LOSSES), 2]
            raise ValueError(f"correctness: expected shape {expected}, got {list(correctness.shape)}")
        if weight is not None and weight.shape != (len(features),):
            raise ValueError(f"weight: expected shape [{len(features)}], got {list(weight.shape)}")
        if self.estimator == "gap":
            gap = self._silence_ties(features, self._outputs(features))
            error = (gap - (correctness[..., 1] - correctness[..., 0])).square().mean(dim=-1)
        else:
            logits = self._confidence_logits(features)
            error = functional.binary_cross_entropy_with_logits(logits, correctness, reduction="none").mean(dim=(1, 2))
        return error.mean() if weight is None else (error * weight).sum() / weight.sum()

    def _confidence_logits(self, features: Tensor) -> Tensor:
        draft, verifier = self._outputs(features).chunk(2, dim=-1)
        tie = self._zero_one_ties(features)
        return torch.stack([draft if tie is None else torch.where(tie, verifier, draft), verifier], dim=-1)

    def _silence_ties(self, features: Tensor, gap: Tensor) -> Tensor:
        tie = self._zero_one_ties(features)
        return gap if tie is None else gap.masked_fill(tie, 0.0)

    def _zero_one_ties(self, features: Tensor) -> Tensor | None:
        """Where both models name the same token [N, 2]: their 0-1 losses are equal; sampled losses still differ."""
        if self._agree_index is None:
            return None
        return features[:, self._agree_index : self._agree_index + 1] > self.tie_threshold

    def _outputs(self, features: Tensor) -> Tensor:
        known = torch.where(torch.isnan(features), self.feature_mean, features)
        deviations = (known - self.feature_mean) / self.feature_std
        outputs: Tensor = self.trunk(deviations.clamp(-DEVIATIONS_KEPT, DEVIATIONS_KEPT))
        return outputs


def make_head(
    kind: str = "mlp", estimator: str = "gap", feature_set: str = "verified", hidden: Sequence[int] = (64, 64)
) -> RouterHead:
    """Build an untrained head.

    Args:
        kind: ``linear``, or ``mlp`` with hidden layers.
        estimator: ``gap`` or ``two_confidence``.
        feature_set: a key of ``FEATURE_SETS``.
        hidden: widths of the hidden layers of ``mlp``; ``linear`` has none.

    Raises:
        ValueError: an unknown name, answered with the nearest, or a width below one.

    >>> head = make_head("linear", "gap", feature_set="draft_only")
    >>> head(torch.zeros(3, head.width)).shape
    torch.Size([3, 2])
    """
    check_choice("kind", kind, HEAD_KINDS)
    check_choice("estimator", estimator, ESTIMATORS)
    check_choice("feature_set", feature_set, FEATURE_SETS)
    widths = tuple(int(size) for size in hidden)
    if kind == "mlp" and (not widths or min(widths) < 1):
        raise ValueError(f"hidden: expected at least one width, each >= 1, for an mlp; got {tuple(hidden)}")
    return RouterHead(kind, estimator, feature_set, widths if kind == "mlp" else ())


def _mlp(width: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    last = nn.Linear(width, outputs)
    # Training starts from "no gap", that is from a rule that never defers at a cost.
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)
