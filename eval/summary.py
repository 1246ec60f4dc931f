"""Answers in, one row a setting out: quality with its interval, counts per token, speed against the verifier alone.

Every figure has one definition, here. Rates are sums over sums, not means of rates; intervals resample prompts, and a
ratio of speeds is taken within each resample, since both methods met the same prompts. Knows no file and no figure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .metrics import bootstrap_weights, interval, resampled_means

__all__ = ["FEW_PROMPTS", "drafter_cost_ratio", "summarise_answers"]

FEW_PROMPTS = 30
"""Below so many prompts a percentile bootstrap is too narrow, and the report says so."""

_COUNTS = ("new_tokens", "seconds", "verifier_calls", "accepted", "rejected", "deferred")


def summarise_answers(results: pd.DataFrame, resamples: int = 1000, seed: int = 0) -> pd.DataFrame:
    """Summarise a table of answers, one row a setting in its order.

    Columns: ``quality`` (mean over answers) with ``_low`` and ``_high``; ``rejection``, ``deferral`` and ``acceptance``
    per examined draft; ``calls_per_token``; ``tokens_per_second``; ``speed_ratio`` to the verifier alone with its
    interval; ``same_as``, the first setting that gave exactly the same texts; ``prompts`` and ``answers``.
    """
    prompts = list(dict.fromkeys(results["prompt_id"]))
    weights = bootstrap_weights(len(prompts), resamples, seed)
    by_key = {str(key): answers for key, answers in results.groupby("key", sort=False)}
    speeds = {key: _speed(answers, prompts, weights) for key, answers in by_key.items()}
    texts: dict[tuple[str, ...], str] = {}
    rows: list[dict[str, Any]] = []
    for key, answers in by_key.items():
        first = answers.iloc[0]
        name = first["label"] if np.isnan(first["alpha"]) else f"{first['label']} α={first['alpha']:.3g}"
        twin = texts.setdefault(tuple(answers["text"]), name)
        rows.append(
            {
                "key": key,
                "method": first["method"],
                "label": first["label"],
                "kind": first["kind"],
                "alpha": first["alpha"],
                **_quality(answers, prompts, weights),
                **_rates(answers),
                **_ratio(speeds[key], speeds.get("verifier")),
                "same_as": None if twin == name else twin,
                "prompts": len(prompts),
                "answers": len(answers),
            }
        )
    return pd.DataFrame(rows)


def _quality(answers: pd.DataFrame, prompts: list[str], weights: NDArray[np.float64]) -> dict[str, float]:
    grouped = answers.groupby("prompt_id")["quality"].agg(["sum", "count"]).reindex(prompts, fill_value=0)
    samples = resampled_means(grouped[["sum"]].to_numpy(float), grouped["count"].to_numpy(float), weights)[:, 0]
    spread = interval(float(answers["quality"].mean()), samples)
    return {"quality": spread.value, "quality_low": spread.low, "quality_high": spread.high}


def _rates(answers: pd.DataFrame) -> dict[str, float]:
    total = {name: float(answers[name].sum()) for name in _COUNTS}
    examined = total["accepted"] + total["rejected"]
    shares = {
        "rejection": total["rejected"] / examined if examined else float("nan"),
        "deferral": total["deferred"] / examined if examined else float("nan"),
        "acceptance": total["accepted"] / examined if examined else float("nan"),
    }
    tokens = max(total["new_tokens"], 1.0)
    return shares | {
        "calls_per_token": total["verifier_calls"] / tokens,
        "tokens_per_second": total["new_tokens"] / total["seconds"] if total["seconds"] else float("nan"),
        "tokens": total["new_tokens"],
    }


def _speed(
    answers: pd.DataFrame, prompts: list[str], weights: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    """Tokens per second, overall and in every resample."""
    sums = answers.groupby("prompt_id")[["new_tokens", "seconds"]].sum().reindex(prompts, fill_value=0).to_numpy(float)
    tokens, seconds = sums.sum(axis=0)
    drawn = weights @ sums
    return float(tokens / seconds), np.asarray(drawn[:, 0] / drawn[:, 1], dtype=np.float64)


def _ratio(
    speed: tuple[float, NDArray[np.float64]], verifier: tuple[float, NDArray[np.float64]] | None
) -> dict[str, float]:
    if verifier is None:
        nothing = float("nan")
        return {"speed_ratio": nothing, "speed_ratio_low": nothing, "speed_ratio_high": nothing}
    spread = interval(speed[0] / verifier[0], speed[1] / verifier[1])
    return {"speed_ratio": spread.value, "speed_ratio_low": spread.low, "speed_ratio_high": spread.high}


def drafter_cost_ratio(results: pd.DataFrame) -> float | None:
    """Seconds a token of the drafter alone over those of the verifier alone; None if either did not run."""
    alone = results[results["method"].isin(("drafter", "verifier"))]
    sums = alone.groupby("method")[["seconds", "new_tokens"]].sum()
    if not {"drafter", "verifier"} <= set(sums.index):
        return None
    each = sums["seconds"] / sums["new_tokens"]
    return float(each["drafter"] / each["verifier"])
