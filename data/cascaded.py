"""Traces of real speculative runs: every position that the verifier examined, with what the rule decided there.

Knows nothing of files. A shard's columns follow from its piece of the examples and the settings, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from .config import CollectConfig
from .encoding import EncodedExample
from .pairs import Pair

__all__ = ["log_cascade"]


def log_cascade(
    config: CollectConfig, pair: Pair, pieces: Sequence[Sequence[EncodedExample]], advance: Callable[[int, int], None]
) -> Generator[dict[str, Any], None, None]:
    """Run the cascade over pieces of examples; yield the columns of one shard for each piece, in order."""
    raise NotImplementedError
