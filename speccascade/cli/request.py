"""What ``speccascade generate`` is asked for, and the checks that need no model: who decides, and the prompts."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..router.checks import unknown_name
from .shell import UsageError

__all__ = ["GenerateConfig", "complete"]

DEMO_ROUTER = "runs/demo/router"

BUDGET_KINDS = ("rejection", "deferral", "latency", "quality_drop")
"""The keys of `router.budgets.BUDGETS`, known before anything is imported that is slow to import."""


@dataclass(frozen=True)
class GenerateConfig:
    """What to write, with which models, and who decides.

    Attributes:
        prompts: the prompts.
        file: a text file with one prompt a line.
        drafter: the small model: a folder, a hub id, embedded:NAME or early-exit:K; default: the router's own.
        verifier: the large model: a folder, a hub id or embedded:NAME; default: the router's own.
        dtype: float32, bfloat16, float16, or auto for what suits the device.
        device: cpu, cuda, cuda:1, mps or auto.
        rule: a plug-in rule by name, such as specdecode, chow, diff, opt, token_v3 or lossy.
        rule_options: further parameters of the rule, as in --rule ensemble --rule-options.weight 0.5.
        router: folder or hub id of a trained router.
        router_rule: which rule reads what a token-level router believes, such as greedyward or token_v2 (give --alpha
            too); by default the router chooses between the two models.
        alpha: the price of a rejection, for --rule or --router; default of a router: the one stored in it.
        budget: choose the router's α from its calibration, so that it stays within this budget.
        budget_kind: what the budget is: rejection, the share of drafted tokens rejected; deferral, the share of
            positions deferred; latency, the modelled time per token relative to the verifier alone (needs
            --cost-ratio); quality_drop, the loss of quality against the verifier, kept with --confidence.
        confidence: how sure the bound of a quality_drop must be; one that the router stores (default: 0.95).
        alone: let one model write without the other, for comparison: drafter or verifier.
        gamma: how many tokens are drafted at a time.
        cost_ratio: draft only as long as it pays, a drafter's step costing this share of a verifier's, in (0, 1];
            --gamma is then the most. A latency budget reads it too, and takes drafts to be of --gamma tokens.
        max_new_tokens: where to stop at the latest.
        temperature: 0 decodes greedily.
        top_p: keep the most probable tokens of this total mass; 1 keeps all.
        top_k: keep this many most probable tokens; 0 keeps all.
        seed: the same seed writes the same text.
        chat: wrap each prompt in the model's chat template, if it has one.
        stats: print acceptance, deferral, rejection, calls and speed.
        show: colour each token by its writer.
        json: write one JSON object a prompt (prompt, text, counts) instead of text.
        out: write to this file instead of stdout; the resolved config goes beside it.
    """

    prompts: list[str] = field(default_factory=list)
    file: Path | None = None
    drafter: str | None = None
    verifier: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    rule: str | None = None
    rule_options: dict[str, float] = field(default_factory=dict)
    router: str | None = None
    router_rule: str | None = None
    alpha: float | None = None
    budget: float | None = None
    budget_kind: str = "rejection"
    confidence: float | None = None
    alone: str | None = None
    gamma: int = 5
    cost_ratio: float | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    chat: bool = True
    stats: bool = False
    show: bool = False
    json: bool = False
    out: Path | None = None


def complete(config: GenerateConfig) -> GenerateConfig:
    """Check who decides, fall back on the demo's router, and read the prompts.

    Raises:
        UsageError: options that exclude each other, nobody to decide, or no prompt.
    """
    return replace(_with_decider(config), prompts=_read_prompts(config))


def _with_decider(config: GenerateConfig) -> GenerateConfig:
    """Check that exactly one decides, and fall back on the demo's router."""
    deciders = {"--rule": config.rule, "--router": config.router, "--alone": config.alone}
    given = [flag for flag, value in deciders.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"cannot take {' and '.join(given)} together: choose one")
    if config.alone not in (None, "drafter", "verifier"):
        raise UsageError(f"--alone: expected drafter or verifier, got {config.alone!r}")
    if config.budget is not None and config.alpha is not None:
        raise UsageError("cannot take --alpha and --budget together: choose one")
    if config.budget is not None and (config.rule or config.alone):
        raise UsageError("--budget: only a router can find its own α; give --router, or --alpha for a rule")
    _check_budget(config)
    _refuse_idle_options(config)
    if given:
        return config
    if not Path(DEMO_ROUTER).is_dir():
        raise UsageError(
            f"nobody decides: give --rule, --router or --alone (no {DEMO_ROUTER} here; `speccascade demo` makes it)"
        )
    return replace(config, router=DEMO_ROUTER)


