"""A pooled estimate of the truth: both models' opinions of the likeliest tokens, weighed by what a position looks like.

log P̂(v) = a(s)·log q°(v) + b(s)·log p°(v) + c(s)·f(v) + const over the union of both models' most probable tokens and
one more bucket, the *tail*, that stands for all other tokens; a, b, c are small functions of the position's features s.
Inside the tail P̂ follows p°. Untrained it is p° itself, so training can only move away from the plug-in. Where the head
tells tokens apart, what training learned about each (`TokenTable`) is added to its score.

Knows no rule and no file. Source: logarithmic opinion pools (Genest and Zidek, Statistical Science 1986); "Rules that
believe a trained estimate" in docs/theory.md.

Shapes: ``N`` position, ``F`` feature, ``K`` candidate; the last axis of candidates is the model (q°, p°).
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from .checks import check_range
from .examples import Examples
from .head_base import Head, HeadSpec, Signature, stack_layers
from .token_table import TokenTable

__all__ = ["LOG_NOTHING", "TAIL_FLOOR", "PooledEstimator"]

CANDIDATE_FLOOR = 1e-8
"""Logarithms of candidates are taken no lower: one model's zero is a strong opinion, not a veto."""

TAIL_FLOOR = 1e-6
"""The same for the tail, which is one minus a float32 sum and no more precise than that."""

LARGEST_WEIGHT = 2.0
"""Bound of a, b, c and d: outside what was seen in training no opinion is taken to a higher power."""

LOG_NOTHING = -20.0
"""log P̂ of padding, and the least of any candidate."""

UNREAL = -1e4
"""Score of padding, before normalisation."""

OPINIONS = ("argmax of q", "argmax of p", "min(log q, log p)", "log((q + p) / 2)")
"""f(v): which token either model names, the more doubtful of both, and their even mixture."""


