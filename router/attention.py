"""A head that reads the last positions too: causal attention over H of them, in the place of the trunk.

One layer of attention, so that what a position reads ends exactly H − 1 positions before it; a residual layer behind
it looks at one position alone. A position whose features are all missing (padding, a bonus token, the time before the
answer began) is nobody's key. Keys and values know nothing of α: where it is fed, it enters behind the attention.

Shapes: ``B`` sequence, ``L`` position, ``F`` feature, ``H`` positions in reach, ``A`` attention head, ``D`` its width,
``G`` loss of the head.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from .head_base import HeadSpec, Signature
from .position_head import RouterHead, output_count

__all__ = ["DEFAULT_CONTEXT", "AttentionHead"]

DEFAULT_CONTEXT = 8
"""Positions in reach where a spec states none: the one decided on, and seven before it."""

ATTENTION_HEADS = 4


class AttentionHead(RouterHead):
    """`RouterHead` whose estimate at a position reads the last ``context`` positions, that one included.

    Args:
        spec: ``context`` is H, 0 standing for ``DEFAULT_CONTEXT``; ``hidden`` the width of the attention, a multiple of
            four, and that of the layer behind it.

    Raises:
        ValueError: other than two widths, or a first one that is no multiple of four.
    """

    def __init__(self, spec: HeadSpec) -> None:
        spec = replace(spec, context=spec.context or DEFAULT_CONTEXT)
        if len(spec.hidden) != 2 or min(spec.hidden) < 1 or spec.hidden[0] % ATTENTION_HEADS:
            raise ValueError(
                f"hidden: expected two widths >= 1 for attention, the first a multiple of {ATTENTION_HEADS}, "
                f"got {spec.hidden}"
            )
        super().__init__(spec, AttentionTrunk(spec))

    @property
    def signature(self) -> Signature:
        """Features [B, L, F], for ``cost_sensitive`` also alpha [B, L], to a gap (or margin) [B, L, G]."""
        alpha: dict[str, tuple[str | int, ...]] = {"alpha": ("B", "L")} if self.reads_alpha else {}
        return Signature({"features": ("B", "L", self.width)} | alpha, {"gap": ("B", "L", len(self.losses))})

    def arrange(self, features: Float[Tensor, "N F"], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Two sequences [2, N, F]: the positions in order, and in reverse with every third one missing."""
        reverse = features.flip(0).clone()
        reverse[::3] = torch.nan
        sequences = torch.stack([features, reverse])
        loose = super().arrange(sequences.flatten(end_dim=1), generator)
        return tuple(part.reshape(*sequences.shape[:2], *part.shape[1:]) for part in loose)

    def forward(
        self, features: Float[Tensor, "B L F"], alpha: Float[Tensor, "B L"] | None = None
    ) -> Float[Tensor, "B L G"]:
        """Estimate the gap at each position of each sequence; a position that is all NaN is told to no other.

        ``cost_sensitive`` returns a margin instead: defer where it is positive.

        Raises:
            ValueError: ``alpha`` is missing for ``cost_sensitive``, or given for another estimator.
        """
        return super().forward(features, alpha)

    def _read(self, features: Tensor) -> Tensor:
        """Normalised features, and whether anything of the position is known."""
        known = ~features.isnan().all(dim=-1, keepdim=True)
        return torch.cat([self.normalise(features), known.to(features.dtype)], dim=-1)


class AttentionTrunk(nn.Module):
    """One layer of attention with a learned bias by distance, one residual layer, and outputs that begin at zero."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        width, inner = spec.hidden
        self.features, self.context = spec.columns, spec.context
        self.enter = nn.Linear(self.features, width)
        self.attention_norm, self.layer_norm, self.last_norm = (nn.LayerNorm(width) for _ in range(3))
        self.project = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.distance_bias = nn.Parameter(torch.zeros(spec.context, ATTENTION_HEADS))
        alpha = spec.estimator == "cost_sensitive"
        self.layer = nn.Sequential(nn.Linear(width + alpha, inner), nn.ReLU(), nn.Dropout(0.0), nn.Linear(inner, width))
        self.last = nn.Linear(width, output_count(spec))
        # Training starts from "no gap", that is from a rule that never defers at a cost.
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, read: Float[Tensor, "B L columns"]) -> Float[Tensor, "B L outputs"]:
        """Map normalised features, a flag of what is known, and squashed α if there is one, to outputs."""
        known, alpha = read[..., self.features] > 0.5, read[..., self.features + 1 :]
        stream = self.enter(read[..., : self.features])
        stream = stream + self.mix(self._attend(self.attention_norm(stream), known))
        stream = stream + self.layer(torch.cat([self.layer_norm(stream), alpha], dim=-1))
        outputs: Tensor = self.last(self.last_norm(stream))
        return outputs

    def _attend(self, stream: Float[Tensor, "B L width"], known: Bool[Tensor, "B L"]) -> Float[Tensor, "B L width"]:
        query, key, value = self.project(stream).unflatten(-1, (3, ATTENTION_HEADS, -1)).unbind(dim=-3)
        keys, values = self._in_reach(key), self._in_reach(value)
        scores = (query.unsqueeze(2) * keys).sum(dim=-1) / query.shape[-1] ** 0.5 + self.distance_bias
        # A position always sees itself: with nothing in reach the weights would be 0 / 0.
        seen = torch.cat([self._in_reach(known)[:, :, :-1], torch.ones_like(known).unsqueeze(-1)], dim=-1)
        weights = scores.masked_fill(~seen.unsqueeze(-1), -torch.inf).softmax(dim=2)
        mixed: Tensor = (weights.unsqueeze(-1) * values).sum(dim=2)
        return mixed.flatten(start_dim=-2)

    def _in_reach(self, values: Tensor) -> Tensor:
        """The last H entries at every position, its own last: ``[B, L, ...]`` to ``[B, L, H, ...]``, 0 before all."""
        length = values.shape[1]
        before = torch.zeros_like(values[:, :1]).expand(-1, self.context - 1, *values.shape[2:])
        padded = torch.cat([before, values], dim=1)
        return torch.stack([padded[:, start : start + length] for start in range(self.context)], dim=2)
