"""Which settings a live run compares: every method at the αs that spend the same offline budgets.

α is found on the validation split of the traces, at shares of lossless decoding's rejection, so that no method is
compared at a luckier setting than another. Knows no model and runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..cascade.blocks import TargetRule
from ..cascade.distributions import Sampling
from ..data.resampling import bootstrap_weights, interval, resampled_means
from ..router import rules
from ..router.checks import check_choice
from .grid import alpha_for_rejection
from .methods import DIALS, Method, missing_arguments, plug_in_methods
from .replay import Replay

__all__ = ["SINGLE_MODELS", "Setting", "check_sampling", "plan_settings", "replay_settings", "samples_as_traced"]

SINGLE_MODELS: dict[str, str] = {"verifier": "Verifier alone", "drafter": "Drafter alone"}


@dataclass(frozen=True)
class Setting:
    """One method at one α, as it runs live.

    ``rule`` is None for a model that decodes alone. ``budgets`` are the shares of lossless decoding's rejection that
    led to this α; several can lead to the same one. ``key`` names the setting in a run folder.
    """

    method: str
    label: str
    kind: str
    alpha: float | None
    budgets: tuple[float, ...]
    key: str
    rule: TargetRule | None


def plan_settings(
    methods: Sequence[str],
    routers: Mapping[str, Method],
    alphas: Mapping[str, Sequence[float]],
    budgets: Sequence[float],
    validation: Replay | None,
    greedy: bool,
    router_digests: Mapping[str, str],
) -> list[Setting]:
    """List the settings in the order in which they run and are shown.

    Args:
        methods: names of rules, ``verifier``, ``drafter``, and ``router`` for all of ``routers``.
        routers: trained routers by name.
        alphas: settings given by hand, by method; they take the place of the budgets.
        budgets: shares of lossless decoding's rejection.
        validation: where α is chosen; None if every α is given.
        greedy: whether the run is at temperature 0.
        router_digests: what tells two bundles of one name apart.

    Raises:
        ValueError: an unknown method or one that needs more than a dial, αs for what has no dial, or no traces where
            an α must be chosen.
    """
    for name in alphas:
        check_choice("alphas", name, [*DIALS, *(routers or ["router"])])
    settings: list[Setting] = []
    for name in _expand(methods, routers):
        if name in SINGLE_MODELS:
            settings.append(Setting(name, SINGLE_MODELS[name], "single", None, (), name, None))
            continue
        method = routers[name] if name in routers else plug_in_methods([name])[0]
        mark = f"#{router_digests[name]}" if name in routers else ""
        loss = "greedy" if greedy else "sampled"
        for alpha, shares in _choose_alphas(method, alphas.get(name, ()), budgets, validation, loss).items():
            fixed = math.isnan(alpha)
            key = name if fixed else f"{name}@{alpha:.6g}{mark}"
            # Live, a router picks the gap by the distributions it meets, as users run it: hence the "greedy" build.
            rule = method.build(alpha, "greedy")
            settings.append(Setting(name, method.label, method.kind, None if fixed else alpha, shares, key, rule))
    return settings


def samples_as_traced(sampling: Sampling, traced: float) -> bool:
    """Whether traces at temperature ``traced`` tell what a run decides: greedily, or sampling from all they saw."""
    if sampling.is_greedy:
        return True
    return sampling.temperature == traced and sampling.top_p == 1 and sampling.top_k == 0


def check_sampling(settings: Sequence[Setting], sampling: Sampling, traced: float) -> None:
    """Refuse αs that were chosen by budget on traces of other distributions; αs given by hand are free.

    Raises:
        ValueError: a temperature that is neither 0 nor ``traced``, or a cut-off by top_p or top_k.
    """
    if not any(setting.budgets for setting in settings) or samples_as_traced(sampling, traced):
        return
    raise ValueError(
        f"temperature: expected 0 or the traces' {traced:g}, with nothing cut off by top_p or top_k, since the traces "
        f"choose α by budget; got {sampling.temperature:g} with top_p={sampling.top_p:g} and top_k={sampling.top_k}; "
        "collect traces at this temperature, or give alphas"
    )


def _expand(methods: Sequence[str], routers: Mapping[str, Method]) -> list[str]:
    expanded: list[str] = []
    known = [*SINGLE_MODELS, *(name for name in rules.RULES if not missing_arguments(name)), "router", *routers]
    for name in methods:
        if name in rules.RULES and (missing := missing_arguments(name)):
            raise ValueError(
                f"methods: expected rules that need nothing but a dial, got {name!r}, which also needs a value for "
                f"{', '.join(missing)}; known: {', '.join(known)}"
            )
        check_choice("methods", name, known)
        deciding = [router for router, method in routers.items() if not method.twin]
        expanded += deciding if name == "router" else [name]
    return list(dict.fromkeys(expanded))


def _choose_alphas(
    method: Method, given: Sequence[float], budgets: Sequence[float], validation: Replay | None, loss: str
) -> dict[float, tuple[float, ...]]:
    """Map each α to the budgets that led to it; a rule without a dial has the one setting NaN."""
    if not method.has_dial:
        return {float("nan"): ()}
    if given:
        return {float(alpha): () for alpha in given}
    if validation is None:
        raise ValueError(
            f"alphas: expected settings for {method.name!r}, or traces from which to choose them by budget, got neither"
        )
    lossless = float(validation.stats(loss).tv.mean())
    chosen: dict[float, tuple[float, ...]] = {}
    for share in budgets:
        alpha = float(f"{alpha_for_rejection(method, validation, share * lossless, loss):.6g}")
        chosen[alpha] = (*chosen.get(alpha, ()), share)
    return chosen


def replay_settings(
    settings: Sequence[Setting], test: Replay, loss: str, resamples: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """What the traces say about each setting on the test split: quality with its interval, rejection, deferral."""
    lossless = rules.get("specdecode")
    counts, weights = test.count(), bootstrap_weights(test.num_documents, resamples, seed)
    rows: list[dict[str, Any]] = []
    for setting in settings:
        if setting.rule is None and setting.method == "drafter":
            sums = test.sum_outcome(test.choice(test.stats(loss).tv < 0, loss))
        else:
            sums = test.sums(lossless if setting.rule is None else setting.rule, loss)
        loss_mean, rejection, rejection_high, deferral = sums.sum(axis=0)[:4] / counts.sum()
        spread = interval(loss_mean, resampled_means(sums[:, :1], counts, weights)[:, 0])
        alone = setting.rule is None
        rows.append(
            {
                "key": setting.key,
                "offline_quality": 1 - spread.value,
                "offline_low": 1 - spread.high,
                "offline_high": 1 - spread.low,
                "offline_rejection": math.nan if alone else rejection,
                "offline_rejection_high": math.nan if alone else rejection_high,
                "offline_deferral": math.nan if alone else deferral,
            }
        )
    return pd.DataFrame(rows)
