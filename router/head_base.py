"""What every trained head states about itself, so that training, export and bundles need not know its kind.

A head normalises its features inside its graph. `HeadSpec` is all that is needed to build it again, `Signature` all
that is needed to run it. Knows no loss by its formula and no file.

Shapes: ``N`` position, ``F`` feature.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .checks import check_choice
from .examples import Examples
from .features import FEATURE_SETS, feature_width

__all__ = ["ESTIMATORS", "LOSSES", "Head", "HeadSpec", "Signature", "stack_layers"]

LOSSES = ("zero_one", "sampled", "log")
"""zero_one: 1 where the argmax misses the label. sampled: 1 − q(label), the expected 0-1 loss of a sampled token.
log: −log q(label), in nats."""

ESTIMATORS = ("gap", "two_confidence", "cost_sensitive", "pooled")

DEVIATIONS_KEPT = 8.0
"""Features further from their mean than this many deviations are clamped: never seen in training, never trusted."""


@dataclass(frozen=True)
class HeadSpec:
    """What has to be known to build a head; its weights come on top.

    Args:
        kind: a key of ``HEAD_KINDS``.
        estimator: what the head learns, one of ``ESTIMATORS``.
        feature_set: which statistics it reads, a key of ``FEATURE_SETS``.
        hidden: widths of its hidden layers, for kinds that have some.
        hidden_sizes: of the two models' hidden states, for a feature set that reads them.
        token_rank: length of the vectors that a head that reads tokens learns of each of them; 0: it does not tell them
            apart.
        rank: how many directions of each hidden state it reads, instead of every number of them; 0: every number.
        losses: one output column each, distinct and in this order.
        context: how many positions an estimate reads, its own included, for kinds that read order; 0: the default of
            the kind.
        top_k: how many of each model's most probable tokens it reads, for kinds that read tokens.

    Raises:
        ValueError: an unknown name, a loss named twice, or one that the estimator cannot learn.
    """

    kind: str = "mlp"
    estimator: str = "gap"
    feature_set: str = "verified"
    hidden: tuple[int, ...] = ()
    losses: tuple[str, ...] = ("zero_one", "sampled")
    context: int = 0
    top_k: int = 0
    hidden_sizes: tuple[int, ...] = ()
    rank: int = 0
    token_rank: int = 0

    def __post_init__(self) -> None:
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_choice("feature_set", self.feature_set, FEATURE_SETS)
        if (self.kind == "pooled") != (self.estimator == "pooled"):
            raise ValueError(
                f"estimator: expected 'pooled' for kind 'pooled' alone, got {self.estimator!r}, {self.kind!r}"
            )
        for loss in self.losses:
            check_choice("losses", loss, LOSSES)
        if not self.losses or len(set(self.losses)) < len(self.losses):
            raise ValueError(f"losses: expected at least one, each once, got {self.losses}")
        if self.estimator == "two_confidence" and "log" in self.losses:
            raise ValueError("losses: two_confidence learns chances, expected zero_one and sampled, got 'log'")
        feature_width(self.feature_set, self.hidden_sizes)  # refuses sizes that are missing or superfluous
        if self.rank < 0 or self.rank > min(self.hidden_sizes, default=0):
            most = f"0 to {min(self.hidden_sizes)}" if self.hidden_sizes else "0 for features without hidden states"
            raise ValueError(f"rank: expected {most}, got {self.rank}")
        if self.token_rank < 0 or (self.token_rank and self.kind != "pooled"):
            raise ValueError(f"token_rank: expected 0, or above 0 for kind 'pooled' alone, got {self.token_rank}")
        if self.context < 0:
            raise ValueError(f"context: expected a number >= 0, got {self.context}")

    @property
    def columns(self) -> int:
        """Numbers a position that ``Head.normalise`` hands to the layers."""
        width = feature_width(self.feature_set, self.hidden_sizes)
        return width - sum(self.hidden_sizes) + len(self.hidden_sizes) * self.rank if self.rank else width

    def refuse_context(self) -> None:
        """Raise ValueError if a context is set; called by kinds that decide each position by itself."""
        if self.context:
            raise ValueError(f"context: expected 0 for kind {self.kind!r}, which reads no order; got {self.context}")


class Signature(NamedTuple):
    """Names and shapes of a head's inputs and outputs, in order; a string is an axis of any size."""

    inputs: Mapping[str, tuple[str | int, ...]]
    outputs: Mapping[str, tuple[str | int, ...]]


