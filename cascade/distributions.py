"""Logits to probabilities, residuals and draws: the one route that drafter and verifier both take.

Knows nothing of models, rules or positions. Equations: docs/theory.md, "Speculative sampling from any target".

Shapes: ``*batch`` any leading axes, ``V`` token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .checks import check_number, is_integer

__all__ = [
    "Sampling",
    "check_finite",
    "draw",
    "draw_uniforms",
    "logits_to_probs",
    "one_hot_argmax",
    "plain_draw",
    "residual",
    "row_slices",
    "total_variation",
]


_BLOCK = 256  # tokens that a first look takes together
_CHUNK = 1 << 18  # elements worked on at once on a CPU
_NUCLEUS_SIZES = (512, 16_384)  # tokens put in order at first, then if those did not reach


@dataclass(frozen=True)
class Sampling:
    """How a next token is drawn: the same settings for drafter and verifier.

    Args:
        temperature: divides the logits; 0 means the one-hot limit at the argmax (ties: the lowest id).
        top_k: keep the k most probable tokens (0 keeps all).
        top_p: keep the smallest set whose mass reaches top_p (1 keeps all).
        min_p: drop tokens less probable than min_p times the most probable one (0 keeps all).
        repetition_penalty: weakens tokens that the row already holds, prompt included (1 changes nothing).
        bad_words: sequences of token ids that are never completed.
        suppress_tokens: token ids that are never drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            check_number(name, getattr(self, name))
        if not is_integer(self.top_k):
            raise ValueError(f"top_k: expected an integer >= 0 (0 keeps every token), got {self.top_k!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: expected a finite number >= 0, got {self.temperature!r}")
        if 0 < self.temperature < 1e-4:
            raise ValueError(f"temperature: expected 0 (greedy) or at least 1e-4, got {self.temperature!r}")
        if self.top_k < 0:
            raise ValueError(f"top_k: expected an integer >= 0 (0 keeps every token), got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number in (0, 1], got {self.top_p!r}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: expected a number in [0, 1], got {self.min_p!r}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty: expected a finite number > 0, got {self.repetition_penalty!r}")
        if not all(self.bad_words):
            raise ValueError("bad_words_ids: expected sequences of at least one token, got an empty one")

    @property
    def reads_history(self) -> bool:
        """Whether logits are changed before they become probabilities, some of them by what the row already holds."""
        return self.repetition_penalty != 1 or bool(self.bad_words) or bool(self.suppress_tokens)

    @property
    def is_greedy(self) -> bool:
        """Whether the distribution is one-hot at the argmax."""
        return self.temperature == 0

    @property
    def is_plain(self) -> bool:
        """Whether processed and raw distributions are one and the same (T = 1, nothing cut off)."""
        cuts = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.temperature == 1 and not cuts and not self.reads_history


def logits_to_probs(
    logits: Float[Tensor, "*batch V"], sampling: Sampling | None = None, source: str = "the model"
) -> Float[Tensor, "*batch V"]:
    """Turn logits into float32 probabilities under ``sampling`` (default: temperature 1, nothing cut off).

    ``-inf`` marks a token that cannot be drawn. Temperature, top-k, top-p and min-p apply in that order, as in
    transformers; penalties and bans come before, by `speccascade.cascade.processing`.

    Raises:
        ValueError: a row holds NaN or +inf, or no finite logit at all; the message names ``source`` and the row.

    >>> logits_to_probs(torch.tensor([0.0, 2.0, 2.0]), Sampling(temperature=0))
    tensor([0., 1., 0.])
    """
    sampling = sampling or Sampling()
    check_finite(logits.amax(dim=-1), source)  # amax carries NaN and +inf, and is -inf only where all are
    if sampling.is_greedy:
        return one_hot_argmax(logits.float())
    probs = logits.to(torch.float32, copy=True)  # the one work buffer: everything up to the softmax happens inside it
    if sampling.temperature != 1:
        probs.div_(sampling.temperature)
    if 0 < sampling.top_k < probs.shape[-1]:
        kth_logit = probs.topk(sampling.top_k, dim=-1).values[..., -1:]
        probs.masked_fill_(probs < kth_logit, -math.inf)
    torch.softmax(probs, dim=-1, out=probs)
    if sampling.top_p < 1:
        flat = probs.view(-1, probs.shape[-1])
        for rows in row_slices(flat):
            _cut_to_nucleus(flat[rows], sampling.top_p)
    if sampling.min_p > 0:
        probs.masked_fill_(probs < sampling.min_p * probs.amax(dim=-1, keepdim=True), 0)
        probs.div_(probs.sum(dim=-1, keepdim=True))
    return probs


