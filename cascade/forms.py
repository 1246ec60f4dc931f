"""The three forms in which a next-token distribution is held: whole, as logits, or as one certain token.

Greedy distributions are one-hot and never need V numbers; the models' own confidences (temperature 1, nothing cut off)
can be read from their logits without a second table beside q and p. Every form answers the same questions, each
computed once and only when asked for. Knows no rule and no model.

Shapes: ``*batch`` any leading axes (``[B, T]`` in the engine), ``V`` token.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .distributions import draw, logits_to_probs, row_slices
from .extremes import find_argmax, find_largest, second_largest

__all__ = [
    "Certain",
    "Distribution",
    "FromLogits",
    "Whole",
    "as_distribution",
    "chunks",
    "cross_entropy",
    "view_sides",
]

_TINY = torch.finfo(torch.float32).tiny


class Distribution(ABC):
    """A next-token distribution at each of many positions ``[*batch]``."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The leading axes."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it lies."""

    @property
    @abstractmethod
    def dense(self) -> Float[Tensor, "*batch V"]:
        """Every probability, float32."""

    @property
    @abstractmethod
    def maximum(self) -> Float[Tensor, "*batch"]:
        """Largest probability."""

    @property
    @abstractmethod
    def argmax(self) -> Int[Tensor, "*batch"]:
        """Most probable token; among equals the lowest id."""

    @property
    @abstractmethod
    def margin(self) -> Float[Tensor, "*batch"]:
        """Largest minus second largest probability."""

    @property
    @abstractmethod
    def entropy(self) -> Float[Tensor, "*batch"]:
        """Entropy, nats."""

    @abstractmethod
    def at(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the probability of one token a position."""

    @abstractmethod
    def first(self, length: int) -> "Distribution":
        """Return the first positions of a ``[B, T]`` distribution."""

    @abstractmethod
    def pick(self, places: Int[Tensor, "B"]) -> "Distribution":
        """Return one position of each row of a ``[B, T]`` distribution, as ``[B, 1]``."""

    @abstractmethod
    def to(self, device: torch.device) -> "Distribution":
        """Return it on a device."""

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.dense.shape[-1]

    def over(self, bar: Float[Tensor, "*batch 1"]) -> Float[Tensor, "*batch V"]:
        """Return how far each probability lies above a bar, as a table of its own."""
        return self.dense - bar

    def row(self, places: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return one position of each row of a ``[B, T]`` distribution, whole."""
        return self.pick(places).dense[:, 0]

    def sample(self, uniforms: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Draw one token a position from one uniform in [0, 1) each."""
        return draw(self.dense, uniforms.to(self.device))


class Whole(Distribution):
    """Every probability, as a table.

    Args:
        probs: ``[*batch, V]``, float32.
        logits: the logits whose softmax ``probs`` is, where they are at hand: they save the logarithms.
    """

    def __init__(self, probs: Float[Tensor, "*batch V"], logits: Tensor | None = None) -> None:
        self._probs, self.logits = probs, logits
        self._top: tuple[Tensor, Tensor] | None = None

    @property
    def shape(self) -> torch.Size:
        """The leading axes."""
        return self._probs.shape[:-1]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._probs.device

    @property
    def dense(self) -> Float[Tensor, "*batch V"]:
        """Every probability, float32."""
        return self._probs

    @cached_property
    def maximum(self) -> Float[Tensor, "*batch"]:
        """Largest probability."""
        return self._probs.amax(dim=-1)

    @cached_property
    def argmax(self) -> Int[Tensor, "*batch"]:
        """Most probable token; among equals the lowest id."""
        return find_argmax(self._probs)

    @cached_property
    def margin(self) -> Float[Tensor, "*batch"]:
        """Largest minus second largest probability."""
        return self.maximum - second_largest(self._probs)

    @cached_property
    def entropy(self) -> Float[Tensor, "*batch"]:
        """Entropy, nats."""
        return cross_entropy(self, self)

    def at(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the probability of one token a position."""
        return self._probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def top(self, count: int) -> tuple[Float[Tensor, "*batch K"], Int[Tensor, "*batch K"]]:
        """Return the `count` ≥ 2 largest probabilities in falling order, and their tokens; maxima are read from them.

        Which of equals come last is left open; the first is the argmax, the lowest of its equals.
        """
        if self._top is not None and self._top[0].shape[-1] == count:
            return self._top
        flat = self._probs.reshape(-1, self._probs.shape[-1])
        values, tokens = find_largest(flat, count)
        shape = (*self.shape, count)
        values, tokens = values.view(shape), tokens.view(shape)
        known = {"maximum": values[..., 0], "argmax": tokens[..., 0], "margin": values[..., 0] - values[..., 1]}
        vars(self).update(known)
        self._top = values, tokens
        return self._top

    def first(self, length: int) -> "Whole":
        """Return the first positions of a ``[B, T]`` distribution."""
        return Whole(self._probs[:, :length], None if self.logits is None else self.logits[:, :length])

    def pick(self, places: Int[Tensor, "B"]) -> "Whole":
        """Return one position of each row of a ``[B, T]`` distribution, as ``[B, 1]``."""
        return Whole(_take(self._probs, places), None if self.logits is None else _take(self.logits, places))

    def to(self, device: torch.device) -> "Whole":
        """Return it on a device."""
        if device == self.device:
            return self
        return Whole(self._probs.to(device), None if self.logits is None else self.logits.to(device))


class FromLogits(Distribution):
    """The softmax of logits at temperature 1, worked out a few positions at a time.

    Args:
        logits: ``[*batch, V]``, of any float type.
    """

    def __init__(self, logits: Float[Tensor, "*batch V"]) -> None:
        self.logits = logits

    @property
    def shape(self) -> torch.Size:
        """The leading axes."""
        return self.logits.shape[:-1]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.logits.device

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.logits.shape[-1]

    @cached_property
    def dense(self) -> Float[Tensor, "*batch V"]:
        """Every probability, float32."""
        return logits_to_probs(self.logits)

    def over(self, bar: Float[Tensor, "*batch 1"]) -> Float[Tensor, "*batch V"]:
        """Return how far each probability lies above a bar, as a table of its own; no other is kept."""
        return logits_to_probs(self.logits).sub_(bar)

    @cached_property
    def maximum(self) -> Float[Tensor, "*batch"]:
        """Largest probability."""
        if "dense" in vars(self):
            return self.dense.amax(dim=-1)
        return torch.cat([probs.amax(dim=-1) for probs, _ in chunks(self)]).view(self.shape)

    @cached_property
    def argmax(self) -> Int[Tensor, "*batch"]:
        """Most probable token; among equals the lowest id."""
        return find_argmax(self.logits)

    @cached_property
    def margin(self) -> Float[Tensor, "*batch"]:
        """Largest minus second largest probability."""
        return (
            self.maximum - (second_largest(self.logits).float() - self.logits.amax(dim=-1).float()).exp() * self.maximum
        )

    @cached_property
    def entropy(self) -> Float[Tensor, "*batch"]:
        """Entropy, nats."""
        return cross_entropy(self, self)

    def at(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the probability of one token a position."""
        if "dense" in vars(self):  # to the bit what a comparison with the whole table sees
            return self.dense.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        logit = self.logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
        return (logit - self.logits.amax(dim=-1).float()).exp() * self.maximum

    def first(self, length: int) -> "FromLogits":
        """Return the first positions."""
        return FromLogits(self.logits[:, :length])

    def pick(self, places: Int[Tensor, "B"]) -> "FromLogits":
        """Return one position of each row, as ``[B, 1]``."""
        return FromLogits(_take(self.logits, places))

    def to(self, device: torch.device) -> "FromLogits":
        """Return it on a device."""
        return self if device == self.device else FromLogits(self.logits.to(device))


class Certain(Distribution):
    """All mass on one token a position: the limit at temperature 0.

    Args:
        tokens: ``[*batch]``.
        vocab_size: V.
    """

    def __init__(self, tokens: Int[Tensor, "*batch"], vocab_size: int) -> None:
        self._tokens, self._vocab_size = tokens, vocab_size

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._vocab_size

    @property
    def shape(self) -> torch.Size:
        """The leading axes."""
        return self._tokens.shape

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._tokens.device

    @cached_property
    def dense(self) -> Float[Tensor, "*batch V"]:
        """Every probability, float32."""
        return _one_hot(self._tokens, self.vocab_size)

    @property
    def maximum(self) -> Float[Tensor, "*batch"]:
        """Largest probability."""
        return torch.ones(self.shape, device=self.device)

    @property
    def argmax(self) -> Int[Tensor, "*batch"]:
        """The token."""
        return self._tokens

    @cached_property
    def margin(self) -> Float[Tensor, "*batch"]:
        """Largest minus second largest probability."""
        return self.maximum

    @property
    def entropy(self) -> Float[Tensor, "*batch"]:
        """Entropy, nats."""
        return torch.zeros(self.shape, device=self.device)

    def at(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the probability of one token a position."""
        return (tokens == self._tokens).float()

    def first(self, length: int) -> "Certain":
        """Return the first positions of a ``[B, T]`` distribution."""
        return Certain(self._tokens[:, :length], self.vocab_size)

    def pick(self, places: Int[Tensor, "B"]) -> "Certain":
        """Return one position of each row of a ``[B, T]`` distribution, as ``[B, 1]``."""
        return Certain(_take(self._tokens, places), self.vocab_size)

    def sample(self, uniforms: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Return the token."""
        return self._tokens

    def to(self, device: torch.device) -> "Certain":
        """Return it on a device."""
        return self if device == self.device else Certain(self._tokens.to(device), self.vocab_size)


def as_distribution(probs: Tensor | Distribution) -> Distribution:
    """Hold a table of probabilities as a distribution; pass anything else on."""
    return Whole(probs) if isinstance(probs, Tensor) else probs


def view_sides(
    law: Distribution, raw: Distribution, view: Callable[[Distribution], Distribution]
) -> tuple[Distribution, Distribution]:
    """View both sides of one model; where they are one and the same they stay so, and nothing is computed twice."""
    viewed = view(law)
    return viewed, viewed if raw is law else view(raw)


def cross_entropy(p: Distribution, q: Distribution) -> Float[Tensor, "*batch"]:
    """−Σ p log q, nats; q is floored at the smallest normal float32 so that the value stays finite."""
    pairs = zip(chunks(p), chunks(q), strict=True)
    return torch.cat([_surprise(true, of, logits) for (true, _), (of, logits) in pairs]).view(p.shape)


Chunk = tuple[Float[Tensor, "N V"], Tensor | None]


def chunks(distribution: Distribution) -> Iterator[Chunk]:
    """Successive positions as ``[N, V]``, each with the logits behind them where those are at hand."""
    if isinstance(distribution, FromLogits):
        logits = distribution.logits.reshape(-1, distribution.logits.shape[-1])
        for rows in row_slices(logits):
            yield logits[rows].float().softmax(dim=-1), logits[rows]
        return
    probs = distribution.dense.reshape(-1, distribution.dense.shape[-1])
    behind = distribution.logits if isinstance(distribution, Whole) else None
    flat = None if behind is None else behind.reshape(probs.shape)
    for rows in row_slices(probs):
        yield probs[rows], None if flat is None else flat[rows]


def _surprise(true: Float[Tensor, "N V"], of: Float[Tensor, "N V"], logits: Tensor | None) -> Float[Tensor, "N"]:
    """−Σ true · log of; the logarithms come from the logits behind ``of`` where they are given."""
    if logits is None:
        log_probs = of.clamp_min(_TINY).log_()
    else:
        log_probs = logits.float() - logits.amax(dim=-1, keepdim=True).float()
        log_probs.add_(of.amax(dim=-1, keepdim=True).log()).clamp_min_(math.log(_TINY))
    return -log_probs.mul_(true).sum(dim=-1).clamp_max_(0)


def _take(positions: Tensor, places: Int[Tensor, "B"]) -> Tensor:
    if len(places) == 1:  # a view
        return positions[:, int(places) : int(places) + 1]
    places = places.to(positions.device)
    return positions[torch.arange(len(places), device=places.device), places].unsqueeze(1)


def _one_hot(tokens: Int[Tensor, "*batch"], vocab_size: int) -> Float[Tensor, "*batch V"]:
    probs = torch.zeros((*tokens.shape, vocab_size), device=tokens.device)
    return probs.scatter_(-1, tokens.unsqueeze(-1), 1.0)
