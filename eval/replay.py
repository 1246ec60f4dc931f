"""What a rule would have done at every logged position: loss, rejection and deferral, from a trace and no model.

Position rules need the statistics alone and are replayed exactly. Token rules need q and p token by token, of which
a trace keeps the union of the two top-k. The rule itself is called on a block whose last two columns stand for the
rest, the *tail* (`columns`), in the two extreme ways that agree with what is known of it:

* ``p`` and ``q`` overlap as little as possible, or as much as possible: for any target that is a multiple of p
  on the tail, the rejection of every other split lies between (``rejection``, the lower end, and ``rejection_high``);
* the confidences of the tail are at most the k-th largest; where a rule would keep a token of that confidence but
  replace one of confidence 0, the tail is *undecided*, and both ends are widened by what it could change.

Of a rule that reads p° as masses (`LearnedLossy`) the ends are those of these two splits, not of all.

At temperature 0 only the two argmaxes matter, which the union always holds: exact again.

Many positions are taken in chunks, on as many threads as PyTorch is given, each chunk for all settings of a rule.
Knows no file and no grid. Shapes: ``N`` position, ``C`` column of a block, ``D`` document, ``M`` setting.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cascade.statistics import Stats
from ..data.resampling import documents, sum_by_prompt
from ..data.traces import TraceSplit
from .columns import Columns
from .methods import check_loss
from .outcomes import OUTCOME_ROWS, TINY, replay_columns, spread_of_models

__all__ = ["Outcome", "Replay"]

Array = NDArray[np.float64]
_Result = TypeVar("_Result")

_CHUNK = 4_096
_KEPT = 16 * _CHUNK
"""Blocks of so many positions are kept between calls; those of more are built anew for each batch of settings."""

_LOSS_ROWS = {"zero_one": 0, "sampled": 1, "log": 2, "greedy": 0}


@dataclass(frozen=True)
class Outcome:
    """What one rule does at ``N`` positions; ``rejection_high`` differs from ``rejection`` for token rules only.

    ``deferral`` is the chance that a drafted token is handed to the verifier, NaN where a rule has no such notion.
    ``entropy`` (nats) of the emitted law and its ``distinctness``, the chance that two tokens drawn from it differ,
    take the tail as one token; NaN at temperature 0.
    """

    loss: Array
    rejection: Array
    rejection_high: Array
    deferral: Array
    entropy: Array
    distinctness: Array


class Replay:
    """One split of a trace, ready to be asked for the outcome of any rule under any loss of `REPLAY_LOSSES`.

    Args:
        source: the positions.
        logged: the k of the trace's top-k; None if the union holds the whole vocabulary.
    """

    def __init__(self, source: TraceSplit, logged: int | None) -> None:
        if len(source) == 0:
            raise ValueError("source: expected a split with at least one position, got none")
        self.source, self.logged = source, logged
        self.correctness = source.correctness
        self.greedy_stats = source.stats.greedy()
        self.num_prompts = len(np.unique(source.prompt_index.numpy()))
        self.document_index: NDArray[np.int64] = documents(source.prompt_ids, source.prompt_index.numpy())
        self.num_documents = int(self.document_index.max()) + 1
        self._known: dict[Any, Array] = {}
        self._thinned: dict[int, Replay] = {}

    def __len__(self) -> int:
        return len(self.source)

    @property
    def size(self) -> str:
        """How much it is, in words: positions, prompts and documents, the last of which are what is resampled."""
        return f"{len(self):,} positions of {self.num_prompts:,} prompts ({self.num_documents:,} documents)"

    def thin(self, positions: int) -> Replay:
        """Keep about so many positions, evenly spread: enough to search a dial, several times as fast."""
        stride = max(len(self) // positions, 1)
        if stride > 1 and stride not in self._thinned:
            self._thinned[stride] = Replay(_stride(self.source, stride), self.logged)
        return self if stride == 1 else self._thinned[stride]

    def stats(self, loss: str) -> Stats:
        """The statistics that a rule sees under ``loss``."""
        return self.greedy_stats if loss == "greedy" else self.source.stats

    def model_losses(self, loss: str) -> tuple[Tensor, Tensor]:
        """Loss ``[N]`` of the drafter's and of the verifier's own emission at each position."""
        check_loss(loss)
        if loss == "log":
            return self._log_losses
        correctness = self.correctness[:, 1 if loss == "sampled" else 0]
        return 1 - correctness[:, 0], 1 - correctness[:, 1]

    def outcome(self, rule: Any, loss: str, bounds: bool = True) -> Outcome:
        """Replay ``rule``; ``bounds=False`` skips the upper end of a token rule's rejection (for searching)."""
        if _chooses(rule):
            return self.choice(self._decide(rule, loss), loss)
        check_loss(loss)
        greedy = loss == "greedy"
        rows = torch.cat(list(self._map_chunks(lambda chunk: chunk.replay(rule, greedy, bounds))), dim=1)
        return Outcome(*_array(rows)[[_LOSS_ROWS[loss], *range(3, len(OUTCOME_ROWS))]])

    def choice(self, defer: Tensor, loss: str) -> Outcome:
        """Replay a choice between q and p: mask ``[N]`` of the deferred positions, of a rule or of an oracle."""
        draft_loss, verifier_loss = self.model_losses(loss)
        rejection = _array(torch.where(defer, self.stats(loss).tv, 0.0))
        losses = _array(torch.where(defer, verifier_loss, draft_loss))
        if loss == "greedy":
            spread = np.full((2, len(self)), np.nan)
        else:
            spread = _array(torch.where(defer, self._spreads[1], self._spreads[0]))
        return Outcome(losses, rejection, rejection, _array(defer), *spread)

    def sums(self, rule: Any, loss: str, bounds: bool = True) -> Array:
        """Every field of the `Outcome` of ``rule``, summed by document: ``[D, 6]``."""
        return self.sums_of_all([rule], loss, bounds)[0]

    def sums_of_all(self, settings: Sequence[Any], loss: str, bounds: bool = True) -> list[Array]:
        """Sum the outcomes of many settings by document, each ``[D, 6]``, going through the positions once.

        Token rules are replayed once for all losses at the trace's temperature, and remembered.
        """
        check_loss(loss)
        keys = [_name_setting(rule, loss == "greedy", bounds) for rule in settings]
        token = [index for index, rule in enumerate(settings) if not _chooses(rule)]
        unknown = [index for index in token if keys[index] not in self._known]
        if unknown:
            made = self._token_sums([settings[index] for index in unknown], loss == "greedy", bounds)
            self._known.update(zip([keys[index] for index in unknown], made, strict=True))
        columns = [_LOSS_ROWS[loss], *range(3, len(OUTCOME_ROWS))]
        return [
            self._known[key][:, columns] if index in token else self.sum_outcome(self.outcome(rule, loss))
            for index, (key, rule) in enumerate(zip(keys, settings, strict=True))
        ]

    def sum_outcome(self, outcome: Outcome) -> Array:
        """Sum an outcome over the positions of each document: ``[D, 6]``."""
        values = np.stack([getattr(outcome, field.name) for field in fields(outcome)])
        return sum_by_prompt(values, self.document_index, self.num_documents)

    def count(self) -> Array:
        """How many positions each document has, ``[D]``."""
        return np.bincount(self.document_index, minlength=self.num_documents).astype(np.float64)

    def columns(self) -> Iterator[tuple[slice, Columns]]:
        """Go through the logged tokens a chunk at a time."""
        for chunk in self._chunks:
            yield chunk.part, chunk.columns

    def _decide(self, rule: Any, loss: str) -> Tensor:
        """Where a position rule defers, ``[N]``; one that reads the order of positions is shown them text by text."""
        if hasattr(rule, "belief_over"):
            greedy = loss == "greedy"
            return torch.cat(list(self._map_chunks(lambda chunk: rule.inner.defer(chunk.believed_stats(rule, greedy)))))
        stats = self.stats(loss)
        if getattr(rule, "context", 0):
            from ..data.decisions import defer_in_order

            in_order: Tensor = defer_in_order(rule, stats, self.source.sequences())
            return in_order
        decided: Tensor = rule.defer(stats)
        return decided

    @cached_property
    def _log_losses(self) -> tuple[Tensor, Tensor]:
        sides = (self.source.q_label, self.source.p_label)
        draft, verifier = (-side.clamp_min(TINY).log() for side in sides)
        return draft, verifier

    @cached_property
    def _spreads(self) -> Tensor:
        """Entropy and distinctness of q and of p: ``[2, 2, N]``."""
        return torch.cat(list(self._map_chunks(lambda chunk: spread_of_models(chunk.columns))), dim=2)

    @cached_property
    def _chunks(self) -> list[_Chunk]:
        kept = len(self) <= _KEPT
        parts = [slice(start, min(start + _CHUNK, len(self))) for start in range(0, len(self), _CHUNK)]
        return [_Chunk(self.source, self.logged, part, kept) for part in parts]

    def _token_sums(self, settings: Sequence[Any], greedy: bool, bounds: bool) -> list[Array]:
        """Sum the rows of `OUTCOME_ROWS` of every setting by document, each ``[D, rows]``."""

        def add_up(chunk: _Chunk) -> tuple[NDArray[np.int64], Tensor]:
            held, inverse = np.unique(self.document_index[chunk.part], return_inverse=True)
            sums = torch.zeros(len(settings), len(held), len(OUTCOME_ROWS), dtype=torch.double)
            with chunk.opened():
                for made, rule in zip(sums, settings, strict=True):
                    made.index_add_(0, torch.from_numpy(inverse), chunk.replay(rule, greedy, bounds).double().T)
            return held, sums

        total = np.zeros((len(settings), self.num_documents, len(OUTCOME_ROWS)))
        for held, sums in self._map_chunks(add_up):
            total[:, held] += sums.numpy()
        return list(total)

    def _map_chunks(self, work: Callable[[_Chunk], _Result]) -> Iterator[_Result]:
        with _one_thread_each() as threads, ThreadPoolExecutor(threads) as pool:
            yield from pool.map(torch.no_grad()(work), self._chunks)


