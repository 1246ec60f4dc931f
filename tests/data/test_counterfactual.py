"""Both tokens tried at a disagreement: the answers are the verifier's own, the scores are those of their text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from speccascade.data import counterfactual
from speccascade.data.cascaded import log_cascade
from speccascade.data.config import CollectConfig
from speccascade.data.counterfactual import Run, choose_disagreements
from speccascade.data.encoding import EncodedExample, end_token_ids
from speccascade.data.pairs import Pair
from speccascade.data.scorers import SCORERS
from speccascade.data.shards import OUTCOME_COLUMNS, write_shard

Rows = list[dict[str, Any]]
COUNT = 3


def count_letters(prediction: str, reference: str) -> float:
    """Depends on every character of the answer, and on the reference."""
    return (sum(map(ord, prediction)) + 31 * len(prediction) + len(reference)) % 97 / 96


@pytest.fixture(autouse=True)
def scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCORERS, "letters", count_letters)


@pytest.fixture
def config(cascade_config: CollectConfig) -> CollectConfig:
    return replace(
        cascade_config, cascade=replace(cascade_config.cascade, scorer="letters", counterfactuals=COUNT, batch_size=4)
    )


def log(config: CollectConfig, pair: Pair, examples: list[EncodedExample], tmp_path: Any) -> Rows:
    rows: Rows = []
    for index, columns in enumerate(
        log_cascade(config, pair, [examples[:3], examples[3:]], lambda prompts, tokens: None)
    ):
        write_shard(tmp_path / f"{index}.parquet", columns, index, "")
        rows += pq.read_table(tmp_path / f"{index}.parquet").to_pylist()
    return rows


def tried(rows: Rows) -> Rows:
    return [row for row in rows if row["outcome_q"] is not None]


@pytest.mark.parametrize("rule", [{"rule": "token_v2", "alpha": 0.1}, {"rule": "specdecode"}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_are_those_of_plain_greedy_continuations(
    config: CollectConfig,
    cascade_pair: Pair,
    encoded: list[EncodedExample],
    temperature: float,
    rule: dict[str, Any],
    tmp_path: Any,
) -> None:
    config = replace(config, temperature=temperature, cascade=replace(config.cascade, **rule))
    encoded = encoded[2:6]
    rows = log(config, cascade_pair, encoded, tmp_path)
    kept = kept_sequences(config, cascade_pair, encoded)
    of = {example.prompt_id: example for example in encoded}
    assert len(tried(rows)) > 2 * len(encoded)
    for row in tried(rows):
        example, sequence = of[row["prompt_id"]], kept[row["prompt_id"]]
        prefix = sequence[: row["position"]]
        models = (cascade_pair.drafter, cascade_pair.verifier)
        draft, verifier = (argmax_of(model, prefix, cascade_pair) for model in models)
        assert draft != verifier == row["label"]
        for name, token in (("outcome_q", draft), ("outcome_p", verifier)):
            answer = finish(config, cascade_pair, [*prefix, token], len(example.prompt_ids))
            text = cascade_pair.tokenizer.decode(answer, skip_special_tokens=True)
            assert example.example is not None
            assert row[name] == pytest.approx(count_letters(text, example.example.reference))
        assert row["answer_changed"] == (row["outcome_q"] != row["outcome_p"])


def kept_sequences(config: CollectConfig, pair: Pair, examples: list[EncodedExample]) -> dict[str, list[int]]:
    """What every run kept, by the runs themselves."""
    from speccascade.cascade import SpeculativeCascade
    from speccascade.data.cascaded import build_rule, seed_of

    settings, kept = config.cascade, {}
    for example in examples:
        rule = build_rule(settings, pair.identity)
        cascade = SpeculativeCascade(pair.drafter, pair.verifier, rule, settings.gamma, vocab_size=pair.vocab_size)
        out = cascade.generate(
            torch.tensor([list(example.prompt_ids)]),
            max_new_tokens=settings.max_new_tokens,
            temperature=config.temperature,
            eos_token_id=end_token_ids(pair.tokenizer, config.prompts, pair.verifier),
            seed=[seed_of(settings.seed, example.prompt_id)],
        )
        kept[example.prompt_id] = out.sequences[0].tolist()
    return kept


@torch.inference_mode()
def argmax_of(model: Any, prefix: list[int], pair: Pair) -> int:
    return int(model(torch.tensor([prefix])).logits[0, -1, : pair.vocab_size].argmax())


def finish(config: CollectConfig, pair: Pair, prefix: list[int], prompt: int) -> list[int]:
    """The library's own greedy decoding from a prefix to the end of the answer."""
    ends = end_token_ids(pair.tokenizer, config.prompts, pair.verifier)
    room = config.cascade.max_new_tokens - (len(prefix) - prompt)
    if prefix[-1] in ends or room == 0:
        return prefix[prompt:]
    ids = torch.tensor([prefix])
    out = pair.verifier.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=room,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        suppress_tokens=list(range(pair.vocab_size, 64)),  # padding rows of the head
    )
    answer: list[int] = out[0, prompt:].tolist()
    return answer


