"""Batches: every position once an epoch, whatever the order, the memory and the number of processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from speccascade.data.traces import Traces
from speccascade.router.examples import Examples
from speccascade.training import batches as module_under_test
from speccascade.training.batches import Scan, Sequences, Slices
from speccascade.training.splits import Reading, ScannedSplit, TraceTensors, concatenate, read_split

from ..data.made_traces import make_traces

Processes = Callable[[int, int], None]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    """`processes(rank, count)` makes this process one of several."""

    def become(rank: int, count: int) -> None:
        monkeypatch.setattr(module_under_test, "_rank", lambda: rank)
        monkeypatch.setattr(module_under_test, "_world_size", lambda: count)

    return become


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """30 prompts of 11 to 25 positions; tv names the position."""
    folder = tmp_path_factory.mktemp("made")
    prompts = {f"p{index}": index % 15 for index in range(30)}
    return make_traces(folder, prompts, length=11, splits={"train": 0.8, "validation": 0.2})


@pytest.fixture(scope="module")
def split(traces: Traces) -> TraceTensors:
    return read_split(traces, "train", Reading("verified"))


def names(batches: list[Examples]) -> list[float]:
    return torch.cat([batch.tv for batch in batches]).tolist()


def make(kind: str, traces: Traces, split: TraceTensors, size: int, epoch: int = 0) -> Slices | Scan:
    if kind == "slices":
        return Slices(split, size, shuffle=True, seed=1, epoch=epoch)
    return Scan(ScannedSplit(traces, "train", Reading(), rows=13), size, shuffle=True, seed=1, epoch=epoch, block=50)


@pytest.mark.parametrize("kind", ["slices", "scan"])
@pytest.mark.parametrize("size", [2, 16, 10_000])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_processes_share_the_split(
    kind: str, size: int, count: int, traces: Traces, split: TraceTensors, processes: Processes
) -> None:
    parts = []
    for rank in range(count):
        processes(rank, count)
        served = make(kind, traces, split, size)
        parts.append(list(served))
        assert len(parts[-1]) == len(served) == -(-len(split) // (size * count))
        assert all(1 <= len(batch.tv) <= size for batch in parts[-1])
    assert sorted(names([batch for part in parts for batch in part])) == sorted(split.tv.tolist())


@pytest.mark.parametrize("kind", ["slices", "scan"])
def test_every_epoch_has_its_own_order(kind: str, traces: Traces, split: TraceTensors) -> None:
    served = make(kind, traces, split, 16)
    first, second = names(list(served)), names(list(served))
    assert first != second
    assert sorted(first) == sorted(second)
    assert names(list(make(kind, traces, split, 16, epoch=1))) == second, "a resumed run goes on with its epoch"


def test_a_scan_serves_rows_whole(traces: Traces, split: TraceTensors) -> None:
    rows = dict(zip(split.tv.tolist(), split.features, strict=True))
    batch = next(iter(make("scan", traces, split, 64)))
    assert all(torch.equal(rows[tv], row) for tv, row in zip(batch.tv.tolist(), batch.features, strict=True))


def test_a_scan_mixes_shards(traces: Traces, split: TraceTensors) -> None:
    """A batch of 16 from blocks of 50: not the rows of one prompt after the other."""
    prompt_of = dict(zip(split.tv.tolist(), split.prompt_index.tolist(), strict=True))
    first = next(iter(make("scan", traces, split, 16)))
    assert len({prompt_of[tv] for tv in first.tv.tolist()}) > 2


def test_a_scan_in_order_is_the_split(traces: Traces, split: TraceTensors) -> None:
    served = Scan(ScannedSplit(traces, "train", Reading(), rows=13), 16, shuffle=False, block=50)
    assert names(list(served)) == split.tv.tolist()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sequences_hold_every_prompt_in_order(count: int, split: TraceTensors, processes: Processes) -> None:
    found: list[list[float]] = []
    steps = set()
    for rank in range(count):
        processes(rank, count)
        served = Sequences(split, batch_size=70, shuffle=True, seed=2)
        parts = list(served)
        steps.add(len(parts))
        assert len(served) == len(parts)
        for batch in parts:
            assert batch.weight is not None
            assert batch.tv.numel() <= 70
            found += [tv[own > 0].tolist() for tv, own in zip(batch.tv, batch.weight, strict=True)]
    assert len(steps) == 1
    own = [split.tv[split.prompt_index == index].tolist() for index in range(len(split.prompt_ids))]
    assert sorted(found) == sorted(own)


def test_padding_says_that_it_is_padding(traces: Traces) -> None:
    split = read_split(traces, "train", Reading("verified", candidates=True))
    for batch in Sequences(split, 200, shuffle=False):
        assert batch.weight is not None and batch.candidates is not None and batch.truth is not None
        padding = batch.weight == 0
        assert batch.features[padding].isnan().all() and not batch.features[~padding].isnan().all(dim=-1).any()
        assert (batch.correctness[padding] == 0).all() and (batch.candidates[padding] == 0).all()
        assert batch.truth.dtype == torch.long
        assert (batch.weight.diff(dim=1) <= 0).all(), "padding stands last"


def test_long_prompts_stand_alone_and_order_changes(split: TraceTensors) -> None:
    served = Sequences(split, 1, shuffle=True)
    assert {batch.tv.shape[0] for batch in served} == {1}
    mixed = Sequences(split, 100, shuffle=True)
    first, second = ([batch.tv.tolist() for batch in mixed] for _ in range(2))
    assert first != second


@pytest.mark.parametrize(("prompts", "count"), [(3, 2), (5, 3), (5, 4), (7, 3)])
def test_prompts_that_cannot_be_shared_evenly_stand_together(
    prompts: int, count: int, split: TraceTensors, processes: Processes
) -> None:
    few, parts = split.take(split.prompt_index < prompts), []
    for rank in range(count):
        processes(rank, count)
        parts.append([len(batch.tv) for batch in Sequences(few, 1, shuffle=False)])
    assert {len(part) for part in parts} == {prompts // count}
    assert sum(map(sum, parts)) == prompts


def test_prompts_without_weight_are_left_out(split: TraceTensors) -> None:
    silent = dataclasses.replace(split, weight=(split.prompt_index > 2).float())
    assert len(Sequences(silent, 1, shuffle=False)) == len(split.prompt_ids) - 3


def test_batches_of_one_position_are_never_empty(split: TraceTensors, processes: Processes) -> None:
    five, parts = split.take(torch.arange(5)), []
    for rank in (0, 1):
        processes(rank, 2)
        parts += list(Slices(five, 1, shuffle=True))
    assert sorted(len(batch.tv) for batch in parts) == [1, 1, 1, 2]


def test_more_processes_than_positions_are_refused(traces: Traces, split: TraceTensors, processes: Processes) -> None:
    processes(0, 7)
    few = split.take(torch.arange(6))
    with pytest.raises(
        ValueError, match=r"trainer\.devices: expected at most as many as there are positions, 6; got 7"
    ):
        len(Slices(few, 4, shuffle=True))
    with pytest.raises(ValueError, match="prompts, 1; got 7"):
        len(Sequences(few, 4, shuffle=True))


def test_concatenated_batches_keep_what_is_missing(split: TraceTensors) -> None:
    both = concatenate([split.examples, split.examples])
    assert len(both.tv) == 2 * len(split) and both.weight is None
