"""Batches, selected logits and ties: the parts that a trace row is made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccascade.cascade.distributions import Sampling
from speccascade.data.scoring import make_batches, reference_logits, score_positions, selecting_heads


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
@settings(deadline=None)
def test_batches_hold_every_sequence_once_within_the_limit(lengths: list[int], limit: int) -> None:
    batches = make_batches(lengths, limit)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= limit


def test_only_selected_positions_pass_the_head(tiny_llama: Any) -> None:
    model = tiny_llama()
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([0, 8, 11])
    heights: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: heights.append(output[..., 0].numel()))
    with torch.inference_mode():
        with selecting_heads(model, model):
            selected = reference_logits(model, ids, rows)
        hook.remove()
        full = model(ids).logits.reshape(18, -1)
    torch.testing.assert_close(selected, full[rows], atol=1e-6, rtol=0)
    assert heights == [3]


def test_a_model_that_never_calls_its_head_gives_the_same_rows(tiny_llama: Any) -> None:
    model = tiny_llama()

    class Headless(torch.nn.Module):
        device = torch.device("cpu")

        def get_output_embeddings(self) -> None:
            return None

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(logits=model(input_ids, use_cache=use_cache).logits)

    ids, rows = torch.arange(3, 13).reshape(2, 5), torch.tensor([1, 7])
    with torch.inference_mode():
        torch.testing.assert_close(reference_logits(Headless(), ids, rows), reference_logits(model, ids, rows))


def test_without_the_selection_the_same_rows_come_back(tiny_llama: Any) -> None:
    model, ids, rows = tiny_llama(), torch.arange(3, 13).reshape(2, 5), torch.tensor([1, 7])
    with torch.inference_mode():
        plain = reference_logits(model, ids, rows)
        with selecting_heads(model):
            torch.testing.assert_close(reference_logits(model, ids, rows), plain, atol=1e-6, rtol=0)
            assert model(ids).logits.shape[:2] == (2, 5), "a model used otherwise meanwhile is left alone"
        torch.testing.assert_close(reference_logits(model, ids, rows), plain)


@pytest.mark.parametrize("top_k", [1, 3])
def test_among_equals_the_argmax_is_the_lowest_id_and_is_logged(top_k: int) -> None:
    logits = torch.zeros(6, 20)
    logits[1, 4] = logits[1, 17] = 3.0
    logits[2, 9] = 5.0
    logits[3, 10:] = 2.0
    pair: Any = SimpleNamespace(vocab_size=20)
    labels = torch.zeros(6, dtype=torch.long)
    rows = score_positions(pair, logits, logits.flip(0), labels, Sampling(), top_k)
    assert rows.token.tolist() == logits.argmax(-1).tolist() == [0, 4, 9, 10, 0, 0]
    for row, token in enumerate(rows.token):
        ids = rows.topk_ids[row][rows.topk_kept[row]].tolist()
        assert token in ids
        assert ids == sorted(set(ids))


def test_temperature_zero_logs_one_hot_probabilities_at_the_raw_top_k() -> None:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    pair: Any = SimpleNamespace(vocab_size=20)
    rows = score_positions(pair, logits, logits, logits.argmax(-1), Sampling(temperature=0), 3)
    assert rows.floats["q_label"].tolist() == [1.0] * 5
    assert [ids.tolist() for ids in rows.topk_ids] == [sorted([*i, *i]) for i in logits.topk(3).indices.tolist()]
    assert (rows.topk_q * rows.topk_kept).sum(1).tolist() == [1.0] * 5
