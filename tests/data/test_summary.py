"""What a summary says is what plain counting over the whole table says, in memory that does not grow with it."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from speccascade.data import summary as summaries
from speccascade.data.calibration import calibration_error, calibration_sums, error_of_sums
from speccascade.data.plots import plot_summary
from speccascade.data.shards import read_rows
from speccascade.data.summary import HISTOGRAMS, SplitTotals, describe, summarise
from speccascade.data.traces import Traces

from .made_traces import make_traces

PROMPTS = {f"{number:02d}{'x' * 14}": number for number in range(24)}


@pytest.fixture(params=[True, False], ids=["cascade", "teacher forced"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    make_traces(tmp_path / "traces", PROMPTS, cascade=request.param, outcomes=request.param)
    return tmp_path / "traces"


def whole(folder: Path, split: str | None = None) -> dict[str, Any]:
    """All rows of a split as numpy arrays (lists of arrays for the top k)."""
    table = read_rows(sorted(folder.glob("*.parquet")), split=split)
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


def by_hand(rows: dict[str, Any]) -> dict[str, float]:
    """Every number of a split, from the whole table at once; those of the truth only where the labels are."""
    right_q, right_p = (
        rows["label"] == np.take_along_axis(rows["topk_ids"], rows[name].argmax(axis=1)[:, None], 1)[:, 0]
        for name in ("topk_q", "topk_p")
    )
    differ = rows["argmax_agree"] == 0
    numbers = {
        "prompts": len(set(rows["prompt_id"])),
        "positions": len(differ),
        "disagreement": differ.mean(),
        "mean_tv": rows["tv"].mean(dtype=np.float64),
    }
    if "accepted" not in rows:
        return numbers | {
            "draft_accuracy": right_q.mean(),
            "verifier_accuracy": right_p.mean(),
            "draft_only_right": (right_q & differ).mean(),
            "verifier_only_right": (right_p & differ).mean(),
            "draft_calibration_error": error_by_hand(rows["draft_max"], right_q),
            "verifier_calibration_error": error_by_hand(rows["verifier_max"], right_p),
        }
    tried = np.array([value is not None for value in rows["answer_changed"]])
    return numbers | {
        "acceptance": rows["accepted"].mean(),
        "deferral": rows["deferred"].mean(),
        "kept_block_length": rows["accepted"].sum() / len(set(zip(rows["prompt_id"], rows["block"], strict=True))),
        "counterfactuals": tried.sum(),
        "answers_changed": rows["answer_changed"][tried].astype(bool).mean(),
    }


def error_by_hand(confidence: Any, right: Any) -> float:
    edges, error = np.linspace(0, 1, 16), 0.0
    for low, high in pairwise(edges):
        inside = (confidence >= low) & ((confidence < high) | (high == 1))
        if inside.any():
            error += inside.mean() * abs(confidence[inside].mean(dtype=np.float64) - right[inside].mean())
    return error


def test_the_numbers_are_those_of_the_whole_table(folder: Path) -> None:
    found = summarise(folder)
    assert list(found.splits) == ["train", "validation", "test"]
    for name, totals in found.splits.items():
        assert totals.numbers() == pytest.approx(by_hand(whole(folder, name)), abs=1e-9)
    assert found.rows == sum(totals.positions for totals in found.splits.values()) == Traces.open(folder).manifest.rows
    size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    assert found.bytes_per_position == pytest.approx(size / found.rows)


def test_the_histograms_are_those_of_the_whole_table(folder: Path) -> None:
    rows = whole(folder, "train")
    rows["gap"] = rows["verifier_max"] - rows["draft_max"]
    rows |= {"draft_loss": -np.log(rows["q_label"]), "verifier_loss": -np.log(rows["p_label"])}
    for name, counts in summarise(folder).splits["train"].histograms.items():
        expected, _ = np.histogram(rows[name].clip(*HISTOGRAMS[name]), bins=len(counts), range=HISTOGRAMS[name])
        assert counts.tolist() == expected.tolist(), name


def test_a_label_of_probability_zero_counts_in_the_last_bin(tmp_path: Path) -> None:
    make_traces(tmp_path, {"a": 0}, length=3)
    (batch,) = read_rows([tmp_path / "part-00000.parquet"]).to_batches()
    totals = SplitTotals()
    totals.update(batch.set_column(batch.schema.names.index("q_label"), "q_label", pa.array([0.0] * 3, pa.float32())))
    assert totals.histograms["draft_loss"].tolist() == [0] * 39 + [3]


@pytest.mark.parametrize("pieces", [1, 2, 7, 1000])
def test_pieces_add_up_to_the_whole(folder: Path, pieces: int) -> None:
    table = read_rows(sorted(folder.glob("*.parquet")), split="train").combine_chunks()
    together, apart = SplitTotals(), SplitTotals()
    (batch,) = table.to_batches()
    together.update(batch)
    for part in table.to_batches(max_chunksize=max(len(table) // pieces, 1)):
        apart.update(part)
    assert apart.numbers() == pytest.approx(together.numbers(), abs=1e-9)
    assert all((apart.histograms[name] == together.histograms[name]).all() for name in HISTOGRAMS)


def test_splits_add_up_to_the_folder(folder: Path) -> None:
    total = SplitTotals()
    for totals in summarise(folder).splits.values():
        total.add(totals)
    assert total.numbers() == pytest.approx(by_hand(whole(folder)), abs=1e-9)


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peaks = []
    for count in (4, 24):
        folder = tmp_path / str(count)
        make_traces(folder, dict(list(PROMPTS.items())[:count]), shard_prompts=4, length=300, k=16)
        pool, usual = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
        pa.set_memory_pool(pool)
        try:
            assert summarise(folder).rows > 300 * count
        finally:
            pa.set_memory_pool(usual)
        peaks.append(pool.max_memory())
    assert 0 < peaks[1] < 1.5 * peaks[0], f"six times the rows took {peaks[1]:,} bytes instead of {peaks[0]:,}"


def test_batches_are_smaller_than_a_large_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_traces(tmp_path / "traces", PROMPTS, shard_prompts=24)
    expected = summarise(tmp_path / "traces").splits["train"].numbers()
    monkeypatch.setattr(summaries, "BATCH_ROWS", 7)
    longest, update = [], SplitTotals.update
    monkeypatch.setattr(SplitTotals, "update", lambda self, batch: (longest.append(len(batch)), update(self, batch)))
    assert summarise(tmp_path / "traces").splits["train"].numbers() == pytest.approx(expected, abs=1e-9)
    assert max(longest) <= 7


def test_without_a_cascade_nothing_is_said_of_one(tmp_path: Path) -> None:
    traces = make_traces(tmp_path / "traces", PROMPTS)
    assert "acceptance" not in summarise(tmp_path / "traces").splits["train"].numbers()
    assert "accept" not in describe(traces)


def test_untried_counterfactuals_are_no_unchanged_ones(tmp_path: Path) -> None:
    make_traces(tmp_path, {"a": 0}, length=4)
    (batch,) = read_rows([tmp_path / "part-00000.parquet"]).to_batches()
    totals = SplitTotals()
    totals.update(batch.append_column("answer_changed", pa.array([None, True, False, None], pa.bool_())))
    assert (totals.numbers()["counterfactuals"], totals.numbers()["answers_changed"]) == (2, 0.5)


def test_the_lines_for_a_log_have_one_width(folder: Path) -> None:
    lines = describe(Traces.open(folder)).splitlines()
    table = lines[-4:]
    assert len({len(line) for line in table}) == 1
    assert table[0].split()[:3] == ["split", "prompts", "positions"]
    assert [line.split()[0] for line in table[1:]] == ["train", "validation", "test"]
    assert f"{sum(PROMPTS.values()) and Traces.open(folder).manifest.rows:,} positions" in lines[0]


def test_the_record_is_json_with_the_same_numbers(folder: Path) -> None:
    found = summarise(folder)
    record = json.loads(json.dumps(found.to_record(), allow_nan=False))
    assert record["splits"]["test"] == found.splits["test"].numbers()
    source = Traces.open(folder).manifest.plan.source
    assert (record["finished"], record["source"], record["shards"]) == (True, source, 12)


def test_an_unfinished_folder_is_summarised_as_far_as_it_goes(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    for index in range(3, 12):
        (folder / f"part-{index:05d}.parquet").unlink()
    found = summarise(folder)
    assert (found.finished, found.shards, found.planned_shards) == (False, 3, 12)
    assert found.rows == len(whole(folder)["label"])
    assert "unfinished: manifest.json is missing, 3 of 12 shards are there" in "\n".join(found.head())


def test_an_unreadable_shard_of_an_unfinished_folder_is_named_and_left_out(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "part-00001.parquet").write_bytes(b"PAR1")
    (folder / "part-00002.parquet").write_bytes((folder / "part-00000.parquet").read_bytes())
    (folder / "other.parquet").write_bytes((folder / "part-00000.parquet").read_bytes())
    found = summarise(folder)
    assert found.shards == 10
    assert [next(word for word in ("damaged", "foreign") if word in said) for said in found.unreadable] == [
        "foreign", "damaged", "foreign",
    ]  # fmt: skip


def test_a_begun_folder_without_rows_has_no_table(folder: Path) -> None:
    for path in (*folder.glob("*.parquet"), folder / "manifest.json"):
        path.unlink()
    found = summarise(folder)
    assert "0 of 12 shards" in "\n".join(summaries.plain_lines(found))
    assert json.dumps(found.to_record(), allow_nan=False)
    with pytest.raises(ValueError, match="expected positions to draw"):
        plot_summary(found, folder / "inspect")


def test_no_traces_and_damaged_traces_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither manifest\.json nor plan\.json"):
        summarise(tmp_path / "nothing")
    (folder / "part-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"part-00001\.parquet is damaged"):
        summarise(folder)


def test_the_figure_is_written_twice_the_same_and_leaves_the_folder_readable(folder: Path) -> None:
    first = {path: path.read_bytes() for path in plot_summary(summarise(folder), folder / "inspect")}
    assert sorted(path.name for path in first) == ["traces.png", "traces.svg"]
    assert all(path.read_bytes() == content for path, content in first.items())
    assert {path: path.read_bytes() for path in plot_summary(summarise(folder), folder / "inspect")} == first
    assert Traces.open(folder).manifest.rows > 0


def test_calibration_error_is_that_of_torchmetrics() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 10, 5000):
        confidence = torch.rand(size, generator=generator)
        correct = (torch.rand(size, generator=generator) < confidence**2).long()
        expected = binary_calibration_error(confidence, correct, n_bins=15, norm="l1")
        assert calibration_error(confidence, correct) == pytest.approx(float(expected), abs=1e-5)


def test_calibration_error_of_pieces_at_the_edges_and_of_nothing() -> None:
    confidence = torch.linspace(0, 1, 1001)
    correct = (torch.arange(1001) % 3 == 0).float()
    sums = sum(calibration_sums(*part) for part in zip(confidence.split(77), correct.split(77), strict=True))
    assert float(error_of_sums(sums)) == pytest.approx(calibration_error(confidence, correct), abs=1e-12)
    assert calibration_sums(torch.tensor([0.0, 0.2, 1.0, 1.0000001]), torch.ones(4))[0].tolist() == (
        [1, 0, 0, 1] + [0] * 10 + [2]
    )
    assert math.isnan(calibration_error(torch.empty(0), torch.empty(0)))