def _check_budget(config: GenerateConfig) -> None:
    """Check that what describes a budget has one to describe."""
    if config.budget_kind not in BUDGET_KINDS:
        raise UsageError(unknown_name("--budget-kind", config.budget_kind, BUDGET_KINDS))
    if config.budget is None and config.budget_kind != GenerateConfig.budget_kind:
        raise UsageError("--budget-kind: says what a budget is; give --budget")
    if config.confidence is not None and (config.budget is None or config.budget_kind != "quality_drop"):
        raise UsageError("--confidence: only a --budget of --budget-kind quality_drop has one")
    if config.budget_kind == "latency" and config.cost_ratio is None:
        raise UsageError("--budget-kind latency: needs --cost-ratio, a drafter's step over a verifier's")


def _refuse_idle_options(config: GenerateConfig) -> None:
    """Refuse what would be dropped without a word: options of a rule or a cascade where there is none."""
    if config.rule_options and config.rule is None:
        raise UsageError("--rule-options: only a rule takes them; give --rule")
    if config.router_rule is not None and (config.rule is not None or config.alone is not None):
        raise UsageError("--router-rule: only a router takes one; give --router")
    if config.alone is not None and config.alpha is not None:
        raise UsageError("--alpha: a model alone defers to nobody; give --rule or --router")
    if config.alone is not None and config.gamma != GenerateConfig.gamma:
        raise UsageError("--gamma: a model alone drafts nothing; give --rule or --router")
    if config.alone is not None and config.cost_ratio is not None:
        raise UsageError("--cost-ratio: a model alone drafts nothing; give --rule or --router")
    if config.json and config.show and config.out is None:
        raise UsageError("cannot take --json and --show together: both write to stdout; choose one, or give --out")


def budget_arguments(config: GenerateConfig) -> dict[str, Any]:
    """What ``with_budget`` is given: the budget, and what belongs to it."""
    budget: dict[str, Any] = {config.budget_kind: config.budget}
    if config.budget_kind == "latency":
        return budget | {"gamma": config.gamma, "cost_ratio": config.cost_ratio}
    return budget if config.confidence is None else budget | {"confidence": config.confidence}


def rule_parameters(config: GenerateConfig) -> dict[str, Any]:
    """Everything that ``rules.get`` is given beside the name."""
    alpha = {} if config.alpha is None else {"alpha": config.alpha}
    return alpha | config.rule_options


def _read_prompts(config: GenerateConfig) -> list[str]:
    if config.prompts and config.file is not None:
        raise UsageError("cannot take prompts from the line and from --file together: choose one")
    if config.prompts:
        return config.prompts
    if config.file is not None:
        if not config.file.is_file():
            raise UsageError(f"--file: no such file: {str(config.file)!r}")
        prompts = [line for line in config.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        if sys.stdin.isatty():
            print("reading a prompt from stdin; end with Ctrl-D", file=sys.stderr)
        prompts = [text for text in [sys.stdin.read().rstrip("\n")] if text.strip()]
    if not prompts:
        raise UsageError("no prompt: expected one on the line, in --file or on stdin")
    return prompts
