"""Run a pair over whole sequences and turn what it says at the reference into trace columns.

Each position of a reference is scored once, given the true tokens before it (teacher forcing). Only the logits that
predict a reference token are ever computed: the head sees the selected hidden states and nothing else. Statistics are
float32, from `cascade.statistics`, in chunks that fit the processor's cache. `tabulate_block` turns distributions into
columns, and serves the blocks of speculative runs as well.

Knows nothing of files. Shapes: ``B`` sequence, ``L`` token, ``N`` scored position, ``V`` token of the vocabulary,
``K`` slot of the top-k union.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cascade.blocks import VerifyBlock
from ..cascade.distributions import Sampling, logits_to_probs
from ..cascade.extremes import find_largest
from ..cascade.forms import Certain, Distribution, FromLogits, Whole
from .encoding import EncodedExample
from .pairs import Pair
from .parallel import map_in_order

__all__ = [
    "ScoredRows",
    "make_batches",
    "reference_logits",
    "score_batch",
    "score_in_order",
    "score_positions",
    "selecting_heads",
    "tabulate_block",
]

_CHUNK_ELEMENTS = 3_000_000
"""Probabilities held at once in each tensor: about 12 MB, since larger chunks run at the speed of memory."""


@dataclass(frozen=True)
class ScoredRows:
    """Columns of consecutive positions: floats ``[N]`` by name, and the top-k union ``[N, 2K]`` with its mask.

    `hidden` holds float16 ``[N, H]`` by column name, where hidden states were asked for.
    """

    token: np.ndarray[Any, Any]
    label: np.ndarray[Any, Any]
    floats: dict[str, np.ndarray[Any, Any]]
    topk_ids: np.ndarray[Any, Any]
    topk_q: np.ndarray[Any, Any]
    topk_p: np.ndarray[Any, Any]
    topk_kept: np.ndarray[Any, Any]
    hidden: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: slice | np.ndarray[Any, Any]) -> ScoredRows:
        """The same rows of every column, by a slice or by their indices."""
        floats = {name: values[rows] for name, values in self.floats.items()}
        topk = self.topk_ids[rows], self.topk_q[rows], self.topk_p[rows], self.topk_kept[rows]
        hidden = {name: values[rows] for name, values in self.hidden.items()}
        return ScoredRows(self.token[rows], self.label[rows], floats, *topk, hidden)

    @classmethod
    def join(cls, parts: Sequence[ScoredRows]) -> ScoredRows:
        """Put parts one after the other."""
        floats = {name: np.concatenate([part.floats[name] for part in parts]) for name in parts[0].floats}
        names = ("topk_ids", "topk_q", "topk_p", "topk_kept")
        topk = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        token, label = (np.concatenate([getattr(part, name) for part in parts]) for name in ("token", "label"))
        hidden = {name: np.concatenate([part.hidden[name] for part in parts]) for name in parts[0].hidden}
        return cls(token, label, floats, **topk, hidden=hidden)


def make_batches(lengths: Sequence[int], batch_tokens: int, borders: Sequence[int] = ()) -> list[list[int]]:
    """Group indices of similar length so that no batch, padded, holds more than `batch_tokens` tokens.

    A sequence longer than `batch_tokens` makes a batch of its own. No batch holds lengths from both sides of a border.

    >>> make_batches([3, 9, 4, 3], batch_tokens=9)
    [[0, 3], [2], [1]]
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        crossed = batches and any(lengths[batches[-1][0]] <= border < lengths[index] for border in borders)
        if batches and not crossed and (len(batches[-1]) + 1) * lengths[index] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@contextmanager
