"""A trace folder opens only when every shard is as the manifest recorded it, and gives back what was logged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from speccascade.cascade.statistics import STAT_FIELDS, Stats
from speccascade.data.collect import collect
from speccascade.data.config import CollectConfig
from speccascade.data.encoding import encode_example
from speccascade.data.pairs import load_pair
from speccascade.data.prompts import load_examples
from speccascade.data.shards import SCHEMA_VERSION
from speccascade.data.traces import Traces
from speccascade.router.features import FEATURE_SETS, build_features

from .made_traces import make_traces


@pytest.fixture
def folder(collect_config: CollectConfig) -> Path:
    collect(collect_config)
    return Path(collect_config.out)


def rows_of(folder: Path, split: str) -> list[dict[str, Any]]:
    table = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("*.parquet"))])
    return [row for row in table.to_pylist() if row["split"] == split]


def test_a_split_gives_back_what_was_logged(folder: Path) -> None:
    split = Traces.open(folder).split("train")
    rows = rows_of(folder, "train")
    assert len(split) == len(rows) > 0
    assert [split.prompt_ids[i] for i in split.prompt_index] == [row["prompt_id"] for row in rows]
    assert split.position.tolist() == [row["position"] for row in rows]
    assert split.label.tolist() == [row["label"] for row in rows]
    assert split.token.tolist() == [row["token"] for row in rows]
    for name in STAT_FIELDS:
        assert getattr(split.stats, name).tolist() == [row[name] for row in rows]
    assert split.p_label.tolist() == [row["p_label"] for row in rows]
    for i, row in enumerate(rows):
        width = len(row["topk_ids"])
        assert split.topk_ids[i].tolist() == row["topk_ids"] + [-1] * (split.topk_ids.shape[1] - width)
        assert split.topk_q[i, :width].tolist() == row["topk_q"]
        assert split.topk_p[i, width:].eq(0).all()


def test_sequences_put_each_answer_in_order(folder: Path) -> None:
    split = Traces.open(folder).split("train")
    index = split.sequences()
    assert index[index >= 0].tolist() == list(range(len(split)))
    assert len(index) == len(split.prompt_ids) and len({int((row >= 0).sum()) for row in index}) > 1
    for row in index:
        held = row[row >= 0]
        assert torch.equal(row[: len(held)], held), "a reference has no holes"
        assert len(split.prompt_index[held].unique()) == 1 and set(split.position[held].diff().tolist()) == {1}


def test_sequences_leave_holes_and_tell_two_answers_of_a_prompt_apart(folder: Path) -> None:
    split = Traces.open(folder).split("train")
    part = replace(
        split,
        prompt_index=torch.tensor([0, 0, 0, 0, 0, 0, 1]),
        position=torch.tensor([5, 6, 8, 5, 6, 7, 8]),
        label=split.label[:7],
    )
    assert part.sequences().tolist() == [[0, 1, -1, 2], [3, 4, 5, -1], [6, -1, -1, -1]]


def test_correctness_of_both_models_under_both_losses(folder: Path) -> None:
    split = Traces.open(folder).split("train")
    assert split.correctness.shape == (len(split), 2, 2)
    assert torch.equal(split.draft_argmax, split.token)
    assert torch.equal(split.correctness[:, 0, 0], (split.label == split.token).float())
    assert torch.equal(split.correctness[:, 0, 1], (split.label == split.verifier_argmax).float())
    assert torch.equal(split.correctness[:, 1, 0], split.q_label)
    assert torch.equal(split.correctness[:, 1, 1], split.p_label)
    agree = (split.draft_argmax == split.verifier_argmax).float()
    assert torch.equal(split.stats.argmax_agree, agree)


def test_an_unknown_split_is_refused_with_the_nearest(folder: Path) -> None:
    with pytest.raises(ValueError, match="expected one of train, validation, test, got 'tset'; did you mean 'test'"):
        Traces.open(folder).split("tset")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def swap_for_a_neighbour(path: Path) -> None:
    path.write_bytes(path.with_name("part-00000.parquet").read_bytes())


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, swap_for_a_neighbour])
def test_a_damaged_or_foreign_shard_is_named(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder / "part-00003.parquet")
    with pytest.raises(ValueError, match=r"part-00003\.parquet is damaged or foreign"):
        Traces.open(folder)


def test_a_missing_shard_is_named_and_can_be_restored(folder: Path, collect_config: CollectConfig) -> None:
    digest = Traces.open(folder).manifest.digest
    (folder / "part-00003.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"part-00003\.parquet is missing"):
        Traces.open(folder)
    assert collect(collect_config).digest == digest
    assert Traces.open(folder).manifest.digest == digest


def test_a_shard_too_many_is_named(folder: Path) -> None:
    (folder / "part-00099.parquet").write_bytes((folder / "part-00000.parquet").read_bytes())
    with pytest.raises(ValueError, match=r"part-00099\.parquet is foreign"):
        Traces.open(folder)


def test_no_traces_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json in"):
        Traces.open(tmp_path / "nothing")


def test_an_unfinished_collection_says_so(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="run collect again"):
        Traces.open(folder)


def test_another_schema_version_is_refused(folder: Path) -> None:
    record = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(record | {"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(ValueError, match=f"schema version {SCHEMA_VERSION + 1}, this release reads {SCHEMA_VERSION}"):
        Traces.open(folder)


@pytest.mark.parametrize("change", [{"rows": 3}, {"digest": "0"}, {"shards": [{"file": "x"}]}])
def test_a_manifest_that_does_not_add_up_is_refused(folder: Path, change: dict[str, Any]) -> None:
    record = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(record | change))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        Traces.open(folder)


def test_a_manifest_that_is_no_json_is_refused(folder: Path) -> None:
    truncate(folder / "manifest.json")
    truncate(folder / "manifest.json")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        Traces.open(folder)


def test_the_manifest_says_who_made_the_rows(folder: Path, collect_config: CollectConfig) -> None:
    manifest = Traces.open(folder).manifest
    assert manifest.identity.verifier == collect_config.pair.verifier
    assert manifest.identity.drafter_digest != manifest.identity.verifier_digest
    assert manifest.plan.dtype == "float32"
    assert manifest.plan.temperature == 1.0
    assert manifest.rows == sum(manifest.split_rows.values()) == sum(shard.rows for shard in manifest.shards)


def test_a_moved_folder_still_opens(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "moved")
    assert Traces.open(tmp_path / "moved").manifest.rows > 0


def test_unchecked_opening_reads_the_manifest_only(folder: Path) -> None:
    flip_a_bit(folder / "part-00000.parquet")
    assert Traces.open(folder, check=False).manifest.rows > 0


def test_temperature_zero_equals_the_greedy_view_of_a_warmer_trace(collect_config: CollectConfig, folder: Path) -> None:
    cold = replace(collect_config, temperature=0.0, out=str(folder.parent / "cold"))
    collect(cold)
    warm_stats, cold_stats = (
        Traces.open(folder).split("train").stats.greedy(),
        Traces.open(cold.out).split("train").stats,
    )
    for name in STAT_FIELDS:
        torch.testing.assert_close(getattr(warm_stats, name), getattr(cold_stats, name), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("feature_set", FEATURE_SETS)
def test_features_of_a_trace_are_those_of_the_models(feature_set: str, collect_config: CollectConfig) -> None:
    """A plain forward over each reference, position by position: what the engine would see there."""
    config = replace(collect_config, hidden=True, top_k=8)
    collect(config)
    split = Traces.open(config.out).split("train", hidden=True)
    logged = build_features(split.stats, feature_set)
    pair = load_pair(config.pair)
    compared = 0
    for example in load_examples(config.prompts):
        if example.prompt_id not in split.prompt_ids:
            continue
        prompt, reference = encode_example(example, pair.tokenizer, config.prompts)
        sequence = torch.tensor([[*prompt, *reference]])
        with torch.inference_mode():
            outputs = [model(sequence, output_hidden_states=True) for model in (pair.drafter, pair.verifier)]
        read = slice(len(prompt) - 1, -1)
        probs = [out.logits[0, read, : pair.vocab_size].softmax(dim=-1) for out in outputs]
        states = [out.hidden_states[-1][0, read] for out in outputs]
        live = build_features(Stats(*probs, *probs, hidden=(states[0], states[1])), feature_set)
        rows = split.prompt_index == split.prompt_ids.index(example.prompt_id)
        torch.testing.assert_close(logged[rows], live, atol=2e-3, rtol=2e-3)
        compared += int(rows.sum())
    assert compared == len(split) > 100


def test_hidden_states_are_kept_as_they_were_stored_and_only_if_asked_for(tmp_path: Path) -> None:
    traces = make_traces(tmp_path / "hidden", {f"p{i}": 0 for i in range(8)}, hidden=True)
    draft, verifier = traces.split("train", hidden=True).stats.hidden
    assert draft.dtype == verifier.dtype == torch.float16
    rows = rows_of(traces.folder, "train")
    assert draft.tolist() == [row["draft_hidden"] for row in rows]
    assert verifier.tolist() == [row["verifier_hidden"] for row in rows]
    with pytest.raises(ValueError, match="hidden: expected positions with the hidden states"):
        _ = traces.split("train").stats.hidden
    without = make_traces(tmp_path / "without", {f"p{i}": 0 for i in range(8)})
    with pytest.raises(ValueError, match="hidden: expected traces collected with hidden=true, .*without holds none"):
        without.split("train", hidden=True)


def test_leading_tokens_of_a_trace_are_those_of_the_union(tmp_path: Path) -> None:
    split = make_traces(tmp_path / "traces", {f"p{i}": 0 for i in range(8)}).split("train")
    leading = split.stats.leading(3)
    for row in range(len(split)):
        for own, other, top, at in (
            (split.topk_q, split.topk_p, leading.draft_top, leading.verifier_at_draft_top),
            (split.topk_p, split.topk_q, leading.verifier_top, leading.draft_at_verifier_top),
        ):
            pairs = sorted(zip(own[row].tolist(), other[row].tolist(), strict=True), reverse=True)[:3]
            assert list(zip(top[row].tolist(), at[row].tolist(), strict=True)) == pairs


def test_leading_tokens_that_a_trace_does_not_tell_are_refused(tmp_path: Path) -> None:
    prompts = {f"p{i}": 0 for i in range(8)}
    plain = make_traces(tmp_path / "plain", prompts).split("train")
    with pytest.raises(ValueError, match="leading: expected at most the logged top_k of 4 tokens, got 5"):
        plain.stats.leading(5)
    cold = make_traces(tmp_path / "cold", prompts, temperature=0.5).split("train")
    with pytest.raises(ValueError, match=r"leading: expected a trace of temperature 1, .* got temperature 0\.5"):
        cold.stats.leading(3)
