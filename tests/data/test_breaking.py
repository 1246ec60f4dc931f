"""What a hunt for faults in collecting found: each stands here by its smallest reproduction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, Phi3Config, Phi3ForCausalLM

from speccascade.data.collect import collect
from speccascade.data.config import CascadeConfig, CollectConfig
from speccascade.data.counterfactual import Trials
from speccascade.data.encoding import EncodedExample
from speccascade.data.pairs import PairConfig, length_borders, load_pair
from speccascade.data.prompts import Example, PromptConfig, load_examples
from speccascade.data.scoring import make_batches
from speccascade.data.traces import Traces

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def save(model: Any, tokenizer: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def longrope_config(collect_config: CollectConfig, tiny_tokenizer: Any, tmp_path: Path) -> CollectConfig:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    }
    own = Phi3Config(**SHAPE, num_key_value_heads=2, original_max_position_embeddings=64, rope_parameters=rope)
    torch.manual_seed(0)
    folder = save(Phi3ForCausalLM(own).eval(), tiny_tokenizer, tmp_path / "longrope")
    pair = PairConfig(folder, folder, dtype="float32", device="cpu")
    return replace(collect_config, pair=pair, batch_tokens=4096, shard_prompts=64)


def test_longrope_rows_do_not_depend_on_the_batch(longrope_config: CollectConfig, tmp_path: Path) -> None:
    pair = load_pair(longrope_config.pair)
    assert length_borders(pair) == [64]
    alone = replace(longrope_config, batch_tokens=1, out=str(tmp_path / "alone"))
    tables = []
    for config in (longrope_config, alone):
        collect(config, pair)
        tables.append(pq.read_table(Path(config.out) / "part-00000.parquet"))
    assert tables[0]["position"].to_numpy().max() > 64
    for name in ("verifier_max", "verifier_entropy", "p_label"):
        np.testing.assert_allclose(tables[0][name].to_numpy(), tables[1][name].to_numpy(), atol=1e-5)


def test_longrope_cascades_do_not_depend_on_the_batch(longrope_config: CollectConfig, tmp_path: Path) -> None:
    pair = load_pair(longrope_config.pair)
    written = []
    for size in (1, 8):
        cascade = CascadeConfig(max_new_tokens=24, batch_size=size, gamma=3)
        out = tmp_path / f"by-{size}"
        collect(replace(longrope_config, source="cascade", cascade=cascade, out=str(out), batch_tokens=2048), pair)
        written.append(
            pq.read_table(out / "part-00000.parquet", columns=["prompt_id", "position", "token"]).to_pydict()
        )
    assert written[0] == written[1]


def test_batches_end_at_borders() -> None:
    assert make_batches([3, 5, 4, 9], 100, borders=[4]) == [[0, 2], [1, 3]]


def test_model_that_looks_ahead_is_refused(
    pair_folders: tuple[Path, Path], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = BertLMHeadModel(BertConfig(**SHAPE)).eval()
    folder = save(model, tiny_tokenizer, tmp_path / "bert")
    with pytest.raises(ValueError, match="verifier .*bert, which looks at later tokens"):
        load_pair(PairConfig(str(pair_folders[0]), folder, dtype="float32", device="cpu"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "x"),
        ("collected", None),
        ("prompts", None),
        ("shard_prompts", 0),
        ("rows", "x"),
        ("split_rows", None),
        ("split_rows", {"train": 5}),
    ],
)
def test_edited_manifest_is_named(collect_config: CollectConfig, key: str, value: object) -> None:
    collect(collect_config)
    path = Path(collect_config.out) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        Traces.open(collect_config.out)


def test_edited_shard_record_is_named(collect_config: CollectConfig) -> None:
    collect(collect_config)
    path = Path(collect_config.out) / "manifest.json"
    record = json.loads(path.read_text())
    for key, value in (("rows", "3"), ("sha256", None)):
        changed = [{**record["shards"][0], key: value}, *record["shards"][1:]]
        path.write_text(json.dumps(record | {"shards": changed}))
        with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
            Traces.open(collect_config.out)


def test_foreign_shard_is_known_before_any_work(collect_config: CollectConfig) -> None:
    collect(collect_config)
    out = Path(collect_config.out)
    (out / "manifest.json").unlink()
    (out / "part-00000.parquet").rename(out / "part-00077.parquet")
    with pytest.raises(ValueError, match=r"part-00077\.parquet is foreign"):
        collect(collect_config)
    assert not (out / "manifest.json").exists()
    assert not (out / "part-00000.parquet").exists()


def test_whole_numbers_are_the_same_plan(collect_config: CollectConfig) -> None:
    config = replace(
        collect_config,
        prompts=replace(collect_config.prompts, splits={"train": 1}, limit=4),
        splits=("train",),
        temperature=1,
    )
    first = collect(config)
    prompts = replace(config.prompts, splits={"train": 1.0})
    assert collect(replace(config, temperature=1.0, prompts=prompts)) == first


def raising(prediction: str, reference: str) -> float:
    raise KeyError("boom")


@pytest.mark.parametrize("scorer", [raising, lambda prediction, reference: 10**400, lambda: 1.0])
def test_scorer_that_fails_is_named_with_the_prompt(scorer: Any, tiny_tokenizer: Any) -> None:
    example = EncodedExample("abc", "train", [5], [6], Example("abc", "a", "b"))
    trials = Trials(None, tiny_tokenizer, scorer, "mine:raising", (2,), CascadeConfig())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scorer 'mine:raising': expected a number in \[0, 1\].*prompt abc"):
        trials._score(example, [5])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"splits": {"train": float("nan"), "test": 1.0}}, "splits: "),
        ({"limit": 10**30}, "limit: "),
        ({"limit": "3"}, "limit: "),
        ({"few_shot": 10**30}, "few_shot: "),
        ({"few_shot": 1.5}, "few_shot: "),
        ({"source": ""}, "source: "),
        ({"instruction": "{prompt} \udcff"}, "instruction: "),
        ({"system": "\udcff"}, "system: "),
    ],
)
def test_prompt_settings_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}expected"):
        PromptConfig(**settings)


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("deep.jsonl", '{"prompt": ' + "[" * 100_000, "source: line 1 of"),
        ("digits.jsonl", '{"prompt": "a", "reference": "b", "n": ' + "9" * 5000 + "}", "source: line 1 of"),
        ("deep.json", "[" * 100_000, "source: "),
        ("half.jsonl", '{"prompt": "a", "reference": "b", "x": "\\ud800"}', "instruction: expected whole"),
    ],
)
def test_unreadable_rows_are_named(name: str, text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    instruction = "{prompt}{x}" if name == "half.jsonl" else None
    with pytest.raises(ValueError, match=f"^{named}"):
        load_examples(PromptConfig(source=str(tmp_path / name), chat=False, instruction=instruction))


def test_gamma_and_out_have_bounds() -> None:
    with pytest.raises(ValueError, match="gamma: expected at most"):
        CascadeConfig(gamma=10**9)
    with pytest.raises(ValueError, match="out: expected a folder"):
        CollectConfig(out="")
    with pytest.raises(ValueError, match="device: expected"):
        load_pair(PairConfig("a", "b", device="meta"))
