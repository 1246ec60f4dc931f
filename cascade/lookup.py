"""Prompt look-up: draft what followed the last few tokens where they occurred before. No model, no training.

A proposal is certain to the drafter, so q is one-hot at it and the verifier accepts it with probability π(x): the
emitted law is π whatever is proposed. As a confidence a look-up has nothing to say, so q° is uniform but for a hair
that marks its choice: rules that trust the drafter's confidence defer, rules that ask the verifier do as always.

Shapes: ``B`` row, ``T`` drafted tokens, ``V`` token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import check_count
from .drafters import Draft, DraftRequest
from .forms import Certain, Whole
from .processing import process_logits

__all__ = ["PromptLookupDrafter"]


class PromptLookupDrafter:
    """Draft by copying from earlier in the row: beside an encoder-decoder, from the decoder's tokens alone.

    Args:
        vocab_size: number of token ids that the verifier may emit.
        longest: try to match so many last tokens first, then fewer.
    """

    def __init__(self, vocab_size: int, longest: int = 3) -> None:
        check_count("vocab_size", vocab_size)
        check_count("longest", longest)
        self.name = "prompt look-up"
        self.vocab_size = vocab_size
        self.longest = longest

    def start(self, prompts: Sequence[Sequence[int]]) -> "PromptLookupDrafter":
        """Return itself: a look-up remembers nothing."""
        return self

    def propose(self, request: DraftRequest) -> Draft:
        """Copy what followed the latest earlier occurrence of each row's end, or repeat its last token."""
        length = request.length + request.peek
        rows = [_avoid_banned(row, self.continue_row(row, length), request, self.vocab_size) for row in request.rows]
        tokens = torch.tensor(rows)
        certain = Certain(tokens, self.vocab_size)
        return Draft(
            tokens[:, : request.length], certain, Whole(_doubt(certain.dense)), [0] * len(rows), request.limits
        )

    def continue_row(self, row: Sequence[int], length: int) -> list[int]:
        """Guess the next ``length`` tokens of one row.

        >>> PromptLookupDrafter(10).continue_row([5, 6, 7, 8, 1, 5, 6], length=3)
        [7, 8, 1]
        """
        tokens = list(row)
        for width in range(min(self.longest, len(tokens) - 1), 0, -1):
            end = tokens[-width:]
            for start in range(len(tokens) - width - 1, -1, -1):
                if tokens[start : start + width] == end:
                    found = tokens[start + width : start + width + length]
                    return found + [found[-1]] * (length - len(found))
        return [tokens[-1]] * length

    def rollback(self, lengths: Sequence[int]) -> None:
        """Do nothing: a look-up reads each row afresh."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Do nothing: a look-up holds no rows."""


def _avoid_banned(row: Sequence[int], guess: list[int], request: DraftRequest, vocab_size: int) -> list[int]:
    """Replace tokens that the request's settings ban where they stand: q must give them no mass."""
    if not request.sampling.reads_history:
        return guess
    history, zeros = list(row), torch.zeros(1, 1, vocab_size)
    for token in guess:
        allowed = process_logits(zeros, [history], request.sampling)[0, 0].isfinite()
        history.append(token if allowed[token] else int(allowed.float().argmax()))
    return history[len(row) :]


def _doubt(probs: Tensor) -> Tensor:
    hair = 1e-3
    return (1 - hair) / probs.shape[-1] + hair * probs
