"""Collect traces: run a pair over references and log every position, so that a killed run loses one shard at most.

The order of work is the data set's, cut into shards of whole prompts; within a shard, batches follow from lengths.
So the bytes of a shard depend on the plan and on nothing else, and a run that was killed and started again ends with
the same files as an unbroken one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import __version__
from .cascaded import log_cascade
from .config import CollectConfig
from .encoding import EncodedExample, encode_example
from .folders import adopt_plan, record_shards, sole_writer, write_text
from .pairs import Pair, load_pair
from .progress import Progress, announce
from .prompts import Example, load_examples, split_of
from .shards import SCHEMA_VERSION, check_shard, shard_name, write_shard
from .summary import describe
from .teacher_forced import log_teacher_forced
from .traces import MANIFEST, Manifest, TracePlan, Traces

__all__ = ["collect"]

BYTES_PER_ROW = 250
"""What a position takes on disk at the default top_k; 246 in benchmarks/results/demo/stages.json."""


def collect(config: CollectConfig, pair: Pair | None = None) -> Manifest:
    """Score the references with both models and write traces to `config.out`; finished shards are kept.

    Args:
        config: what to collect.
        pair: models already loaded; by default they are loaded from `config.pair`.

    Raises:
        ValueError: the folder was begun under another plan (the key is named), a shard is damaged or foreign, a prompt
            does not fit, a reference is empty, or logits are not finite.
        OSError: the folder cannot be written to, or another run is writing to it.
    """
    out = Path(config.out)
    with sole_writer(out):
        prompts = load_examples(config.prompts)  # first, since a misspelt column is found faster than a model is loaded
        pair = pair or load_pair(config.pair)
        examples = _encode_all(config, pair, prompts)
        plan = _make_plan(config, pair, examples)
        adopt_plan(out, plan)
        if (out / MANIFEST).is_file() and all((out / shard.file).is_file() for shard in Manifest.read(out).shards):
            traces = Traces.open(out)
            announce(f"Traces in {out} are complete: {traces.manifest.rows:,} positions")
            return traces.manifest
        _run_shards(config, pair, examples, plan, out)
        manifest = _write_manifest(out, plan)
    announce(describe(Traces.open(out, check=False)))
    return manifest


def _encode_all(config: CollectConfig, pair: Pair, examples: Sequence[Example]) -> list[EncodedExample]:
    """Tokenise everything first: what cannot be collected is known before an hour of work, not after."""
    encoded, skipped = [], 0
    context = min(_context(pair.drafter), _context(pair.verifier))
    for example in examples:
        split = split_of(example.prompt_id, config.prompts.splits)
        if split not in config.splits:
            continue
        prompt_ids, reference_ids = encode_example(example, pair.tokenizer, config.prompts)
        item = EncodedExample(example.prompt_id, split, prompt_ids, reference_ids[: config.max_tokens])
        if len(item) > context:
            if not config.skip_long:
                raise ValueError(
                    f"prompt {item.prompt_id}: {len(item):,} tokens with its reference, the models' context is "
                    f"{context:,}; set skip_long to leave such prompts out, or max_tokens to score less of them"
                )
            skipped += 1
            continue
        if max(*prompt_ids, *reference_ids) >= pair.vocab_size:
            raise ValueError(
                f"prompt {item.prompt_id}: a token id is beyond the {pair.vocab_size:,} that both models know"
            )
        encoded.append(item)
    if skipped:
        announce(f"Left out {skipped:,} prompts that do not fit into the context of {context:,} tokens")
    if not encoded:
        raise ValueError(
            f"splits: expected prompts in {', '.join(config.splits)}, got none from {config.prompts.source}"
        )
    return encoded


def _context(model: Any) -> int:
    return int(getattr(model.config, "max_position_embeddings", None) or 1 << 60)


def _make_plan(config: CollectConfig, pair: Pair, examples: Sequence[EncodedExample]) -> TracePlan:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(
            json.dumps([example.prompt_id, example.split, example.prompt_ids, example.reference_ids]).encode()
        )
    prompts = {key: value for key, value in asdict(config.prompts).items() if key != "splits"}
    return TracePlan(
        schema_version=SCHEMA_VERSION,
        code_version=__version__,
        source=config.source,
        **asdict(pair.identity),
        vocab_size=pair.vocab_size,
        dtype=str(pair.verifier.dtype).removeprefix("torch."),
        device=pair.verifier.device.type,
        temperature=config.temperature,
        top_k=config.top_k,
        hidden=config.hidden,
        cascade=asdict(config.cascade) if config.source == "cascade" else None,
        splits=dict(config.prompts.splits),
        collected=list(config.splits),
        prompts=prompts,
        max_tokens=config.max_tokens,
        batch_tokens=config.batch_tokens,
        shard_prompts=config.shard_prompts,
        examples=len(examples),
        examples_digest=digest.hexdigest(),
    )


def _run_shards(
    config: CollectConfig, pair: Pair, examples: Sequence[EncodedExample], plan: TracePlan, out: Path
) -> None:
    pieces = [examples[i : i + config.shard_prompts] for i in range(0, len(examples), config.shard_prompts)]
    positions = sum(len(example.reference_ids) for example in examples)
    megabytes = positions * BYTES_PER_ROW * max(config.top_k, 4) / 16 / 1e6
    announce(
        f"Collecting {positions:,} positions of {len(examples):,} prompts in {len(pieces)} shards, "
        f"about {max(megabytes, 0.1):,.1f} MB, into {out}"
    )
    with Progress("Collecting", positions) as progress:
        todo: list[int] = []
        for index, piece in enumerate(pieces):
            if (out / shard_name(index)).is_file():
                check_shard(out / shard_name(index), index, plan.digest)
                progress.skip(sum(len(example.reference_ids) for example in piece))
            else:
                todo.append(index)
        log = LOGGERS[config.source]
        with closing(log(config, pair, [pieces[index] for index in todo], progress.advance)) as shards:
            for index, columns in zip(todo, shards, strict=True):
                write_shard(out / shard_name(index), columns, index, plan.digest)


def _write_manifest(out: Path, plan: TracePlan) -> Manifest:
    """Vouch for the finished shards; the manifest appears last and whole."""
    count = -(-plan.examples // plan.shard_prompts)
    manifest = record_shards(plan, [out / shard_name(index) for index in range(count)])
    write_text(out / MANIFEST, manifest.to_json())
    return manifest


LOGGERS = {"teacher_forced": log_teacher_forced, "cascade": log_cascade}
