"""What the tests of the engine share: a model of known odds, and a chi-square of sequences against their law."""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from scipy.stats import chi2

Logits = Callable[[list[int]], torch.Tensor]
Check = Callable[[Counter[tuple[int, ...]], dict[tuple[int, ...], float], int], None]


class TableLM:
    """A language model of known odds: the logits follow from the last two tokens by a table."""

    def __init__(self, seed: int, vocab_size: int, spread: float = 1.5) -> None:
        self.name = f"table {seed}"
        self.vocab_size = vocab_size
        self.table = torch.randn((vocab_size,) * 3, generator=torch.Generator().manual_seed(seed)) * spread
        self.device = torch.device("cpu")

    def start(self, prompts: Sequence[Sequence[int]]) -> "TableState":
        return TableState(self, len(prompts))

    def logits_after(self, prefix: list[int]) -> torch.Tensor:
        return self.table[prefix[-2], prefix[-1]] if len(prefix) > 1 else self.table[0, prefix[-1]]


class TableState:
    def __init__(self, model: TableLM, batch: int) -> None:
        self.model, self.rows = model, [list[int]() for _ in range(batch)]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def extend(self, tokens: torch.Tensor, counts: Sequence[int], keep: int) -> torch.Tensor:
        ends = list[tuple[int, int]]()
        for row, new, count in zip(self.rows, tokens.tolist(), counts, strict=True):
            row += new[:count]
            ends += [(row[end - 2] if end > 1 else 0, row[end - 1]) for end in range(len(row) - keep + 1, len(row) + 1)]
        before, last = torch.tensor(ends).T
        return self.model.table[before, last].view(len(self.rows), keep, -1)

    def rollback(self, lengths: Sequence[int]) -> None:
        for row, length in zip(self.rows, lengths, strict=True):
            del row[length:]

    def select_rows(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


@pytest.fixture(scope="session")
def check_follows() -> Check:
    """`check_follows(counts, law, draws)` fails where counts of sequences do not follow their law."""
    return _check_follows


def _check_follows(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float], draws: int) -> None:
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    assert set(counts) <= {sequence for sequence, mass in law.items() if mass > 0}, "an impossible sequence came out"
    common = [sequence for sequence, mass in law.items() if mass * draws >= 5]
    expected = [law[sequence] * draws for sequence in common]
    observed = [counts[sequence] for sequence in common]
    rest = draws - sum(expected)
    if rest > 5:
        expected, observed = [*expected, rest], [*observed, draws - sum(observed)]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    limit = chi2.ppf(1 - 1e-6, df=len(expected) - 1)
    assert statistic < limit, f"chi-square {statistic:.1f} over {limit:.1f}: odds of a false alarm are 1e-6"


def sequence_law(
    at: Callable[[list[int]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]], start: list[int], vocab: int, bonus: str
) -> dict[tuple[int, ...], float]:
    """The law of three tokens with γ = 2, from q, p and π after any prefix.

    Positions 0 and 1 follow π; position 2 is a bonus with the probability that both drafts were accepted, else it
    follows π.
    """
    law = {}
    q0, _, pi0 = at(start)
    for a in range(vocab):
        q1, _, pi1 = at([*start, a])
        for b in range(vocab):
            _, p2, pi2 = at([*start, a, b])
            both_accepted = float(min(q0[a], pi0[a]) * min(q1[b], pi1[b]))
            otherwise = float(pi0[a] * pi1[b]) - both_accepted
            after = p2 if bonus == "verifier" else pi2
            for c in range(vocab):
                law[a, b, c] = both_accepted * float(after[c]) + otherwise * float(pi2[c])
    return law


class RecordingLM(TableLM):
    """A table that keeps its last state and counts the tokens and passes that went into it."""

    def start(self, prompts: Sequence[Sequence[int]]) -> "RecordingState":
        self.state = RecordingState(self, len(prompts))
        return self.state


class RecordingState(TableState):
    passes = 0
    read = 0

    def extend(self, tokens: torch.Tensor, counts: Sequence[int], keep: int) -> torch.Tensor:
        assert min(counts) >= keep, "a row was asked for more positions than it reads"
        self.passes += 1
        self.read += sum(counts)
        return super().extend(tokens, counts, keep)
