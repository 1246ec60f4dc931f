"""One trace set out of several: nothing lost, nothing twice, the same bytes whatever happened on the way."""

from __future__ import annotations

import hashlib
import itertools
import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from speccascade.data import merge as merger
from speccascade.data.manifest import Manifest
from speccascade.data.merge import merge
from speccascade.data.prompts import split_of
from speccascade.data.traces import Traces

from .kills import run_and_die, run_until_killed
from .made_traces import make_traces

Rows = dict[str, list[dict[str, Any]]]


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".parquet", ".json"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rows_by_prompt(folder: Path) -> Rows:
    rows: Rows = {}
    for path in sorted(folder.glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            rows.setdefault(row.pop("prompt_id"), []).append(row)
    return rows


@pytest.fixture
def maths(tmp_path: Path) -> Path:
    """Five prompts, one of them with two references."""
    prompts = {"a": 0, "b": 0, "b-1": 1, "c": 0, "d": 0}
    return make_traces(tmp_path / "maths", prompts, prompts={"source": "maths"}).folder


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Two new prompts; two repeated ones; and new references of two known ones."""
    prompts = {"a": 0, "b-1": 0, "e": 0, "b": 2, "f": 0, "c": 5}
    return make_traces(tmp_path / "code", prompts, prompts={"source": "code"}, seed=1).folder


def test_all_prompts_are_there_once_and_new_references_get_the_next_suffix(
    maths: Path, code: Path, tmp_path: Path
) -> None:
    manifest = merge([maths, code], tmp_path / "both")
    merged, one, two = (rows_by_prompt(folder) for folder in (tmp_path / "both", maths, code))
    assert {name: merged[name] for name in one} == one
    assert {name: rows for name, rows in merged.items() if name not in one} == {
        "e": two["e"], "b-2": two["b"], "f": two["f"], "c-1": two["c"],
    }  # fmt: skip
    assert manifest.rows == sum(map(len, merged.values()))
    assert manifest.plan.examples == len(merged) == sum(manifest.split_prompts.values())


def test_renamed_prompts_stay_in_the_split_of_their_prompt(maths: Path, code: Path, tmp_path: Path) -> None:
    manifest = merge([maths, code], tmp_path / "both")
    for name, rows in rows_by_prompt(tmp_path / "both").items():
        assert {row["split"] for row in rows} == {split_of(name, manifest.plan.splits)}


def test_the_merged_set_opens_and_splits(maths: Path, code: Path, tmp_path: Path) -> None:
    merge([maths, code], tmp_path / "both")
    traces = Traces.open(tmp_path / "both")
    ids = {name: traces.split(name).prompt_ids for name in traces.splits}
    assert sorted(itertools.chain(*ids.values())) == sorted(rows_by_prompt(tmp_path / "both"))
    assert traces.manifest.plan.prompts["source"] == "merged: maths, code"


def test_shards_without_anything_new_leave_no_gap(maths: Path, tmp_path: Path) -> None:
    other = make_traces(tmp_path / "other", {"a": 0, "b": 0, "e": 0}, shard_prompts=1, seed=3).folder
    manifest = merge([maths, other], tmp_path / "both")
    assert [shard.file for shard in manifest.shards] == [f"part-0000{i}.parquet" for i in range(4)]
    assert manifest.origins[1].shards == ("part-00003.parquet",)


def test_origins_say_which_shards_came_from_where(maths: Path, code: Path, tmp_path: Path) -> None:
    manifest = merge([maths, code], tmp_path / "both")
    assert [origin.source for origin in manifest.origins] == ["maths", "code"]
    assert [origin.digest for origin in manifest.origins] == [Manifest.read(folder).digest for folder in (maths, code)]
    one, two = manifest.shards_of("maths"), manifest.shards_of(manifest.origins[1].digest)
    assert (*one, *two) == manifest.shards
    assert sum(shard.rows for shard in one) == manifest.origins[0].rows == Manifest.read(maths).rows
    with pytest.raises(ValueError, match="origin: expected one of maths, code, got 'math'; did you mean 'maths'"):
        manifest.shards_of("math")
    own = Manifest.read(maths)
    assert own.shards_of("maths") == own.shards_of(own.digest) == own.shards


def test_the_rows_of_one_origin_can_be_read_alone(maths: Path, code: Path, tmp_path: Path) -> None:
    merge([maths, code], tmp_path / "both")
    both = Traces.open(tmp_path / "both")
    for name in both.splits:
        whole, parts = both.split(name), []
        for origin in both.manifest.origins:
            held = pq.ParquetDataset([tmp_path / "both" / file for file in origin.shards]).read()
            if name in held["split"].to_pylist():
                parts.append(both.split(name, origin=origin.source))
                ids = {
                    i
                    for i, s in zip(held["prompt_id"].to_pylist(), held["split"].to_pylist(), strict=True)
                    if s == name
                }
                assert set(parts[-1].prompt_ids) == ids
        assert torch.equal(torch.cat([part.label for part in parts]), whole.label)
    with pytest.raises(ValueError, match="did you mean 'maths'"):
        both.split("train", origin="math")


def test_a_merged_set_can_be_merged_again_and_keeps_its_origins(maths: Path, code: Path, tmp_path: Path) -> None:
    news = make_traces(tmp_path / "news", {"g": 0, "h": 0, "a": 0}, prompts={"source": "news"}).folder
    merge([maths, code], tmp_path / "both")
    stepwise = merge([tmp_path / "both", news, code], tmp_path / "stepwise")
    at_once = merge([maths, code, news], tmp_path / "once")
    assert rows_by_prompt(tmp_path / "stepwise") == rows_by_prompt(tmp_path / "once")
    assert stepwise.plan.prompts["source"] == at_once.plan.prompts["source"] == "merged: maths, code, news"
    assert stepwise.origins == at_once.origins
    assert Manifest.read(tmp_path / "once") == at_once


def test_a_set_with_nothing_new_is_an_origin_without_rows(maths: Path, tmp_path: Path) -> None:
    again = make_traces(tmp_path / "again", {"a": 0, "d": 0}, prompts={"source": "again"}, seed=1).folder
    manifest = merge([maths, again], tmp_path / "both")
    assert rows_by_prompt(tmp_path / "both") == rows_by_prompt(maths)
    assert (manifest.origins[1].rows, manifest.shards_of("again")) == (0, ())
    both = Traces.open(tmp_path / "both")
    with pytest.raises(ValueError, match=f"origin: expected one with rows in split '{both.splits[0]}', got 'again'"):
        both.split(both.splits[0], origin="again")


def test_columns_of_a_cascade_survive(tmp_path: Path) -> None:
    folders = [
        make_traces(tmp_path / name, {name: 0, f"{name}{name}": 0}, cascade=True, outcomes=True).folder for name in "ab"
    ]
    merge(folders, tmp_path / "both")
    assert rows_by_prompt(tmp_path / "both") == rows_by_prompt(folders[0]) | rows_by_prompt(folders[1])
    assert any(row["answer_changed"] is None for row in itertools.chain(*rows_by_prompt(tmp_path / "both").values()))


def test_hidden_states_survive(tmp_path: Path) -> None:
    folders = [make_traces(tmp_path / name, {name: 0, "z": 0}, hidden=True).folder for name in "ab"]
    merge(folders, tmp_path / "both")
    one, two = map(rows_by_prompt, folders)
    assert rows_by_prompt(tmp_path / "both") == one | {"b": two["b"]}
    assert len(one["a"][0]["draft_hidden"]) == 6


def test_the_bytes_depend_on_the_inputs_alone(maths: Path, code: Path, tmp_path: Path) -> None:
    merge([maths, code], tmp_path / "one")
    merge([str(maths), str(code)], str(tmp_path / "two"))
    before = digests(tmp_path / "one")
    assert digests(tmp_path / "two") == before
    merge([maths, code], tmp_path / "one")
    assert digests(tmp_path / "one") == before
    maths.rename(tmp_path / "moved")
    merge([tmp_path / "moved", code], tmp_path / "three")
    assert digests(tmp_path / "three") == before


KILL_POINTS = {
    "the plan is written": ("adopt_plan", 1, "after"),
    "the first shard is half written": ("write_shard", 1, "half"),
    "the first shard is there": ("write_shard", 1, "after"),
    "the third shard is half written": ("write_shard", 2, "half"),
    "three shards are there": ("write_shard", 2, "after"),
    "all shards are there": ("record_shards", 1, "before"),
    "the manifest is there": ("write_text", 1, "after"),
}


def test_killed_anywhere_and_run_again_it_ends_byte_identical(maths: Path, code: Path, tmp_path: Path) -> None:
    merge([maths, code], tmp_path / "unbroken")
    again = partial(merge, [maths, code], tmp_path / "broken")
    for point, kill in KILL_POINTS.items():
        assert run_until_killed(run_and_die, again, merger, *kill) == -signal.SIGKILL, f"not killed when {point}"
    merge([maths, code], tmp_path / "broken")
    assert digests(tmp_path / "broken") == digests(tmp_path / "unbroken")


def test_finished_shards_are_kept(maths: Path, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merge([maths, code], tmp_path / "both")
    before = digests(tmp_path / "both")
    (tmp_path / "both" / "manifest.json").unlink()
    (tmp_path / "both" / "part-00002.parquet").unlink()
    written: list[str] = []
    write = merger.write_shard
    monkeypatch.setattr(merger, "write_shard", lambda path, *rest: (written.append(path.name), write(path, *rest)))
    merge([maths, code], tmp_path / "both")
    assert written == ["part-00002.parquet"]
    assert digests(tmp_path / "both") == before


def test_two_writers_are_refused(maths: Path, code: Path, tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "both").mkdir()
    with FileLock(tmp_path / "both" / ".lock"), pytest.raises(OSError, match="another run is writing to"):
        merge([maths, code], tmp_path / "both")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"drafter_digest": "x"}, "drafter_digest = 'd'"),
        ({"verifier_digest": "x"}, "verifier_digest = 'v'"),
        ({"vocabulary_fingerprint": "x"}, "vocabulary_fingerprint = 'f'"),
        ({"vocab_size": 51}, "vocab_size = 50"),
        ({"dtype": "bfloat16"}, "dtype = 'float32'"),
        ({"temperature": 0.5}, "temperature = 1.0"),
        ({"k": 3}, "top_k = 4"),
        ({"cascade": True}, "source = 'teacher_forced'"),
        ({"hidden": True}, "hidden = False"),
        ({"splits": {"train": 0.6, "validation": 0.1, "test": 0.3}}, "splits.train = 0.5"),
    ],
)
def test_another_pair_or_setting_is_refused_by_its_key(
    maths: Path, tmp_path: Path, change: dict[str, Any], key: str
) -> None:
    make_traces(tmp_path / "other", {"e": 0}, **change)
    with pytest.raises(ValueError, match=rf"merge: \S+maths has {key}, \S+other has ") as caught:
        merge([maths, tmp_path / "other"], tmp_path / "both")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "both").exists()


def test_another_rule_of_the_cascade_is_refused_by_its_key(tmp_path: Path) -> None:
    for name in ("chow", "opt"):
        record = make_traces(tmp_path / name, {name: 0}, cascade=True).folder / "manifest.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"cascade": {"rule": name, "gamma": 5}}))
    with pytest.raises(ValueError, match=r"chow has cascade\.rule = 'chow', \S+opt has 'opt'"):
        merge([tmp_path / "chow", tmp_path / "opt"], tmp_path / "both")


def test_another_order_of_splits_is_refused(maths: Path, tmp_path: Path) -> None:
    splits = dict(reversed(Manifest.read(maths).plan.splits.items()))
    make_traces(tmp_path / "other", {"e": 0}, splits=splits)
    with pytest.raises(ValueError, match="has its splits in the order"):
        merge([maths, tmp_path / "other"], tmp_path / "both")


def test_too_few_folders_and_folders_in_each_other_are_refused(maths: Path, code: Path, tmp_path: Path) -> None:
    for folders, said in (([], "got none"), ([maths], "got .*maths")):
        with pytest.raises(ValueError, match=f"merge: expected at least two trace folders, {said}"):
            merge(folders, tmp_path / "both")
    with pytest.raises(ValueError, match="merge: expected different folders"):
        merge([maths, code, code.parent / "." / "code"], tmp_path / "both")
    for out in (code, code / "both", code / "deep" / "both"):
        with pytest.raises(ValueError, match="out: expected a folder outside of what is merged"):
            merge([maths, code], out)
    assert not (code / "both").exists()


def test_unfinished_and_damaged_inputs_are_named(maths: Path, code: Path, tmp_path: Path) -> None:
    manifest = (code / "manifest.json").read_text()
    (code / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json in \S+code; its collection is unfinished"):
        merge([maths, code], tmp_path / "both")
    (code / "manifest.json").write_text(manifest)
    (code / "part-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"code/part-00001\.parquet is damaged"):
        merge([maths, code], tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_a_prompt_in_two_shards_of_one_set_is_refused(maths: Path, tmp_path: Path) -> None:
    other = make_traces(tmp_path / "other", {"e": 0, "f": 0}, shard_prompts=1).folder
    first, record = (other / "part-00000.parquet").read_bytes(), json.loads((other / "manifest.json").read_text())
    (other / "part-00001.parquet").write_bytes(first)
    record["shards"][1]["sha256"] = record["shards"][0]["sha256"]
    digest = hashlib.sha256(2 * record["shards"][0]["sha256"].encode()).hexdigest()
    (other / "manifest.json").write_text(json.dumps(record | {"digest": digest}))
    with pytest.raises(ValueError, match=r"part-00001\.parquet repeats prompt e of an earlier shard"):
        merge([maths, other], tmp_path / "both")


def test_what_is_there_already_is_never_overwritten(maths: Path, code: Path, tmp_path: Path) -> None:
    other = make_traces(tmp_path / "other", {"z": 0}).folder
    before = digests(other)
    with pytest.raises(ValueError, match=r"out: \S+other was begun with "):
        merge([maths, code], other)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "mine.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"mine\.parquet is foreign"):
        merge([maths, code], tmp_path / "foreign")
    merge([maths, code], tmp_path / "both")
    (tmp_path / "both" / "manifest.json").unlink()
    (tmp_path / "both" / "part-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"both/part-00001\.parquet is damaged"):
        merge([maths, code], tmp_path / "both")
    assert digests(other) == before


def test_other_inputs_into_the_same_folder_are_refused(maths: Path, code: Path, tmp_path: Path) -> None:
    merge([maths, code], tmp_path / "both")
    before = digests(tmp_path / "both")
    with pytest.raises(ValueError, match=r"was begun with prompts\.source = 'merged: maths, code'"):
        merge([code, maths], tmp_path / "both")
    assert digests(tmp_path / "both") == before


def test_settings_that_only_shaped_the_shards_may_differ(maths: Path, tmp_path: Path) -> None:
    other = make_traces(tmp_path / "other", {"e": 0}, batch_tokens=7, device="cuda", code_version="1")
    plan = merge([maths, other.folder], tmp_path / "both").plan
    assert (plan.batch_tokens, plan.device) == (7, "cpu, cuda")


def test_one_shard_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make_traces(tmp_path / name, {f"{name}{i}": 0 for i in range(6)}).folder for name in "ab"]
    longest: list[int] = []
    read = merger.read_rows

    def read_and_count(paths: list[Path], *rest: Any, **named: Any) -> Any:
        table = read(paths, *rest, **named)
        longest.append(len(table))
        return table

    monkeypatch.setattr(merger, "read_rows", read_and_count)
    manifest = merge(folders, tmp_path / "both")
    assert len(longest) == 2 * len(manifest.shards)
    assert max(longest) == max(shard.rows for shard in manifest.shards)
