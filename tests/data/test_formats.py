"""A trace folder is plain Parquet: other tools open it as it is, and it takes no more room than was promised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow.dataset
import pytest

from speccascade.cascade.statistics import STAT_FIELDS
from speccascade.data.collect import collect
from speccascade.data.config import CollectConfig
from speccascade.data.summary import summarise
from speccascade.data.traces import Traces

from .made_traces import make_traces


@pytest.fixture(params=["collected", "cascade"])
def traces(request: Any, collect_config: CollectConfig, tmp_path: Path) -> Traces:
    """Traces of a tiny pair, and made-up ones with every optional column."""
    if request.param == "collected":
        collect(replace(collect_config, shard_prompts=8))
        return Traces.open(collect_config.out)
    prompts = {f"p{i}": i for i in range(12)}
    return make_traces(tmp_path / "made", prompts, shard_prompts=5, cascade=True, outcomes=True)


def test_hugging_face_datasets(traces: Traces, tmp_path: Path) -> None:
    from datasets import load_dataset

    files = f"{traces.folder}/*.parquet"
    rows = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert rows.num_rows == traces.manifest.rows
    assert {*STAT_FIELDS, "prompt_id", "topk_ids"} < set(rows.column_names)
    split = traces.split(rows[0]["split"])
    first = split.prompt_index.eq(split.prompt_ids.index(rows[0]["prompt_id"])).nonzero()[0]
    assert rows[0]["topk_ids"] == [index for index in split.topk_ids[first][0].tolist() if index >= 0]


def test_pandas_and_pyarrow(traces: Traces) -> None:
    table = pyarrow.dataset.dataset(sorted(map(str, traces.folder.glob("*.parquet")))).to_table()
    frame = pd.concat(pd.read_parquet(path) for path in sorted(traces.folder.glob("*.parquet")))
    assert len(table) == len(frame) == traces.manifest.rows
    split = traces.split("train")
    assert frame.loc[frame["split"] == "train", "tv"].tolist() == split.stats.tv.tolist()


def test_duckdb(traces: Traces) -> None:
    query = f"SELECT split, count(*), avg(tv) FROM '{traces.folder}/*.parquet' GROUP BY 1"
    found = {name: (rows, mean) for name, rows, mean in duckdb.sql(query).fetchall()}
    splits = {name: traces.split(name) for name in traces.splits}
    assert {name: rows for name, (rows, _) in found.items()} == {name: len(split) for name, split in splits.items()}
    for name, split in splits.items():
        assert found[name][1] == pytest.approx(split.stats.tv.double().mean().item(), abs=1e-6)
    widest = duckdb.sql(f"SELECT max(len(topk_ids)), max(len(topk_q)) FROM '{traces.folder}/*.parquet'").fetchall()
    assert widest == [2 * (max(split.topk_ids.shape[1] for split in splits.values()),)]


def test_a_position_takes_at_most_400_bytes(tmp_path: Path) -> None:
    """The least favourable case at the default settings: top-16 lists that share no token, and nothing to compress."""
    prompts = {f"p{i}": 0 for i in range(16)}
    vocabulary = 151_936
    make_traces(tmp_path, prompts, k=CollectConfig.top_k, vocabulary=vocabulary, length=100, shard_prompts=16)
    split = Traces.open(tmp_path).split("train")
    assert split.topk_ids.shape[1] == 32
    assert len(np.unique(split.topk_q.numpy())) > 0.99 * split.topk_q.numel()
    assert 100 < summarise(tmp_path).bytes_per_position <= 400