class _Chunk:
    """Some of the positions: their columns, and the blocks that rules are called on while it is open.

    Args:
        source: all positions.
        logged: as in `Replay`.
        part: which of them.
        kept: keep the blocks when closed.
    """

    def __init__(self, source: TraceSplit, logged: int | None, part: slice, kept: bool) -> None:
        self._source, self._logged, self.part, self._kept = source, logged, part, kept
        self.columns = Columns.from_source(source, logged, part)
        self._believed: dict[Any, Columns] = {}
        self._believed_stats: dict[tuple[Any, bool], Stats] = {}

    @cached_property
    def stats(self) -> Stats:
        """The logged statistics."""
        return self._source.stats.select(self.part)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep blocks from one setting to the next, and let go of them at the end."""
        yield
        if not self._kept:
            for columns in (self.columns, *self._believed.values()):
                columns.forget_blocks()

    def replay(self, rule: Any, greedy: bool, bounds: bool) -> Tensor:
        """Return the rows of `OUTCOME_ROWS` for one rule, ``[rows, N]``."""
        if not hasattr(rule, "belief_over"):
            return replay_columns(rule, self.columns, greedy, bounds)
        return replay_columns(rule.inner, self._believe(rule), greedy, bounds)

    def believed_stats(self, router: Any, greedy: bool) -> Stats:
        """The statistics as a token-level router sees them, worked out once for all αs."""
        key = router.runtime, greedy
        if key not in self._believed_stats:
            logged, believed = self.stats.greedy() if greedy else self.stats, self._believe(router)
            with self.opened():
                self._believed_stats[key] = believed.believed_stats(logged, greedy)
        return self._believed_stats[key]

    def _believe(self, router: Any) -> Columns:
        """The columns as a token-level router sees them: its head is asked once for all its rules and αs."""
        if router.runtime not in self._believed:
            self._believed[router.runtime] = self.columns.believing(router, self.stats)
        return self._believed[router.runtime]


def _chooses(rule: Any) -> bool:
    """Whether a rule chooses between q and p, by its statistics or by those that its belief makes of them."""
    return hasattr(rule.inner if hasattr(rule, "belief_over") else rule, "defer")


def _name_setting(rule: Any, greedy: bool, bounds: bool) -> Hashable:
    """What an outcome is remembered by: of a belief, the head and the rule that reads it."""
    named = (rule.runtime, rule.inner) if hasattr(rule, "belief_over") else (rule,)
    return (*named, greedy, bounds) if all(isinstance(one, Hashable) for one in named) else object()


@contextmanager
def _one_thread_each() -> Iterator[int]:
    """Give PyTorch's threads to chunks in place of single operations: yields how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _stride(source: TraceSplit, stride: int) -> TraceSplit:
    """Take every ``stride``-th position."""
    columns = {field.name: getattr(source, field.name) for field in fields(source)}
    kept: dict[str, Any] = {name: column[::stride] for name, column in columns.items() if isinstance(column, Tensor)}
    return replace(source, stats=source.stats.select(slice(None, None, stride)), **kept)


def _array(values: Tensor) -> Array:
    return values.double().numpy()
