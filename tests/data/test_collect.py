"""What a trace must be: right to 1e-5, the same whatever the batches, byte-identical after any kill, never mixed."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from speccascade.cascade.distributions import Sampling, logits_to_probs
from speccascade.cascade.statistics import STAT_FIELDS, Stats
from speccascade.data import collect as collector
from speccascade.data import job, plan
from speccascade.data.collect import collect
from speccascade.data.config import CollectConfig
from speccascade.data.encoding import encode_example
from speccascade.data.pairs import load_pair
from speccascade.data.prompts import load_examples, split_of
from speccascade.data.traces import Traces

from .kills import run_and_die, run_until_killed

BFLOAT16_TOLERANCE = 0.05
CONTINUOUS = ("draft_max", "verifier_max", "draft_margin", "verifier_margin", "tv", "tv_raw", "q_label", "p_label")
"""Probabilities and distances; in bfloat16 they may differ by so much, as docs/traces.md states."""


def digests(folder: str | Path) -> dict[str, str]:
    files = sorted(path for path in Path(folder).iterdir() if path.suffix in (".parquet", ".json"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rows_by_prompt(folder: str | Path) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(Path(folder).glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            rows.setdefault(row["prompt_id"], []).append(row)
    return rows


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_rows_equal_statistics_recomputed_from_full_logits(collect_config: CollectConfig, temperature: float) -> None:
    config = replace(collect_config, temperature=temperature)
    collect(config)
    logged = rows_by_prompt(config.out)
    pair = load_pair(config.pair)
    for example in load_examples(config.prompts)[:8]:
        prompt, reference = encode_example(example, pair.tokenizer, config.prompts)
        sequence = torch.tensor([prompt + reference])
        with torch.inference_mode():
            full = [
                model(sequence).logits[0, len(prompt) - 1 : -1, : pair.vocab_size]
                for model in (pair.drafter, pair.verifier)
            ]
        q, p = (logits_to_probs(logits, Sampling(temperature=temperature)) for logits in full)
        q_raw, p_raw = (logits_to_probs(logits) for logits in full)
        expected = Stats(q, p, q_raw, p_raw).columns()
        rows = logged[example.prompt_id]
        assert [row["label"] for row in rows] == reference
        assert [row["position"] for row in rows] == list(range(len(prompt), len(prompt) + len(reference)))
        assert [row["token"] for row in rows] == q_raw.argmax(-1).tolist()
        for name in STAT_FIELDS:
            torch.testing.assert_close(torch.tensor([row[name] for row in rows]), expected[name], atol=1e-5, rtol=1e-5)
        at = torch.arange(len(reference)), torch.tensor(reference)
        torch.testing.assert_close(torch.tensor([row["q_label"] for row in rows]), q[at], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor([row["p_label"] for row in rows]), p[at], atol=1e-5, rtol=0)
        for i, row in enumerate(rows):
            union = sorted({*q_raw[i].topk(4).indices.tolist(), *p_raw[i].topk(4).indices.tolist()})
            assert row["topk_ids"] == union
            torch.testing.assert_close(torch.tensor(row["topk_q"]), q[i, union], atol=1e-5, rtol=0)
            torch.testing.assert_close(torch.tensor(row["topk_p"]), p[i, union], atol=1e-5, rtol=0)


def check_same_rows(one: str, two: str, tolerance: float) -> None:
    """Rows of equal keys hold equal values; `tolerance` is that of every float."""
    left, right = rows_by_prompt(one), rows_by_prompt(two)
    assert left.keys() == right.keys()
    for prompt_id, rows in left.items():
        for row, twin in zip(rows, right[prompt_id], strict=True):
            for name, value in row.items():
                if isinstance(value, float):
                    assert value == pytest.approx(twin[name], abs=tolerance, rel=tolerance), name
                elif not name.startswith("topk_"):
                    assert value == twin[name], name


def test_rows_do_not_depend_on_batches_or_shards(collect_config: CollectConfig, tmp_path: Path) -> None:
    collect(collect_config)
    other = replace(collect_config, out=str(tmp_path / "other"), batch_tokens=1, shard_prompts=7)
    collect(other)
    assert list(rows_by_prompt(collect_config.out)) == list(rows_by_prompt(other.out))
    check_same_rows(collect_config.out, other.out, 1e-5)


def test_rows_do_not_depend_on_the_order_of_prompts(collect_config: CollectConfig, tmp_path: Path) -> None:
    collect(collect_config)
    lines = Path(collect_config.prompts.source).read_text().splitlines(keepends=True)
    random.Random(3).shuffle(lines)
    (tmp_path / "shuffled.jsonl").write_text("".join(lines))
    prompts = replace(collect_config.prompts, source=str(tmp_path / "shuffled.jsonl"))
    other = replace(collect_config, out=str(tmp_path / "other"), prompts=prompts)
    collect(other)
    assert list(rows_by_prompt(collect_config.out)) != list(rows_by_prompt(other.out))
    check_same_rows(collect_config.out, other.out, 1e-5)


def test_in_bfloat16_rows_depend_on_batches_within_the_stated_tolerance(
    collect_config: CollectConfig, tiny_llama: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    for name, seed, layers in (("drafter", 1, 1), ("verifier", 0, 2)):
        tiny_llama(seed=seed, layers=layers, hidden=256).save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    folders = {"drafter": str(tmp_path / "drafter"), "verifier": str(tmp_path / "verifier")}
    config = replace(collect_config, pair=replace(collect_config.pair, dtype="bfloat16", **folders))
    collect(config)
    other = replace(config, out=str(tmp_path / "other"), batch_tokens=1)
    collect(other)
    one, two = rows_by_prompt(config.out), rows_by_prompt(other.out)
    pairs = [pair for key in one for pair in zip(one[key], two[key], strict=True)]
    largest = 0.0
    for row, twin in pairs:
        for key in ("prompt_id", "split", "position", "label"):
            assert row[key] == twin[key]
        gaps = [abs(row[name] - twin[name]) for name in CONTINUOUS]
        largest = max(largest, *gaps)
        clear = all(min(side[f"{model}_margin"] for side in (row, twin)) > 0.1 for model in ("draft", "verifier"))
        if clear:  # where a model's two best tokens are close, either may come first
            assert (row["token"], row["argmax_agree"]) == (twin["token"], twin["argmax_agree"])
    assert 0 < largest < BFLOAT16_TOLERANCE


def test_bytes_do_not_depend_on_the_number_of_cores(collect_config: CollectConfig, tmp_path: Path) -> None:
    collect(collect_config)
    other = replace(collect_config, out=str(tmp_path / "other"))
    torch.set_num_threads(3)
    try:
        collect(other)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert digests(other.out) == digests(collect_config.out)


def test_a_second_run_changes_nothing(collect_config: CollectConfig) -> None:
    collect(collect_config)
    before = digests(collect_config.out)
    collect(collect_config)
    assert digests(collect_config.out) == before


KILL_POINTS = {
    "the plan is written": (plan, "write_text", 1, "after"),
    "the first shard is scored": (job, "write_shard", 1, "before"),
    "the first shard is half written": (job, "write_shard", 1, "half"),
    "a first shard is renamed": (job, "write_shard", 1, "after"),
    "the next shard is half written": (job, "write_shard", 1, "half"),
    "two more shards are renamed": (job, "write_shard", 2, "after"),
    "all shards are there": (collector, "_write_manifest", 1, "before"),
    "the manifest is there": (collector, "write_text", 1, "after"),
}


def test_killed_anywhere_and_resumed_it_ends_byte_identical(collect_config: CollectConfig, tmp_path: Path) -> None:
    collect(collect_config)
    unbroken = digests(collect_config.out)
    broken = replace(collect_config, out=str(tmp_path / "broken"))
    for point, kill in KILL_POINTS.items():
        assert run_until_killed(run_and_die, partial(collect, broken), *kill) == -signal.SIGKILL, (
            f"not killed when {point}"
        )
    collect(broken)
    assert digests(broken.out) == unbroken


def test_killed_twenty_times_at_random_it_ends_byte_identical(collect_config: CollectConfig, tmp_path: Path) -> None:
    config = replace(collect_config, shard_prompts=1)
    started = time.monotonic()
    assert run_until_killed(collect, config) == 0
    longest = time.monotonic() - started
    unbroken = digests(config.out)
    broken = replace(config, out=str(tmp_path / "broken"))
    chance, kills, runs = random.Random(20), 0, 0
    while kills < 20:
        runs += 1
        assert runs < 200, f"only {kills} of {runs} runs were still at work when they were killed"
        if run_until_killed(collect, broken, delay=chance.uniform(0, longest)) == -signal.SIGKILL:
            kills += 1
        else:
            assert digests(broken.out) == unbroken
            shutil.rmtree(broken.out)
    collect(broken)
    assert digests(broken.out) == unbroken


@pytest.mark.parametrize(
    ("change", "key"),
    [({"top_k": 5}, "top_k"), ({"temperature": 0.5}, "temperature"), ({"splits": ("train",)}, "collected")],
)
def test_another_plan_in_the_same_folder_is_refused(
    collect_config: CollectConfig, change: dict[str, Any], key: str
) -> None:
    collect(collect_config)
    before = digests(collect_config.out)
    with pytest.raises(ValueError, match=f"was begun with {key} = "):
        collect(replace(collect_config, **change))
    assert digests(collect_config.out) == before


def test_another_prompt_setting_is_refused_by_its_key(collect_config: CollectConfig) -> None:
    collect(collect_config)
    with pytest.raises(ValueError, match=r"was begun with prompts\.instruction = '\{prompt\}', this run has 'Q: "):
        collect(replace(collect_config, prompts=replace(collect_config.prompts, instruction="Q: {prompt}")))


def test_another_order_of_splits_is_refused(collect_config: CollectConfig) -> None:
    collect(collect_config)
    turned = dict(reversed(collect_config.prompts.splits.items()))
    with pytest.raises(ValueError, match="was begun with"):
        collect(replace(collect_config, prompts=replace(collect_config.prompts, splits=turned)))


def test_a_damaged_shard_of_an_unfinished_run_is_named(collect_config: CollectConfig) -> None:
    collect(collect_config)
    folder = Path(collect_config.out)
    (folder / "manifest.json").unlink()
    shard = folder / "part-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"part-00001\.parquet is damaged"):
        collect(collect_config)


def test_a_flipped_bit_in_an_unfinished_run_is_named(collect_config: CollectConfig) -> None:
    collect(collect_config)
    folder = Path(collect_config.out)
    (folder / "manifest.json").unlink()
    shard = folder / "part-00001.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"part-00001\.parquet is damaged"):
        collect(collect_config)


def test_a_shard_of_another_plan_is_refused(collect_config: CollectConfig, tmp_path: Path) -> None:
    other = replace(collect_config, out=str(tmp_path / "other"), top_k=3)
    collect(other)
    Path(collect_config.out).mkdir()
    collect(collect_config)
    folder = Path(collect_config.out)
    (folder / "manifest.json").unlink()
    (folder / "part-00002.parquet").write_bytes((tmp_path / "other" / "part-00002.parquet").read_bytes())
    with pytest.raises(ValueError, match=r"part-00002\.parquet is foreign"):
        collect(collect_config)


def test_parquet_files_of_others_are_not_mixed_with_ours(collect_config: CollectConfig) -> None:
    Path(collect_config.out).mkdir()
    (Path(collect_config.out) / "mine.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"mine\.parquet is foreign"):
        collect(collect_config)


def test_two_writers_on_one_folder_are_refused(collect_config: CollectConfig) -> None:
    from filelock import FileLock

    Path(collect_config.out).mkdir()
    with FileLock(Path(collect_config.out) / ".lock"), pytest.raises(OSError, match="another run is writing to"):
        collect(collect_config)


def test_a_folder_that_cannot_be_written_is_named(collect_config: CollectConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"out: cannot write to .*file"):
        collect(replace(collect_config, out=str(tmp_path / "file" / "traces")))


def test_a_full_disk_leaves_finished_shards_and_no_half_one(
    collect_config: CollectConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect(collect_config)
    unbroken = digests(collect_config.out)
    folder = Path(collect_config.out)
    (folder / "manifest.json").unlink()
    (folder / "part-00002.parquet").unlink()

    def full(table: Any, file: Any, **_: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("speccascade.data.shards.pq.write_table", full)
        with pytest.raises(OSError, match="No space left"):
            collect(collect_config)
    assert sorted(p.name for p in folder.glob("part-*")) == [f"part-0000{i}.parquet" for i in (0, 1, 3, 4)]
    collect(collect_config)
    assert digests(collect_config.out) == unbroken


def test_an_interrupted_run_says_what_is_kept_and_goes_on(
    collect_config: CollectConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    collect(collect_config)
    broken = replace(collect_config, out=str(tmp_path / "broken"))
    write, calls = job.write_shard, itertools.count(1)

    def interrupted(*arguments: Any) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collect(broken)
    assert "Stopped with 2 of 5 shards written; the same command goes on from there" in capsys.readouterr().err
    collect(broken)
    assert digests(broken.out) == digests(collect_config.out)


@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_non_finite_logits_name_model_prompt_and_position(collect_config: CollectConfig, role: str) -> None:
    pair = load_pair(collect_config.pair)
    with torch.no_grad():
        getattr(pair, role).lm_head.weight[7] = float("nan")
    with pytest.raises(
        ValueError, match=rf"{role} '.*': logits are not finite in prompt [0-9a-f]{{16}} at position \d+"
    ):
        collect(collect_config, pair)


def test_a_prompt_beyond_the_context_is_named_or_left_out(collect_config: CollectConfig) -> None:
    pair = load_pair(collect_config.pair)
    lengths = [
        len(prompt) + len(reference) - 1
        for prompt, reference in (
            encode_example(example, pair.tokenizer, collect_config.prompts)
            for example in load_examples(collect_config.prompts)
        )
    ]
    pair.verifier.config.max_position_embeddings = max(lengths) - 1
    with pytest.raises(ValueError, match=r"prompt [0-9a-f]{16}: \d+ tokens with its reference, the models' context is"):
        collect(collect_config, pair)
    manifest = collect(replace(collect_config, skip_long=True), pair)
    assert manifest.plan.examples == sum(length < max(lengths) for length in lengths)


def test_where_no_prompt_fits_that_is_said(collect_config: CollectConfig) -> None:
    pair = load_pair(collect_config.pair)
    pair.verifier.config.max_position_embeddings = 3
    with pytest.raises(ValueError, match="skip_long: expected a prompt that fits into the context of 3 tokens, none"):
        collect(replace(collect_config, skip_long=True), pair)


def test_max_tokens_cuts_references(collect_config: CollectConfig) -> None:
    collect(replace(collect_config, max_tokens=5))
    assert {len(rows) for rows in rows_by_prompt(collect_config.out).values()} == {5}


def test_splits_are_disjoint_by_prompt_and_as_hashed(collect_config: CollectConfig) -> None:
    manifest = collect(collect_config)
    traces = Traces.open(collect_config.out)
    ids = {name: set(traces.split(name).prompt_ids) for name in traces.splits}
    assert sum(map(len, ids.values())) == len(set.union(*ids.values())) == 20
    for name, prompts in ids.items():
        assert {split_of(prompt_id, collect_config.prompts.splits) for prompt_id in prompts} == {name}
        assert manifest.split_prompts[name] == len(prompts)


def test_only_the_splits_asked_for_are_collected(collect_config: CollectConfig) -> None:
    collect(replace(collect_config, splits=("test",)))
    assert Traces.open(collect_config.out).splits == ("test",)


def test_an_unknown_split_is_refused_with_the_nearest(collect_config: CollectConfig) -> None:
    with pytest.raises(ValueError, match="did you mean 'validation'"):
        replace(collect_config, splits=("valid",))


def test_padding_rows_of_the_head_never_count(
    collect_config: CollectConfig, tiny_llama: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    wide = tiny_llama(seed=1, layers=1, vocab=80)
    with torch.no_grad():
        wide.lm_head.weight[64:] = 50 * wide.lm_head.weight[:16]  # padding rows that would win if they were looked at
    wide.save_pretrained(tmp_path / "wide")
    tiny_tokenizer.save_pretrained(tmp_path / "wide")
    config = replace(collect_config, pair=replace(collect_config.pair, drafter=str(tmp_path / "wide")))
    manifest = collect(config)
    assert manifest.plan.vocab_size == len(tiny_tokenizer)
    for rows in rows_by_prompt(config.out).values():
        assert max(max(row["topk_ids"]) for row in rows) < len(tiny_tokenizer)


def test_what_a_split_leaves_out_is_said(collect_config: CollectConfig, capsys: pytest.CaptureFixture[str]) -> None:
    splits = {"tune": 0.5, "train": 0.5, "validation": 0.0}
    prompts = replace(collect_config.prompts, splits=splits)
    manifest = collect(replace(collect_config, prompts=prompts, splits=("train", "validation")))
    assert manifest is not None
    told = capsys.readouterr().err
    left = 20 - manifest.plan.examples
    assert f"Left out {left} of 20 prompts: they fell into split tune (what a drafter is tuned on)" in told
    assert "Split validation is empty: none of 20 prompts fell into it" in told
    assert re.search(r"First prompt ends 'what is \d+ \+ \d+\? .*', its reference begins 'it is", told)
