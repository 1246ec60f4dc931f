"""Tiny pairs on disk and a handful of prompts: everything that the data package reads, made in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speccascade.data.config import CollectConfig
from speccascade.data.pairs import PairConfig
from speccascade.data.prompts import PromptConfig

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
