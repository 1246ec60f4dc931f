"""Routers over the most probable tokens and over hidden states, from head to bundle to engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from speccascade import LearnedRouter, SpeculativeCascade
from speccascade.cascade import Stats
from speccascade.cascade.engine import Round
from speccascade.router.bundle import load_bundle, save_bundle
from speccascade.router.config import RouterConfig
from speccascade.router.features import FEATURE_SETS, build_features, feature_width, needs_hidden
from speccascade.router.heads import RouterHead, make_head

RICH_SETS = [name for name in FEATURE_SETS if "+" in name]
SIZES = (16, 32)  # of the drafter's and the verifier's hidden states
PROMPTS = torch.randint(3, 64, (3, 6), generator=torch.Generator().manual_seed(3))


def plain_stats(models: Sequence[LlamaForCausalLM], sequence: list[int]) -> Stats:
    """The statistics of every position that a plain forward of both models predicts ``[L]``."""
    with torch.inference_mode():
        outputs = [model(torch.tensor([sequence]), output_hidden_states=True) for model in models]
    probs = [out.logits[0].softmax(dim=-1) for out in outputs]
    states = [out.hidden_states[-1][0] for out in outputs]
    return Stats(*probs, *probs, hidden=(states[0], states[1]))


def opinionated_head(feature_set: str, models: Sequence[LlamaForCausalLM]) -> RouterHead:
    """Random weights, normalised and centred on what the pair gives, so that some positions are deferred."""
    head = make_head("mlp", "gap", feature_set, (8,), hidden_sizes=SIZES if needs_hidden(feature_set) else ())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for values in head.parameters():
            values.copy_(torch.randn(values.shape, generator=generator) * 0.3)
    sequence = torch.randint(3, 64, (200,), generator=generator).tolist()
    features = build_features(plain_stats(models, sequence), feature_set)
    head.set_normalisation(features.mean(dim=0), features.std(dim=0))
    with torch.no_grad():
        head.trunk[-1].bias -= head._outputs(features).mean(dim=0)
    return head.eval()


@pytest.fixture(scope="module")
def models(tiny_llama: Callable[..., LlamaForCausalLM]) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    return tiny_llama(seed=1, layers=1, hidden=SIZES[0]), tiny_llama(seed=0, layers=2, hidden=SIZES[1])


@dataclass(frozen=True)
class Exported:
    """A head, and the bundle that was written of it."""

    head: RouterHead
    config: RouterConfig
    folder: Path

    @property
    def feature_set(self) -> str:
        return self.head.feature_set


@pytest.fixture(scope="module", params=RICH_SETS)
def rich(
    request: pytest.FixtureRequest, models: Any, config: RouterConfig, tmp_path_factory: pytest.TempPathFactory
) -> Exported:
    head, folder = opinionated_head(request.param, models), tmp_path_factory.mktemp("rich")
    return Exported(head, save_bundle(folder, head, config), folder)


@pytest.mark.parametrize("backend", ["onnx", "torch"])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_decisions_of_the_engine_are_those_of_a_plain_forward(
    rich: Exported, temperature: float, backend: str, models: Any
) -> None:
    head, feature_set = rich.head, rich.feature_set
    router = LearnedRouter.from_pretrained(rich.folder, alpha=0.1, backend=backend)
    rounds = list[tuple[Round, list[int]]]()

    class Watcher:
        def observe(self, round_: Round, rows: Sequence[int], kept: Sequence[int]) -> None:
            rounds.append((round_, list(rows)))

    cascade = SpeculativeCascade(*models, router, gamma=4, observer=Watcher())
    written = cascade.generate(PROMPTS, max_new_tokens=20, temperature=temperature, seed=1).sequences
    column = 0 if temperature == 0 else 1
    seen, deferred = 0, 0
    for round_, prompts in rounds:
        for place, prompt in enumerate(prompts):
            start, count = int(round_.block.positions[place, 0]), round_.lengths[place]
            sequence = [*written[prompt, :start].tolist(), *round_.block.tokens[place, :count].tolist()]
            stats = plain_stats(models, sequence).select(slice(start - 1, -1))
            with torch.inference_mode():
                margin = (
                    head(build_features(stats, feature_set))[:, column] - 0.1 * round_.block.stats.tv[place, :count]
                )
            clear = margin.abs() > 1e-4
            assert torch.equal((margin > 0)[clear], round_.target.deferred[place, :count][clear])
            seen, deferred = seen + int(clear.sum()), deferred + int((margin > 0).sum())
    assert seen > 40
    assert 0 < deferred < seen


def test_a_bundle_remembers_how_wide_its_features_are(rich: Exported) -> None:
    head, bundle = rich.head, load_bundle(rich.folder)
    assert bundle.config == rich.config
    assert bundle.config.features == FEATURE_SETS[rich.feature_set]
    assert bundle.config.hidden_sizes == head.spec.hidden_sizes
    again = bundle.head()
    assert again.width == head.width == feature_width(rich.feature_set, head.spec.hidden_sizes)
    features: Tensor = torch.randn(5, head.width)
    assert torch.equal(again(features), head(features))


def test_only_a_router_that_reads_hidden_states_asks_for_them(
    rich: Exported, models: Any, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    router, other = LearnedRouter.from_pretrained(rich.folder), tiny_llama(hidden=32)
    assert router.needs_hidden == needs_hidden(rich.feature_set) == router.with_alpha(2.0).needs_hidden
    if not router.needs_hidden:
        SpeculativeCascade(other, models[1], router)
        return
    with pytest.raises(ValueError, match=r"expected models with hidden states of sizes \(16, 32\), got \(32, 32\)"):
        SpeculativeCascade(other, models[1], router)
