"""P̂ as a distribution: some tokens with probabilities of their own, and a share of p° for each of the others.

No table as large as the vocabulary is written down unless one is asked for: the few tokens that both models hold likely
decide nearly everything that a rule reads. Knows no head and no rule.

Shapes: ``*batch`` any leading axes (``[B, T]`` in the engine), ``K`` candidate token, ``V`` token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..cascade.extremes import find_argmax, find_largest, second_largest
from ..cascade.forms import Distribution, FromLogits, Whole
from ..cascade.leading import values_at

__all__ = ["Belief", "Candidates", "find_candidates"]


@dataclass(frozen=True)
class Candidates:
    """The union of both models' most probable tokens.

    Args:
        tokens: ``[*batch, K]``, ascending.
        draft: q° at those tokens, 0 where ``repeated``.
        verifier: p°, likewise.
        repeated: whether a token only repeats the one before it, since both models named it.
        ceiling: ``[*batch]``, what p° does not exceed at any other token.
    """

    tokens: Int[Tensor, "*batch K"]
    draft: Float[Tensor, "*batch K"]
    verifier: Float[Tensor, "*batch K"]
    repeated: Bool[Tensor, "*batch K"]
    ceiling: Float[Tensor, "*batch"]

    def take(self, index: Callable[[Tensor], Tensor]) -> "Candidates":
        """Apply the same indexing of leading axes to every column."""
        return Candidates(*(index(getattr(self, name)) for name in self.__dataclass_fields__))


def find_candidates(draft: Distribution, verifier: Distribution, top_k: int) -> Candidates:
    """Search q° and p° ``[*batch]`` for their ``top_k`` ≥ 2 most probable tokens each."""
    verifier_tokens = _search(verifier, top_k)
    tokens = torch.cat([_search(draft, top_k), verifier_tokens], dim=-1).sort(dim=-1).values
    repeated = torch.zeros_like(tokens, dtype=torch.bool)
    repeated[..., 1:] = tokens[..., 1:] == tokens[..., :-1]
    q, p = (values_at(side, tokens).masked_fill(repeated, 0) for side in (draft, verifier))
    return Candidates(tokens, q, p, repeated, ceiling=values_at(verifier, verifier_tokens).amin(dim=-1))


class Belief(Distribution):
    """P̂ ``[*batch]``: probabilities of the candidates, scale · p° elsewhere.

    ``maximum``, ``argmax`` and ``margin`` speak of the tokens that q or p may emit: what P̂ holds likely and nobody may
    say is nothing to gain. ``dense``, ``at`` and ``entropy`` are those of P̂ itself.

    Args:
        base: p°.
        candidates: the tokens that have probabilities of their own.
        probs: ``[*batch, K]``, those; read no further where a candidate is repeated.
        scale: ``[*batch]``, of p° at all other tokens.
        emitters: q and p, where something was cut off from them; None where every token may be emitted.
    """

    def __init__(
        self,
        base: Distribution,
        candidates: Candidates,
        probs: Float[Tensor, "*batch K"],
        scale: Float[Tensor, "*batch"],
        emitters: tuple[Distribution, Distribution] | None = None,
    ) -> None:
        self._base, self._candidates, self._scale, self._emitters = base, candidates, scale, emitters
        # A repeated token carries its own value again, so that no order of writing matters.
        self._probs = torch.where(candidates.repeated, probs.roll(1, dims=-1), probs)

    @property
    def shape(self) -> torch.Size:
        """The leading axes."""
        return self._scale.shape

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._scale.device

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._base.vocab_size

    @cached_property
    def dense(self) -> Float[Tensor, "*batch V"]:
        """Every probability, float32."""
        return self._table()

    def over(self, bar: Float[Tensor, "*batch 1"]) -> Float[Tensor, "*batch V"]:
        """Return how far each probability lies above a bar, as a table of its own; no other is kept."""
        return self._table().sub_(bar)

    def at(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the probability of one token a position."""
        same = self._candidates.tokens == tokens.unsqueeze(-1)
        own = torch.where(same, self._probs, 0).amax(dim=-1)
        return torch.where(same.any(dim=-1), own, self._scale * self._base.at(tokens))

    @cached_property
    def maximum(self) -> Float[Tensor, "*batch"]:
        """Largest probability of a token that may be emitted."""
        return self._best[0]

    @cached_property
    def argmax(self) -> Int[Tensor, "*batch"]:
        """Most probable token that may be emitted; among equals the lowest id."""
        return self._best[1]

    @cached_property
    def margin(self) -> Float[Tensor, "*batch"]:
        """Largest minus second largest probability of tokens that may be emitted."""
        return self.maximum - second_largest(self._emissible_table).clamp_min(0)

    @cached_property
    def entropy(self) -> Float[Tensor, "*batch"]:
        """Entropy, nats: of the candidates, and of the tail from the entropy of p°."""
        own = torch.where(self._candidates.repeated, 0, self._probs)
        verifier = self._candidates.verifier
        tail = (1 - verifier.sum(dim=-1)).clamp_min(0)
        tail_entropy = (self._base.entropy + torch.xlogy(verifier, verifier).sum(dim=-1)).clamp_min(0)
        spread = self._scale * tail_entropy - torch.xlogy(self._scale, self._scale) * tail
        return (spread - torch.xlogy(own, own).sum(dim=-1)).clamp_min(0)

    def first(self, length: int) -> "Belief":
        """Return the first positions of a ``[B, T]`` distribution."""
        return self._map(lambda values: values[:, :length], lambda side: side.first(length))

    def pick(self, places: Int[Tensor, "B"]) -> "Belief":
        """Return one position of each row of a ``[B, T]`` distribution, as ``[B, 1]``."""
        places = places.to(self.device)
        rows = torch.arange(len(places), device=self.device)
        return self._map(lambda values: values[rows, places].unsqueeze(1), lambda side: side.pick(places))

    def to(self, device: torch.device) -> "Belief":
        """Return it on a device."""
        return self._map(lambda values: values.to(device), lambda side: side.to(device))

    def _map(self, index: Callable[[Tensor], Tensor], view: Callable[[Distribution], Distribution]) -> "Belief":
        emitters = None if self._emitters is None else (view(self._emitters[0]), view(self._emitters[1]))
        candidates = self._candidates.take(index)
        return Belief(view(self._base), candidates, index(self._probs), index(self._scale), emitters)

    def _table(self) -> Float[Tensor, "*batch V"]:
        scale = self._scale.unsqueeze(-1)
        return self._base.over(torch.zeros_like(scale)).mul_(scale).scatter_(-1, self._candidates.tokens, self._probs)

    @property
    def _emissible_table(self) -> Float[Tensor, "*batch V"]:
        if self._emitters is None:
            return self._table()
        draft, verifier = self._emitters
        return self._table().masked_fill_((draft.dense == 0) & (verifier.dense == 0), -1)

    @cached_property
    def _best(self) -> tuple[Float[Tensor, "*batch"], Int[Tensor, "*batch"]]:
        """Largest probability and its token: a candidate's, unless one of the many others may be likelier."""
        probs, tokens = self._probs, self._candidates.tokens
        if self._emitters is not None:
            allowed = (values_at(self._emitters[0], tokens) > 0) | (values_at(self._emitters[1], tokens) > 0)
            probs = torch.where(allowed, probs, -1)
        best, place = probs.max(dim=-1)
        if bool((best >= self._scale * self._candidates.ceiling).all()):
            return best, tokens.gather(-1, place.unsqueeze(-1)).squeeze(-1)
        table = self._emissible_table
        argmax = find_argmax(table)
        return table.gather(-1, argmax.unsqueeze(-1)).squeeze(-1), argmax


def _search(distribution: Distribution, top_k: int) -> Int[Tensor, "*batch K"]:
    """The most probable tokens of each position, as traces log them: which equals are there is left open."""
    count = min(top_k, distribution.vocab_size)
    if isinstance(distribution, Whole):
        return distribution.top(count)[1]
    # Logits are ordered as their probabilities are, and need no second table.
    scores = distribution.logits if isinstance(distribution, FromLogits) else distribution.dense
    return find_largest(scores.reshape(-1, scores.shape[-1]), count)[1].view(*distribution.shape, count)
