"""Hidden states on request: what each model's head read, as float16, beside the same rows as ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from speccascade.data.collect import collect
from speccascade.data.config import CollectConfig
from speccascade.data.encoding import encode_example
from speccascade.data.pairs import load_pair
from speccascade.data.prompts import load_examples
from speccascade.data.traces import Traces


def read_shards(folder: str) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(Path(folder).glob("*.parquet"))).unify_dictionaries()


def test_hidden_states_are_the_last_ones_of_each_model(collect_config: CollectConfig) -> None:
    config = replace(collect_config, hidden=True)
    collect(config)
    table = read_shards(config.out)
    pair = load_pair(config.pair)
    ids = np.array(table["prompt_id"].to_pylist())
    for example in load_examples(config.prompts)[:6]:
        prompt, reference = encode_example(example, pair.tokenizer, config.prompts)
        sequence = torch.tensor([[*prompt, *reference]])
        for name, model in (("draft_hidden", pair.drafter), ("verifier_hidden", pair.verifier)):
            with torch.inference_mode():
                states = model(sequence, output_hidden_states=True).hidden_states[-1][0, len(prompt) - 1 : -1]
            logged = torch.tensor(np.stack(table[name].filter(ids == example.prompt_id).to_numpy()).astype(np.float32))
            torch.testing.assert_close(logged, states, atol=2e-3, rtol=2e-3)


def test_all_other_columns_stay_as_they_are(collect_config: CollectConfig, tmp_path: Path) -> None:
    collect(collect_config)
    with_hidden = replace(collect_config, hidden=True, out=str(tmp_path / "hidden"))
    collect(with_hidden)
    plain, rich = read_shards(collect_config.out), read_shards(with_hidden.out)
    assert set(rich.column_names) - set(plain.column_names) == {"draft_hidden", "verifier_hidden"}
    assert rich.select(plain.column_names).equals(plain)
    kind = rich.schema.field("draft_hidden").type
    assert (kind.value_type, kind.list_size) == (pa.float16(), 32)


def test_hidden_states_are_not_read_unless_asked_for(collect_config: CollectConfig) -> None:
    config = replace(collect_config, hidden=True)
    manifest = collect(config)
    assert manifest is not None
    assert manifest.plan.hidden
    split = Traces.open(config.out).split("train")
    assert len(split) == manifest.split_rows["train"]


def test_states_beyond_float16_are_named(collect_config: CollectConfig) -> None:
    pair = load_pair(collect_config.pair)
    with torch.no_grad():
        pair.verifier.model.norm.weight *= 1e6
        pair.verifier.lm_head.weight /= 1e6
    with pytest.raises(ValueError, match=r"hidden: expected states within float16's 65,504, got verifier_hidden up to"):
        collect(replace(collect_config, hidden=True), pair)


def test_hidden_states_of_a_cascade_are_refused(collect_config: CollectConfig) -> None:
    with pytest.raises(ValueError, match="hidden: expected false with source 'cascade'"):
        replace(collect_config, source="cascade", hidden=True)