class PooledEstimator(Head):
    """log P̂ over candidates and the tail.

    The tail is pooled like one more candidate of masses 1 − Σq° and 1 − Σp°, which no model names, plus d(s).

    Args:
        spec: of kind and estimator ``pooled`` and losses ``("log",)``; ``hidden`` are the widths of the layers that a,
            b, c and d share (none: they are linear in the features), ``top_k`` is how many of each model's most
            probable tokens are candidates, as the traces log them.

    Raises:
        ValueError: another estimator or loss, a context, a width below one, or a `top_k` below two.

    >>> head = PooledEstimator(HeadSpec("pooled", "pooled", "draft_only", (8,), losses=("log",), top_k=2))
    >>> belief = head(torch.zeros(1, head.width), torch.tensor([[[0.1, 0.7], [0.6, 0.2]]])).exp()
    >>> [round(value, 3) for value in belief[0].tolist()]
    [0.7, 0.2, 0.1]
    """

    def __init__(self, spec: HeadSpec) -> None:
        if spec.losses != ("log",):
            raise ValueError(f"losses: expected ('log',) for a pooled head, got {spec.losses}")
        if spec.hidden and min(spec.hidden) < 1:
            raise ValueError(f"hidden: expected widths >= 1, got {spec.hidden}")
        check_range("top_k", spec.top_k, 2, float("inf"))
        spec.refuse_context()
        super().__init__(spec)
        self.top_k = spec.top_k
        self.trunk = stack_layers(spec.columns, spec.hidden, len(OPINIONS) + 3)
        last = self.trunk[-1]
        assert isinstance(last, nn.Linear), "the layers end in a linear one"
        with torch.no_grad():  # b = 1, all else 0: P̂ = p°
            last.bias[1] = LARGEST_WEIGHT * math.atanh(1 / LARGEST_WEIGHT)
        self.table = TokenTable(spec.columns, spec.token_rank) if spec.token_rank else None

    @property
    def gap_losses(self) -> tuple[str, ...]:
        """The losses whose gaps follow from one P̂."""
        return "zero_one", "sampled"

    def estimate(self, examples: Examples) -> Float[Tensor, "N 2"]:
        """Estimate both gaps: P̂(argmax p) − P̂(argmax q), and E of p(v) − q(v) over the candidates, v ~ P̂.

        Raises:
            ValueError: examples without candidates.
        """
        if examples.candidates is None:
            raise ValueError("candidates: expected them for a pooled head, got examples without")
        belief = self(*self._inputs(examples)).exp()[:, :-1]
        draft, verifier = examples.candidates.unbind(dim=-1)
        best = [belief.gather(-1, side.argmax(dim=-1, keepdim=True))[:, 0] for side in (draft, verifier)]
        return torch.stack([best[1] - best[0], (belief * (verifier - draft)).sum(dim=-1)], dim=-1)

    @property
    def signature(self) -> Signature:
        """Features [N, F], candidates [N, K, 2] and, where it tells them apart, their ids [N, K], to log P̂ [N, K+1]."""
        inputs: dict[str, tuple[str | int, ...]] = {"features": ("N", self.width), "candidates": ("N", "K", 2)}
        if self.reads_tokens:
            inputs["tokens"] = ("N", "K")
        return Signature(inputs, {"log_belief": ("N", "K+1")})

    def arrange(self, features: Float[Tensor, "N F"], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Features as they are; beside them candidates of random pairs, some of them padding."""
        sharpness = torch.rand(2, len(features), 1, generator=generator) * 8
        pair = (sharpness * torch.randn(2, len(features), 40, generator=generator)).softmax(dim=-1)
        candidates = pair[..., :32].movedim(0, -1)
        padding = torch.arange(32) >= torch.randint(1, 33, (len(features), 1), generator=generator)
        candidates = candidates.masked_fill(padding.unsqueeze(-1), 0.0)
        if self.table is None:
            return features, candidates
        return features, candidates, torch.randint(len(self.table.rows), padding.shape, generator=generator)

    @property
    def reads_tokens(self) -> bool:
        """Whether it tells tokens apart."""
        return self.table is not None

    def forward(
        self,
        features: Float[Tensor, "N F"],
        candidates: Float[Tensor, "N K 2"],
        tokens: Int[Tensor, "N K"] | None = None,
    ) -> Float[Tensor, "N K+1"]:
        """Estimate log P̂ of every candidate and, last, of the tail.

        Args:
            features: as ``build_features`` returns them; NaN is replaced by the training mean.
            candidates: q° and p° of each; one that both hold impossible is padding and gets `LOG_NOTHING`.
            tokens: their ids, where the head tells tokens apart.

        Raises:
            ValueError: ids are missing, or given to a head that does not read them.
        """
        if (tokens is None) == self.reads_tokens:
            raise ValueError(f"tokens: expected {'their ids' if self.reads_tokens else 'none'}, got the other")
        logs, opinions = _opinions(candidates)
        # In float64, as sums over thousands of numbers differ between ONNX and torch.
        columns = self.along_directions(self.deviations(features).double())
        weights = self._weights(columns).unsqueeze(1)
        pooled = (weights[..., :2] * logs).sum(dim=-1) + (weights[..., 2:-1] * opinions).sum(dim=-1)
        real = candidates.amax(dim=-1) > 0
        scores = pooled[:, :-1] if self.table is None else pooled[:, :-1] + self.table(columns.float(), tokens)
        scores = torch.where(real, scores, UNREAL)
        tail = pooled[:, -1:] + weights[..., -1]
        return torch.cat([scores, tail], dim=-1).log_softmax(dim=-1).clamp_min(LOG_NOTHING).float()

    def loss(self, examples: Examples, generator: torch.Generator | None = None) -> Float[Tensor, ""]:
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
        error: Tensor = -self(*self._inputs(examples)).gather(-1, truth.unsqueeze(-1)).squeeze(-1)
        return error.mean() if examples.weight is None else (error * examples.weight).sum() / examples.weight.sum()

    def _inputs(self, examples: Examples) -> tuple[Tensor | None, ...]:
        inputs = examples.features, examples.candidates
        return (*inputs, examples.tokens) if self.reads_tokens else inputs

    def _weights(self, columns: Float[Tensor, "N C"]) -> Float[Tensor, "N W"]:
        """Return a, b, c and d of each position, in float64: they are multiplied by logarithms of up to 18 nats."""
        weights: Tensor = columns
        for layer in self.trunk:
            if isinstance(layer, nn.Linear):
                weights = functional.linear(weights, layer.weight.double(), layer.bias.double())
            else:
                weights = layer(weights)
        return LARGEST_WEIGHT * (weights / LARGEST_WEIGHT).tanh()


def _opinions(candidates: Float[Tensor, "N K 2"]) -> tuple[Float[Tensor, "N K+1 2"], Float[Tensor, "N K+1 4"]]:
    """log q° and log p°, and f, of every candidate and of the tail."""
    # In float64: the order of a float32 sum would show in the logarithm of a thin tail.
    candidates = candidates.double()
    tail = (1 - candidates.sum(dim=1, keepdim=True)).clamp_min(TAIL_FLOOR)
    logs = torch.cat([candidates.clamp_min(CANDIDATE_FLOOR), tail], dim=1).log()
    named = (candidates == candidates.amax(dim=1, keepdim=True)) & (candidates > 0)
    named_by = torch.cat([named.double(), torch.zeros_like(tail)], dim=1)
    doubtful = logs.amin(dim=-1, keepdim=True)
    mixed = (logs.exp().mean(dim=-1, keepdim=True)).log()
    return logs, torch.cat([named_by, doubtful, mixed], dim=-1)
