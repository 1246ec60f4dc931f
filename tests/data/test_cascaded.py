"""What is logged of a speculative run: the numbers that the rule read, at the examined positions and no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from speccascade.cascade import SpeculativeCascade
from speccascade.cascade.distributions import Sampling, logits_to_probs
from speccascade.cascade.statistics import Stats
from speccascade.data.cascaded import build_rule, log_cascade, seed_of
from speccascade.data.collect import collect
from speccascade.data.config import CascadeConfig, CollectConfig
from speccascade.data.encoding import EncodedExample, end_token_ids
from speccascade.data.job import prepare
from speccascade.data.pairs import Pair
from speccascade.data.shards import CASCADE_COLUMNS, write_shard
from speccascade.data.traces import Traces

TEMPERATURES = [0.0, 0.7, 1.0]
Rows = list[dict[str, Any]]


def log(config: CollectConfig, pair: Pair, pieces: Sequence[Sequence[EncodedExample]], folder: Path) -> dict[str, Rows]:
    """Log, write shards, read them again: rows by prompt."""
    rows: dict[str, Rows] = {}
    folder.mkdir(exist_ok=True)
    for index, columns in enumerate(log_cascade(config, pair, pieces, lambda prompts, tokens: None)):
        write_shard(folder / f"{index}.parquet", columns, index, "")
        for row in pq.read_table(folder / f"{index}.parquet").to_pylist():
            rows.setdefault(row["prompt_id"], []).append(row)
    return rows


def run_alone(config: CollectConfig, pair: Pair, example: EncodedExample) -> Any:
    """The same run with no other prompt beside it and nobody looking on."""
    settings = config.cascade
    rule = build_rule(settings, pair.identity)
    return SpeculativeCascade(pair.drafter, pair.verifier, rule, settings.gamma, vocab_size=pair.vocab_size).generate(
        torch.tensor([list(example.prompt_ids)]),
        max_new_tokens=settings.max_new_tokens,
        temperature=config.temperature,
        eos_token_id=end_token_ids(pair.tokenizer, config.prompts, pair.verifier),
        seed=[seed_of(settings.seed, example.prompt_id)],
    )


RULES = {
    "position": {"rule": "opt", "alpha": 0.05},
    "token": {"rule": "token_v2", "rule_options": {"alpha": 0.1}},
    "mixture": {"rule": "ensemble", "rule_options": {"weight": 0.5}},
}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("rule", RULES)
def test_rows_are_the_examined_positions_of_each_run(
    cascade_config: CollectConfig,
    cascade_pair: Pair,
    encoded: list[EncodedExample],
    rule: str,
    temperature: float,
    tmp_path: Path,
) -> None:
    settings = replace(cascade_config.cascade, **RULES[rule])
    config = replace(cascade_config, temperature=temperature, cascade=settings)
    logged = log(config, cascade_pair, [encoded[:5], encoded[5:]], tmp_path / "shards")
    assert list(logged) == [example.prompt_id for example in encoded]
    rejected = 0
    for example in encoded:
        rows, out = logged[example.prompt_id], run_alone(config, cascade_pair, example)
        sequence = out.sequences[0].tolist()
        assert sum(row["accepted"] for row in rows) == out.stats.accepted
        assert sum(not row["accepted"] for row in rows) == out.stats.rejected
        assert sum(row["deferred"] for row in rows) == out.stats.deferred
        assert rows[-1]["block"] + 1 == out.stats.rounds
        positions = [row["position"] for row in rows]
        assert positions == sorted(set(positions))
        for row in rows:
            assert (sequence[row["position"]] == row["token"]) == row["accepted"]
            assert (row["label_kind"], row["source"]) == ("verifier", "cascade")
        check_blocks(rows, settings.gamma)
        check_numbers(rows, cascade_pair, sequence, temperature)
        rejected += out.stats.rejected
    assert rejected > 0


def check_blocks(rows: Rows, gamma: int) -> None:
    for row, following in pairwise(rows):
        if following["block"] == row["block"]:
            assert row["accepted"], "nothing follows a rejection in its block"
            assert following["draft_index"] == row["draft_index"] + 1 < gamma
            assert following["position"] == row["position"] + 1
        else:
            assert following["block"] == row["block"] + 1
            assert following["draft_index"] == 0
            # A rejected draft is replaced where it stood; behind a block accepted whole stands a bonus token.
            assert following["position"] == row["position"] + (2 if row["accepted"] else 1)


def check_numbers(rows: Rows, pair: Pair, sequence: list[int], temperature: float) -> None:
    """Every number against the full logits of both models along the kept sequence."""
    at = torch.tensor([row["position"] - 1 for row in rows])
    with torch.inference_mode():
        both = [
            model(torch.tensor([sequence])).logits[0, at, : pair.vocab_size] for model in (pair.drafter, pair.verifier)
        ]
    q, p = (logits_to_probs(logits, Sampling(temperature=temperature)) for logits in both)
    q_raw, p_raw = (logits_to_probs(logits) for logits in both)
    label, token = p_raw.argmax(-1), torch.tensor([row["token"] for row in rows])
    each = torch.arange(len(rows))
    expected = Stats(q, p, q_raw, p_raw).columns() | {"q_label": q[each, label], "p_label": p[each, label]}
    sides = {"q_token": q, "p_token": p, "q_token_raw": q_raw, "p_token_raw": p_raw}
    expected |= {name: side[each, token] for name, side in sides.items()}
    assert [row["label"] for row in rows] == label.tolist()
    for name, values in expected.items():
        logged = torch.tensor([row[name] for row in rows])
        torch.testing.assert_close(logged, values, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    for i, row in enumerate(rows):
        union = sorted({*q_raw[i].topk(4).indices.tolist(), *p_raw[i].topk(4).indices.tolist()})
        assert row["topk_ids"] == union
        torch.testing.assert_close(torch.tensor(row["topk_q"]), q[i, union], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(row["topk_p"]), p[i, union], atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_rows_of_a_prompt_depend_on_nothing_beside_it(
    cascade_config: CollectConfig, cascade_pair: Pair, encoded: list[EncodedExample], temperature: float, tmp_path: Path
) -> None:
    config = replace(cascade_config, temperature=temperature, cascade=replace(cascade_config.cascade, **RULES["token"]))
    together = log(config, cascade_pair, [encoded], tmp_path / "together")
    alone = replace(config, cascade=replace(config.cascade, batch_size=1))
    turned = replace(config, cascade=replace(config.cascade, batch_size=5))
    others = [
        log(alone, cascade_pair, [encoded[4:], encoded[:4]], tmp_path / "alone"),
        log(turned, cascade_pair, [encoded[::-2], encoded[2:5:2]], tmp_path / "turned"),
    ]
    for other in others:
        for prompt_id, rows in other.items():
            assert len(rows) == len(together[prompt_id])
            for row, twin in zip(rows, together[prompt_id], strict=True):
                assert exact(row) == exact(twin)
                floats = [name for name, value in row.items() if isinstance(value, float)]
                assert [row[f] for f in floats] == pytest.approx([twin[f] for f in floats], abs=1e-5, rel=1e-5)
    another = replace(config, cascade=replace(config.cascade, seed=1))
    changed = log(another, cascade_pair, [encoded], tmp_path / "seed")
    same = [exact(row) for rows in together.values() for row in rows] == [
        exact(row) for rows in changed.values() for row in rows
    ]
    assert same == (temperature == 0), "another seed draws other tokens, unless nothing is drawn"


def exact(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not isinstance(value, float | list)}


@pytest.mark.parametrize("rule", ["specdecode", "chow", "opt"])
def test_greedily_a_position_rule_keeps_a_draft_unless_it_defers_and_the_models_differ(
    cascade_config: CollectConfig, cascade_pair: Pair, encoded: list[EncodedExample], rule: str, tmp_path: Path
) -> None:
    alpha = None if rule == "specdecode" else {"chow": 0.8, "opt": 0.05}[rule]
    config = replace(cascade_config, temperature=0.0, cascade=replace(cascade_config.cascade, rule=rule, alpha=alpha))
    rows = [row for some in log(config, cascade_pair, [encoded], tmp_path / "rows").values() for row in some]
    for row in rows:
        assert row["accepted"] == (not row["deferred"] or row["token"] == row["label"])
        assert (row["token"] == row["label"]) == bool(row["argmax_agree"])
    assert len({row["accepted"] for row in rows}) == 2


def test_it_collects_and_opens_as_any_trace(cascade_config: CollectConfig, cascade_pair: Pair) -> None:
    config = replace(cascade_config, cascade=replace(cascade_config.cascade, **RULES["token"]))
    manifest = collect(config, cascade_pair)
    split = Traces.open(config.out).split("train")
    assert manifest.plan.source == "cascade" and manifest.plan.cascade is not None
    assert manifest.split_prompts == {"train": 8} and len(split) == manifest.rows > 8
    assert split.accepted is not None and split.deferred is not None and split.q_token_raw is not None
    assert (split.temperature, split.top_k, split.outcomes) == (1.0, 4, None)
    assert split.accepted.dtype == split.deferred.dtype == torch.bool
    tables = [pq.read_table(path).to_pydict() for path in sorted(Path(config.out).glob("*.parquet"))]
    for name in (*CASCADE_COLUMNS.names, "draft_index", "token"):
        logged = [value for table in tables for value in table[name]]
        assert getattr(split, name).tolist() == logged, name


def test_teacher_forced_traces_hold_none_of_it(collect_config: CollectConfig) -> None:
    collect(collect_config)
    split = Traces.open(collect_config.out).split("train")
    for name in (*CASCADE_COLUMNS.names, "draft_index", "outcomes", "answer_changed"):
        assert getattr(split, name) is None, name


def test_progress_counts_prompts_and_rows(
    cascade_config: CollectConfig, cascade_pair: Pair, encoded: list[EncodedExample]
) -> None:
    told: list[tuple[int, int]] = []
    pieces = [encoded[:5], encoded[5:]]
    logged = log_cascade(cascade_config, cascade_pair, pieces, lambda prompts, tokens: told.append((prompts, tokens)))
    shards = [len(columns["token"]) for columns in logged]
    assert [prompts for prompts, _ in told] == [3, 2, 3]
    assert [told[0][1] + told[1][1], told[2][1]] == shards


def test_a_prompt_without_room_for_its_answer_is_named_or_left_out(
    cascade_config: CollectConfig, cascade_pair: Pair, encoded: list[EncodedExample]
) -> None:
    longest = max(len(example.prompt_ids) for example in encoded)
    config = replace(cascade_config, cascade=replace(cascade_config.cascade, max_new_tokens=512 - longest + 1))
    with pytest.raises(ValueError, match=r"prompt [0-9a-f]{16}: 513 tokens with its answer, .* 512; set skip_long"):
        prepare(config, refuse_to_run(cascade_pair))
    job = prepare(replace(config, skip_long=True), refuse_to_run(cascade_pair))
    short = [example.prompt_id for example in encoded if len(example.prompt_ids) < longest]
    assert [example.prompt_id for piece in job.pieces for example in piece] == short


def refuse_to_run(pair: Pair) -> Pair:
    """The same pair, whose models must not be asked anything."""

    class Refusing(type(pair.verifier)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, position_ids: Any = None, **others: Any) -> Any:
            raise AssertionError("a model ran")

    twins = {name: Refusing(pair.verifier.config).eval() for name in ("drafter", "verifier")}
    return replace(pair, **twins)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scorer": "rogue_l", "counterfactuals": 1}, "scorer: expected one of .*did you mean 'rouge_l'"),
        ({"router": "/no/such/router"}, "router"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_runs(
    cascade_config: CollectConfig,
    cascade_pair: Pair,
    encoded: list[EncodedExample],
    change: dict[str, Any],
    message: str,
) -> None:
    config = replace(cascade_config, cascade=replace(cascade_config.cascade, **change))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        next(log_cascade(config, refuse_to_run(cascade_pair), [encoded], lambda prompts, tokens: None))


def test_a_router_of_another_pair_is_refused(
    cascade_config: CollectConfig, cascade_pair: Pair, save_router: Callable[..., str], tmp_path: Path
) -> None:
    foreign = replace(cascade_pair.identity, vocabulary_fingerprint="f" * 64)
    settings = CascadeConfig(router=save_router(foreign), alpha=0.2)
    with pytest.raises(ValueError, match="router: trained for .* the vocabulary differ"):
        build_rule(settings, cascade_pair.identity)
    rule: Any = build_rule(settings, foreign)
    assert rule.alpha == 0.2


@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_logits_that_are_not_finite_name_the_model_and_the_prompts(
    cascade_config: CollectConfig, cascade_pair: Pair, encoded: list[EncodedExample], tiny_llama: Any, role: str
) -> None:
    broken = tiny_llama(seed=3)
    broken.config.name_or_path = "broken-135M"
    with torch.no_grad():
        broken.lm_head.weight[7] = float("nan")
    pair = replace(cascade_pair, **{role: broken})
    with pytest.raises(ValueError, match=rf"the {role} broken-135M: expected finite .*{encoded[0].prompt_id}"):
        next(log_cascade(cascade_config, pair, [encoded[:1]], lambda prompts, tokens: None))


def test_a_closed_generator_leaves_the_models_as_they_were(
    cascade_config: CollectConfig, cascade_pair: Pair, encoded: list[EncodedExample], tmp_path: Path
) -> None:
    import threading

    before = threading.active_count()
    shards = log_cascade(cascade_config, cascade_pair, [encoded[:2], encoded[2:]], lambda prompts, tokens: None)
    next(shards)
    shards.close()
    assert threading.active_count() == before
    hooked = [
        name
        for model in (cascade_pair.drafter, cascade_pair.verifier)
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks
    ]
    assert not hooked


def test_seeds_differ_by_prompt_and_by_seed() -> None:
    seeds = [seed_of(seed, prompt) for seed in (0, 1) for prompt in ("a", "b", "1 a")]
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert np.array(seeds, dtype=np.uint64).max() > 2**40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 0}, "gamma: expected an integer >= 1, got 0"),
        ({"gamma": 2.5}, "gamma: expected an integer >= 1, got 2.5"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer >= 1"),
        ({"batch_size": True}, "batch_size: expected an integer >= 1, got True"),
        ({"seed": -1}, "seed: expected an integer >= 0, got -1"),
        ({"counterfactuals": -2, "scorer": "rouge_l"}, "counterfactuals: expected an integer >= 0, got -2"),
        ({"scorer": "rouge_l"}, "counterfactuals: expected at least 1 beside scorer 'rouge_l', got 0"),
        ({"rule": "optt"}, "no rule is called 'optt'.*did you mean 'opt'"),
        ({"rule": "opt"}, "rule 'opt': expected a value for alpha, got none"),
        ({"alpha": 0.3}, "rule 'specdecode': takes no parameter, got 'alpha'"),
        ({"rule": "ensemble", "rule_options": {"weight": 0.5}, "alpha": 1.0}, "rule 'ensemble': takes weight"),
        ({"rule": "chow", "alpha": 1.5}, r"alpha: expected a number in \[0, 1\], got 1.5"),
        ({"rule": "opt", "alpha": 0.3, "rule_options": {"alpha": 0.2}}, "alpha: expected it once, got 0.3 and 0.2"),
        (
            {"router": "r", "rule": "chow", "alpha": 0.1},
            "a rule or a router, got router 'r' beside rule 'chow'",
        ),
        (
            {"router": "r", "rule_options": {"alpha": 0.1}},
            "a rule or a router, got router 'r' beside rule_options",
        ),
        ({"router": "r", "alpha": float("nan")}, "alpha: expected a number"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CascadeConfig(**settings)


def test_a_length_of_references_means_nothing_to_a_cascade(cascade_config: CollectConfig) -> None:
    with pytest.raises(ValueError, match=r"max_tokens: expected none with source 'cascade'.*cascade\.max_new_tokens"):
        replace(cascade_config, max_tokens=5)


def test_answers_are_graded_by_the_scorer_of_the_task_unless_another_is_named(cascade_config: CollectConfig) -> None:
    tried = replace(cascade_config.cascade, counterfactuals=2)
    with pytest.raises(ValueError, match=r"cascade\.scorer: expected a name .* the prompts have no task; got none"):
        replace(cascade_config, cascade=tried)
    maths, code = (replace(cascade_config.prompts, task=task) for task in ("maths", "code"))
    assert replace(cascade_config, cascade=tried, prompts=maths).scorer == "final_answer"
    named = replace(tried, scorer="exact_match")
    assert replace(cascade_config, cascade=named, prompts=maths).scorer == "exact_match"
    with pytest.raises(ValueError, match=r"since task 'code' has no scorer"):
        replace(cascade_config, cascade=tried, prompts=code)
