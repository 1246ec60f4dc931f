"""Tune a smaller model on references and on a larger model's next-token distributions at once.

The loss at a position is the cross-entropy of the student against a mixture of the reference token and the teacher's
distribution: gold makes it right where the teacher is wrong, distillation makes it agree where the reference is a
matter of taste. Embedding and head stay the teacher's own.

Three things make a step cheap on a CPU: leading layers that both models share are run once, inside the teacher, and
stay as they are; logits exist for reference positions only, a slice at a time; batches hold sequences of like length.

Shapes: ``B`` sequence, ``L`` token, ``N`` position that predicts a reference token, ``D`` width, ``V`` vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from .layers import Given, backbone_of, head_logits, layer_stack, only_layers

__all__ = ["Agreement", "Batch", "Distiller", "TokenisedExample", "batches_of", "compare", "shuffled_batches"]

_LOGIT_ROWS = 128
"""Rows of logits that exist at once: at 49k tokens 25 MB in float32, which stays in cache."""


@dataclass(frozen=True)
class TokenisedExample:
    """A prompt and its reference as token ids."""

    prompt: list[int]
    reference: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.reference)


@dataclass(frozen=True)
class Batch:
    """Right-padded ids, the positions whose next token is a reference token, and those tokens in the same order."""

    ids: Int[Tensor, "B L"]
    predicts: Bool[Tensor, "B L"]
    labels: Int[Tensor, "N"]


def make_batch(examples: Sequence[TokenisedExample], device: torch.device) -> Batch:
    """Pad examples on the right. No attention mask is needed: nothing real stands after padding."""
    rows = [torch.tensor(example.prompt + example.reference) for example in examples]
    ids = pad_sequence(rows, batch_first=True)
    place = torch.arange(ids.shape[1])
    first = torch.tensor([len(example.prompt) for example in examples])[:, None]
    end = torch.tensor([len(example) for example in examples])[:, None]
    predicts = (place >= first - 1) & (place < end - 1)
    labels = ids[:, 1:][predicts[:, :-1]]
    return Batch(ids.to(device), predicts.to(device), labels.to(device))


def batches_of(examples: Sequence[TokenisedExample], size: int, device: torch.device) -> list[Batch]:
    """All examples once, shortest first."""
    ordered = sorted(examples, key=len)
    return [make_batch(ordered[start : start + size], device) for start in range(0, len(ordered), size)]


def shuffled_batches(
    examples: Sequence[TokenisedExample], size: int, seed: int, device: torch.device
) -> Iterator[Batch]:
    """Endless epochs; each is shuffled, cut into groups of eight batches, and sorted by length within a group."""
    for epoch in count():
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        group = 8 * size
        pooled = [
            sorted(order[start : start + group], key=lambda index: len(examples[index]))
            for start in range(0, len(order), group)
        ]
        chunks = [pool[start : start + size] for pool in pooled for start in range(0, len(pool), size)]
        turn = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(~(seed + epoch))).tolist()
        for index in turn:
            yield make_batch([examples[row] for row in chunks[index]], device)


class Distiller:
    """One student, its teacher and the optimiser: call `step` with a batch and a learning rate.

    Args:
        teacher: the full model.
        student: a model made by `keep_layers`.
        kept: which of the teacher's layers the student has.
        gold_weight: share of the reference token in the mixture, in [0, 1]; the rest is the teacher's distribution.
        weight_decay: of AdamW, decoupled.
    """

    def __init__(
        self,
        teacher: PreTrainedModel,
        student: PreTrainedModel,
        kept: Sequence[int],
        gold_weight: float = 0.5,
        weight_decay: float = 0.0,
    ) -> None:
        self.teacher, self.student, self.gold_weight = teacher, student, gold_weight
        self._teacher_layers, self._student_layers = list(layer_stack(teacher)[1]), list(layer_stack(student)[1])
        # At least one layer must learn, even where the student is a plain prefix of the teacher.
        leading = next((place for place, layer in enumerate(kept) if place != layer), len(kept))
        self._shared = min(leading, len(kept) - 1)
        student.requires_grad_(False)
        for module in (*self._student_layers[self._shared :], *_final_norms(student)):
            module.requires_grad_(True)
        self._weights = [weight for weight in student.parameters() if weight.requires_grad]
        # Small steps vanish in bfloat16: the optimiser works on float32 copies.
        self._masters = [weight.detach().float().clone() for weight in self._weights]
        self._optimiser = torch.optim.AdamW(self._masters, betas=(0.9, 0.95), weight_decay=weight_decay)

    def step(self, batch: Batch, learning_rate: float) -> float:
        """Move the student by one batch and return its mean loss before the move, in nats."""
        loss, gradients = self.gradients(batch)
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient.float()
        nn.utils.clip_grad_norm_(self._masters, 1.0)
        for group in self._optimiser.param_groups:
            group["lr"] = learning_rate
        self._optimiser.step()
        with torch.no_grad():
            for master, weight in zip(self._masters, self._weights, strict=True):
                weight.copy_(master)
        return loss

    def gradients(self, batch: Batch) -> tuple[float, list[Tensor]]:
        """Mean loss of a batch in nats, and its gradient in every tuned weight, in order of `Module.parameters`."""
        given, teacher_hidden = self._run_teacher(batch)
        hidden = self._run_student(batch, given)[batch.predicts]
        loss, gradient = self._loss_and_gradient(hidden.detach(), teacher_hidden, batch.labels)
        return loss, list(torch.autograd.grad(hidden, self._weights, gradient))

    def _run_teacher(self, batch: Batch) -> tuple[Tensor | None, Tensor]:
        """Hidden states after the shared layers [B, L, D], and the final ones of predicting positions [N, D]."""
        captured: list[Tensor] = []
        hook = None
        if self._shared:
            hook = self._teacher_layers[self._shared - 1].register_forward_hook(
                lambda module, args, output: captured.append(output[0] if isinstance(output, tuple) else output)
            )
        with torch.no_grad():
            hidden = backbone_of(self.teacher)(input_ids=batch.ids, use_cache=False)[0][batch.predicts]
        if hook is None:
            return None, hidden
        hook.remove()
        return captured[0], hidden

    def _run_student(self, batch: Batch, given: Tensor | None) -> Tensor:
        if given is None:
            return cast(Tensor, backbone_of(self.student)(input_ids=batch.ids, use_cache=False)[0])
        shared = self._shared
        modules = [Given(given.to(self.student.dtype)), *self._student_layers[shared:]]
        with only_layers(self.student, modules, range(shared - 1, len(self._student_layers))):
            return cast(Tensor, backbone_of(self.student)(input_ids=batch.ids, use_cache=False)[0])

    def _loss_and_gradient(
        self, hidden: Float[Tensor, "N D"], teacher_hidden: Float[Tensor, "N D"], labels: Int[Tensor, "N"]
    ) -> tuple[float, Float[Tensor, "N D"]]:
        """Mean cross-entropy against the mixture and its gradient in `hidden`, a slice of rows at a time."""
        total, gradients = 0.0, []
        for rows in torch.arange(len(labels), device=labels.device).split(_LOGIT_ROWS):
            with torch.no_grad():
                target = head_logits(self.teacher, teacher_hidden[rows]).softmax(dim=-1)
                target.mul_(1 - self.gold_weight)
                target[torch.arange(len(rows), device=rows.device), labels[rows]] += self.gold_weight
            leaf = hidden[rows].requires_grad_(True)
            loss = functional.cross_entropy(head_logits(self.student, leaf), target, reduction="sum") / len(labels)
            gradients.append(torch.autograd.grad(loss, leaf)[0])
            total += loss.item()
        return total, torch.cat(gradients)


def _final_norms(model: PreTrainedModel) -> list[nn.Module]:
    """What stands between the last layer and the head."""
    skipped = {id(module) for module in layer_stack(model)[1].modules()}
    skipped |= {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    return [
        module
        for module in backbone_of(model).children()
        if id(module) not in skipped and any(True for _ in module.parameters()) and not isinstance(module, nn.Embedding)
    ]


@dataclass(frozen=True)
class Agreement:
    """How two models relate at reference positions; every field a mean over positions.

    agreement: both prefer the same token. tv: D_TV at temperature 1. *_accuracy: the preferred token is the reference
    token. *_right_alone: the share of positions where this model is right and the other wrong.
    """

    positions: int
    agreement: float
    tv: float
    drafter_accuracy: float
    verifier_accuracy: float
    drafter_right_alone: float
    verifier_right_alone: float


@torch.inference_mode()
def compare(drafter: PreTrainedModel, verifier: PreTrainedModel, batches: Sequence[Batch]) -> Agreement:
    """Compare two models at the reference positions of `batches`, teacher-forced."""
    names = ("agreement", "tv", "drafter_accuracy", "verifier_accuracy", "drafter_right_alone", "verifier_right_alone")
    sums, positions = torch.zeros(len(names), dtype=torch.float64), 0
    for batch in batches:
        finals = [backbone_of(m)(input_ids=batch.ids, use_cache=False)[0][batch.predicts] for m in (drafter, verifier)]
        for q_rows, p_rows, labels in zip(*(x.split(_LOGIT_ROWS) for x in (*finals, batch.labels)), strict=True):
            q, p = head_logits(drafter, q_rows).softmax(dim=-1), head_logits(verifier, p_rows).softmax(dim=-1)
            q_top, p_top = q.argmax(dim=-1), p.argmax(dim=-1)
            q_right, p_right = q_top == labels, p_top == labels
            tv = 1 - torch.minimum(p, q).sum(dim=-1)
            columns = (q_top == p_top, tv, q_right, p_right, q_right & ~p_right, p_right & ~q_right)
            sums += torch.stack([column.double().sum().cpu() for column in columns])
        positions += len(batch.labels)
    means: Any = dict(zip(names, (sums / max(positions, 1)).tolist(), strict=True))
    return Agreement(positions=positions, **means)
