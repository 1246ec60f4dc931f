"""Why a rule falls short of one who knows the label: its threshold, the scale of its score, or the score's ranking.

At price α a rule r pays L(r) = mean[(1 − r)·ℓ_q + r·(ℓ_p + α·tv)]; least is paid by r* = 1[g > α·tv], g = ℓ_q − ℓ_p
being the gain that only the label tells. A rule with a score ĝ for g defers where ĝ > α·tv. Its *regret* L(r) − L(r*)
is the sum of three parts:

* ``threshold``: L(r) less that of the best threshold on the rule's own order of positions (by ĝ/tv; by ĝ for `Diff`,
  which does not divide by the distance);
* ``calibration``: that, less the best threshold on ĝ'/tv, where ĝ' is what g comes to on average where the score is ĝ:
  what a monotone correction of the score would be worth;
* ``ranking``: the rest down to r*, which no correction of this score reaches.

ĝ' is fitted by isotonic regression (pool adjacent violators) on four fifths of the documents and read on the last
fifth, in turn: fitted on the positions that it is judged on it would learn their noise, and call calibration what is
ranking. So ``calibration`` may come out slightly below 0. Both best thresholds are chosen on all positions: one number.
Intervals resample documents at the thresholds found once.

``ranking`` holds the noise of the labels, which no feature removes. How much that is cannot be told without the
true distribution; ``noise`` is what it would be if labels were drawn from p: the cost, against r*, of one who knows p
and q whole and no label. Where p is overconfident, true noise is larger.

Source: Narasimhan et al., ICLR 2025, equation 8 (L) and Lemma 4 (the rule). Shapes: ``N`` position, ``A`` price.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cascade.statistics import Stats
from ..data.resampling import bootstrap_weights, interval, resampled_means, sum_by_prompt
from .columns import Columns
from .methods import Method
from .outcomes import TINY
from .replay import Replay

__all__ = ["PARTS", "Scored", "measure_regret", "recalibrate", "scored_methods", "scores_positions", "split_regret"]

Array = NDArray[np.float64]

PARTS = ("threshold", "calibration", "ranking")
_FOLDS = 5


@dataclass(frozen=True)
class Scored:
    """A rule that defers where a score of the position exceeds a bar.

    Args:
        name: as in the frontiers.
        label: how tables call it.
        kind: ``position`` or ``router``.
        gap: from statistics and loss to ĝ ``[N]``.
        by_distance: defers iff ĝ > α·tv; if False, iff ĝ > α.
        losses: those that ĝ is meant for.
    """

    name: str
    label: str
    kind: str
    gap: Callable[[Stats, str], Tensor]
    by_distance: bool
    losses: tuple[str, ...]


def _confidence_gap(stats: Stats, loss: str) -> Tensor:
    return stats.verifier_max - stats.draft_max


def _verifier_gap(stats: Stats, loss: str) -> Tensor:
    return stats.argmax_gain


def _entropy_gap(stats: Stats, loss: str) -> Tensor:
    return stats.draft_entropy - stats.verifier_entropy


_CHANCES = ("zero_one", "sampled", "greedy")
PLUG_INS: dict[str, Scored] = {
    "opt": Scored("opt", "OPT", "position", _confidence_gap, True, _CHANCES),
    "diff": Scored("diff", "Diff", "position", _confidence_gap, False, _CHANCES),
    "verifier_gap": Scored("verifier_gap", "VerifierGap", "position", _verifier_gap, True, _CHANCES),
    "opt_log": Scored("opt_log", "OPTLog", "position", _entropy_gap, True, ("log",)),
    "diff_log": Scored("diff_log", "DiffLog", "position", _entropy_gap, False, ("log",)),
}


def scored_methods(methods: Sequence[Method]) -> list[Scored]:
    """Describe those methods that have a score: three plug-ins (two for log loss) and routers of single positions."""
    found = []
    for method in methods:
        if method.name in PLUG_INS:
            found.append(PLUG_INS[method.name])
        elif method.kind == "router" and scores_positions(method.build(max(method.low, 0.0), method.losses[0])):
            found.append(_router_score(method))
    return found


def scores_positions(rule: Any) -> bool:
    """Whether a router estimates a gap from one position; of one that is fed α or reads order nothing is split."""
    return hasattr(rule, "gap") and not getattr(rule, "context", 0) and not getattr(rule, "reads_alpha", False)


def _router_score(method: Method) -> Scored:
    def gap(stats: Stats, loss: str) -> Tensor:
        rule: Any = method.build(0.0, loss)
        estimated: Tensor = rule.gap(stats)
        return estimated

    return Scored(method.name, method.label, method.kind, gap, True, method.losses)


def measure_regret(
    scored: Sequence[Scored],
    test: Replay,
    losses: Sequence[str],
    alphas: Sequence[float],
    resamples: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """Split the regret of every rule at every price under every loss: a row each.

    Columns: ``loss``, ``method``, ``label``, ``kind``, ``alpha``, ``objective`` (L of the rule), ``oracle`` (of r*),
    ``regret`` and the three `PARTS`, each of these four with ``_low`` and ``_high``, and ``noise``.
    """
    counts, weights = test.count(), bootstrap_weights(test.num_documents, resamples, seed)
    rows: list[dict[str, Any]] = []
    for loss in losses:
        draft_loss, verifier_loss = (one.double().numpy() for one in test.model_losses(loss))
        gain, distance = draft_loss - verifier_loss, test.stats(loss).tv.double().numpy()
        noise = _noise_if_verifier_is_true(test, loss, alphas)
        for rule in (rule for rule in scored if loss in rule.losses):
            gap = rule.gap(test.stats(loss), loss).double().numpy()
            corrected = recalibrate(gap, gain, test.document_index)
            for alpha, floor in zip(alphas, noise, strict=True):
                parts = split_regret(gain, distance, gap, corrected, alpha, rule.by_distance)
                sums = sum_by_prompt(np.stack([parts.sum(axis=0), *parts]), test.document_index, test.num_documents)
                oracle = float((draft_loss - np.maximum(gain - alpha * distance, 0)).mean())
                rows.append(
                    {"loss": loss, "method": rule.name, "label": rule.label, "kind": rule.kind, "alpha": alpha,
                     "objective": oracle + float(parts.sum() / len(test)), "oracle": oracle,
                     **_spread_out(sums, counts, weights), "noise": floor}
                )  # fmt: skip
    return pd.DataFrame(rows)


def _spread_out(sums: Array, counts: Array, weights: Array) -> dict[str, float]:
    means, samples = sums.sum(axis=0) / counts.sum(), resampled_means(sums, counts, weights)
    figures: dict[str, float] = {}
    for column, name in enumerate(("regret", *PARTS)):
        spread = interval(means[column], samples[:, column])
        figures |= {name: spread.value, f"{name}_low": spread.low, f"{name}_high": spread.high}
    return figures


def split_regret(
    gain: Array, distance: Array, gap: Array, corrected: Array, alpha: float, by_distance: bool = True
) -> Array:
    """Split one rule's regret at one price into the three `PARTS`, position by position: ``[3, N]``.

    Args:
        gain: ℓ_q − ℓ_p ``[N]``.
        distance: D_TV(p, q) ``[N]``.
        gap: the rule's score ĝ ``[N]``.
        corrected: the recalibrated score ĝ' ``[N]``.
        alpha: the price of a rejection.
        by_distance: whether the rule defers iff ĝ > α·tv, rather than ĝ > α.
    """
    worth = gain - alpha * distance
    own = _per_distance(gap, distance) if by_distance else gap
    choices = [
        gap > alpha * distance if by_distance else gap > alpha,
        _best_threshold(own, worth),
        _best_threshold(_per_distance(corrected, distance), worth),
        worth > 0,
    ]
    # L(r) is mean ℓ_q less the worth of what is deferred: of two rules, what the second defers for more is regret.
    earned = [np.where(chosen, worth, 0.0) for chosen in choices]
    return np.stack([better - worse for worse, better in pairwise(earned)])


def recalibrate(gap: Array, gain: Array, document_index: NDArray[np.int64]) -> Array:
    """Return what ``gain`` comes to on average at each score, learned on other documents ``[N]``.

    With fewer documents than folds, each document is a fold; a single one is fitted on itself.
    """
    from sklearn.isotonic import IsotonicRegression  # slow to import, needed here alone

    folds = min(_FOLDS, int(document_index.max()) + 1)
    fold, corrected = document_index % folds, np.empty_like(gap)
    for part in range(folds):
        here = fold == part
        learned = ~here if folds > 1 else here
        fitted = IsotonicRegression(out_of_bounds="clip").fit(gap[learned], gain[learned])
        corrected[here] = fitted.predict(gap[here])
    return corrected


def _per_distance(gap: Array, distance: Array) -> Array:
    """ĝ/tv; where p = q the choice costs nothing, and the sign of ĝ decides."""
    apart = distance > 0
    return np.where(apart, gap / np.where(apart, distance, 1.0), np.where(gap > 0, np.inf, -np.inf))


def _best_threshold(score: Array, worth: Array) -> NDArray[np.bool_]:
    """Defer the positions of highest score, as many as pay best together; equal scores go together."""
    order = np.argsort(-score, kind="stable")
    ranked, total = score[order], np.concatenate([[0.0], np.cumsum(worth[order])])
    ends = np.concatenate([[True], ranked[1:] != ranked[:-1], [True]])
    best = int(np.where(ends, total, -np.inf).argmax())
    chosen = np.zeros(len(score), dtype=bool)
    chosen[order[:best]] = True
    return chosen


def _noise_if_verifier_is_true(test: Replay, loss: str, alphas: Sequence[float]) -> list[float]:
    """Mean gain of r* over one who knows p and q but no label, if labels were drawn from p, at each price."""
    total = np.zeros(len(alphas))
    for part, columns in test.columns():
        gains, chances = _possible_gains(columns, loss)
        distance = test.stats(loss).tv[part].double().unsqueeze(-1)
        for index, alpha in enumerate(alphas):
            worth = gains - alpha * distance
            knowing, expected = (chances * worth.clamp_min(0)).sum(dim=-1), (chances * worth).sum(dim=-1)
            total[index] += float((knowing - expected.clamp_min(0)).sum())
    return [float(value) for value in total / len(test)]


def _possible_gains(columns: Columns, loss: str) -> tuple[Tensor, Tensor]:
    """What is gained by deferring, for every logged token that may be the label and for the tail, and its chance."""
    tails = columns.draft_tail.unsqueeze(-1), columns.verifier_tail.unsqueeze(-1)
    draft, verifier = columns.draft.double(), columns.verifier.double()
    chances = torch.cat([verifier, tails[1].double()], dim=-1)
    if loss == "log":  # the tail is one token: the mean of log p/q over it is at least this
        gains = torch.cat([verifier, tails[1].double()], -1).clamp_min(TINY).log()
        return gains - torch.cat([draft, tails[0].double()], -1).clamp_min(TINY).log(), chances
    if loss == "sampled":
        gains = verifier - draft
    else:
        best = [torch.zeros_like(one).scatter_(-1, one.argmax(dim=-1, keepdim=True), 1.0) for one in (draft, verifier)]
        gains = best[1] - best[0]
    return torch.nn.functional.pad(gains, (0, 1)), chances
