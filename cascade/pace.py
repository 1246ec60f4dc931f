"""How many tokens to draft: a fixed number, or as many as are worth their cost.

A block of j drafted tokens is expected to emit 1 + R₁ + … + R_j tokens, R_i being the chance that the first i drafts
are all kept, and costs 1 + c·j verifier steps. Another draft pays as long as what it adds, R_{j+1} / c, exceeds the
rate reached so far (docs/theory.md, "How long a block should be"). The chance that a draft is kept is estimated for
each row from its own verified positions, by how confident the drafter was; a rule that knows that it will not defer
says so.

The decision to go on reads the prefix and the tokens already drafted, never the token that it is about: whatever it
answers, each emitted token follows π (a bonus token p). Knows no model and no rule by name.

Shapes: ``B`` row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .checks import check_count
from .forms import Distribution
from .statistics import Stats

__all__ = ["AdaptiveGamma", "Pacer"]

_BINS = 10
_PRIOR_WEIGHT = 2.0  # drafts that the prior counts for, in each bin and in the average
_PRIOR_AVERAGE = 0.75


@dataclass(frozen=True)
class AdaptiveGamma:
    """Stop drafting a block when the next token is expected to cost more than it brings.

    Args:
        cost_ratio: time of a drafter's step over that of a verifier's pass, in (0, 1].
        maximum: most tokens drafted per block.
    """

    cost_ratio: float
    maximum: int = 12

    def __post_init__(self) -> None:
        if not 0 < self.cost_ratio <= 1:
            raise ValueError(f"cost_ratio: expected a number in (0, 1], got {self.cost_ratio!r}")
        check_count("maximum", self.maximum)


@dataclass
class _RowHistory:
    """Kept and examined drafts of one row by the drafter's confidence, beginning as if it were honest."""

    kept: list[int] = field(default_factory=lambda: [0] * _BINS)
    seen: list[int] = field(default_factory=lambda: [0] * _BINS)

    def chance(self, confidence: float) -> float:
        """The share of drafts of such confidence that were kept; at first, the middle of their bin."""
        place = _bin(confidence)
        return (self.kept[place] + _PRIOR_WEIGHT * (place + 0.5) / _BINS) / (self.seen[place] + _PRIOR_WEIGHT)

    def average(self) -> float:
        """The share of all drafts that were kept."""
        return (sum(self.kept) + _PRIOR_WEIGHT * _PRIOR_AVERAGE) / (sum(self.seen) + _PRIOR_WEIGHT)


class Pacer:
    """Decides for each row of one call when its block is long enough, and learns from every verified block.

    Args:
        gamma: the setting.
        rows: number of rows.
        rule: may offer ``surely_kept(stats) -> bool [B, 1]``: where it will not defer whatever the verifier says.
    """

    def __init__(self, gamma: AdaptiveGamma, rows: int, rule: object) -> None:
        self._gamma, self._surely_kept = gamma, getattr(rule, "surely_kept", None)
        self._histories = [_RowHistory() for _ in range(rows)]
        self._begin_block()

    def goes_on(self, law: Distribution, raw: Distribution) -> list[bool]:
        """Take note of the token just drafted from ``law`` ``[B, 1]`` (q; ``raw`` is q°); tell which rows go on."""
        confidences = raw.maximum[:, 0].tolist()
        sure = [False] * len(confidences) if self._surely_kept is None else self._sure(law, raw)
        answers = []
        for row, (confidence, kept) in enumerate(zip(confidences, sure, strict=True)):
            history = self._histories[row]
            self._confidences[row].append(confidence)
            self._reached[row] *= 1.0 if kept else history.chance(confidence)
            self._expected[row] += self._reached[row]
            cost = self._gamma.cost_ratio
            rate = self._expected[row] / (1 + cost * len(self._confidences[row]))
            answers.append(self._reached[row] * history.average() > cost * rate)
        return answers

    def learn(self, accepted: Sequence[int], lengths: Sequence[int]) -> None:
        """Take note of how many of each row's ``lengths[i]`` drafts were kept."""
        for history, confidences, kept, drafted in zip(
            self._histories, self._confidences, accepted, lengths, strict=True
        ):
            for place, confidence in enumerate(confidences[: min(kept + 1, drafted)]):
                history.seen[_bin(confidence)] += 1
                history.kept[_bin(confidence)] += place < kept
        self._begin_block()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._histories = [self._histories[row] for row in rows]
        self._begin_block()

    def _begin_block(self) -> None:
        rows = len(self._histories)
        self._confidences: list[list[float]] = [[] for _ in range(rows)]
        self._reached, self._expected = [1.0] * rows, [1.0] * rows

    def _sure(self, law: Distribution, raw: Distribution) -> list[bool]:
        """Ask the rule; the drafter's distributions stand in for the verifier's, which are not known yet."""
        assert self._surely_kept is not None
        answers: list[bool] = self._surely_kept(Stats(law, law, raw, raw))[:, 0].tolist()
        return answers


def _bin(confidence: float) -> int:
    return min(int(confidence * _BINS), _BINS - 1)
