"""The data module: splits by prompt, permuted slices, normalisation from the training split alone."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from speccascade.training import datamodule as module_under_test
from speccascade.training import memory as memory_under_test
from speccascade.training.datamodule import Slices, TraceDataModule, TraceTensors
from speccascade.training.holdout import divide
from speccascade.training.splits import ScannedSplit


@pytest.fixture
def data(traces_dir: Path) -> TraceDataModule:
    made = TraceDataModule(str(traces_dir), batch_size=1000)
    made.setup("fit")
    return made


def test_no_prompt_stands_in_two_splits(data: TraceDataModule) -> None:
    assert data.train is not None and data.validation is not None
    assert not set(data.train.prompt_ids) & set(data.validation.prompt_ids)
    assert len(data.train) == 9600


def test_half_of_the_validation_documents_are_left_to_the_calibration(data: TraceDataModule, traces_dir: Path) -> None:
    """Of 64 documents 22 to 42 are kept, beyond which the odds of a fair hash are 1%; windows stay together."""
    assert data.validation is not None
    whole = TraceDataModule(str(traces_dir), calibration_share=0.0)
    whole.setup("fit")
    assert whole.validation is not None and len(whole.validation) == 3200
    chosen_on, back = divide(whole.validation, 0.5)
    assert torch.equal(data.validation.features, chosen_on.features)
    assert back is not None and len(chosen_on) + len(back) == 3200
    prompts, others = set(chosen_on.prompt_index.tolist()), set(back.prompt_index.tolist())
    assert not prompts & others and 22 <= len(prompts) <= 42
    named = dataclasses.replace(whole.validation, prompt_ids=tuple(f"{n}-1" for n in whole.validation.prompt_ids))
    assert torch.equal(divide(named, 0.5)[0].prompt_index, chosen_on.prompt_index)


def test_one_document_is_not_divided(data: TraceDataModule) -> None:
    assert data.train is not None
    only = data.train.take(data.train.prompt_index == 3)
    assert divide(only, 0.5) == (only, None)


@pytest.mark.parametrize("window", ["", "-1"])
def test_a_text_in_two_splits_is_refused(window: str, traces_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = module_under_test.read_split

    def leaky(*arguments: object) -> module_under_test.TraceTensors:
        loaded = honest(*arguments)
        return dataclasses.replace(loaded, prompt_ids=(*loaded.prompt_ids, f"p0000{window}"))

    monkeypatch.setattr(module_under_test, "read_split", leaky)
    with pytest.raises(ValueError, match="1 prompts stand both in 'train' and in 'validation'"):
        TraceDataModule(str(traces_dir)).setup("fit")


def test_every_epoch_serves_each_position_once_in_another_order(data: TraceDataModule) -> None:
    assert data.train is not None
    loader = data.train_dataloader()
    assert len(loader) == 10
    epochs = [torch.cat([batch[0] for batch in loader]) for _ in range(2)]
    assert not torch.equal(epochs[0], epochs[1])
    for epoch in epochs:
        assert torch.equal(epoch.sum(dim=1).sort().values, data.train.features.sum(dim=1).sort().values)


def test_the_seed_decides_the_order(data: TraceDataModule) -> None:
    assert data.train is not None
    first, same, other = (next(iter(Slices(data.train, 1000, True, seed)))[0] for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_rows_keep_their_labels(data: TraceDataModule) -> None:
    """In every batch the gap of a row is the gap of the same row of the split."""
    assert data.train is not None
    known = {tuple(row.tolist()): value for row, value in zip(data.train.features, data.train.correctness, strict=True)}
    features, correctness, tv, *_ = next(iter(data.train_dataloader()))
    assert all(torch.equal(known[tuple(row.tolist())], value) for row, value in zip(features, correctness, strict=True))
    assert torch.allclose(tv, features[:, 7]), "tv_raw is tv in traces at temperature 1"


def test_normalisation_ignores_missing_values_and_the_validation_split(data: TraceDataModule) -> None:
    assert data.train is not None and data.validation is not None
    mean, std = data.normalisation()
    torch.testing.assert_close(mean, data.train.features.mean(dim=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(std, data.train.features.std(dim=0, correction=0), rtol=1e-3, atol=1e-4)
    features = data.train.features.clone()
    features[::2, 0] = float("nan")
    data.train = dataclasses.replace(data.train, features=features)
    data.validation = dataclasses.replace(data.validation, features=torch.zeros_like(data.validation.features))
    again, _ = data.normalisation()
    torch.testing.assert_close(again[0], features[1::2, 0].mean(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again[1:], mean[1:])


def test_missing_traces_and_splits_are_named(traces_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        TraceDataModule(str(tmp_path)).setup("fit")
    with pytest.raises(ValueError, match="did you mean 'train'"):
        TraceDataModule(str(traces_dir), train_split="tran").setup("fit")
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        TraceDataModule(str(traces_dir), batch_size=0)


def test_auto_reads_from_disk_what_does_not_fit(
    traces_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for free, kind, said in (
        (1 << 40, TraceTensors, "in memory"),
        (1 << 20, ScannedSplit, "read from disk each epoch"),
        (None, TraceTensors, "in memory"),
    ):
        monkeypatch.setattr(module_under_test, "free_memory", lambda free=free: free)
        made = TraceDataModule(str(traces_dir))
        made.setup("fit")
        assert isinstance(made.train, kind) and isinstance(made.validation, TraceTensors)
        assert re.search(rf"Traces: 12,800 positions, 1\.\d MB of features, {said}", capsys.readouterr().err)


@pytest.mark.parametrize("memory", ["whole", "scan"])
def test_weights_are_for_training_alone(memory: str, traces_dir: Path) -> None:
    made = TraceDataModule(str(traces_dir), memory=memory, weight="bootstrap", seed=3)
    made.setup("fit")
    training = [batch.weight for batch in made.train_dataloader()]
    assert all(weight is not None and (weight > 0).all() for weight in training)
    assert all(batch.weight is None for batch in made.val_dataloader())
    other = TraceDataModule(str(traces_dir), memory=memory, weight="bootstrap", seed=4)
    other.setup("fit")
    assert made.train is not None and other.train is not None
    assert len(made.train) < 9600 and len(made.train) != len(other.train), "about 0.63 of the prompts, others each time"


def test_memory_free_is_told_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "meminfo"
    system.write_text("MemTotal:  9 kB\nMemAvailable:   1000 kB\n")
    monkeypatch.setattr(memory_under_test, "_SYSTEM", system)
    monkeypatch.setattr(memory_under_test, "_GROUP", tmp_path)
    assert memory_under_test.free_memory() == 1_024_000
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert memory_under_test.free_memory() == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_under_test.free_memory() == 1_024_000
    system.unlink()
    assert memory_under_test.free_memory() is None


def test_options_that_do_not_go_together_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'whole'"):
        TraceDataModule(memory="whol")
    with pytest.raises(ValueError, match="did you mean 'prompt'"):
        TraceDataModule(weight="prompts")
    with pytest.raises(ValueError, match="memory: expected 'whole' or 'auto' for a head that reads order, got 'scan'"):
        TraceDataModule(memory="scan", sequences=True)


def test_tokens_are_frequent_where_they_are_a_label_or_a_choice(data: TraceDataModule, traces_dir: Path) -> None:
    """Each counts once a position, and a label that is no candidate not at all: as a loop counts."""
    reading = TraceDataModule(str(traces_dir), needs_candidates=True)
    reading.setup("fit")
    train = reading.train
    assert isinstance(train, TraceTensors) and train.candidates is not None
    assert train.tokens is not None and train.truth is not None
    counts = dict[int, int]()
    for candidates, tokens, truth in zip(train.candidates, train.tokens.tolist(), train.truth.tolist(), strict=True):
        named = {tokens[int(place)] for place in candidates.argmax(dim=0)} | set(tokens[truth : truth + 1])
        for token in named:
            counts[token] = counts.get(token, 0) + 1
    least = sorted(counts.values())[len(counts) // 2]
    expected = sorted(token for token, count in counts.items() if count >= least)
    assert reading.frequent_tokens(least).tolist() == expected and 0 < len(expected) < len(counts)
