"""What the tests of the engine share: a chi-square of sequences against a law worked out by hand."""

from collections import Counter
from collections.abc import Callable

import pytest
from scipy.stats import chi2


@pytest.fixture(scope="session")
def check_follows() -> Callable[[Counter[tuple[int, ...]], dict[tuple[int, ...], float], int], None]:
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
