"""A small pair on disk, for commands that read models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory, tiny_llama, tiny_tokenizer) -> tuple[Path, Path]:
    """Folders of a drafter and a verifier: the verifier's weights with some noise draft."""
    root = tmp_path_factory.mktemp("models")
    verifier, drafter = tiny_llama(0), tiny_llama(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in drafter.parameters():
            weights += 0.02 * torch.randn(weights.shape, generator=generator)
    for name, model in (("drafter", drafter), ("verifier", verifier)):
        model.save_pretrained(root / name)
        tiny_tokenizer.save_pretrained(root / name)
    return root / "drafter", root / "verifier"
