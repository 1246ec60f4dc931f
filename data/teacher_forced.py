"""Traces along references: both models scored over whole sequences, in batches of similar length.

Knows nothing of files. A shard's columns follow from its piece of the examples and the settings, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from ..cascade.distributions import Sampling
from .config import CollectConfig
from .encoding import EncodedExample
from .pairs import Pair, length_borders
from .scoring import ScoredRows, make_batches, score_in_order
from .shards import topk_columns

__all__ = ["log_teacher_forced"]


def log_teacher_forced(
    config: CollectConfig, pair: Pair, pieces: Sequence[Sequence[EncodedExample]], advance: Callable[[int, int], None]
) -> Generator[dict[str, Any], None, None]:
    """Score pieces of examples; yield the columns of one shard for each piece, in order.

    Args:
        config: the settings.
        pair: the models.
        pieces: the examples of each shard.
        advance: is told of scored positions: how many steps of progress and how many tokens they are.

    Raises:
        ValueError: logits are not finite; the message names the model, the prompt and the position.
    """
    borders = length_borders(pair)
    batches = [make_batches([len(example) for example in piece], config.batch_tokens, borders) for piece in pieces]
    work = ([piece[j] for j in batch] for piece, many in zip(pieces, batches, strict=True) for batch in many)
    sampling = Sampling(temperature=config.temperature)
    with closing(score_in_order(pair, work, sampling, config.top_k, config.hidden)) as results:
        for piece, many in zip(pieces, batches, strict=True):
            scored: dict[int, ScoredRows] = {}
            for batch, rows in zip(many, results, strict=False):
                scored.update(zip(batch, rows, strict=True))
                positions = sum(len(part) for part in rows)
                advance(positions, positions)
            yield _columns(piece, [scored[j] for j in range(len(piece))])


def _columns(piece: Sequence[EncodedExample], scored: Sequence[ScoredRows]) -> dict[str, Any]:
    """All columns of one shard, prompts in the order of the data set."""
    rows = ScoredRows.join(scored)
    counts = [len(part) for part in scored]
    positions = [len(example.prompt_ids) + np.arange(n) for example, n in zip(piece, counts, strict=True)]
    return {
        "prompt_id": np.repeat([example.prompt_id for example in piece], counts).tolist(),
        "split": np.repeat([example.split for example in piece], counts).tolist(),
        "position": np.concatenate(positions),
        "draft_index": np.full(len(rows), -1),
        "token": rows.token,
        "label": rows.label,
        "label_kind": ["gold"] * len(rows),
        "source": ["teacher_forced"] * len(rows),
        **rows.floats,
        **rows.hidden,
        **topk_columns(rows.topk_ids, rows.topk_q, rows.topk_p, rows.topk_kept),
    }
