"""What a disagreement costs: the answer after the drafter's token beside the answer after the verifier's own.

At a position where the two models would go on with different tokens, both are tried: from the kept prefix the verifier
alone ends the answer greedily, once after argmax q° and once after argmax p°, and both answers are scored against the
reference. A disagreement that changes no score was not worth deferring; R2R (Fu et al., 2025) labels tokens in this
manner.

Knows no file and no rule. Shapes: ``N`` examined position of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..cascade.single import SingleModel
from .answers import generate_answers
from .config import CascadeConfig, CollectConfig
from .encoding import EncodedExample
from .pairs import Pair
from .scorers import Scorer, find_scorer

__all__ = ["Run", "Trials", "choose_disagreements", "outcome_columns"]


@dataclass(frozen=True)
class Run:
    """One prompt's answer and what was examined of it.

    Args:
        example: the prompt.
        answer: the kept tokens after the prompt.
        position: ``[N]``, ascending, index in the whole sequence.
        draft_choice: ``[N]``, argmax q°.
        verifier_choice: ``[N]``, argmax p°.
        greedy: whether the run was at temperature 0, so that every token not examined is the verifier's argmax.
    """

    example: EncodedExample
    answer: list[int]
    position: np.ndarray[Any, Any]
    draft_choice: np.ndarray[Any, Any]
    verifier_choice: np.ndarray[Any, Any]
    greedy: bool = False

    def start_with(self, row: int, token: int) -> list[int]:
        """The answer up to an examined position, with another token there."""
        return [*self.answer[: self._offsets[row]], token]

    def goes_on_greedily(self, start: Sequence[int]) -> bool:
        """Whether the run itself is what the verifier writes greedily after ``start``."""
        if not self.greedy or self.answer[: len(start)] != list(start):
            return False
        foreign = np.array(self.answer)[self._offsets] != self.verifier_choice
        return not bool(foreign[self._offsets >= len(start)].any())

    @property
    def _offsets(self) -> np.ndarray[Any, Any]:
        offsets: np.ndarray[Any, Any] = self.position - len(self.example.prompt_ids)
        return offsets


@dataclass(frozen=True)
class Trials:
    """Everything that it takes to try both tokens at some disagreements of each prompt.

    Args:
        verifier: ends the answers.
        tokenizer: turns them into text.
        scorer: grades the text.
        scorer_name: how errors call it.
        ends: token ids that end an answer.
        config: how many disagreements a prompt, how long an answer, how many answers at a time.
    """

    verifier: SingleModel
    tokenizer: Any
    scorer: Scorer
    scorer_name: str
    ends: tuple[int, ...]
    config: CascadeConfig

    @classmethod
    def prepare(
        cls,
        config: CollectConfig,
        pair: Pair,
        ends: Sequence[int],
        pieces: Sequence[Sequence[EncodedExample]],
    ) -> Trials:
        """Find the scorer, and make sure that every example brings its reference.

        Raises:
            ValueError: an unknown scorer, or an example whose text was not kept; the prompt is named.
        """
        assert config.scorer is not None, "the config was checked"
        scorer = find_scorer(config.scorer)
        bare = next((example for piece in pieces for example in piece if example.example is None), None)
        if bare is not None:
            raise ValueError(f"counterfactuals: expected the reference of prompt {bare.prompt_id} as text, got none")
        verifier = SingleModel(pair.verifier, vocab_size=pair.vocab_size)
        return cls(verifier, pair.tokenizer, scorer, config.scorer, tuple(ends), config.cascade)

    def run(self, runs: Sequence[Run]) -> list[np.ndarray[Any, Any]]:
        """Try both tokens at the chosen disagreements of each run.

        Returns:
            For each run the scores ``[N, 2]`` after the drafter's and after the verifier's token, NaN where none was
            tried.

        Raises:
            ValueError: a score that is no number in [0, 1]; scorer and prompt are named.
        """
        outcomes = [np.full((len(run.position), 2), np.nan, dtype=np.float32) for run in runs]
        tried = [
            (index, row, side, run.start_with(row, int(choice[row])))
            for index, run in enumerate(runs)
            for row in choose_disagreements(run, self.config.counterfactuals)
            for side, choice in enumerate((run.draft_choice, run.verifier_choice))
        ]
        answers = self._finish([(runs[index], start) for index, _, _, start in tried])
        for (index, row, side, _), answer in zip(tried, answers, strict=True):
            outcomes[index][row, side] = self._score(runs[index].example, answer)
        return outcomes

    def _finish(self, started: Sequence[tuple[Run, list[int]]]) -> list[list[int]]:
        """End every started answer as the verifier would, in batches of similar length."""
        answers = [list(start) for _, start in started]
        left: list[tuple[int, int]] = []  # how many tokens an answer may still get, and its index
        for index, (run, start) in enumerate(started):
            if run.goes_on_greedily(start):
                answers[index] = run.answer
            elif start[-1] not in self.ends and len(start) < self.config.max_new_tokens:
                left.append((self.config.max_new_tokens - len(start), index))
        prefixes = {index: [*started[index][0].example.prompt_ids.tolist(), *started[index][1]] for _, index in left}
        for batch in self._make_batches(sorted(left, reverse=True), prefixes):
            prompts = [prefixes[index] for _, index in batch]
            for (room, index), written in zip(
                batch, generate_answers(self.verifier, prompts, batch[0][0], self.ends), strict=True
            ):
                answers[index] = [*answers[index], *written[:room]]
        return answers

    def _make_batches(
        self, left: Sequence[tuple[int, int]], prefixes: dict[int, list[int]]
    ) -> list[list[tuple[int, int]]]:
        """Group answers, those with the most room first; the longest prefix has room for the most tokens of a batch."""
        context = self.verifier.max_length or math.inf
        batches: list[list[tuple[int, int]]] = []
        for item in left:
            full = not batches or len(batches[-1]) == self.config.batch_size
            if full or len(prefixes[item[1]]) + batches[-1][0][0] > context:
                batches.append([item])
            else:
                batches[-1].append(item)
        return batches

    def _score(self, example: EncodedExample, answer: Sequence[int]) -> float:
        assert example.example is not None, "prepare() has looked"
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        try:
            score = self.scorer(text, example.example.reference)
        except Exception as error:  # anything: it is a user's own function
            raise ValueError(
                f"scorer {self.scorer_name!r}: expected a number in [0, 1], got {type(error).__name__}: {error} for an "
                f"answer to prompt {example.prompt_id}"
            ) from error
        try:
            value = float(score)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not 0 <= value <= 1:
            raise ValueError(
                f"scorer {self.scorer_name!r}: expected a number in [0, 1], got {score!r} for an answer to prompt "
                f"{example.prompt_id}"
            )
        return value


def choose_disagreements(run: Run, count: int) -> list[int]:
    """Up to ``count`` rows where the two models' choices differ, spread evenly over all of those.

    >>> import numpy as np
    >>> prompt = EncodedExample("a", "train", [5], [])
    >>> choose_disagreements(Run(prompt, [1] * 6, np.arange(1, 7), np.arange(6), np.array([9, 1, 9, 9, 9, 9])), 2)
    [2, 4]
    """
    rows = np.flatnonzero(run.draft_choice != run.verifier_choice)
    if len(rows) > count:
        rows = rows[(2 * np.arange(count) + 1) * len(rows) // (2 * count)]
    chosen: list[int] = rows.tolist()
    return chosen


def outcome_columns(outcomes: np.ndarray[Any, Any]) -> dict[str, pa.Array]:
    """Turn scores ``[N, 2]``, NaN where none was tried, into the columns of `OUTCOME_COLUMNS`, null there.

    An answer counts as changed where the two scores differ.
    """
    untried = np.isnan(outcomes[:, 0])
    return {
        "outcome_q": pa.array(outcomes[:, 0], pa.float32(), mask=untried),
        "outcome_p": pa.array(outcomes[:, 1], pa.float32(), mask=untried),
        "answer_changed": pa.array(outcomes[:, 0] != outcomes[:, 1], pa.bool_(), mask=untried),
    }
