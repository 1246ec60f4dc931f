"""The data module: splits by prompt, permuted slices, normalisation from the training split alone."""

import dataclasses
from pathlib import Path

import pytest
import torch

from speccascade.data.traces import Traces
from speccascade.training import datamodule as module_under_test
from speccascade.training.datamodule import Slices, TraceDataModule
from speccascade.training.holdout import divide


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


def test_a_prompt_in_two_splits_is_refused(traces_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = module_under_test.load_split

    def leaky(traces: Traces, split: str, feature_set: str) -> module_under_test.TraceTensors:
        loaded = honest(traces, split, feature_set)
        return dataclasses.replace(loaded, prompt_ids=(*loaded.prompt_ids, "p0000"))

    monkeypatch.setattr(module_under_test, "load_split", leaky)
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
