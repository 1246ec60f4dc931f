"""Answers in, one row a setting out: quality with its interval, counts per token, speed against the verifier alone.

Every figure has one definition, here. Rates are sums over sums, not means of rates. Speed is the median over prompts,
so that one hiccup of the machine does not decide it, and its ratio is taken prompt by prompt. Intervals resample
prompts. Knows no file and no figure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..data.resampling import bootstrap_weights, interval, resampled_means

__all__ = ["FEW_PROMPTS", "drafter_cost_ratio", "summarise_answers"]

FEW_PROMPTS = 30
"""Below so many prompts a percentile bootstrap is too narrow, and the report says so."""

_COUNTS = ("new_tokens", "verifier_calls", "accepted", "rejected", "deferred")


def summarise_answers(results: pd.DataFrame, resamples: int = 1000, seed: int = 0) -> pd.DataFrame:
    """Summarise a table of answers, one row a setting in its order.

    Columns: ``quality`` (mean over answers) with ``_low`` and ``_high``; ``rejection``, ``deferral`` and ``acceptance``
    per examined draft, NaN for a model alone; ``calls_per_token``; ``tokens_per_second``; ``speed_ratio`` to the
    verifier alone with its interval; ``same_as``, the first setting that gave exactly the same texts;
    ``prompts`` and ``answers``.
    """
    prompts = list(dict.fromkeys(results["prompt_id"]))
    weights = bootstrap_weights(len(prompts), resamples, seed)
    by_key = {str(key): answers for key, answers in results.groupby("key", sort=False)}
    speeds = {key: _speeds(answers, prompts) for key, answers in by_key.items()}
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
                "tokens_per_second": float(np.median(speeds[key])),
                **_ratio(speeds[key], speeds.get("verifier"), weights),
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
    # What a model alone writes is neither accepted nor rejected: nothing examined it.
    examined = 0.0 if answers["kind"].iat[0] == "single" else total["accepted"] + total["rejected"]
    names = {"rejection": "rejected", "deferral": "deferred", "acceptance": "accepted"}
    shares = {rate: total[count] / examined if examined else float("nan") for rate, count in names.items()}
    calls = total["verifier_calls"] / max(total["new_tokens"], 1.0)
    return {**shares, "calls_per_token": calls, "tokens": total["new_tokens"]}


def _speeds(answers: pd.DataFrame, prompts: list[str]) -> NDArray[np.float64]:
    """Tokens per second on each prompt."""
    sums = answers.groupby("prompt_id")[["new_tokens", "seconds"]].sum().reindex(prompts).to_numpy(float)
    return np.asarray(sums[:, 0] / sums[:, 1], dtype=np.float64)


def _ratio(
    speeds: NDArray[np.float64], verifier: NDArray[np.float64] | None, weights: NDArray[np.float64]
) -> dict[str, float]:
    """Median over prompts of the ratio to the verifier alone on the same prompt."""
    if verifier is None:
        nothing = float("nan")
        return {"speed_ratio": nothing, "speed_ratio_low": nothing, "speed_ratio_high": nothing}
    ratios = speeds / verifier
    drawn = [np.median(np.repeat(ratios, counts)) for counts in weights.astype(int)]
    spread = interval(float(np.median(ratios)), drawn)
    return {"speed_ratio": spread.value, "speed_ratio_low": spread.low, "speed_ratio_high": spread.high}


def drafter_cost_ratio(results: pd.DataFrame) -> float | None:
    """Time a token of the drafter alone over that of the verifier alone, median over prompts; None without both."""
    prompts = list(dict.fromkeys(results["prompt_id"]))
    alone = {name: results[results["method"] == name] for name in ("drafter", "verifier")}
    if any(answers.empty for answers in alone.values()):
        return None
    drafter, verifier = (_speeds(answers, prompts) for answers in alone.values())
    return float(np.median(verifier / drafter))
