"""What to collect, over what, and where it goes: the settings of ``speccascade collect``."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cascade.checks import check_count, is_integer
from ..cascade.distributions import Sampling
from ..router import rules
from ..router.checks import check_range, unknown_name
from .pairs import PairConfig
from .prompts import PromptConfig

__all__ = ["EXECUTORS", "SOURCES", "CascadeConfig", "CollectConfig", "RayConfig"]

SOURCES = ("teacher_forced", "cascade")
MOST_DRAFTED = 4096
"""Every round draws numbers for so many drafts, however few tokens are left to write."""

EXECUTORS = ("local", "ray")


@dataclass(frozen=True)
class CascadeConfig:
    """How the speculative runs go whose verified positions are logged.

    Args:
        rule: the plug-in rule that decides, by name.
        rule_options: its parameters, such as {alpha: 0.3}.
        router: folder or hub id of a trained router that decides instead of a rule.
        alpha: the price of a rejection, for the rule or the router.
        gamma: tokens drafted a block.
        max_new_tokens: where an answer stops at the latest.
        batch_size: prompts that run together.
        seed: with each prompt's id it decides what is drawn, whatever else runs.
        scorer: grades the answers of `counterfactuals` against the reference, such as 'final_answer'; by default the
            task's own.
        counterfactuals: at up to so many disagreements a prompt, let the verifier end the answer after the drafter's
            token and after its own, and log how good the two answers are; 0 for none.

    Raises:
        ValueError: a number out of range, a rule that is unknown or cannot be built from its options, a rule beside a
            router, α given twice, or a `scorer` without `counterfactuals`.
    """

    rule: str = "specdecode"
    rule_options: dict[str, float] = field(default_factory=dict)
    router: str | None = None
    alpha: float | None = None
    gamma: int = 5
    max_new_tokens: int = 256
    batch_size: int = 8
    seed: int = 0
    scorer: str | None = None
    counterfactuals: int = 0

    def __post_init__(self) -> None:
        for name in ("gamma", "max_new_tokens", "batch_size"):
            check_count(name, getattr(self, name))
        for name in ("seed", "counterfactuals"):
            value = getattr(self, name)
            if not is_integer(value) or value < 0:
                raise ValueError(f"{name}: expected an integer >= 0, got {value!r}")
        if self.gamma > MOST_DRAFTED:
            raise ValueError(f"gamma: expected at most {MOST_DRAFTED:,}, got {self.gamma:,}")
        if self.router is None:
            rules.get(self.rule, **self.parameters)  # a rule that cannot be built is known before a model is loaded
        else:
            self._check_router_alone()
        if self.scorer is not None and not self.counterfactuals:
            raise ValueError(f"counterfactuals: expected at least 1 beside scorer {self.scorer!r}, got 0")

    @property
    def parameters(self) -> dict[str, float]:
        """What the rule is built with: its options, and `alpha` where it is given.

        Raises:
            ValueError: α is given in both places.
        """
        if self.alpha is None:
            return dict(self.rule_options)
        if "alpha" in self.rule_options:
            raise ValueError(
                f"alpha: expected it once, got {self.alpha!r} and {self.rule_options['alpha']!r} in rule_options"
            )
        return {**self.rule_options, "alpha": self.alpha}

    def _check_router_alone(self) -> None:
        if self.rule != "specdecode" or self.rule_options:
            raise ValueError(
                f"router: expected a rule or a router, got router {self.router!r} beside "
                + (f"rule {self.rule!r}" if self.rule != "specdecode" else f"rule_options {self.rule_options!r}")
            )
        if self.alpha is not None:
            check_range("alpha", self.alpha, -float("inf"), float("inf"))


@dataclass(frozen=True)
class RayConfig:
    """How a Ray cluster shares the work.

    Args:
        workers: actors, each with both models.
        cpus: cores of each.
        gpus: GPUs of each; by default one where the cluster has any.
        address: of the cluster, such as 'auto'; by default the one around, or a new one on this host.
    """

    workers: int = 2
    cpus: float = 1
    gpus: float | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        check_count("ray.workers", self.workers)
        if self.cpus <= 0:
            raise ValueError(f"ray.cpus: expected a number above 0, got {self.cpus}")
        if self.gpus is not None and self.gpus < 0:
            raise ValueError(f"ray.gpus: expected a number >= 0, got {self.gpus}")


@dataclass(frozen=True)
class CollectConfig:
    """What to run over what, and where the traces go.

    Args:
        pair: the two models.
        prompts: prompts with references.
        out: folder of the traces; a run that was broken off there is continued.
        source: 'teacher_forced' scores both models along the references; 'cascade' logs what speculative runs verified.
        cascade: how those runs go; read with source 'cascade' only.
        splits: which splits of the prompts to collect.
        temperature: the temperature that q and p are processed with (raw confidences are always at 1).
        top_k: how many of each model's most probable tokens are logged with a position.
        hidden: also log both models' last hidden states as float16: thousands of bytes a position.
        max_tokens: score at most so many tokens of each reference.
        skip_long: leave out prompts that do not fit into the models' context, instead of refusing them.
        batch_tokens: teacher-forced, tokens a batch, padding included; bounds the memory.
        shard_prompts: prompts a shard: what a killed run may lose.
        executor: 'local' (this process, or every process of torchrun and accelerate launch) or 'ray' (many hosts).
        ray: what the actors are given; read with executor 'ray' only.
        allow_large: collect without asking, however large the traces will be.
    """

    pair: PairConfig = field(default_factory=PairConfig)
    prompts: PromptConfig = field(default_factory=PromptConfig)
    out: str = "runs/demo/traces"
    source: str = "teacher_forced"
    cascade: CascadeConfig = field(default_factory=CascadeConfig)
    splits: tuple[str, ...] = ("train", "validation", "test")
    temperature: float = 1.0
    top_k: int = 16
    hidden: bool = False
    max_tokens: int | None = None
    skip_long: bool = False
    batch_tokens: int = 2048
    shard_prompts: int = 64
    executor: str = "local"
    ray: RayConfig = field(default_factory=RayConfig)
    allow_large: bool = False

    def __post_init__(self) -> None:
        for name in ("top_k", "batch_tokens", "shard_prompts"):
            check_count(name, getattr(self, name))
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens)
        if not self.splits or len(set(self.splits)) < len(self.splits):
            raise ValueError(f"splits: expected different names, at least one, got {list(self.splits)}")
        for split in self.splits:
            if split not in self.prompts.splits:
                raise ValueError(unknown_name("splits", split, self.prompts.splits))
        if self.executor not in EXECUTORS:
            raise ValueError(unknown_name("executor", self.executor, EXECUTORS))
        if self.executor != "ray" and self.ray != RayConfig():
            raise ValueError("ray: expected no settings beside executor 'local', got some; set executor: ray")
        if self.source not in SOURCES:
            raise ValueError(unknown_name("source", self.source, SOURCES))
        if self.source != "cascade" and self.cascade != CascadeConfig():
            raise ValueError(
                "cascade: expected no settings of a cascade with source 'teacher_forced'; set source: cascade"
            )
        if self.source == "cascade" and self.hidden:
            raise ValueError("hidden: expected false with source 'cascade', which logs no hidden states, got true")
        if self.source == "cascade" and self.batch_tokens != type(self).batch_tokens:
            raise ValueError(
                "batch_tokens: expected none with source 'cascade', whose batches are of cascade.batch_size prompts, "
                f"got {self.batch_tokens}"
            )
        if self.source == "cascade" and self.max_tokens is not None:
            raise ValueError(
                "max_tokens: expected none with source 'cascade', which scores no reference; "
                f"set cascade.max_new_tokens, got {self.max_tokens}"
            )
        task = self.prompts.task_name
        if self.cascade.counterfactuals and self.scorer is None:
            raise ValueError(
                "cascade.scorer: expected a name beside counterfactuals, such as 'final_answer', since "
                f"{'the prompts have no task' if task is None else f'task {task!r} has no scorer'}; got none"
            )
        if not str(self.out):
            raise ValueError("out: expected a folder, got ''")
        Sampling(temperature=self.temperature)

    @property
    def scorer(self) -> str | None:
        """Name of what grades the answers of counterfactuals: as given, else the task's own, if it has one."""
        return self.cascade.scorer or self.prompts.preset.scorer
