"""Token rules at equal rates of rejection: how likely they make the label, what that costs in diversity, and pairs.

Each rule is read off its own frontier, whose settings validation chose, at fixed rejections per position. Between two
settings it mixes them at random, so chance, entropy and distinctness are means over that mixture; beyond its last
setting it spends no more, and says what it spends. Differences between two rules are taken within each resample of the
documents. The diversity of settings is known; it is not resampled.

Knows no rule and no file. Shapes: ``M`` setting, ``R`` resample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..data.resampling import interval
from .ledger import Measured
from .methods import Method
from .metrics import curve_at

__all__ = ["RATES", "RATE_LOSS", "compare_at_rates", "pair_rules"]

RATE_LOSS = "sampled"
RATES = (0.05, 0.10, 0.15, 0.20, 0.25, 0.30)

_RIVALS = ("token_v1", "token_v2", "token_v3", "lossy")
_ENTROPY, _DISTINCTNESS = 4, 5
_COLUMNS = (
    "rate", "method", "label", "against", "against_label", "right", "low", "high", "spent", "entropy", "distinctness",
)  # fmt: skip


def pair_rules(methods: Sequence[Method]) -> list[tuple[Method, Method]]:
    """List who is compared with whom: a belief's rule with its twin on p°, and `Greedyward` with all that rival it.

    Rivals are the token rules of the literature and colder verifiers; a `Greedyward` on a belief meets them too.
    """
    tokens = {method.name: method for method in methods if method.kind == "token"}
    twins = [(one, tokens[one.twin]) for one in methods if one.twin in tokens]
    rivals = [other for name, other in tokens.items() if name in _RIVALS or name.startswith("verifier_t")]
    ours = [method for method in methods if "greedyward" in (method.name, method.twin)]
    return [*twins, *((one, other) for one in ours for other in rivals)]


def compare_at_rates(
    methods: Sequence[Method], paths: Mapping[str, list[int]], measured: Measured, rates: Sequence[float] = RATES
) -> pd.DataFrame:
    """Read every token rule, and every pair of `pair_rules`, at each rate of rejection: a row each.

    Args:
        methods: all that were measured under the loss of a sample; those without a token rule are passed over.
        paths: by name, the settings in order of rejection that validation chose, the drafter first.
        measured: what the settings came to.
        rates: rejections per position; those beyond lossless decoding's are left out.

    Returns:
        Columns ``rate``, ``method``, ``label``, ``against`` and ``against_label`` (empty for a rule by itself),
        ``right`` (chance that a sample is the label, or the difference: method minus the other) with ``low`` and
        ``high``, the rejection that is ``spent``, and ``entropy`` and ``distinctness``, of a pair the differences.
    """
    shown = [method for method in methods if method.kind == "token" or method.twin]
    rows = []
    for rate in (rate for rate in rates if rate <= measured.limit.value):
        found = {method.name: _read(paths[method.name], measured, rate) for method in shown}
        rows += [_row(rate, (method, None), found[method.name]) for method in shown]
        rows += [
            _row(rate, (one, other), tuple(a - b for a, b in zip(found[one.name], found[other.name], strict=True)))
            for one, other in pair_rules(methods)
        ]
    return pd.DataFrame(rows, columns=list(_COLUMNS))


_Read = tuple[NDArray[np.float64], ...]


def _read(path: list[int], measured: Measured, rate: float) -> _Read:
    """Chance of the label on all documents and in every resample, rejection spent, entropy and distinctness."""
    means = measured.means[path]
    rejection = means[:, 1]
    right = 1 - curve_at(rejection, means[:, 0], rate)
    samples = 1 - curve_at(measured.rejections[:, path], measured.losses[:, path], rate)
    diversity = [curve_at(rejection, means[:, column], rate) for column in (_ENTROPY, _DISTINCTNESS)]
    return (right, samples, np.asarray(min(rejection.max(), rate)), *diversity)


def _row(rate: float, pair: tuple[Method, Method | None], found: _Read) -> dict[str, Any]:
    method, other = pair
    right, samples, spent, entropy, distinctness = found
    spread = interval(float(right), samples)
    names = {"method": method.name, "label": method.label}
    names |= {"against": other.name if other else "", "against_label": other.label if other else ""}
    figures = {"right": spread.value, "low": spread.low, "high": spread.high, "spent": float(spent)}
    return {"rate": rate, **names, **figures, "entropy": float(entropy), "distinctness": float(distinctness)}
