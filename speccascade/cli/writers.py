"""The models, the tokenizer and the rule behind ``speccascade generate``, loaded and checked against each other."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..cascade import AdaptiveGamma, SingleModel, SpeculativeCascade
from ..cascade.results import GenerationResult
from ..data.encoding import encode_prompt, end_token_ids
from ..data.pairs import Pair, PairConfig, load_pair
from ..data.prompts import PromptConfig
from ..router import rules
from ..router.bundled import Bundled
from ..router.loading import load_router
from .request import GenerateConfig, budget_arguments, rule_parameters
from .shell import UsageError

__all__ = ["Writer", "load_writer"]

DEMO_DRAFTER = "runs/demo/drafter"
DEMO_VERIFIER = "embedded:smollm2-135m-instruct"


@dataclass(frozen=True)
class Writer:
    """A loaded pair (or one model of it) that turns prompts into text."""

    config: GenerateConfig
    pair: Pair
    model: SpeculativeCascade | SingleModel

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the pair."""
        return self.pair.tokenizer

    def write(self, prompt: str) -> GenerationResult:
        """Generate after one prompt."""
        config = self.config
        ids = encode_prompt(prompt, self.tokenizer, self.prompts)
        return self.model.generate(
            torch.tensor([ids], device=self.pair.verifier.device),
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            eos_token_id=end_token_ids(self.tokenizer, self.prompts, self.pair.verifier),
            seed=config.seed,
            ledger=config.show,
        )

    def text_of(self, result: GenerationResult) -> str:
        """Decode what was written, without the prompt and special tokens."""
        ids = result.sequences[0, result.prompt_length :]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()

    @property
    def prompts(self) -> PromptConfig:
        """How a prompt is put to the model: in the chat template if there is one and it is wanted."""
        return PromptConfig(chat=self.config.chat and bool(getattr(self.tokenizer, "chat_template", None)))


def load_writer(config: GenerateConfig) -> tuple[GenerateConfig, Writer]:
    """Load what a config names; return it with every default filled in, and the writer.

    Raises:
        ValueError: a router that belongs to another pair, or an argument out of range.
        OSError: a model or router that cannot be found.
    """
    if config.rule is not None:
        rules.get(config.rule, **rule_parameters(config))  # before any model is read
    router = _load_router(config)
    config = _with_models(config, router)
    models = PairConfig(str(config.drafter), str(config.verifier), dtype=config.dtype, device=config.device)
    pair = load_pair(models, decoding=True)
    return config, Writer(config, pair, _make_model(config, pair, router))


def _load_router(config: GenerateConfig) -> Bundled | None:
    if config.router is None:
        return None
    router: Bundled = load_router(config.router, config.alpha, config.router_rule)
    if config.budget is not None:
        router = router.with_budget(**budget_arguments(config), greedy=config.temperature == 0)
    return router


def _with_models(config: GenerateConfig, router: Bundled | None) -> GenerateConfig:
    """Fill in the pair that a router was trained for, or the demo's."""
    if router is not None:
        own = (router.config.drafter, router.config.verifier)
    else:
        own = (DEMO_DRAFTER, DEMO_VERIFIER)
        if config.drafter is None and not Path(own[0]).is_dir():
            raise UsageError(f"--drafter: needed and not given (`speccascade demo` makes one in {DEMO_DRAFTER})")
    return replace(config, drafter=config.drafter or own[0], verifier=config.verifier or own[1])


def _make_model(config: GenerateConfig, pair: Pair, router: Bundled | None) -> SpeculativeCascade | SingleModel:
    if config.alone == "drafter":
        return SingleModel(pair.drafter, role="drafter", vocab_size=pair.vocab_size)
    if config.alone == "verifier":
        return SingleModel(pair.verifier, vocab_size=pair.vocab_size)
    if router is not None:
        router.check_pair(**asdict(pair.identity))
        rule: Any = router
    else:
        rule = rules.get(str(config.rule), **rule_parameters(config))
    gamma = config.gamma if config.cost_ratio is None else AdaptiveGamma(config.cost_ratio, maximum=config.gamma)
    return SpeculativeCascade(pair.drafter, pair.verifier, rule, gamma=gamma, vocab_size=pair.vocab_size)
