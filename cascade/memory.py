"""What a rule wants to know of the positions before a block: kept for each row, position by position.

A rule with ``context`` H > 0 offers ``remember(block)``, some numbers for each position of a block. The engine keeps
them for the positions whose prefix was kept: accepted drafts, and the first rejected one, whose token is another but
whose distributions are those of the prefix before it. At the next block the rule is given those of the H − 1 positions
before it; NaN stands where nothing is known: before the first block, and at bonus tokens, where no draft was judged
(with ``bonus="target"`` one was). So π still depends on nothing but what was known before its token was drawn.

Places are absolute positions in the sequence, so that a row may be rolled back and go on, as drafting for a larger
model asks of it. Knows no rule by name and nothing of what the numbers mean.

Shapes: ``B`` row, ``T`` position in the block, ``C`` = H − 1 positions before it, ``M`` number remembered a position.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .blocks import VerifyBlock
from .checks import is_integer

__all__ = ["Memory", "RememberingRule", "context_of"]


@runtime_checkable
class RememberingRule(Protocol):
    """A rule that reads the last ``context`` positions, the one it decides on included."""

    context: int

    def remember(self, block: VerifyBlock) -> Float[Tensor, "B T M"]:
        """Return what to remember of each position; it may depend on q, p and the position, on no drafted token.

        It is asked before ``block.memory`` is filled in, and by rows: no row may change what another is told.
        """
        ...


def context_of(rule: Any) -> int:
    """Return how many positions a rule reads, the one it decides on included; 0: that one, and nothing is remembered.

    Raises:
        ValueError: a ``context`` that is no integer >= 0, or one above 0 without ``remember(block)``.
    """
    context: Any = getattr(rule, "context", 0)
    if not is_integer(context) or context < 0:
        raise ValueError(f"rule {rule!r}: expected a context that is an integer >= 0, got {context!r}")
    if context and not callable(getattr(rule, "remember", None)):
        raise ValueError(f"rule {rule!r}: expected remember(block) beside a context of {context}, got none")
    return int(context)


class Memory:
    """What a rule remembers of every row of one call.

    Args:
        rule: whom to ask; its ``context`` is above 0.
    """

    def __init__(self, rule: RememberingRule) -> None:
        self._rule, self._span = rule, context_of(rule) - 1
        # Column j of row i is position origins[i] + j − span: the first columns stand before anything is known.
        self._origins: Tensor | None = None
        self._values: Tensor | None = None

    def join(
        self, block: VerifyBlock, after: VerifyBlock, ends: Int[Tensor, "B"], peek: bool
    ) -> tuple[VerifyBlock, VerifyBlock]:
        """Give a round's blocks their memory: the drafted one, and with ``peek`` the position after each row's drafts.

        Args:
            block: the drafted block.
            after: the position behind each row's drafts.
            ends: how many drafts each row has.
            peek: whether the drafter's side of ``after`` is known.

        Raises:
            ValueError: the rule answers with another shape than ``[B, T, M]``, or with whole numbers.
        """
        own = self._ask(block)
        block = block.with_memory(self._recall(block.positions[:, 0], own), own)
        if peek:
            # The window that ends before ``after`` is the one that its own position would close.
            after = after.with_memory(_window(block.memory, ends, self._span), self._ask(after))
        return block, after

    def keep(self, block: VerifyBlock, after: VerifyBlock, accepted: Int[Tensor, "B"], ends: Int[Tensor, "B"]) -> None:
        """Take over the accepted positions and the first rejected one, and ``after`` where it was decided on."""
        assert block.memory is not None, "join comes first"
        length = block.tokens.shape[1]
        places = torch.arange(length, device=ends.device)
        judged = places < torch.minimum(accepted + 1, ends).unsqueeze(1)
        self._write(block.positions, block.memory[:, -length:], judged)
        if after.memory is not None:
            self._write(after.positions, after.memory[:, -1:], (accepted == ends).unsqueeze(1))

    def forget(self, ends: Sequence[int]) -> None:
        """Forget row i's positions from ``ends[i]`` on."""
        if self._values is not None and self._origins is not None:
            edge = torch.tensor(ends, device=self._origins.device) - self._origins + self._span
            columns = torch.arange(self._values.shape[1], device=edge.device)
            self._values.masked_fill_((columns >= edge.unsqueeze(1)).unsqueeze(-1), torch.nan)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        if self._values is not None and self._origins is not None:
            index = torch.tensor(rows, device=self._origins.device)
            self._values, self._origins = self._values[index], self._origins[index]

    def _ask(self, block: VerifyBlock) -> Float[Tensor, "B T M"]:
        own: Any = self._rule.remember(block)
        shape = tuple(block.tokens.shape)
        if not isinstance(own, Tensor) or not own.is_floating_point() or own.dim() != 3 or own.shape[:2] != shape:
            got = f"{own.dtype} {tuple(own.shape)}" if isinstance(own, Tensor) else type(own).__name__
            raise ValueError(f"rule {self._rule!r}: expected to remember floating-point {(*shape, 'M')}, got {got}")
        return own

    def _recall(self, starts: Int[Tensor, "B"], own: Float[Tensor, "B T M"]) -> Float[Tensor, "B C M"]:
        """What is known of the positions before each row's block."""
        if self._values is None or self._origins is None:
            self._origins = starts
            self._values = own.new_full((len(starts), self._span, own.shape[-1]), torch.nan)
        offsets = starts - self._origins
        self._grow(int(offsets.amax()) + self._span)
        return _window(self._values, offsets, self._span)

    def _write(self, positions: Int[Tensor, "B T"], values: Float[Tensor, "B T M"], known: Bool[Tensor, "B T"]) -> None:
        assert self._values is not None and self._origins is not None, "join comes first"
        columns = positions - self._origins.unsqueeze(1) + self._span
        self._grow(int(columns.amax()) + 1)
        rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
        before = self._values[rows, columns]
        self._values[rows, columns] = torch.where(known.unsqueeze(-1), values, before)

    def _grow(self, columns: int) -> None:
        """Make room for so many columns, by doubling."""
        assert self._values is not None
        rows, room, width = self._values.shape
        if columns > room:
            more = self._values.new_full((rows, max(columns, 2 * room) - room, width), torch.nan)
            self._values = torch.cat([self._values, more], dim=1)


def _window(values: Float[Tensor, "B S M"] | None, starts: Int[Tensor, "B"], length: int) -> Float[Tensor, "B W M"]:
    """Take ``length`` columns of each row, from ``starts[i]`` on."""
    assert values is not None
    columns = starts.unsqueeze(1) + torch.arange(length, device=starts.device)
    return values[torch.arange(len(starts), device=starts.device).unsqueeze(1), columns]
