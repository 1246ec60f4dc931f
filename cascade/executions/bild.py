"""The big little decoder: the drafter writes while it is sure, the verifier checks and may take its tokens back.

Greedy only. Knows no rule: two thresholds decide. Source: Kim et al., *Speculative Decoding with Big Little Decoder*,
NeurIPS 2023, Algorithm 1; what the speculative engine runs under a rule is the variant of Narasimhan et al., ICLR 2025.

Shapes: ``B`` row, ``T`` drafted tokens, ``K`` drafter steps, ``V`` token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..checks import check_count
from ..closeness import distance
from ..distribute import join
from ..drafters import Drafter
from ..forms import Distribution
from ..models import CausalLM
from ..pair import PairLoop, PairState, tokens_of
from ..requests import Request, Row
from ..results import LedgerEntry, Writer

__all__ = ["BiLD"]


class BiLD(PairLoop):
    """Draft until max q° < fallback or the window ends; the verifier reads the drafts in one pass.

    The first draft x with −log p°(x) > rollback is replaced by the verifier's argmax and what follows it is dropped.
    Where there is none the verifier's argmax is the next token: in place of the draft of which the drafter was unsure,
    or as a bonus after a whole window. No law: at temperature 0 a token follows from the prefix and from where
    its window began. An end token is checked like any other draft.

    In the ledger a position is deferred where the verifier's word was taken: after a fallback (``verifier``), and
    where a draft was rolled back (``residual``). The drafter's unsure step counts as a call, not as a draft. In a batch
    rows draft in step and each keeps to its own thresholds, so its tokens and counts do not depend on its neighbours;
    the seconds are the batch's.

    Args:
        drafter: a Hugging Face model or any `Drafter`.
        verifier: a Hugging Face model or any `CausalLM`.
        fallback: smallest max q° at which the drafter writes, in [0, 1]; 0 always drafts a whole window.
        rollback: largest surprise −log p° (nats) at which a draft stays, ≥ 0; infinity keeps every draft.
        gamma: longest window.
        vocab_size: number of token ids that both models share and may emit; default: the smaller head.

    Raises:
        ValueError: an argument out of range, two vocabularies, or a model that cannot be run exactly. A temperature
            above 0 is refused by ``generate``.
    """

    def __init__(
        self,
        drafter: PreTrainedModel | Drafter,
        verifier: PreTrainedModel | CausalLM,
        fallback: float = 0.6,
        rollback: float = 3.0,
        gamma: int = 10,
        vocab_size: int | None = None,
    ) -> None:
        if not 0 <= fallback <= 1:
            raise ValueError(f"fallback: expected a probability in [0, 1], got {fallback!r}")
        if not rollback >= 0:
            raise ValueError(f"rollback: expected a number of nats >= 0, got {rollback!r}")
        check_count("gamma", gamma)
        super().__init__(drafter, verifier, vocab_size)
        self.fallback = fallback
        self.rollback = rollback
        self.gamma = gamma

    def open_session(self, prompts: Sequence[Sequence[int]]) -> "BiLDSession":
        """Begin one call with a row for each prompt."""
        return BiLDSession(self, prompts)


@dataclass(frozen=True)
class Window:
    """What the drafter wrote after every row.

    ``tokens[i]`` holds as many as the longest draft has, of which row i's own are the first ``lengths[i]``; ``unsure``
    says whether it stopped because of the drafter's doubt. ``law`` ``[B, K]`` (q) and ``calls`` ``[K][B]`` belong to
    the steps that the batch took.
    """

    tokens: list[list[int]]
    lengths: list[int]
    unsure: list[bool]
    law: Distribution
    calls: list[Sequence[int]]

    def steps(self, row: int) -> int:
        """Steps of the drafter that a row asked for: its drafts, and the one that it was unsure of."""
        return self.lengths[row] + self.unsure[row]


class BiLDSession:
    """Both models' caches for one call: a block is a checked window and the verifier's token after it."""

    def __init__(self, owner: BiLD, prompts: Sequence[Sequence[int]]) -> None:
        self._owner, self._state = owner, PairState(owner, prompts)

    def step(self, rows: Sequence[Row], request: Request) -> list[list[LedgerEntry]]:
        """Write the next block of every row."""
        if not request.sampling.is_greedy:
            raise ValueError(f"temperature: expected 0, as BiLD is greedy, got {request.sampling.temperature!r}")
        window = self._draft(rows, request)
        longest = max(window.lengths)
        drafted = [[*row.tokens, *tokens] for row, tokens in zip(rows, window.tokens, strict=True)]
        verifier, verifier_raw = self._state.verify(drafted, request.sampling, positions=longest + 1)
        accepted = self._check(window, verifier_raw.first(longest)) if longest else window.lengths
        choices: list[list[int]] = verifier.argmax.tolist()
        distances = _distances(window, verifier) if request.ledger else None
        blocks = list[list[LedgerEntry]]()
        for i, (row, kept) in enumerate(zip(rows, accepted, strict=True)):
            writer, deferred = _outcome(kept, window.lengths[i], window.unsure[i])
            tv = distances[i] if distances else [None] * (longest + 1)
            block = [LedgerEntry(window.tokens[i][t], "drafter", False, tv[t]) for t in range(kept)]
            last = LedgerEntry(choices[i][kept], writer, deferred, None if writer == "bonus" else tv[kept])
            blocks.append([*block, last])
            row.rounds += 1
            row.drafted += window.lengths[i]
            row.drafter_calls += sum(calls[i] for calls in window.calls[: window.steps(i)])
            row.verifier_calls += 1
        self._state.rollback([len(row.tokens) + kept for row, kept in zip(rows, accepted, strict=True)])
        return blocks

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._state.select_rows(rows)

    def _draft(self, rows: Sequence[Row], request: Request) -> Window:
        """Draft until every row has stopped; one that stopped early drafts on in step, and its surplus is ignored."""
        limits = [min(self._owner.gamma, request.stopping.max_new_tokens - len(row.entries)) for row in rows]
        tokens: list[list[int]] = [[] for _ in rows]
        lengths: list[int | None] = [None] * len(rows)
        unsure, laws, calls = [False] * len(rows), list[Distribution](), list[Sequence[int]]()
        luck = torch.zeros(len(rows), 1, dtype=torch.float64)  # greedy: nothing is drawn
        while None in lengths:
            sequences = [[*row.tokens, *new] for row, new in zip(rows, tokens, strict=True)]
            draft = self._state.draft(sequences, luck, request.sampling)
            laws.append(draft.law)
            calls.append(draft.calls)
            doubts = (draft.raw.maximum[:, 0] < self._owner.fallback).tolist()
            for i, (token, doubt) in enumerate(zip(tokens_of(draft), doubts, strict=True)):
                if lengths[i] is None and doubt:
                    lengths[i], unsure[i] = len(tokens[i]), True
                tokens[i].append(token)
                if lengths[i] is None and len(tokens[i]) == limits[i]:
                    lengths[i] = len(tokens[i])
        known = [length for length in lengths if length is not None]
        return Window([new[: max(known)] for new in tokens], known, unsure, join(laws), calls)

    def _check(self, window: Window, verifier: Distribution) -> list[int]:
        """Count each row's own drafts before the first whose surprise −log p° is over the threshold."""
        surprise = -verifier.at(torch.tensor(window.tokens, device=verifier.device)).log()
        stays = (surprise <= self._owner.rollback).long().cumprod(dim=-1).sum(dim=-1).tolist()
        return [min(pair) for pair in zip(stays, window.lengths, strict=True)]


def _outcome(kept: int, length: int, unsure: bool) -> tuple[Writer, bool | None]:
    """Who wrote the token after ``kept`` drafts of ``length``, and whether its position was deferred."""
    if kept < length:
        return "residual", True
    return ("verifier", True) if unsure else ("bonus", None)


def _distances(window: Window, verifier: Distribution) -> list[list[float]]:
    """D_TV(p, q) at every position of which both distributions are known."""
    both = min(window.law.shape[1], verifier.shape[1])
    distances: list[list[float]] = distance(verifier.first(both), window.law.first(both).to(verifier.device)).tolist()
    return distances
