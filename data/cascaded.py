"""Traces of real speculative runs: every position that the verifier examined, with what the rule decided there.

Logged are the drafted tokens that were accepted and kept, and the first rejected one of each round. Drafts behind a
rejection stand on a prefix that was never kept, and a bonus token was never drafted: neither is logged. So the prefix
of each row is the kept sequence before its ``position``; where the draft was rejected, that sequence goes on with
another token than the row's. The label is the verifier's own choice, argmax p°.

What a prompt draws depends on the seed and its own id, and on nothing that runs beside it.

Knows nothing of files. Shapes: ``B`` row of the batch, ``T`` position in a block, ``N`` examined position.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..cascade.blocks import TargetRule
from ..cascade.engine import Round, SpeculativeCascade
from ..router import rules
from .answers import generate_answers
from .config import CascadeConfig, CollectConfig
from .counterfactual import Run, Trials, outcome_columns
from .encoding import EncodedExample, end_token_ids
from .pairs import Pair, PairIdentity, length_borders
from .parallel import map_in_order
from .scoring import ScoredRows, tabulate_block
from .shards import topk_columns

__all__ = ["RoundRecorder", "build_rule", "log_cascade", "seed_of"]


def log_cascade(
    config: CollectConfig, pair: Pair, pieces: Sequence[Sequence[EncodedExample]], advance: Callable[[int, int], None]
) -> Generator[dict[str, Any], None, None]:
    """Run the cascade over pieces of examples; yield the columns of one shard for each piece, in order.

    Rows stand in the order of the piece's prompts, those of a prompt in the order of their positions.

    Args:
        config: the settings.
        pair: the models.
        pieces: the examples of each shard.
        advance: is told of prompts that have their answers, and of the tokens logged of them.

    Raises:
        ValueError: before a model runs: the router belongs to another pair, the scorer is unknown, or an example lacks
            the reference that its answers are scored against; later: logits are not finite (the model and the prompts
            are named), or a score lies outside [0, 1].
    """
    ends = end_token_ids(pair.tokenizer, config.prompts, pair.verifier)
    trials = Trials.prepare(config, pair, ends, pieces) if config.cascade.counterfactuals else None
    build_rule(config.cascade, pair.identity)  # what is wrong with it is known before a model runs
    own = threading.local()  # a router's buffers serve one thread

    def run(batch: Sequence[EncodedExample]) -> list[_Logged]:
        if not hasattr(own, "rule"):
            own.rule = build_rule(config.cascade, pair.identity)
        return _run_batch(config, pair, batch, own.rule, ends, trials)

    room = min(length_borders(pair), default=None)
    batches = [_make_batches(piece, config.cascade, room) for piece in pieces]
    work = ([piece[index] for index in batch] for piece, many in zip(pieces, batches, strict=True) for batch in many)
    with closing(map_in_order(run, work, pair)) as results:
        for piece, many in zip(pieces, batches, strict=True):
            logged: dict[int, _Logged] = {}
            for batch, ran in zip(many, results, strict=False):
                logged.update(zip(batch, ran, strict=True))
                advance(len(batch), sum(len(one.examined.rows) for one in ran))
            yield _columns([logged[index] for index in range(len(piece))], with_outcomes=trials is not None)


def build_rule(config: CascadeConfig, identity: PairIdentity) -> TargetRule:
    """Build the rule that decides, or load the router and make sure that it belongs to the pair.

    Raises:
        ValueError: an unknown rule or option, or a router that was trained for another pair.
        FileNotFoundError: there is no such router.
    """
    if config.router is None:
        return rules.get(config.rule, **config.parameters)
    from ..router.loading import load_router  # onnx is slow to import, and needed here alone

    router = load_router(config.router, config.alpha)
    router.check_pair(**asdict(identity))
    return router


class RoundRecorder:
    """Turns each round's examined positions into columns at once, so that no table over the vocabulary outlives it.

    Args:
        top_k: how many of each model's most probable tokens to keep.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._parts: list[Examined] = []

    def observe(self, round_: Round, rows: Sequence[int], kept: Sequence[int]) -> None:
        """Take note of one round; every row that still goes on takes part in every round."""
        block, device = round_.block, round_.block.tokens.device
        length = block.tokens.shape[1]
        # Behind the kept drafts stands one rejected draft, or a bonus token, which was not drafted.
        counts = [min(count, drafted) for count, drafted in zip(kept, round_.lengths, strict=True)]
        places = torch.arange(length, device=device)
        examined = places < torch.tensor(counts, device=device).unsqueeze(1)
        labels = block.verifier_raw.argmax
        scored = tabulate_block(block, labels, self._top_k, examined, at_tokens=True)
        facts = {
            "prompt": torch.tensor(rows, device=device).unsqueeze(1).expand_as(labels),
            "position": block.positions,
            "draft_index": places.expand_as(labels),
            "block": torch.full_like(labels, len(self._parts)),
            "accepted": places < torch.tensor(round_.accepted, device=device).unsqueeze(1),
            "deferred": round_.target.deferred,
            "draft_choice": block.draft_raw.argmax,
        }
        numbers = torch.stack([values[examined].long() for values in facts.values()]).cpu().numpy()
        self._parts.append(Examined(scored, dict(zip(facts, numbers, strict=True))))

    def collect(self, prompts: int) -> list[Examined]:
        """Hand over what was logged of each prompt, by position, and forget it."""
        parts, self._parts = self._parts, []
        whole = Examined.join(parts)
        whole = whole.take(np.lexsort((whole.facts["position"], whole.facts["prompt"])))
        edges = np.searchsorted(whole.facts["prompt"], np.arange(prompts + 1))
        return [whole.take(slice(*pair)) for pair in pairwise(edges)]


