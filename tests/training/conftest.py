"""A made-up trace folder whose truth is known: how often each model is right is a given function of its confidence."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speccascade.cascade.statistics import STAT_FIELDS, Stats
from speccascade.data.manifest import Manifest, Shard, TracePlan
from speccascade.data.shards import HIDDEN_COLUMNS, SCHEMA_VERSION, write_shard

VOCABULARY = 24
SPLITS = {"train": 0.6, "validation": 0.2, "test": 0.2}


def true_confidences(stats: Stats) -> Tensor:
    """How often the drafter's and the verifier's preferred token is right ``[N, 2]``, whatever the models claim.

    The drafter is overconfident where it disagrees, as real ones are; both are given the same chance where they agree.
    """
    together = 0.3 + 0.65 * stats.verifier_max
    draft = torch.where(stats.argmax_agree > 0.5, together, 0.35 * stats.draft_max)
    verifier = torch.where(stats.argmax_agree > 0.5, together, 0.6 * stats.verifier_max)
    return torch.stack([draft, verifier], dim=-1)


def draw_positions(positions: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draft and verifier distributions ``[N, V]`` and labels that follow `true_confidences`."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = 0.5 + 3 * torch.rand(positions, 1, generator=generator)
    shared = torch.randn(positions, VOCABULARY, generator=generator)
    draft, verifier = (
        (sharpness * (shared + 0.7 * torch.randn(positions, VOCABULARY, generator=generator))).softmax(dim=-1)
        for _ in range(2)
    )
    q_top, p_top = draft.argmax(dim=-1), verifier.argmax(dim=-1)
    right = true_confidences(Stats(draft, verifier, draft, verifier))
    chance = torch.rand(positions, generator=generator)
    # Some token that neither prefers; with ids in a ring, at most two steps from any start are taken.
    other = (torch.maximum(q_top, p_top) + 1) % VOCABULARY
    other = torch.where((other == q_top) | (other == p_top), (other + 1) % VOCABULARY, other)
    other = torch.where((other == q_top) | (other == p_top), (other + 1) % VOCABULARY, other)
    label = torch.where(chance < right[:, 0], q_top, other)
    apart = (q_top != p_top) & (chance >= right[:, 0]) & (chance < right.sum(dim=-1))
    return draft, verifier, torch.where(apart, p_top, label)


def write_traces(folder: Path, prompts: int, length: int, seed: int = 0, hidden: int = 0) -> Path:
    """Write a complete trace folder of `prompts` × `length` positions, all of the vocabulary logged.

    With `hidden`, states of that many numbers are logged too: the logarithms of the first tokens' confidences.
    """
    names = [f"p{index:04d}" for index in range(prompts)]
    ends = [round(prompts * share) for share in (0.6, 0.8, 1.0)]
    split_of = [next(name for name, end in zip(SPLITS, ends, strict=True) if index < end) for index in range(prompts)]
    draft, verifier, label = draw_positions(prompts * length, seed)
    stats = Stats(draft, verifier, draft, verifier)
    count = prompts * length
    everything = [list(range(VOCABULARY))] * count
    columns = {
        "prompt_id": [name for name in names for _ in range(length)],
        "split": [split for split in split_of for _ in range(length)],
        "position": list(range(length)) * prompts,
        "draft_index": [-1] * count,
        "token": draft.argmax(dim=-1).tolist(),
        "label": label.tolist(),
        "label_kind": ["gold"] * count,
        "source": ["teacher_forced"] * count,
        **{name: stats.columns()[name].tolist() for name in STAT_FIELDS},
        "q_label": draft.gather(1, label[:, None])[:, 0].tolist(),
        "p_label": verifier.gather(1, label[:, None])[:, 0].tolist(),
        "topk_ids": everything,
        "topk_q": draft.tolist(),
        "topk_p": verifier.tolist(),
    }
    if hidden:
        states = (side[:, :hidden].log().half().numpy() for side in (draft, verifier))
        columns |= dict(zip(HIDDEN_COLUMNS, states, strict=True))
    plan = TracePlan(
        schema_version=SCHEMA_VERSION, code_version="test", source="teacher_forced", drafter="small", verifier="large",
        drafter_digest="d", verifier_digest="v", vocabulary_fingerprint="f", vocab_size=VOCABULARY, dtype="float32",
        device="cpu", temperature=1.0, top_k=VOCABULARY, splits=dict(SPLITS), collected=list(SPLITS), prompts={},
        max_tokens=None, batch_tokens=0, shard_prompts=prompts, examples=prompts, examples_digest="e",
        hidden=hidden > 0,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    shard = folder / "part-00000.parquet"
    write_shard(shard, columns, 0, plan.digest)
    manifest = Manifest(
        plan,
        (Shard(shard.name, count, hashlib.sha256(shard.read_bytes()).hexdigest()),),
        count,
        {name: split_of.count(name) * length for name in SPLITS},
        {name: split_of.count(name) for name in SPLITS},
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder


@pytest.fixture(scope="session")
def traces_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16,000 positions of 320 prompts."""
    return write_traces(tmp_path_factory.mktemp("made") / "traces", prompts=320, length=50)


@pytest.fixture(scope="session")
def make_traces() -> Callable[..., Path]:
    """`make_traces(folder, prompts, length, seed=0, hidden=0)` writes a trace folder."""
    return write_traces


@pytest.fixture(autouse=True)
def _restore_global_generator() -> Iterator[None]:
    """Lightning seeds the global generator; other tests must not depend on that."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
