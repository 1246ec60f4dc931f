"""The head of a position: features to the expected gain in quality if the verifier writes it instead of the drafter.

The optimal rule defers iff the gap E[ℓ(v, q)] − E[ℓ(v, p)] exceeds α · D_TV(p, q) ("The optimal rule,
and learning it" in docs/theory.md). The distance is known at verify time, so only the gap is learned, and one head
serves every α. The cost-sensitive estimator learns the decision instead, and is told α.

What is known exactly is not learned: normalisation and the treatment of missing values are part of the graph, a gap
of two probabilities stays in [−1, 1], and where both argmaxes agree the 0-1 gap is zero whatever the truth.

Shapes: ``*batch`` is ``[N]`` positions, or ``[B, L]`` where their order matters; ``F`` feature, ``G`` loss of the head
(``losses``); axes of length two are the rows of ``Examples.correctness`` and the models (q, p).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from .calibration import PiecewiseLinear
from .examples import Examples
from .features import feature_index
from .head_base import Head, HeadSpec, Signature

__all__ = ["CORRECTNESS_ROW", "RouterHead", "gap_labels", "output_count", "squash"]

LARGEST_GAP = {"zero_one": 1.0, "sampled": 1.0, "log": 20.0}
"""No gap is larger: two chances differ by one at most; log-probabilities are cut to 20 nats apart."""

CORRECTNESS_ROW = {"zero_one": 0, "sampled": 1, "log": 1}
_GOLDEN = 0.6180339887498949


class RouterHead(Head):
    """In-graph normalisation, a trunk and one of three estimators, calibrated afterwards if one likes.

    ``gap`` regresses ℓ(v, q) − ℓ(v, p) by squared loss. ``two_confidence`` fits how often each model is right by
    cross-entropy with soft targets, and subtracts. Both are Fisher-consistent for the gap. ``cost_sensitive`` is fed α
    and classifies gap > α · D_TV, every position weighted by what a wrong decision costs there.

    Args:
        spec: what to build.
        trunk: what maps normalised features ``[*batch, spec.columns]``, and for ``cost_sensitive`` squashed α as one
            more, to ``output_count(spec)`` outputs.
    """

    largest_gap: Tensor
    tie_threshold: Tensor

    def __init__(self, spec: HeadSpec, trunk: nn.Module) -> None:
        super().__init__(spec)
        self.trunk = trunk
        self.calibration = nn.ModuleDict({loss: PiecewiseLinear() for loss in self.losses})
        self._agree_index = feature_index(self.feature_set, "argmax_agree")
        thresholds = [0.5 if loss == "zero_one" else torch.inf for loss in self.losses]
        largest = [LARGEST_GAP[loss] for loss in self.losses]
        self.register_buffer("tie_threshold", torch.tensor(thresholds), persistent=False)
        self.register_buffer("largest_gap", torch.tensor(largest), persistent=False)

    @property
    def reads_alpha(self) -> bool:
        """Whether ``forward`` is told α, and returns margins instead of gaps."""
        return self.estimator == "cost_sensitive"

    @property
    def signature(self) -> Signature:
        """Features [N, F], for ``cost_sensitive`` also alpha [N], to a gap (or margin) [N, G]."""
        alpha: dict[str, tuple[str | int, ...]] = {"alpha": ("N",)} if self.reads_alpha else {}
        return Signature({"features": ("N", self.width)} | alpha, {"gap": ("N", len(self.losses))})

    def arrange(self, features: Float[Tensor, "N F"], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Features as they are; beside them α from every part of its range, where the head reads it."""
        if not self.reads_alpha:
            return (features,)
        return features, unsquash(torch.rand(len(features), generator=generator) * 2 - 1)

    def forward(
        self, features: Float[Tensor, "*batch F"], alpha: Float[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch G"]:
        """Estimate the gap under each loss: how much better the verifier does than the drafter, in [−1, 1] or nats.

        ``cost_sensitive`` returns a margin instead: defer where it is positive.

        Raises:
            ValueError: ``alpha`` is missing for ``cost_sensitive``, or given for another estimator.
        """
        return self.finish(features, self._outputs(features, alpha), alpha)

    def finish(
        self, features: Float[Tensor, "*batch F"], outputs: Float[Tensor, "*batch C"], alpha: Tensor | None = None
    ) -> Float[Tensor, "*batch G"]:
        """Turn the trunk's outputs into gaps (or margins): the part of ``forward`` that comes after it."""
        if self.estimator == "two_confidence":
            draft, verifier = self._chances(outputs).chunk(2, dim=-1)
            outputs = verifier - draft
        elif self.estimator == "gap":
            outputs = torch.minimum(torch.maximum(outputs, -self.largest_gap), self.largest_gap)
        return self._settle_ties(features, self._calibrate(outputs), alpha)

    def confidences(self, features: Float[Tensor, "*batch F"]) -> Float[Tensor, "*batch G 2"]:
        """Estimate how often each model is right, per loss and per model (q, p), before calibration.

        Raises:
            ValueError: the estimator is another than ``two_confidence``, and learns no confidences.
        """
        if self.estimator != "two_confidence":
            raise ValueError(f"confidences: expected a head with estimator 'two_confidence', got {self.estimator!r}")
        return self._chances(self._paired_outputs(features))

    def set_calibration(self, loss: str, knots: Tensor, values: Tensor) -> None:
        """Map one loss's gap through a monotone piecewise-linear function, constant outside its ``[M]`` knots.

        Gaps of exactly zero where both argmaxes agree stay zero. ``loss`` (the training loss) does not see it.

        Raises:
            ValueError: the head has no such loss or no gap, or the function is not monotone or leaves the gap's range.
        """
        if self.reads_alpha:
            raise ValueError("set_calibration: expected a head that estimates a gap, got 'cost_sensitive'")
        if loss not in self.losses:
            raise ValueError(f"loss: expected one of {', '.join(self.losses)}, got {loss!r}")
        if len(values) and values.abs().max() > LARGEST_GAP[loss]:
            raise ValueError(f"values: expected gaps in [-{LARGEST_GAP[loss]:g}, {LARGEST_GAP[loss]:g}] for {loss}")
        stored = self.calibration[loss]
        assert isinstance(stored, PiecewiseLinear)
        stored.set(knots, values)

    def loss(self, examples: Examples, generator: torch.Generator | None = None) -> Float[Tensor, ""]:
        """Training loss, averaged over positions and losses.

        Squared for ``gap``, cross-entropy for ``two_confidence``. For ``cost_sensitive`` w · softplus(−s·margin), with
        w = |gap label − α·tv| / (1 + |α|) and s the sign of what is inside. α / (1 + |α|) is drawn uniformly over
        (−1, 1), so that half of the draws lie within ±1 and every α has its share; the factor depends on α alone and so
        moves no minimum. ``tv`` being that of the examples, the head learns for their temperature.

        Args:
            examples: labelled positions.
            generator: draws α for ``cost_sensitive``; without it α is spread evenly, the same at every call. No other
                estimator draws anything.

        Raises:
            ValueError: shapes that do not fit.
        """
        self._check(examples)
        features, weight = examples.features, examples.weight
        if self.estimator == "gap":
            gap = self._settle_ties(features, self._outputs(features))
            error = (gap - gap_labels(examples.correctness, self.losses)).square()
        elif self.estimator == "two_confidence":
            rows = [CORRECTNESS_ROW[loss] for loss in self.losses]
            error = self._chance_error(self._paired_outputs(features), examples.correctness[..., rows, :]).mean(dim=-1)
        else:
            error = self._decision_error(examples, generator)
        error = error.mean(dim=-1)
        return error.mean() if weight is None else (error * weight).sum() / weight.sum()

    def _decision_error(self, examples: Examples, generator: torch.Generator | None) -> Float[Tensor, "*batch G"]:
        dial = _dials(examples.tv, generator)
        alpha = unsquash(dial)
        margin = self._settle_ties(examples.features, self._outputs(examples.features, alpha), alpha)
        label = gap_labels(examples.correctness, self.losses)
        # (gap − α·tv) / (1 + |α|), written so that no α is too large.
        worth = (1 - dial.abs()).unsqueeze(-1) * label - (dial * examples.tv).unsqueeze(-1)
        return worth.abs() * functional.softplus(-worth.sign() * margin)

    def _check(self, examples: Examples) -> None:
        batch = examples.features.shape[:-1]
        wanted = {"correctness": [*batch, 2, 2], "tv": [*batch], "weight": [*batch]}
        for name, expected in wanted.items():
            values = getattr(examples, name)
            if values is not None and list(values.shape) != expected:
                raise ValueError(f"{name}: expected shape {expected}, got {list(values.shape)}")

    def _calibrate(self, estimate: Tensor) -> Tensor:
        maps = [self.calibration[loss] for loss in self.losses]
        if all(one.is_identity for one in maps):
            return estimate  # adds nothing to the graph
        return torch.stack([one(column) for one, column in zip(maps, estimate.unbind(dim=-1), strict=True)], dim=-1)

    def _chances(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def _chance_error(self, outputs: Tensor, correctness: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, correctness, reduction="none")

    def _paired_outputs(self, features: Tensor) -> Float[Tensor, "*batch G 2"]:
        draft, verifier = self._outputs(features).chunk(2, dim=-1)
        tie = self._zero_one_ties(features)
        return torch.stack([draft if tie is None else torch.where(tie, verifier, draft), verifier], dim=-1)

    def _settle_ties(self, features: Tensor, estimate: Tensor, alpha: Tensor | None = None) -> Tensor:
        """Where the 0-1 gap is known to be zero, say so: a gap of 0, a margin that defers iff α < 0."""
        tie = self._zero_one_ties(features)
        if tie is None:
            return estimate
        return estimate.masked_fill(tie, 0.0) if alpha is None else torch.where(tie, -alpha.unsqueeze(-1), estimate)

    def _zero_one_ties(self, features: Tensor) -> Tensor | None:
        """Where both models name the same token [*batch, G]: their 0-1 losses are equal; others still differ."""
        if self._agree_index is None:
            return None
        return features[..., self._agree_index : self._agree_index + 1] > self.tie_threshold

    def _read(self, features: Tensor) -> Tensor:
        return self.normalise(features)

    def _outputs(self, features: Tensor, alpha: Tensor | None = None) -> Tensor:
        if (alpha is not None) != self.reads_alpha:
            expected, came = ("one value a position", "none") if self.reads_alpha else ("none", "some")
            raise ValueError(f"alpha: expected {expected} for estimator {self.estimator!r}, got {came}")
        read = self._read(features)
        if alpha is not None:
            read = torch.cat([read, squash(alpha).unsqueeze(-1)], dim=-1)
        outputs: Tensor = self.trunk(read)
        return outputs


def output_count(spec: HeadSpec) -> int:
    """How many outputs a trunk must give: one a loss, two for ``two_confidence`` (all of q, then all of p)."""
    return len(spec.losses) * (2 if spec.estimator == "two_confidence" else 1)


def gap_labels(correctness: Float[Tensor, "*batch 2 2"], losses: tuple[str, ...]) -> Float[Tensor, "*batch G"]:
    """ℓ(v, q) − ℓ(v, p) of every position under each loss; for ``log`` in nats, cut to ±20.

    >>> gap_labels(torch.tensor([[[0.0, 1.0], [0.25, 0.5]]]), ("zero_one", "sampled", "log"))
    tensor([[1.0000, 0.2500, 0.6931]])
    """
    difference = correctness[..., 1] - correctness[..., 0]
    columns = [difference[..., CORRECTNESS_ROW[loss]] for loss in losses]
    if "log" in losses:
        logs = correctness[..., 1, :].clamp_min(torch.finfo(torch.float32).tiny).log()
        largest = LARGEST_GAP["log"]
        columns[losses.index("log")] = (logs[..., 1] - logs[..., 0]).clamp(-largest, largest)
    return torch.stack(columns, dim=-1)


def squash(alpha: Tensor) -> Tensor:
    """α / (1 + |α|): every finite α on one scale from −1 to 1."""
    return alpha / (1 + alpha.abs())


def unsquash(dial: Tensor) -> Tensor:
    """The α of a squashed one."""
    return dial / (1 - dial.abs()).clamp_min(1e-6)


def _dials(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Squashed α of the shape of ``like``, uniform over (−1, 1): drawn, or multiples of the golden ratio."""
    if generator is None:
        steps = torch.arange(1, like.numel() + 1, dtype=torch.float64, device=like.device)
        return ((steps * _GOLDEN) % 1 * 2 - 1).to(like.dtype).reshape(like.shape)
    drawn = torch.rand(like.shape, generator=generator, device=generator.device, dtype=torch.float32)
    return (drawn * 2 - 1).to(like)