def one_hot_argmax(scores: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch V"]:
    """Put all mass on the largest score; among equals, on the lowest id."""
    return torch.zeros_like(scores).scatter_(-1, scores.argmax(dim=-1, keepdim=True), 1.0)


def total_variation(p: Float[Tensor, "*batch V"], q: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """D_TV(p, q) = Σ max(0, p − q), in [0, 1]: the rejection rate of lossless speculative decoding."""
    return (p - q).clamp_min(0).sum(dim=-1).clamp_max(1)


def residual(
    target_probs: Float[Tensor, "*batch V"], draft_probs: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch V"]:
    """Normalise max(0, π − q): what a rejected draft is replaced from. All zero where π never exceeds q."""
    excess = (target_probs - draft_probs).clamp_min(0)
    mass = excess.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, excess / mass.clamp_min(torch.finfo(torch.float32).tiny), excess)


def draw(probs: Float[Tensor, "*batch V"], uniforms: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """Draw one token a row by inverse CDF from one uniform in [0, 1) each; weights need not sum to one.

    A token of weight zero is never drawn. On a CPU a large vocabulary is summed by blocks first, and looked through in
    the one block that holds the point; `plain_draw` is the plain form.
    """
    if probs.device.type != "cpu" or probs.shape[-1] < 4 * _BLOCK:
        return plain_draw(probs, uniforms)
    flat = probs.reshape(-1, probs.shape[-1])
    count = flat.shape[-1] // _BLOCK
    sums = flat[:, : count * _BLOCK].unflatten(1, (count, _BLOCK)).sum(dim=-1)
    sums = torch.cat([sums, flat[:, count * _BLOCK :].sum(dim=-1, keepdim=True)], dim=1).double()
    cumulative = sums.cumsum(dim=-1)
    points = _below(cumulative, uniforms.reshape(-1, 1) * cumulative[:, -1:])
    # A row without any weight has no token to draw; what it gives is of no meaning.
    block = torch.searchsorted(cumulative, points, right=True).clamp_max_(count)
    index = block * _BLOCK + torch.arange(_BLOCK)
    inside = flat.gather(1, index.clamp_max(flat.shape[-1] - 1)).masked_fill(index >= flat.shape[-1], 0)
    within = inside.cumsum(dim=-1, dtype=torch.float64)
    rest = (points - (cumulative - sums).gather(1, block)).clamp_min(0)
    place = torch.searchsorted(within, _below(within, rest), right=True)
    return (block * _BLOCK + place).view(probs.shape[:-1])


def plain_draw(probs: Float[Tensor, "*batch V"], uniforms: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """Draw what `draw` draws from the sums over every token."""
    # Sums of single precision may fall where they should stay, and so make room for a token of weight zero.
    cumulative = probs.cumsum(dim=-1, dtype=torch.float32 if probs.device.type == "mps" else torch.float64)
    points = _below(cumulative, uniforms.to(cumulative).unsqueeze(-1) * cumulative[..., -1:])
    return torch.searchsorted(cumulative, points, right=True).squeeze(-1)


def _below(cumulative: Tensor, points: Tensor) -> Tensor:
    """Keep points under the last of the cumulative sums, so that each falls on a token with weight."""
    total = cumulative[..., -1:]
    return torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))


def draw_uniforms(generators: Sequence[torch.Generator], count: int) -> Float[Tensor, "B count"]:
    """Take ``count`` uniforms from each row's own generator, so that no row's luck depends on its neighbours.

    The numbers come from the generator's own device: a CPU generator gives the same stream wherever the model runs.
    """
    return torch.stack([torch.rand(count, generator=g, device=g.device, dtype=torch.float64) for g in generators])


def check_finite(largest: Float[Tensor, "*batch"], source: str) -> None:
    """Raise unless the largest logit of every row is finite; the message names ``source`` and the row."""
    usable = largest.isfinite()
    if not usable.all():
        row = tuple((~usable).nonzero()[0].tolist())
        raise ValueError(f"logits of {source}: expected finite values, got NaN, +inf or only -inf at row {row}")


def row_slices(flat: Float[Tensor, "N V"]) -> list[slice]:
    """Cut rows into runs that are worked on at once: few on a CPU, so that they stay in its cache; all elsewhere.

    No rows are one empty run: what is found run by run can always be put together.
    """
    size = max(1, _CHUNK // flat.shape[-1]) if flat.device.type == "cpu" else max(1, flat.shape[0])
    return [slice(start, start + size) for start in range(0, max(1, flat.shape[0]), size)]


def _cut_to_nucleus(flat: Float[Tensor, "N V"], top_p: float) -> None:
    """Keep, in place, the fewest tokens whose mass reaches ``top_p`` and let them sum to one; of equals the lowest ids.

    The largest few hundred reach it almost always; only where they do not are more of them put in order.
    """
    for size in (*_NUCLEUS_SIZES, flat.shape[-1]):
        descending = flat.topk(min(size, flat.shape[-1]), dim=-1).values
        if not bool((descending.sum(dim=-1) < top_p).any()):
            break
    mass_above = descending.cumsum(dim=-1) - descending
    count = (mass_above < top_p).sum(dim=-1, keepdim=True)
    least = descending.gather(-1, count - 1)
    flat.masked_fill_(flat < least, 0)
    room = count - (descending > least).sum(dim=-1, keepdim=True)
    tied = flat == least
    crowded = (tied.sum(dim=-1, keepdim=True) > room).squeeze(-1)
    if bool(crowded.any()):
        surplus = tied[crowded] & (tied[crowded].cumsum(dim=-1) > room[crowded])
        flat[crowded] = flat[crowded].masked_fill(surplus, 0)
    flat.div_(flat.sum(dim=-1, keepdim=True))
