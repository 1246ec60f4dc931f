"""One split of the traces as heads learn from it: features, what is known at each position, and how much it counts.

A split stands in memory (`read_split`), or is read from its shards anew each epoch (`ScannedSplit`); both give the same
positions. Windows of one text are one document: they are weighted and drawn together.

Knows nothing of heads, batches or optimisers.

Shapes: ``N`` position, ``F`` feature, ``K`` candidate token, ``P`` prompt, ``D`` document; axes of length two are the
losses (zero_one, sampled) and the models (q, p).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ..data.resampling import documents
from ..data.traces import Traces, TraceSplit
from ..router.checks import check_choice
from ..router.examples import Examples
from ..router.features import build_features, needs_hidden

__all__ = ["LABELS", "WEIGHTS", "Reading", "ScannedSplit", "TraceTensors", "read_pieces", "read_split"]

LABELS = ("gold", "outcome")
WEIGHTS = ("position", "prompt", "bootstrap")

PIECE = 1 << 16
"""Rows that are read at a time."""

Normalisation = tuple[Float[Tensor, "F"], Float[Tensor, "F"]]


@dataclass(frozen=True)
class Reading:
    """What to take from the traces.

    Args:
        feature_set: which features to build.
        labels: ``gold`` judges a model by the reference's token; ``outcome`` by the score of the answer that its token
            led to, where counterfactuals were collected, and leaves all other positions out.
        candidates: fill ``Examples.candidates`` and ``truth``.
        whole_prompts: keep positions without an outcome, at weight 0: others are read in their light.

    Raises:
        ValueError: unknown labels, or candidates beside outcomes, which name no token.
    """

    feature_set: str = "verified"
    labels: str = "gold"
    candidates: bool = False
    whole_prompts: bool = False

    def __post_init__(self) -> None:
        check_choice("labels", self.labels, LABELS)
        if self.candidates and self.labels != "gold":
            raise ValueError(f"labels: expected 'gold' for a head that reads candidate tokens, got {self.labels!r}")

    def check(self, traces: Traces) -> None:
        """Refuse traces that cannot teach this.

        Raises:
            ValueError: the label is the verifier's own choice, or candidates were logged at another temperature than 1.
        """
        plan = traces.manifest.plan
        if self.labels == "gold" and plan.source == "cascade":
            raise ValueError(
                "labels: expected 'outcome' for traces of source 'cascade', whose label is the verifier's own choice, "
                "got 'gold'; collect with cascade.counterfactuals, or train on teacher-forced traces"
            )
        if self.candidates and plan.temperature != 1:
            raise ValueError(
                f"candidates: expected traces at temperature 1, got {plan.temperature:g}: their q and p are logged as "
                "processed, and the head reads raw ones"
            )


@dataclass(frozen=True)
class TraceTensors:
    """One split of the traces, ready for a head.

    `tv` is D_TV(p, q) at the temperature of the traces, `agree` 1 where both models prefer the same token,
    `prompt_index` counts within the split; `weight`, `candidates`, `tokens` and `truth` are those of `Examples`.
    """

    features: Float[Tensor, "N F"]
    correctness: Float[Tensor, "N 2 2"]
    tv: Float[Tensor, "N"]
    agree: Float[Tensor, "N"]
    prompt_index: Int[Tensor, "N"]
    prompt_ids: tuple[str, ...]
    weight: Float[Tensor, "N"] | None = None
    candidates: Float[Tensor, "N K 2"] | None = None
    tokens: Int[Tensor, "N K"] | None = None
    truth: Int[Tensor, "N"] | None = None

    def __len__(self) -> int:
        return len(self.tv)

    @property
    def examples(self) -> Examples:
        """All positions, as heads learn from them."""
        return Examples(self.features, self.correctness, self.tv, self.weight, self.candidates, self.truth, self.tokens)

    @property
    def counted(self) -> "TraceTensors":
        """The positions that can be judged; others are read in their light alone."""
        return self if self.weight is None else self.take(self.weight > 0)

    def normalisation(self) -> Normalisation:
        """Mean and deviation of every feature, missing values (NaN) left out."""
        return Moments().add(self.features).normalisation()

    def take(self, rows: Tensor) -> "TraceTensors":
        """Positions by index or by mask; prompts keep their numbers."""
        taken: dict[str, Any] = {name: value[rows] for name, value in self._tensors().items()}
        return replace(self, **taken)

    def weighted(self, weight: str, seed: int) -> "TraceTensors":
        """Weigh positions as `document_weights` says; those of weight 0 are left out."""
        if weight == "position":
            return self
        document = torch.from_numpy(documents(self.prompt_ids, self.prompt_index.numpy()))
        own = torch.ones(len(self)) if self.weight is None else self.weight
        sizes = torch.bincount(document, weights=(own > 0).float())
        drawn = document_weights(sizes, weight, seed)[document]
        return replace(self, weight=drawn * own).take(drawn > 0)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def read_split(traces: Traces, split: str, reading: Reading) -> TraceTensors:
    """Read a whole split, piece by piece.

    Raises:
        ValueError: as `read_pieces`.
    """
    pieces = list(read_pieces(traces, split, reading))
    width = max((piece.candidates.shape[1] for piece in pieces if piece.candidates is not None), default=0)
    numbers: dict[str, int] = {}
    parts = [_widened(piece, width)._tensors() | {"prompt_index": _number(piece, numbers)} for piece in pieces]
    columns: dict[str, Any] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return TraceTensors(**columns, prompt_ids=tuple(numbers))


def read_pieces(
    traces: Traces, split: str, reading: Reading, rows: int = PIECE, order: Sequence[int] | None = None
) -> Iterator[TraceTensors]:
    """Read a split in pieces, shard by shard in the given order; pieces that teach nothing are left out.

    Raises:
        ValueError: as `Reading.check`; no outcomes were collected, or none is left.
    """
    reading.check(traces)
    empty = True
    for part in traces.scan(split, rows, order, needs_hidden(reading.feature_set)):
        piece = _tensors_of(part, reading)
        if len(piece):
            empty = False
            yield piece
    if empty and order is None:
        raise ValueError(f"labels: expected positions with an outcome in split {split!r}, got none")


class ScannedSplit:
    """A split that stays on disk: read through once to learn its size, normalisation and prompts, then once an epoch.

    Args:
        traces: the opened traces.
        split: which split.
        reading: what to take from them.
        weight: one of ``WEIGHTS``.
        seed: of a bootstrap.

    Raises:
        ValueError: as `read_pieces`.
    """

    def __init__(
        self, traces: Traces, split: str, reading: Reading, weight: str = "position", seed: int = 0, rows: int = PIECE
    ) -> None:
        self._traces, self._split, self._reading, self._rows = traces, split, reading, rows
        self._moments, self._width = Moments(), 0
        self._numbers: dict[str, int] = {}
        counts = torch.zeros(0, dtype=torch.long)
        for piece in read_pieces(traces, split, reading, rows):
            numbers = _number(piece, self._numbers)
            counts = functional.pad(counts, (0, len(self._numbers) - len(counts)))
            counts += torch.bincount(numbers, minlength=len(counts))
            self._moments.add(piece.features)
            self._width = max(self._width, 0 if piece.candidates is None else piece.candidates.shape[1])
        self.prompt_ids = tuple(self._numbers)
        self._weights: Tensor | None = None
        if weight != "position":
            document = torch.from_numpy(documents(self.prompt_ids, np.arange(len(counts))))
            sizes = torch.zeros(int(document.max()) + 1, dtype=torch.long).index_add_(0, document, counts)
            self._weights = document_weights(sizes, weight, seed)[document]
            counts = counts[self._weights > 0]
        self._positions = int(counts.sum())

    def __len__(self) -> int:
        return self._positions

    @property
    def shards(self) -> int:
        """How many shards the traces have."""
        return len(self._traces.manifest.shards)

    def normalisation(self) -> Normalisation:
        """Mean and deviation of every feature, missing values (NaN) left out."""
        return self._moments.normalisation()

    def pieces(self, order: Sequence[int] | None = None) -> Iterator[Examples]:
        """All positions in pieces, shard by shard in the given order; only prompts of weight above 0."""
        for piece in read_pieces(self._traces, self._split, self._reading, self._rows, order):
            wide = _widened(piece, self._width)
            if self._weights is not None:
                weight = self._weights[_number(piece, self._numbers)]
                wide = replace(wide, weight=weight).take(weight > 0)
            if len(wide):
                yield wide.examples


@dataclass
class Moments:
    """Mean and spread of features over pieces, each known value counted once (Chan, Golub and LeVeque, 1979)."""

    count: Tensor | float = 0.0
    mean: Tensor | float = 0.0
    spread: Tensor | float = field(default=0.0)

    def add(self, features: Float[Tensor, "N F"]) -> "Moments":
        """Take in positions; return itself."""
        values = features.double()
        known = ~values.isnan()
        count = known.sum(dim=0).double()
        mean = values.nan_to_num(0.0).sum(dim=0) / count.clamp_min(1)
        spread = torch.where(known, values - mean, 0.0).square().sum(dim=0)
        total = torch.as_tensor(self.count + count)
        shift, share = mean - self.mean, count / total.clamp_min(1)
        self.spread = self.spread + spread + shift.square() * self.count * share
        self.mean, self.count = self.mean + shift * share, total
        return self

    def normalisation(self) -> Normalisation:
        """Mean and deviation ``[F]`` of what was added; 0 and 0 for a feature that was never known."""
        count, mean, spread = (torch.as_tensor(value) for value in (self.count, self.mean, self.spread))
        return mean.float(), (spread / count.clamp_min(1)).sqrt().float()


def document_weights(positions: Tensor, weight: str, seed: int) -> Float[Tensor, "D"]:
    """How much a position of each document counts, from the documents' sizes ``[D]``; 1 on average over what counts.

    ``position``: all alike. ``prompt``: documents alike, whatever their length. ``bootstrap``: as often as the document
    is drawn, with replacement, in as many draws as there are documents. One without positions is none, and gets 0.

    Raises:
        ValueError: unknown weight.
    """
    check_choice("weight", weight, WEIGHTS)
    teaches = positions > 0
    sizes, weights = positions[teaches].double(), torch.zeros(len(positions))
    if weight == "position":
        own = torch.ones(len(sizes))
    elif weight == "prompt":
        own = sizes.mean() / sizes
    else:
        drawn = torch.randint(len(sizes), (len(sizes),), generator=torch.Generator().manual_seed(seed))
        times = torch.bincount(drawn, minlength=len(sizes)).double()
        own = times * sizes[times > 0].sum() / (times * sizes).sum()
    weights[teaches] = own.float()
    return weights


def _tensors_of(part: TraceSplit, reading: Reading) -> TraceTensors:
    correctness, weight = part.correctness.float(), None
    candidates, tokens, truth = _candidates_of(part) if reading.candidates else (None, None, None)
    tried = None
    if reading.labels == "outcome":
        if part.outcomes is None:
            raise ValueError(
                "labels: expected 'gold' for traces without outcomes, got 'outcome'; "
                "cascade.counterfactuals collects them"
            )
        tried = ~part.outcomes.isnan().any(dim=-1)
        correctness = part.outcomes.nan_to_num(0.0).float()[:, None].expand(-1, 2, -1)
        weight = tried.float() if reading.whole_prompts else None
    tensors = TraceTensors(
        features=build_features(part.stats, reading.feature_set),
        correctness=correctness,
        tv=part.stats.tv.float(),
        agree=part.stats.argmax_agree.float(),
        prompt_index=part.prompt_index,
        prompt_ids=part.prompt_ids,
        weight=weight,
        candidates=candidates,
        tokens=tokens,
        truth=truth,
    )
    return tensors if tried is None or reading.whole_prompts else tensors.take(tried)


def _candidates_of(part: TraceSplit) -> tuple[Tensor, Tensor, Tensor]:
    """q and p of the logged union ``[N, K, 2]``, its ids ``[N, K]``, and which of them the label is ``[N]``, or K."""
    hit = part.topk_ids == part.label[:, None]
    truth = torch.where(hit.any(dim=1), hit.long().argmax(dim=1), hit.shape[1])
    return torch.stack([part.topk_q, part.topk_p], dim=-1).float(), part.topk_ids.clamp_min(0).int(), truth


def _widened(piece: TraceTensors, width: int) -> TraceTensors:
    """The same positions with room for `width` candidates; "none of them" moves behind the last."""
    if piece.candidates is None or piece.tokens is None or piece.truth is None:
        return piece
    missing = width - piece.candidates.shape[1]
    none = piece.truth == piece.candidates.shape[1]
    candidates = functional.pad(piece.candidates, (0, 0, 0, missing))
    tokens = functional.pad(piece.tokens, (0, missing))
    return replace(piece, candidates=candidates, tokens=tokens, truth=piece.truth.masked_fill(none, width))


def _number(piece: TraceTensors, numbers: dict[str, int]) -> Tensor:
    """Number a piece's prompts as they come first, over all pieces, and keep count in `numbers`."""
    own = [numbers.setdefault(name, len(numbers)) for name in piece.prompt_ids]
    return torch.tensor(own, dtype=torch.long)[piece.prompt_index]


def bytes_a_position(piece: TraceTensors) -> float:
    """Memory that one position takes."""
    return sum(value.element_size() * value.numel() for value in piece._tensors().values()) / len(piece)


def some_positions(split: TraceTensors | ScannedSplit, count: int = PIECE) -> Examples:
    """Positions of a split, the same in every process: evenly spread, or of a scanned one the first piece."""
    if isinstance(split, ScannedSplit):
        return next(iter(split.pieces()))
    return split.take(torch.linspace(0, len(split) - 1, min(count, len(split))).long()).examples


def concatenate(parts: Iterable[Examples]) -> Examples:
    """Put batches of positions one behind the other."""
    columns: Iterable[Any] = zip(*parts, strict=True)
    return Examples(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]
