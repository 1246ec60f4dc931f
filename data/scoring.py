"""Run a pair over whole sequences and turn what it says at the reference into trace columns.

Each position of a reference is scored once, given the true tokens before it (teacher forcing). Only the logits that
predict a reference token are ever computed: the head sees the selected hidden states and nothing else. Statistics are
float32, from `cascade.statistics`, in chunks that fit the processor's cache.

Knows nothing of files. Shapes: ``B`` sequence, ``L`` token, ``N`` scored position, ``V`` token of the vocabulary,
``K`` slot of the top-k union.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cascade.distributions import Sampling, logits_to_probs
from ..cascade.forms import Whole
from ..cascade.statistics import Stats
from .encoding import EncodedExample
from .pairs import Pair

__all__ = [
    "ScoredRows",
    "make_batches",
    "reference_logits",
    "score_batch",
    "score_in_order",
    "score_positions",
    "selecting_heads",
]

_CHUNK_ELEMENTS = 3_000_000
"""Probabilities held at once in each tensor: about 12 MB, since larger chunks run at the speed of memory."""

_MOST_WORKERS = 16
"""Each worker holds the logits of one batch, so that memory, not cores, sets a limit."""


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

    def take(self, rows: slice) -> ScoredRows:
        """The same rows of every column."""
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


def make_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group indices of similar length so that no batch, padded, holds more than `batch_tokens` tokens.

    A sequence longer than `batch_tokens` makes a batch of its own.

    >>> make_batches([3, 9, 4, 3], batch_tokens=9)
    [[0, 3], [2], [1]]
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= batch_tokens:
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
    rows, labels = [], []
    for index, example in enumerate(batch):
        tokens = [*example.prompt_ids, *example.reference_ids[:-1]]
        input_ids[index] = torch.tensor(tokens + tokens[-1:] * (longest - len(tokens)))
        first = index * longest + len(example.prompt_ids) - 1
        rows.append(torch.arange(first, first + len(example.reference_ids)))
        labels.extend(example.reference_ids)
    flat_rows = torch.cat(rows)
    with torch.inference_mode():
        draft_logits, draft_states = read_positions(pair.drafter, input_ids, flat_rows)
        verifier_logits, verifier_states = read_positions(pair.verifier, input_ids, flat_rows)
        verifier_logits = verifier_logits.to(draft_logits.device)
        try:
            scored = score_positions(pair, draft_logits, verifier_logits, torch.tensor(labels), sampling, top_k)
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
    """Score batches and yield their records in the order given.

    On a CPU each core works on a batch of its own with one thread: nothing waits for the slowest core at every layer,
    which matters most where other programs share the machine, and no number depends on how many cores there are.
    """
    cores = torch.get_num_threads()
    on_cpu = pair.verifier.device.type == pair.drafter.device.type == "cpu"
    workers, threads_each = (min(cores, _MOST_WORKERS), 1) if on_cpu else (1, cores)
    pending: deque[Future[list[ScoredRows]]] = deque()
    with selecting_heads(pair.drafter, pair.verifier):
        pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads_each,))
        try:
            for batch in batches:
                pending.append(pool.submit(score_batch, pair, batch, sampling, top_k, hidden))
                if len(pending) > workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(cores)


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
    draft_raw, verifier_raw = (Whole(logits_to_probs(logits), logits) for logits in (draft_logits, verifier_logits))
    draft, verifier = draft_raw, verifier_raw
    if not sampling.is_plain:
        draft, verifier = (Whole(logits_to_probs(logits, sampling)) for logits in (draft_logits, verifier_logits))
    stats = Stats(draft, verifier, draft_raw, verifier_raw)
    draft_probs, verifier_probs = draft.dense, verifier.dense
    at_label = labels.unsqueeze(-1)
    floats = {
        **stats.columns(),
        "q_label": draft_probs.gather(-1, at_label).squeeze(-1),
        "p_label": verifier_probs.gather(-1, at_label).squeeze(-1),
    }
    draft_ids, token = _top_ids(draft_raw.dense, top_k)
    verifier_ids, _ = _top_ids(verifier_raw.dense, top_k)
    union = torch.cat([draft_ids, verifier_ids], dim=-1).sort(dim=-1).values
    kept = torch.ones_like(union, dtype=torch.bool)
    kept[:, 1:] = union[:, 1:] != union[:, :-1]
    arrays = [token, labels, union, draft_probs.gather(-1, union), verifier_probs.gather(-1, union), kept]
    token_np, label_np, ids, q_top, p_top, kept_np = (array.cpu().numpy() for array in arrays)
    named = {name: values.cpu().numpy() for name, values in floats.items()}
    return ScoredRows(token_np, label_np, named, ids, q_top, p_top, kept_np)


def _top_ids(confidence: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Ids of the `top_k` most probable tokens ``[N, K]`` and the argmax ``[N]``, which is always among them."""
    top_k = min(top_k, confidence.shape[-1])
    found = confidence.topk(min(max(top_k, 2), confidence.shape[-1]), dim=-1)
    ids, argmax = found.indices[:, :top_k], found.indices[:, 0].clone()
    # topk orders equals at will, and may leave out the lowest of them, which is the argmax. Rare: argmax is slow.
    tied = found.values[:, 0] == found.values[:, 1]
    if tied.any():
        argmax[tied] = confidence[tied].argmax(dim=-1)
        missed = (ids != argmax.unsqueeze(-1)).all(dim=-1)
        ids[missed, -1] = argmax[missed]
    return ids, argmax


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