def test_tried_are_disagreements_spread_over_each_prompt_and_all_else_is_null(
    config: CollectConfig, cascade_pair: Pair, encoded: list[EncodedExample], tmp_path: Any
) -> None:
    rows = log(config, cascade_pair, encoded, tmp_path)
    assert pq.read_schema(tmp_path / "0.parquet").names[-3:] == OUTCOME_COLUMNS.names
    for example in encoded:
        own = [row for row in rows if row["prompt_id"] == example.prompt_id]
        disagreeing = [row for row in own if row["argmax_agree"] == 0]
        assert len(tried(own)) == min(COUNT, len(disagreeing))
        assert all(row["argmax_agree"] == 0 for row in tried(own))
        for row in own:
            assert len({row[name] is None for name in OUTCOME_COLUMNS.names}) == 1
    assert log(config, cascade_pair, encoded, tmp_path) == rows


@pytest.mark.parametrize(("count", "expected"), [(1, [5]), (2, [2, 7]), (3, [1, 5, 8]), (10, list(range(10)))])
def test_disagreements_are_chosen_evenly(count: int, expected: list[int]) -> None:
    prompt = EncodedExample("a", "train", [5], [])
    run = Run(prompt, [1] * 20, np.arange(1, 21), np.arange(20), np.where(np.arange(20) % 2, np.arange(20), -1))
    assert [row // 2 for row in choose_disagreements(run, count)] == expected


def test_a_greedy_run_is_not_decoded_again_and_its_scores_are_the_same(
    config: CollectConfig,
    cascade_pair: Pair,
    encoded: list[EncodedExample],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(config, temperature=0.0)
    generate, asked = counterfactual.generate_answers, list[int]()

    def count(engine: Any, prompts: Any, *arguments: Any) -> Any:
        asked.append(len(prompts))
        return generate(engine, prompts, *arguments)

    monkeypatch.setattr(counterfactual, "generate_answers", count)
    reused = log(config, cascade_pair, encoded, tmp_path)
    with_reuse = sum(asked)
    asked.clear()
    monkeypatch.setattr(Run, "goes_on_greedily", lambda run, start: False)
    assert log(config, cascade_pair, encoded, tmp_path) == reused
    assert with_reuse <= sum(asked) / 2 + 2, "the verifier's own continuation is the run"


def test_rows_do_not_depend_on_the_size_of_batches(
    config: CollectConfig, cascade_pair: Pair, encoded: list[EncodedExample], tmp_path: Any
) -> None:
    rows = log(config, cascade_pair, encoded, tmp_path)
    small = replace(config, cascade=replace(config.cascade, batch_size=1))
    for row, twin in zip(rows, log(small, cascade_pair, encoded, tmp_path), strict=True):
        for name in (*OUTCOME_COLUMNS.names, "position", "token"):
            assert row[name] == twin[name]


def test_answers_near_the_end_of_the_context_fit(
    config: CollectConfig, cascade_pair: Pair, encoded: list[EncodedExample], tmp_path: Any, tiny_llama: Any
) -> None:
    """The longest prompt with a full answer fills the context to its end: no batch may ask for more."""
    longest = max(len(example.prompt_ids) for example in encoded)
    roomy = log(config, cascade_pair, encoded, tmp_path)
    limits = [model.config for model in (cascade_pair.drafter, cascade_pair.verifier)]
    try:
        for limit in limits:
            limit.max_position_embeddings = longest + config.cascade.max_new_tokens
        assert log(config, cascade_pair, encoded, tmp_path) == roomy
    finally:
        for limit in limits:
            limit.max_position_embeddings = 512


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1.5, -0.1, "good", None])
def test_a_score_that_is_none_names_scorer_and_prompt(
    config: CollectConfig, cascade_pair: Pair, encoded: list[EncodedExample], score: Any
) -> None:
    SCORERS["letters"] = lambda prediction, reference: score
    with pytest.raises(ValueError, match=r"'letters': expected a number in \[0, 1\], got .* prompt [0-9a-f]{16}"):
        next(log_cascade(config, cascade_pair, [encoded], lambda prompts, tokens: None))


def test_an_example_without_its_text_is_named(
    config: CollectConfig, cascade_pair: Pair, encoded: list[EncodedExample]
) -> None:
    bare = replace(encoded[2], example=None)
    with pytest.raises(ValueError, match=f"counterfactuals: expected the reference of prompt {bare.prompt_id}"):
        next(log_cascade(config, cascade_pair, [encoded[:2], [bare]], lambda prompts, tokens: None))
