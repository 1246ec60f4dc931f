"""Distillation on tiny models: the fast step is the plain one, batches are complete, the student comes closer."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch.nn import functional

from speccascade.training.distil import (
    Batch,
    Distiller,
    TokenisedExample,
    batches_of,
    compare,
    make_batch,
    shuffled_batches,
)
from speccascade.training.layers import keep_layers

CPU = torch.device("cpu")


@pytest.fixture
def examples() -> list[TokenisedExample]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 20, (40, 2), generator=generator).tolist()
    return [
        TokenisedExample(*(torch.randint(3, 64, (length,), generator=generator).tolist() for length in pair))
        for pair in lengths
    ]


def test_a_batch_predicts_exactly_the_reference() -> None:
    batch = make_batch([TokenisedExample([5, 6, 7], [8, 9]), TokenisedExample([4], [3, 2, 1])], CPU)
    assert batch.ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, 2, 1, 0]]
    assert batch.predicts.tolist() == [[False, False, True, True, False], [True, True, True, False, False]]
    assert batch.labels.tolist() == [8, 9, 3, 2, 1]


def test_an_epoch_holds_every_example_once_with_little_padding(examples: list[TokenisedExample]) -> None:
    batches = list(islice(shuffled_batches(examples, 4, seed=0, device=CPU), 10))
    assert sum(len(batch.labels) for batch in batches) == sum(len(example.reference) for example in examples)
    cells = sum(batch.ids.numel() for batch in batches)
    assert cells < 1.25 * sum(map(len, examples)), "batches of like length waste little"
    again = list(islice(shuffled_batches(examples, 4, seed=0, device=CPU), 10))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(batches, again, strict=True))
    other = list(islice(shuffled_batches(examples, 4, seed=1, device=CPU), 10))
    assert any(a.ids.shape != b.ids.shape or not torch.equal(a.ids, b.ids) for a, b in zip(batches, other, strict=True))


@pytest.mark.parametrize("kept", [[0, 1, 3], [1, 2, 3], [0, 1, 2]])
def test_a_step_follows_the_plain_gradient(
    kept: list[int], examples: list[TokenisedExample], tiny_llama: Callable[..., Any]
) -> None:
    """Shared layers run once and logits come in slices, yet the gradient is that of the textbook loss."""
    teacher = tiny_llama(layers=4)
    batch = make_batch(examples[:20], CPU)
    assert len(batch.labels) > 128, "more than one slice of logits"
    plain = keep_layers(teacher, kept)
    logits = plain(input_ids=batch.ids).logits[batch.predicts]
    with torch.no_grad():
        target = teacher(input_ids=batch.ids).logits[batch.predicts].softmax(-1)
    expected = 0.3 * functional.cross_entropy(logits, batch.labels) + 0.7 * functional.cross_entropy(logits, target)
    expected.backward()
    student = keep_layers(teacher, kept)
    distiller = Distiller(teacher, student, kept, gold_weight=0.3)
    loss, gradients = distiller.gradients(batch)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    names = [name for name, weight in student.named_parameters() if weight.requires_grad]
    assert len(names) == len(gradients)
    references = dict(plain.named_parameters())
    for name, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(gradient, references[name].grad, rtol=1e-4, atol=1e-6)


def test_shared_leading_layers_and_the_embedding_stay(
    examples: list[TokenisedExample], tiny_llama: Callable[..., Any]
) -> None:
    teacher = tiny_llama(layers=4)
    student = keep_layers(teacher, [0, 2, 3])
    before = {name: weight.clone() for name, weight in student.named_parameters()}
    distiller = Distiller(teacher, student, [0, 2, 3])
    distiller.step(make_batch(examples[:8], CPU), 1e-2)
    changed = {name for name, weight in student.named_parameters() if not torch.equal(weight, before[name])}
    assert not any("layers.0" in name or "embed" in name or "lm_head" in name for name in changed)
    assert any("layers.1" in name for name in changed) and any("layers.2" in name for name in changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_student_comes_closer(
    dtype: torch.dtype, examples: list[TokenisedExample], tiny_llama: Callable[..., Any]
) -> None:
    teacher = tiny_llama(layers=4).to(dtype)
    student = keep_layers(teacher, [0, 3])
    check = batches_of(examples, 8, CPU)
    before = compare(student, teacher, check)
    distiller = Distiller(teacher, student, [0, 3], gold_weight=0.0)
    for batch in islice(shuffled_batches(examples, 8, 0, CPU), 60):
        distiller.step(batch, 5e-3)
    after = compare(student, teacher, check)
    assert after.tv < 0.8 * before.tv
    assert after.agreement > before.agreement


def test_comparison_by_hand(tiny_llama: Callable[..., Any], examples: list[TokenisedExample]) -> None:
    one, other = tiny_llama(seed=1), tiny_llama(seed=2)
    batch: Batch = make_batch(examples, CPU)
    measured = compare(one, other, [batch])
    with torch.inference_mode():
        q, p = (model(input_ids=batch.ids).logits[batch.predicts].softmax(-1) for model in (one, other))
    assert measured.positions == len(batch.labels)
    assert measured.agreement == pytest.approx(float((q.argmax(-1) == p.argmax(-1)).float().mean()), abs=1e-6)
    assert measured.tv == pytest.approx(float((q - p).abs().sum(-1).mean() / 2), abs=1e-5)
    right_q, right_p = q.argmax(-1) == batch.labels, p.argmax(-1) == batch.labels
    assert measured.drafter_accuracy == pytest.approx(float(right_q.float().mean()), abs=1e-6)
    assert measured.verifier_right_alone == pytest.approx(float((right_p & ~right_q).float().mean()), abs=1e-6)
    same = compare(one, one, [batch])
    assert (same.agreement, same.drafter_right_alone) == (1, 0)
    assert abs(same.tv) < 1e-5
