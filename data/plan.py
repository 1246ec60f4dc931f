"""The plan of a trace: everything that decides its bytes, written before the first shard and compared on resuming."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import __version__
from ..router.bundle import bundle_digest
from .config import CollectConfig
from .encoding import EncodedExample, end_token_ids
from .folders import folder_lock, write_text
from .manifest import PLAN, TracePlan, read_plan
from .pairs import Pair
from .shards import SCHEMA_VERSION

__all__ = ["adopt_plan", "flatten", "make_plan"]


def make_plan(config: CollectConfig, pair: Pair, examples: Sequence[EncodedExample]) -> TracePlan:
    """Gather what decides the bytes: models, settings, and a digest of all examples in their order."""
    digest = hashlib.sha256()
    for example in examples:
        tokens = [example.prompt_ids.tolist(), example.reference_ids.tolist()]
        digest.update(json.dumps([example.prompt_id, example.split, *tokens]).encode())
    prompts = {key: value for key, value in config.prompts.describe().items() if key != "splits"}
    return TracePlan(
        schema_version=SCHEMA_VERSION,
        code_version=__version__,
        source=config.source,
        **asdict(pair.identity),
        vocab_size=pair.vocab_size,
        dtype=_of_both(pair, lambda model: str(model.dtype).removeprefix("torch.")),
        device=_of_both(pair, lambda model: str(model.device.type)),
        temperature=float(config.temperature),
        top_k=config.top_k,
        hidden=config.hidden,
        cascade=_describe_cascade(config, pair) if config.source == "cascade" else None,
        splits={name: float(share) for name, share in config.prompts.splits.items()},
        collected=list(config.splits),
        prompts=prompts,
        max_tokens=config.max_tokens,
        batch_tokens=config.batch_tokens,
        shard_prompts=config.shard_prompts,
        examples=len(examples),
        examples_digest=digest.hexdigest(),
    )


def adopt_plan(out: Path, plan: TracePlan) -> None:
    """Begin the folder with this plan, or make sure that it was begun with the same one.

    A plan under which nothing has been written yet is replaced: a setting that turned out wrong costs no folder.

    Raises:
        ValueError: it was begun with another; the first differing key and both values are named.
    """
    with folder_lock(out):
        earlier = read_plan(out)
        if earlier is None or not any(out.glob("*.parquet")):
            if earlier is None:
                _refuse_foreign(out)
            write_text(out / PLAN, json.dumps(asdict(plan), indent=2) + "\n")
            return
    old, new = flatten(asdict(earlier)), flatten(asdict(plan))
    for key in [*new, *old]:
        if old.get(key) != new.get(key):
            raise ValueError(
                f"out: {out} was begun with {key} = {old.get(key)!r}, this run has {new.get(key)!r}; "
                "use the same settings or another folder"
            )
    if earlier.digest != plan.digest:
        raise ValueError(
            f"out: {out} was begun with its splits in another order; use the same settings or another folder"
        )


def _of_both(pair: Pair, read: Callable[[Any], str]) -> str:
    """What holds for both models; for each, drafter first, where they differ."""
    return ", ".join(dict.fromkeys(read(model) for model in (pair.drafter, pair.verifier)))


def _describe_cascade(config: CollectConfig, pair: Pair) -> dict[str, Any]:
    """The settings of the runs, with the content of a router and the tokens that end an answer."""
    options = {name: float(value) for name, value in config.cascade.rule_options.items()}
    alpha = None if config.cascade.alpha is None else float(config.cascade.alpha)  # 1 and 1.0 are one plan
    settings = asdict(config.cascade) | {"rule_options": options, "alpha": alpha}
    settings |= {"scorer": config.scorer if config.cascade.counterfactuals else None}
    if config.cascade.router is not None:
        settings["router_digest"] = bundle_digest(config.cascade.router)
    return settings | {"end_token_ids": end_token_ids(pair.tokenizer, config.prompts, pair.verifier)}


def _refuse_foreign(out: Path) -> None:
    foreign = sorted(path.name for path in out.glob("*.parquet"))
    if foreign:
        raise ValueError(
            f"out: {out / foreign[0]} is foreign: {out} holds Parquet files but no plan; use another folder"
        )


def flatten(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested dictionaries into one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
