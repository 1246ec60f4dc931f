"""Splits: the same positions in memory and from disk, other labels, other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speccascade.data.resampling import documents
from speccascade.data.traces import Traces
from speccascade.router.examples import Examples
from speccascade.router.features import build_features
from speccascade.training.splits import (
    Moments,
    Reading,
    ScannedSplit,
    _widened,
    concatenate,
    document_weights,
    read_pieces,
    read_split,
)

from ..data.made_traces import make_traces

PROMPTS = {f"{name}{suffix}": index for index, name in enumerate("abcdefghijkl") for suffix in ("", "-1")}
"""Two windows each of twelve documents."""


def made(folder: Path, **options: Any) -> Traces:
    return make_traces(folder, PROMPTS, **{"splits": {"train": 0.7, "validation": 0.3}, "length": 20} | options)


def rows_of(examples: Examples) -> list[tuple[float, ...]]:
    """Every position with all that is known about it, sorted: a set that may repeat."""
    columns = [values.flatten(1) if values.dim() > 1 else values[:, None] for values in examples if values is not None]
    return sorted(tuple(row) for row in torch.cat([column.double() for column in columns], dim=1).tolist())


def test_pieces_are_the_split_in_order(tmp_path: Path) -> None:
    traces = made(tmp_path)
    whole, pieces = traces.split("train"), list(traces.scan("train", rows=7))
    assert max(map(len, pieces)) <= 7
    assert torch.equal(torch.cat([piece.label for piece in pieces]), whole.label)
    assert torch.equal(torch.cat([piece.stats.tv for piece in pieces]), whole.stats.tv)
    names = [piece.prompt_ids[index] for piece in pieces for index in piece.prompt_index.tolist()]
    assert names == [whole.prompt_ids[index] for index in whole.prompt_index.tolist()]
    assert torch.equal(torch.cat([piece.topk_ids for piece in pieces]), whole.topk_ids)
    backwards = traces.scan("train", order=range(len(traces.manifest.shards) - 1, -1, -1))
    shards = [piece.label for piece in traces.scan("train")]
    assert torch.equal(torch.cat([piece.label for piece in backwards]), torch.cat(shards[::-1]))
    with pytest.raises(ValueError, match="did you mean 'train'"):
        next(traces.scan("tran"))


def test_a_loaded_split_is_what_the_traces_say(tmp_path: Path) -> None:
    traces = made(tmp_path)
    part, loaded = traces.split("train"), read_split(traces, "train", Reading("verified"))
    assert torch.equal(loaded.features, build_features(part.stats, "verified"))
    assert torch.equal(loaded.correctness, part.correctness)
    assert torch.equal(loaded.tv, part.stats.tv)
    assert (loaded.prompt_ids, loaded.prompt_index.tolist()) == (part.prompt_ids, part.prompt_index.tolist())


@pytest.mark.parametrize("labels", ["gold", "outcome"])
@pytest.mark.parametrize("weight", ["position", "prompt", "bootstrap"])
def test_a_scanned_split_is_the_one_in_memory(weight: str, labels: str, tmp_path: Path) -> None:
    traces = made(tmp_path, outcomes=True)
    candidates = labels == "gold"
    whole = read_split(traces, "train", Reading("verified", labels, candidates)).weighted(weight, seed=3)
    scanned = ScannedSplit(traces, "train", Reading("verified", labels, candidates), weight, seed=3, rows=11)
    assert len(scanned) == len(whole)
    assert rows_of(concatenate(scanned.pieces())) == rows_of(whole.examples)
    shuffled = concatenate(scanned.pieces(torch.randperm(scanned.shards).tolist()))
    assert rows_of(shuffled) == rows_of(whole.examples)
    everything = read_split(traces, "train", Reading("verified", labels, candidates))
    for mine, plain in zip(scanned.normalisation(), everything.normalisation(), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


def test_moments_of_pieces_are_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(100, 3, generator=generator) * 5 + 1000
    features[torch.rand(100, 3, generator=generator) < 0.3] = float("nan")
    features[:, 2] = float("nan")
    moments = Moments()
    for piece in features.split([1, 60, 39]):
        moments.add(piece)
    mean, std = moments.normalisation()
    known = [column[~column.isnan()].double() for column in features.unbind(dim=1)]
    torch.testing.assert_close(mean[:2], torch.stack([column.mean() for column in known[:2]]).float())
    torch.testing.assert_close(std[:2], torch.stack([column.std(correction=0) for column in known[:2]]).float())
    assert (float(mean[2]), float(std[2])) == (0.0, 0.0), "a feature that was never known"


def test_windows_of_a_text_are_one_document() -> None:
    index = torch.tensor([3, 0, 1, 2, 2])
    assert documents(("a", "b", "a-1", "b-12"), index.numpy()).tolist() == [1, 0, 1, 0, 0]


def test_documents_count_alike_whatever_their_length() -> None:
    sizes = torch.tensor([10, 40, 10])
    weights = document_weights(sizes, "prompt", 0)
    assert torch.allclose(weights * sizes, torch.full((3,), 20.0))
    assert document_weights(sizes, "position", 0).tolist() == [1, 1, 1]
    assert document_weights(torch.tensor([10, 0, 40, 10]), "prompt", 0)[[0, 2, 3]].tolist() == weights.tolist()
    assert float(document_weights(torch.tensor([10, 0, 40, 10]), "prompt", 0)[1]) == 0


def test_a_bootstrap_draws_as_many_documents_as_there_are() -> None:
    sizes = torch.tensor([3, 5, 7, 2, 9])
    seen = []
    for seed in range(300):
        weights = document_weights(sizes, "bootstrap", seed)
        assert float((weights * sizes).sum() / sizes[weights > 0].sum()) == pytest.approx(1, rel=1e-5)
        unit = weights[weights > 0].min()
        times = weights / unit
        scale = next(scale for scale in range(1, 6) if abs(float(times.sum()) * scale - 5) < 1e-3)
        seen.append(times * scale)
    counts = torch.stack(seen)
    assert counts.sum(dim=1).tolist() == pytest.approx([5.0] * 300)
    # Each count is binomial(5, 1/5): mean 1, deviation 0.89; the mean of 300 is within 0.26 at five deviations.
    assert (counts.mean(dim=0) - 1).abs().max() < 0.26


def test_windows_are_drawn_together(tmp_path: Path) -> None:
    drawn = read_split(made(tmp_path), "train", Reading("verified")).weighted("bootstrap", seed=1)
    assert drawn.weight is not None
    weights: dict[str, set[float]] = {}
    for index, weight in zip(drawn.prompt_index.tolist(), drawn.weight.tolist(), strict=True):
        weights.setdefault(drawn.prompt_ids[index].partition("-")[0], set()).add(weight)
    assert all(len(values) == 1 for values in weights.values())
    assert len(set.union(*weights.values())) > 1
    windows = {drawn.prompt_ids[index] for index in drawn.prompt_index.tolist()}
    assert {name for name in windows if "-" in name} == {f"{name}-1" for name in weights}


def test_outcomes_stand_for_labels(tmp_path: Path) -> None:
    traces = made(tmp_path, outcomes=True)
    part, loaded = traces.split("train"), read_split(traces, "train", Reading("verified", "outcome"))
    assert part.outcomes is not None
    tried = ~part.outcomes[:, 0].isnan()
    assert 0 < len(loaded) == int(tried.sum()) < len(part)
    for row in (0, 1):
        assert torch.equal(loaded.correctness[:, row], part.outcomes[tried])
    in_order = read_split(traces, "train", Reading("verified", "outcome", whole_prompts=True))
    assert in_order.weight is not None and torch.equal(in_order.weight, tried.float())
    assert len(in_order) == len(part) and not in_order.correctness.isnan().any()


def test_candidates_are_the_logged_union(tmp_path: Path) -> None:
    traces = made(tmp_path)
    part, loaded = traces.split("train"), read_split(traces, "train", Reading("verified", candidates=True))
    assert loaded.candidates is not None and loaded.truth is not None
    assert torch.equal(loaded.candidates, torch.stack([part.topk_q, part.topk_p], dim=-1))
    width, found = part.topk_ids.shape[1], 0
    for ids, truth, label in zip(part.topk_ids.tolist(), loaded.truth.tolist(), part.label.tolist(), strict=True):
        assert truth == (ids.index(label) if label in ids else width)
        found += label in ids
    assert 0 < found < len(part), "both cases occur"


def test_candidates_of_unequal_pieces_are_padded(tmp_path: Path) -> None:
    """A narrow piece beside a wide one: "none of them" stands behind the widest."""
    traces = made(tmp_path)
    narrow, wide = next(read_pieces(traces, "train", Reading(candidates=True))), 12
    assert narrow.candidates is not None and narrow.truth is not None
    width = narrow.candidates.shape[1]
    padded = _widened(narrow, wide)
    assert padded.candidates is not None and padded.truth is not None
    assert padded.candidates.shape[1] == wide and (padded.candidates[:, width:] == 0).all()
    assert torch.equal(padded.truth == wide, narrow.truth == width)
    assert torch.equal(padded.truth[padded.truth < wide], narrow.truth[narrow.truth < width])


@pytest.mark.parametrize(
    ("options", "reading", "answer"),
    [
        ({}, {"labels": "outcome"}, "labels: expected 'gold' for traces without outcomes, got 'outcome'"),
        (
            {"cascade": True},
            {},
            "labels: expected 'outcome' for traces of source 'cascade', .* got 'gold'; collect with",
        ),
        ({"temperature": 0.7}, {"candidates": True}, "candidates: expected traces at temperature 1, got 0.7"),
        ({}, {"labels": "glod"}, "did you mean 'gold'"),
        (
            {"outcomes": True},
            {"labels": "outcome", "candidates": True},
            "labels: expected 'gold' for a head that reads",
        ),
    ],
)
def test_what_traces_cannot_teach_is_refused(
    options: dict[str, Any], reading: dict[str, Any], answer: str, tmp_path: Path
) -> None:
    traces = made(tmp_path, **options)
    with pytest.raises(ValueError, match=answer):
        read_split(traces, "train", Reading("verified", **reading))


def test_outcomes_of_cascades_are_taken(tmp_path: Path) -> None:
    assert len(read_split(made(tmp_path, cascade=True, outcomes=True), "train", Reading("verified", "outcome")))
