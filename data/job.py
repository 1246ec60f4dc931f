"""One run of `collect`, ready to go: the pair, the plan and the examples cut into shards; and the writing of shards.

Whoever executes it, this process, one of several ranks or an actor on another host, writes the same bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from .cascaded import log_cascade
from .config import CollectConfig
from .encoding import EncodedExample, encode_examples
from .estimate import Estimate
from .manifest import TracePlan
from .pairs import Pair, load_pair
from .plan import make_plan
from .progress import announce
from .prompts import Example, read_examples, split_of
from .shards import measure_shard, shard_name, write_shard
from .teacher_forced import log_teacher_forced
from .workers import current_worker

__all__ = ["Advance", "Job", "prepare"]

Advance = Callable[[int, int], None]

PROBED_PROMPTS = 8


@dataclass(frozen=True)
class Job:
    """What one run has to do.

    Args:
        config: the settings.
        pair: the models.
        pieces: the examples of each shard, in the order of the data set.
        plan: what decides the bytes.
    """

    config: CollectConfig
    pair: Pair
    pieces: Sequence[Sequence[EncodedExample]]
    plan: TracePlan

    @property
    def sizes(self) -> list[int]:
        """Steps of progress of each shard: tokens where they are known beforehand, else prompts."""
        if self.config.source == "cascade":
            return [len(piece) for piece in self.pieces]
        return [sum(len(example.reference_ids) for example in piece) for piece in self.pieces]

    def write(self, shards: Sequence[int], advance: Advance) -> None:
        """Log and write shards, one after the other; `advance` is told of steps and of tokens as they are done."""
        log, folder = LOGGERS[self.config.source], Path(self.config.out)
        with closing(log(self.config, self.pair, [self.pieces[shard] for shard in shards], advance)) as results:
            for shard, columns in zip(shards, results, strict=True):
                write_shard(folder / shard_name(shard), columns, shard, self.plan.digest)

    def estimate(self, shards: Sequence[int]) -> Estimate | None:
        """Log a few prompts, evenly spread over these shards, and extrapolate; None where it would not pay."""
        left = [example for shard in shards for example in self.pieces[shard]]
        if len(left) < 10 * PROBED_PROMPTS:
            return None
        probe = left[:: len(left) // PROBED_PROMPTS][:PROBED_PROMPTS]
        # A batch for each prompt, so that every core has its own.
        config = replace(self.config, batch_tokens=1) if self.config.source != "cascade" else self.config
        started = time.perf_counter()
        (columns,) = LOGGERS[config.source](config, self.pair, [probe], lambda steps, tokens: None)
        seconds, size = time.perf_counter() - started, measure_shard(columns)
        factor = len(left) / len(probe)
        if config.source != "cascade":
            factor = sum(len(example) for example in left) / sum(len(example) for example in probe)
        return Estimate(seconds * factor, size * factor, len(probe))


def prepare(config: CollectConfig, pair: Pair | None = None) -> Job:
    """Read and tokenise all prompts, load the pair and make the plan: what cannot be collected is known at once.

    Raises:
        ValueError: a column is missing, a prompt does not fit, a reference is empty, or no prompt is left.
    """
    prompts = read_examples(config.prompts)
    first = next(prompts, None)  # a misspelt column is found faster than a model is loaded
    pair = pair or load_pair(config.pair)
    context = min(_context(pair.drafter), _context(pair.verifier))
    fallen: Counter[str] = Counter()
    examples: list[EncodedExample] = []
    skipped = 0
    wanted = _choose_split(chain([first] if first else [], prompts), config, fallen)
    for item in encode_examples(
        wanted, pair.tokenizer, config.prompts, keep_examples=config.cascade.counterfactuals > 0
    ):
        if config.max_tokens is not None:
            item = replace(item, reference_ids=item.reference_ids[: config.max_tokens].copy())
        if _fits(item, config, context):
            _check_ids(item, pair.vocab_size)
            examples.append(item)
        else:
            skipped += 1
    talks = current_worker().is_first
    if talks:
        _tell_left_out(config, fallen)
    if skipped and talks:
        announce(f"Left out {skipped:,} prompts that do not fit into the context of {context:,} tokens")
    if skipped and not examples:
        raise ValueError(f"skip_long: expected a prompt that fits into the context of {context:,} tokens, none does")
    if not examples:
        raise ValueError(
            f"splits: expected prompts in {', '.join(config.splits)}, got none from {config.prompts.source}"
        )
    if talks:
        _show_first(examples[0], pair)
    cuts = range(0, len(examples), config.shard_prompts)
    pieces = [examples[start : start + config.shard_prompts] for start in cuts]
    return Job(config, pair, pieces, make_plan(config, pair, examples))


def _choose_split(examples: Iterable[Example], config: CollectConfig, fallen: Counter[str]) -> Iterator[Example]:
    """Pass on what falls into a split that is asked for; count how many fell into each."""
    for example in examples:
        split = split_of(example.prompt_id, config.prompts.splits)
        fallen[split] += 1
        if split in config.splits:
            yield example


def _tell_left_out(config: CollectConfig, fallen: Counter[str]) -> None:
    """Say which prompts are not collected because of their split, and which splits nothing fell into."""
    for split in config.prompts.splits:
        if split in config.splits and not fallen[split]:
            announce(f"Split {split} is empty: none of {fallen.total():,} prompts fell into it")
        elif split not in config.splits and fallen[split]:
            kept = " (what a drafter is tuned on)" if split == "tune" else ""
            announce(f"Left out {fallen[split]:,} of {fallen.total():,} prompts: they fell into split {split}{kept}")


def _show_first(example: EncodedExample, pair: Pair) -> None:
    """Show how the first prompt and its reference meet: a wrong template or a missing space is seen at once."""
    before = pair.tokenizer.decode(example.prompt_ids[-16:])
    after = pair.tokenizer.decode(example.reference_ids[:16])
    announce(f"First prompt ends {before!r}, its reference begins {after!r}")


def _fits(example: EncodedExample, config: CollectConfig, context: int) -> bool:
    answered = config.source == "cascade"
    tokens = len(example.prompt_ids) + config.cascade.max_new_tokens if answered else len(example)
    if tokens <= context:
        return True
    if config.skip_long:
        return False
    what, limit = ("its answer", "cascade.max_new_tokens") if answered else ("its reference", "max_tokens")
    raise ValueError(
        f"prompt {example.prompt_id}: {tokens:,} tokens with {what}, the models' context is {context:,}; "
        f"set skip_long to leave such prompts out, or {limit} to log less of them"
    )


def _check_ids(example: EncodedExample, vocab_size: int) -> None:
    if max(example.prompt_ids.max(), example.reference_ids.max()) >= vocab_size:
        raise ValueError(f"prompt {example.prompt_id}: a token id is beyond the {vocab_size:,} that both models know")


def _context(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 60)


LOGGERS = {"teacher_forced": log_teacher_forced, "cascade": log_cascade}
