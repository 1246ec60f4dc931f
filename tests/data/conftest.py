"""Tiny pairs on disk and a handful of prompts: everything that the data package reads, made in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speccascade.cascade import VerifyBlock
from speccascade.data.config import CascadeConfig, CollectConfig
from speccascade.data.encoding import EncodedExample, encode_example
from speccascade.data.pairs import Pair, PairConfig, PairIdentity, load_pair
from speccascade.data.prompts import PromptConfig, load_examples
from speccascade.router.bundle import save_bundle
from speccascade.router.config import RouterConfig
from speccascade.router.features import build_features
from speccascade.router.heads import make_head

SPLITS = {"train": 0.5, "validation": 0.2, "test": 0.3}


@pytest.fixture(scope="session")
def pair_folders(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable[..., Any], tiny_tokenizer: Any
) -> tuple[Path, Path]:
    """Folders of a drafter (one layer) and a verifier (two layers) over one tokenizer."""
    root = tmp_path_factory.mktemp("pair")
    for name, seed, layers in (("drafter", 1, 1), ("verifier", 0, 2)):
        tiny_llama(seed=seed, layers=layers).save_pretrained(root / name)
        tiny_tokenizer.save_pretrained(root / name)
    return root / "drafter", root / "verifier"


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty prompts with references of very different lengths, as JSON lines."""
    path = tmp_path_factory.mktemp("prompts") / "sums.jsonl"
    rows = [
        {"prompt": f"what is {i} + {i}? " + "please " * (i % 5), "reference": f"it is {2 * i}. " * (1 + i % 7)}
        for i in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def collect_config(pair_folders: tuple[Path, Path], prompt_file: Path, tmp_path: Path) -> CollectConfig:
    """Twenty prompts in five shards, into a fresh folder."""
    return CollectConfig(
        pair=PairConfig(drafter=str(pair_folders[0]), verifier=str(pair_folders[1]), dtype="float32", device="cpu"),
        prompts=PromptConfig(source=str(prompt_file), chat=False, splits=dict(SPLITS)),
        out=str(tmp_path / "traces"),
        top_k=4,
        batch_tokens=256,
        shard_prompts=4,
    )


@pytest.fixture(scope="session")
def cascade_pair(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable[..., Any], tiny_tokenizer: Any) -> Pair:
    """A verifier of four layers that often agrees with its own first three; some letters end an answer."""
    folder = tmp_path_factory.mktemp("cascade") / "verifier"
    tiny_llama(seed=0, layers=4).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    pair = load_pair(PairConfig(drafter="early-exit:3", verifier=str(folder), dtype="float32", device="cpu"))
    pair.verifier.generation_config.eos_token_id = [2, 5, 17]
    return pair


@pytest.fixture
def cascade_config(collect_config: CollectConfig, prompt_file: Path) -> CollectConfig:
    """Eight prompts in two shards, logged from speculative runs."""
    return replace(
        collect_config,
        source="cascade",
        batch_tokens=CollectConfig.batch_tokens,
        prompts=PromptConfig(source=str(prompt_file), chat=False, limit=8, splits={"train": 1.0}),
        splits=("train",),
        cascade=CascadeConfig(gamma=3, max_new_tokens=24, batch_size=3),
    )


@pytest.fixture
def encoded(cascade_config: CollectConfig, cascade_pair: Pair) -> list[EncodedExample]:
    """The eight prompts as token ids, their text beside them."""
    return [
        EncodedExample(e.prompt_id, "train", *encode_example(e, cascade_pair.tokenizer, cascade_config.prompts), e)
        for e in load_examples(cascade_config.prompts)
    ]


@pytest.fixture
def save_router(tmp_path: Path) -> Callable[..., str]:
    """`save_router(identity, kind="mlp", hidden=(8,), context=0)` writes a bundle with random weights for a pair."""

    def save(identity: PairIdentity, kind: str = "mlp", hidden: tuple[int, ...] = (8,), context: int = 0) -> str:
        head = make_head(kind, "gap", "verified", hidden=hidden, context=context)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for values in head.parameters():
                values.copy_(0.5 * torch.randn(values.shape, generator=generator))
        shared, own = (torch.randn(count, 50, 1, 64, generator=generator) for count in (1, 2))
        probs = (shared + own).softmax(dim=-1)
        features = build_features(VerifyBlock.from_probs(*probs).stats, "verified").flatten(end_dim=-2)
        head.set_normalisation(features.mean(dim=0), features.std(dim=0))  # so that it has opinions, right or wrong
        if kind == "attention":
            with torch.no_grad():
                head.trunk.last.bias -= head(features.unsqueeze(1)).mean(dim=(0, 1))  # type: ignore[operator,union-attr]
        config = RouterConfig(**asdict(identity), trace_digest="d" * 64, default_alpha=0.3, calibration={})
        save_bundle(tmp_path / "router", head.eval(), config)
        return str(tmp_path / "router")

    return save
