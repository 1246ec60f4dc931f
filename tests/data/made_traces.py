"""Trace folders made without a model: random numbers in the right columns, labels by prompt and reference."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from speccascade.data.folders import write_text
from speccascade.data.manifest import TracePlan, record_shards
from speccascade.data.prompts import split_of
from speccascade.data.shards import (
    CASCADE_COLUMNS,
    FLOAT_COLUMNS,
    HIDDEN_COLUMNS,
    SCHEMA_VERSION,
    shard_name,
    write_shard,
)
from speccascade.data.traces import Traces

SPLITS = {"train": 0.5, "validation": 0.2, "test": 0.3}


def make_traces(folder: Path, prompts: dict[str, int], /, **options: Any) -> Traces:
    """Write a made-up trace folder without any model.

    Args:
        folder: where to.
        prompts: prompt ids and which of several references each has; labels and positions follow from both.
        options: shard_prompts=2, length=9 (of the shortest prompt), k=4, vocabulary=50, seed=0 (of everything but
            labels), cascade=False and outcomes=False (further columns), and any field of the plan.
    """
    own = {"shard_prompts": 2, "length": 9, "k": 4, "vocabulary": 50, "seed": 0, "cascade": False, "outcomes": False}
    made = {name: options.pop(name, value) for name, value in own.items()}
    plan = TracePlan(**(PLAN_FIELDS | {
        "examples": len(prompts), "shard_prompts": made["shard_prompts"], "top_k": made["k"],
        "source": "cascade" if made["cascade"] else "teacher_forced",
    } | options))  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "plan.json", json.dumps(asdict(plan)))
    items, paths = list(prompts.items()), []
    for start in range(0, len(items), plan.shard_prompts):
        piece = items[start : start + plan.shard_prompts]
        parts = [make_rows(name, reference, made, plan) for name, reference in piece]
        columns: dict[str, Any] = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        columns |= {name: np.stack(columns[name]) for name in HIDDEN_COLUMNS if name in columns}
        paths.append(folder / shard_name(len(paths)))
        write_shard(paths[-1], columns, len(paths) - 1, plan.digest)
    write_text(folder / "manifest.json", record_shards(plan, paths).to_json())
    return Traces.open(folder)


PLAN_FIELDS: dict[str, Any] = {
    "schema_version": SCHEMA_VERSION, "code_version": "0", "drafter": "small", "verifier": "large",
    "drafter_digest": "d", "verifier_digest": "v", "vocabulary_fingerprint": "f", "vocab_size": 50, "dtype": "float32",
    "device": "cpu", "temperature": 1.0, "splits": dict(SPLITS), "collected": list(SPLITS),
    "prompts": {"source": "made up"}, "max_tokens": None, "batch_tokens": 1, "examples_digest": "e",
}  # fmt: skip


def make_rows(name: str, reference: int, made: dict[str, Any], plan: TracePlan) -> dict[str, list[Any]]:
    """All columns of one prompt: random numbers in the right ranges, the argmax of the top k as likely as not right."""
    base = int.from_bytes(name.partition("-")[0].encode()[:8].ljust(8), "big")
    content, noise = np.random.default_rng([base, reference]), np.random.default_rng([base, made["seed"]])
    count = made["length"] + reference % 3
    label = content.integers(made["vocabulary"], size=count)
    floats = {field: noise.random(count, dtype=np.float32) for field in FLOAT_COLUMNS}
    floats["argmax_agree"] = (floats["argmax_agree"] < 0.6).astype(np.float32)
    union = [np.sort(noise.choice(made["vocabulary"], 2 * made["k"], replace=False)) for _ in range(count)]
    for ids, token in zip(union, label, strict=True):
        if token not in ids and noise.random() < 0.7:
            ids[noise.integers(len(ids))] = token
            ids.sort()
    tops = {side: noise.random((count, 2 * made["k"]), dtype=np.float32) for side in ("topk_q", "topk_p")}
    columns: dict[str, Any] = {
        "prompt_id": [name] * count, "split": [split_of(name, plan.splits)] * count,
        "position": 5 + np.arange(count), "draft_index": np.full(count, -1), "token": label, "label": label,
        "label_kind": ["gold"] * count, "source": [plan.source] * count, **floats, "topk_ids": union, **tops,
    }  # fmt: skip
    if made["cascade"]:
        columns["draft_index"], columns["block"] = np.arange(count) % 4, np.arange(count) // 4
        columns["accepted"], columns["deferred"] = noise.random(count) < 0.6, noise.random(count) < 0.3
        columns |= {f.name: noise.random(count) for f in CASCADE_COLUMNS if f.type == pa.float32()}
    if plan.hidden:
        columns |= {key: noise.standard_normal((count, 6)).astype(np.float16) for key in HIDDEN_COLUMNS}
    if made["outcomes"]:
        tried = noise.random(count) < 0.5
        values = {"outcome_q": noise.random(count), "outcome_p": noise.random(count)}
        values["answer_changed"] = noise.random(count) < 0.4
        columns |= {key: np.where(tried, of.astype(object), None) for key, of in values.items()}
    return {key: list(value) for key, value in columns.items()}