@dataclass(frozen=True)
class Examined:
    """Examined positions: their columns, and integer ``facts`` ``[N]`` by name."""

    rows: ScoredRows
    facts: dict[str, np.ndarray[Any, Any]]

    def take(self, rows: slice | np.ndarray[Any, Any]) -> Examined:
        """The same rows of every column."""
        return Examined(self.rows.take(rows), {name: values[rows] for name, values in self.facts.items()})

    @classmethod
    def join(cls, parts: Sequence[Examined]) -> Examined:
        """Put parts one after the other."""
        facts = {name: np.concatenate([part.facts[name] for part in parts]) for name in parts[0].facts}
        return cls(ScoredRows.join([part.rows for part in parts]), facts)


@dataclass(frozen=True)
class _Logged:
    """One prompt's run: what was examined on the way, and how its disagreements turned out ``[N, 2]``."""

    example: EncodedExample
    examined: Examined
    outcomes: np.ndarray[Any, Any] | None = None


def _run_batch(
    config: CollectConfig,
    pair: Pair,
    examples: Sequence[EncodedExample],
    rule: TargetRule,
    ends: Sequence[int],
    trials: Trials | None,
) -> list[_Logged]:
    """Run a batch of prompts to their ends, and try what is to be tried of them."""
    recorder = RoundRecorder(config.top_k)
    cascade = SpeculativeCascade(
        pair.drafter, pair.verifier, rule, config.cascade.gamma, vocab_size=pair.vocab_size, observer=recorder
    )
    answers = _answer(cascade, examples, config, ends)
    parts = recorder.collect(len(examples))
    logged = [_Logged(*both) for both in zip(examples, parts, strict=True)]
    if trials is None:
        return logged
    greedy = config.temperature == 0
    runs = [
        Run(one.example, answer, facts["position"], facts["draft_choice"], one.examined.rows.label, greedy)
        for one, answer in zip(logged, answers, strict=True)
        for facts in [one.examined.facts]
    ]
    return [replace(one, outcomes=tried) for one, tried in zip(logged, trials.run(runs), strict=True)]


def _make_batches(piece: Sequence[EncodedExample], config: CascadeConfig, room: int | None = None) -> list[list[int]]:
    """Group indices of prompts of similar length: the less padding, the better.

    A prompt whose answer may go beyond `room` tokens runs alone.
    """
    order = sorted(range(len(piece)), key=lambda index: (len(piece[index].prompt_ids), index))
    together = [i for i in order if room is None or len(piece[i].prompt_ids) + config.max_new_tokens <= room]
    starts = range(0, len(together), config.batch_size)
    alone = [[index] for index in order[len(together) :]]
    return [together[start : start + config.batch_size] for start in starts] + alone


def _answer(
    cascade: SpeculativeCascade, examples: Sequence[EncodedExample], config: CollectConfig, ends: Sequence[int]
) -> list[list[int]]:
    """Run a batch of prompts to their ends; each draws from a seed of its own."""
    prompts = [example.prompt_ids.tolist() for example in examples]
    seeds = [seed_of(config.cascade.seed, example.prompt_id) for example in examples]
    try:
        return generate_answers(cascade, prompts, config.cascade.max_new_tokens, ends, config.temperature, seeds)
    except ValueError as error:
        among = ", ".join(example.prompt_id for example in examples)
        raise ValueError(f"{error} (in a batch of the prompts {among})") from error


def seed_of(seed: int, prompt_id: str) -> int:
    """Return the seed of a prompt's draws: 64 bits that follow from both."""
    return int.from_bytes(hashlib.sha256(f"{seed} {prompt_id}".encode()).digest()[:8], "big")


def _columns(logged: Sequence[_Logged], with_outcomes: bool) -> dict[str, Any]:
    """All columns of one shard, prompts in the order given."""
    whole = Examined.join([one.examined for one in logged])
    rows, facts = whole.rows, whole.facts
    counts = [len(one.examined.rows) for one in logged]
    columns = {
        "prompt_id": _repeat((one.example.prompt_id for one in logged), counts),
        "split": _repeat((one.example.split for one in logged), counts),
        "token": rows.token,
        "label": rows.label,
        "label_kind": ["verifier"] * len(rows),
        "source": ["cascade"] * len(rows),
        **{name: facts[name] for name in ("position", "draft_index", "block")},
        **{name: facts[name].astype(bool) for name in ("accepted", "deferred")},
        **rows.floats,
        **topk_columns(rows.topk_ids, rows.topk_q, rows.topk_p, rows.topk_kept),
    }
    if with_outcomes:
        columns |= outcome_columns(np.concatenate([one.outcomes for one in logged if one.outcomes is not None]))
    return columns


def _repeat(values: Iterable[str], counts: Sequence[int]) -> list[str]:
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