def selecting_heads(*models: Any) -> Iterator[None]:
    """While this lasts, `reference_logits` makes the models' heads see the scored positions only.

    The hook is set once, not around each call: several threads may be inside the models at a time.
    """
    heads = {id(head): head for head in (model.get_output_embeddings() for model in models) if head is not None}
    hooks = [head.register_forward_pre_hook(_select_rows) for head in heads.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def reference_logits(model: Any, input_ids: Tensor, rows: Tensor) -> Tensor:
    """Logits ``[N, rows of the head]`` at the flat positions `rows` of ``[B, L]`` token ids, in the model's dtype.

    Sequences are padded on the right: a causal model never looks there, so no mask is needed.
    """
    return read_positions(model, input_ids, rows)[0]


def read_positions(model: Any, input_ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits as `reference_logits`, and what the head read there ``[N, H]``, where it was seen to read it."""
    selection = _Selection(rows)
    _current.selection = selection
    try:
        logits: Tensor = model(input_ids=input_ids.to(model.device), use_cache=False).logits
    finally:
        _current.selection = None
    if selection.hidden is not None:
        return logits[0], selection.hidden
    # Outside `selecting_heads`, or where a model reads its head's weight without calling it, all positions come back.
    return logits.reshape(-1, logits.shape[-1])[rows.to(logits.device)], None


@dataclass
class _Selection:
    """The positions that the next call of a head is to see, and what it saw."""

    rows: Tensor
    hidden: Tensor | None = None


_current = threading.local()


def _select_rows(module: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    selection: _Selection | None = getattr(_current, "selection", None)
    if selection is None or selection.hidden is not None:
        return arguments
    states = arguments[0]
    selection.hidden = states.reshape(-1, states.shape[-1])[selection.rows.to(states.device)]
    return (selection.hidden.unsqueeze(0), *arguments[1:])


def score_batch(
    pair: Pair, batch: Sequence[EncodedExample], sampling: Sampling, top_k: int, hidden: bool = False
) -> list[ScoredRows]:
    """Score every reference position of a batch; one record an example, in the order given.

    Raises:
        ValueError: a model's logits are not finite (the message names the model, the prompt and the position), or
            hidden states are asked for and cannot be had.
    """
    longest = max(len(example) for example in batch)
    input_ids = torch.empty(len(batch), longest, dtype=torch.long)
    rows = []
    for index, example in enumerate(batch):
        tokens = np.concatenate([example.prompt_ids, example.reference_ids[:-1]])
        input_ids[index] = torch.from_numpy(np.pad(tokens, (0, longest - len(tokens)), mode="edge"))
        first = index * longest + len(example.prompt_ids) - 1
        rows.append(torch.arange(first, first + len(example.reference_ids)))
    flat_rows = torch.cat(rows)
    labels = torch.from_numpy(np.concatenate([example.reference_ids for example in batch])).long()
    with torch.inference_mode():
        draft_logits, draft_states = read_positions(pair.drafter, input_ids, flat_rows)
        verifier_logits, verifier_states = read_positions(pair.verifier, input_ids, flat_rows)
        verifier_logits = verifier_logits.to(draft_logits.device)
        try:
            scored = score_positions(pair, draft_logits, verifier_logits, labels, sampling, top_k)
        except ValueError as error:
            _name_non_finite(pair, draft_logits, verifier_logits, batch)
            raise error
    if hidden:
        states = {"draft_hidden": draft_states, "verifier_hidden": verifier_states}
        scored = replace(scored, hidden={name: _as_float16(name, value) for name, value in states.items()})
    ends = np.cumsum([len(example.reference_ids) for example in batch])
    starts = ends - [len(example.reference_ids) for example in batch]
    return [scored.take(slice(start, end)) for start, end in zip(starts, ends, strict=True)]


def _as_float16(name: str, states: Tensor | None) -> np.ndarray[Any, Any]:
    if states is None:
        raise ValueError(f"hidden: expected a model that calls its output head, which {name} is read from; got another")
    halves = states.to(torch.float16)
    if not bool(halves.isfinite().all()):
        raise ValueError(
            f"hidden: expected states within float16's 65,504, got {name} up to {float(states.abs().max()):.3g}"
        )
    return np.asarray(halves.cpu().numpy())


def score_in_order(
    pair: Pair,
    batches: Iterable[Sequence[EncodedExample]],
    sampling: Sampling,
    top_k: int,
    hidden: bool = False,
) -> Generator[list[ScoredRows], None, None]:
    """Score batches and yield their records in the order given."""

    def score(batch: Sequence[EncodedExample]) -> list[ScoredRows]:
        return score_batch(pair, batch, sampling, top_k, hidden)

    with selecting_heads(pair.drafter, pair.verifier), closing(map_in_order(score, batches, pair)) as results:
        yield from results


def score_positions(
    pair: Pair, draft_logits: Tensor, verifier_logits: Tensor, labels: Tensor, sampling: Sampling, top_k: int
) -> ScoredRows:
    """Turn both models' logits ``[N, V]`` at the same positions into trace columns.

    Raises:
        ValueError: logits are not finite.
    """
    labels = labels.to(draft_logits.device)
    chunk = max(1, _CHUNK_ELEMENTS // pair.vocab_size)
    parts = []
    for start in range(0, len(labels), chunk):
        rows = slice(start, start + chunk)
        q, p = draft_logits[rows, : pair.vocab_size], verifier_logits[rows, : pair.vocab_size]
        parts.append(_score_chunk(q, p, labels[rows], sampling, top_k))
    return ScoredRows.join(parts)


def _score_chunk(
    draft_logits: Tensor, verifier_logits: Tensor, labels: Tensor, sampling: Sampling, top_k: int
) -> ScoredRows:
    # Converted once: every statistic that takes logarithms from the logits would convert them again.
    draft_logits, verifier_logits = (logits.float().unsqueeze(0) for logits in (draft_logits, verifier_logits))
    draft_raw, verifier_raw = (Whole(logits_to_probs(logits), logits) for logits in (draft_logits, verifier_logits))
    draft, verifier = draft_raw, verifier_raw
    if not sampling.is_plain:
        draft, verifier = (Whole(logits_to_probs(logits, sampling)) for logits in (draft_logits, verifier_logits))
    _top_of(draft_raw, top_k)  # tells the argmax, which a search of its own would find more slowly
    positions = torch.arange(len(labels), device=labels.device).unsqueeze(0)
    block = VerifyBlock(draft, draft_raw, verifier, verifier_raw, draft_raw.argmax, positions)
    return tabulate_block(block, labels.unsqueeze(0), top_k)


def tabulate_block(
    block: VerifyBlock, labels: Tensor, top_k: int, chosen: Tensor | None = None, at_tokens: bool = False
) -> ScoredRows:
    """Turn both models' distributions over a block into trace columns: the one place where either logger does it.

    The statistics are ``block.stats``, the very numbers that a rule reads.

    Args:
        block: ``[B, T]`` positions; its tokens are logged as what the drafter proposes.
        labels: ``[B, T]``, the true tokens.
        top_k: how many of each model's most probable tokens to keep.
        chosen: ``[B, T]`` truth values, which positions to log; default: all.
        at_tokens: whether to add q, p, q° and p° at the block's tokens, as rules read them.

    Returns:
        The rows of the chosen positions, sequence by sequence.
    """

    def take(values: Tensor) -> Tensor:
        return values.flatten(0, 1) if chosen is None else values[chosen]

    # First of all: once a whole table is at hand, it answers with other last digits than the rule was given.
    floats = _at_tokens(block) if at_tokens else {}
    # Then these: the statistics read their maxima from what is found here.
    draft_ids, verifier_ids = (_top_ids(side, top_k, take) for side in (block.draft_raw, block.verifier_raw))
    floats |= block.stats.columns() | {"expected_gain": block.stats.expected_gain}
    floats |= {"q_label": block.draft.at(labels), "p_label": block.verifier.at(labels)}
    union = torch.cat([draft_ids, verifier_ids], dim=-1).sort(dim=-1).values
    kept = torch.ones_like(union, dtype=torch.bool)
    kept[:, 1:] = union[:, 1:] != union[:, :-1]
    q_top, p_top = (_probs_at(side, union, take) for side in (block.draft, block.verifier))
    numbers = torch.stack([take(values) for values in floats.values()]).cpu().numpy()
    arrays = [take(block.tokens), take(labels), union, q_top, p_top, kept]
    token, label, ids, q_np, p_np, kept_np = (array.cpu().numpy() for array in arrays)
    return ScoredRows(token, label, dict(zip(floats, numbers, strict=True)), ids, q_np, p_np, kept_np)


def _at_tokens(block: VerifyBlock) -> dict[str, Tensor]:
    return {
        "q_token": block.draft.at(block.tokens),
        "p_token": block.verifier.at(block.tokens),
        "q_token_raw": block.draft_raw.at(block.tokens),
        "p_token_raw": block.verifier_raw.at(block.tokens),
    }


_Take = Callable[[Tensor], Tensor]


def _top_ids(confidence: Distribution, top_k: int, take: _Take) -> Tensor:
    """Ids of the `top_k` most probable tokens ``[N, K]``, the argmax always among them."""
    count = min(top_k, confidence.vocab_size)
    if isinstance(confidence, Whole):
        return take(_top_of(confidence, count))
    # Logits are ordered as their probabilities are, and need no second table.
    scores = take(confidence.logits if isinstance(confidence, FromLogits) else confidence.dense)
    return find_largest(scores, count)[1]


def _top_of(confidence: Whole, count: int) -> Tensor:
    at_least_two = min(max(count, 2), confidence.vocab_size)
    tokens: Tensor = confidence.top(at_least_two)[1][..., :count]
    return tokens


def _probs_at(side: Distribution, ids: Tensor, take: _Take) -> Tensor:
    """Probabilities ``[N, K]`` of several tokens a position."""
    if isinstance(side, Certain):
        return (ids == take(side.argmax).unsqueeze(-1)).float()
    return take(side.dense).gather(-1, ids)


def _name_non_finite(
    pair: Pair, draft_logits: Tensor, verifier_logits: Tensor, batch: Sequence[EncodedExample]
) -> None:
    """Raise with the model, prompt and position of the first logits that are no numbers."""
    owners = [(example, offset) for example in batch for offset in range(len(example.reference_ids))]
    named = (("drafter", pair.identity.drafter, draft_logits), ("verifier", pair.identity.verifier, verifier_logits))
    for role, name, logits in named:
        usable = logits[:, : pair.vocab_size].float().amax(dim=-1).isfinite()
        if not usable.all():
            example, offset = owners[int((~usable).nonzero()[0])]
            position = len(example.prompt_ids) + offset
            raise ValueError(
                f"{role} {name!r}: logits are not finite in prompt {example.prompt_id} at position {position}; "
                "try dtype float32"
            )