class Head(nn.Module):
    """Base of all heads: the spec, and the normalisation of features. Build one with ``make_head``."""

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        self.kind, self.estimator, self.feature_set = spec.kind, spec.estimator, spec.feature_set
        self.hidden, self.losses, self.context = spec.hidden, spec.losses, spec.context
        self.register_buffer("feature_mean", torch.zeros(self.width))
        self.register_buffer("feature_std", torch.ones(self.width))
        self.directions = nn.ParameterList(
            nn.Parameter(torch.zeros(size, spec.rank), requires_grad=False) for size in spec.hidden_sizes if spec.rank
        )

    @property
    def width(self) -> int:
        """Number of features F."""
        return feature_width(self.feature_set, self.spec.hidden_sizes)

    @property
    def gap_losses(self) -> tuple[str, ...]:
        """The losses whose gaps ``estimate`` gives, one column each."""
        return self.losses

    def estimate(self, examples: Examples) -> Float[Tensor, "*batch G"]:
        """Estimate the gap of each of ``gap_losses`` at labelled positions; a head that is fed α has none."""
        gap: Tensor = self(examples.features)
        return gap

    @property
    def signature(self) -> Signature:
        """What ``forward`` takes and returns; the ONNX file has the same names."""
        raise AssertionError(f"{type(self).__name__} must state its inputs and outputs")

    def arrange(self, features: Float[Tensor, "N F"], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Make inputs of ``forward`` out of loose positions: to trace the graph on, and to compare ONNX with torch."""
        raise AssertionError(f"{type(self).__name__} must arrange its inputs")

    def loss(self, examples: Examples, generator: torch.Generator | None = None) -> Float[Tensor, ""]:
        """Training loss, a weighted mean over positions."""
        raise AssertionError(f"{type(self).__name__} must have a loss")

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

    def set_directions(self, draft: Float[Tensor, "H1 rank"], verifier: Float[Tensor, "H2 rank"]) -> None:
        """Store which directions of the normalised hidden states are read; they are not trained.

        Raises:
            ValueError: shapes other than those of the spec, or a spec without a rank.
        """
        if not len(self.directions):
            raise ValueError("directions: expected none for a head of rank 0, got some")
        for name, own, values in zip(("draft", "verifier"), self.directions, (draft, verifier), strict=True):
            if values.shape != own.shape:
                raise ValueError(f"{name}: expected shape {list(own.shape)}, got {list(values.shape)}")
            own.copy_(values)

    def fill_missing(self, features: Float[Tensor, "*batch F"]) -> Float[Tensor, "*batch F"]:
        """Put the training mean in place of NaN."""
        return torch.where(torch.isnan(features), self.feature_mean, features)

    def deviations(self, features: Float[Tensor, "*batch F"]) -> Float[Tensor, "*batch F"]:
        """Deviations from the training mean, missing values at 0, none beyond ``DEVIATIONS_KEPT``."""
        deviations = (self.fill_missing(features) - self.feature_mean) / self.feature_std
        return deviations.clamp(-DEVIATIONS_KEPT, DEVIATIONS_KEPT)

    def normalise(self, features: Float[Tensor, "*batch F"]) -> Float[Tensor, "*batch C"]:
        """Deviations ``[*batch, C]``, C = ``spec.columns``; of hidden states along the stored directions, if any."""
        return self.along_directions(self.deviations(features))

    def along_directions(self, deviations: Float[Tensor, "*batch F"]) -> Float[Tensor, "*batch C"]:
        """Put each hidden state's products with the stored directions in its place, in the precision of the input."""
        if not len(self.directions):
            return deviations
        sizes = self.spec.hidden_sizes
        scalars, *states = deviations.split([self.width - sum(sizes), *sizes], dim=-1)
        pairs = zip(states, self.directions, strict=True)
        return torch.cat([scalars, *(state @ own.to(state.dtype) for state, own in pairs)], dim=-1)


def stack_layers(width: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Linear layers with ReLU and a dropout that is off until training sets it; the last one begins at zero."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU(), nn.Dropout(0.0)]
        width = size
    last = nn.Linear(width, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)
