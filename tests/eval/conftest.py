"""Small made-up traces whose full distributions are known, so that a replay can be checked against brute force."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from speccascade.cascade.statistics import Stats


@dataclass(frozen=True)
class MadeTrace:
    """What `TraceSplit` holds, and the full distributions behind it."""

    prompt_ids: tuple[str, ...]
    prompt_index: Tensor
    label: Tensor
    stats: Stats
    q_label: Tensor
    p_label: Tensor
    topk_ids: Tensor
    topk_q: Tensor
    topk_p: Tensor
    draft_probs: Tensor
    verifier_probs: Tensor

    @property
    def correctness(self) -> Tensor:
        label = self.label
        hits = [(probs.argmax(dim=-1) == label).float() for probs in (self.draft_probs, self.verifier_probs)]
        return torch.stack([torch.stack(hits, dim=-1), torch.stack([self.q_label, self.p_label], dim=-1)], dim=1)

    def __len__(self) -> int:
        return len(self.label)

    def sequences(self) -> Tensor:
        return torch.arange(len(self)).view(len(self.prompt_ids), -1)


def make_trace(prompts: int = 30, length: int = 20, vocabulary: int = 12, k: int = 12, seed: int = 0) -> MadeTrace:
    generator = torch.Generator().manual_seed(seed)
    positions = prompts * length
    shared = 2 * torch.randn(positions, vocabulary, generator=generator)
    truth, draft, verifier = (
        (shared + scale * torch.randn(positions, vocabulary, generator=generator)).softmax(dim=-1)
        for scale in (0.3, 1.5, 1.0)
    )
    label = torch.multinomial(truth, 1, generator=generator).squeeze(-1)
    ids, kept_q, kept_p = log_top_k(draft, verifier, k)
    stats = Stats(draft, verifier, draft, verifier)
    return MadeTrace(
        prompt_ids=tuple(f"p{index}" for index in range(prompts)),
        prompt_index=torch.arange(prompts).repeat_interleave(length),
        label=label,
        stats=Stats.from_columns(stats.columns(), gain=lambda: stats.expected_gain),
        q_label=draft.gather(-1, label.unsqueeze(-1)).squeeze(-1),
        p_label=verifier.gather(-1, label.unsqueeze(-1)).squeeze(-1),
        topk_ids=ids,
        topk_q=kept_q,
        topk_p=kept_p,
        draft_probs=draft,
        verifier_probs=verifier,
    )


def log_top_k(draft: Tensor, verifier: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the union of the two top-k of each row, padded with id −1 and probability 0."""
    kept = torch.zeros_like(draft, dtype=torch.bool)
    for probs in (draft, verifier):
        kept.scatter_(-1, probs.topk(k, dim=-1).indices, True)
    width = int(kept.sum(dim=-1).max())
    order = kept.int().argsort(dim=-1, descending=True, stable=True)[:, :width]
    present = kept.gather(-1, order)
    values = [torch.where(present, probs.gather(-1, order), 0.0) for probs in (draft, verifier)]
    return torch.where(present, order, -1), values[0], values[1]


@pytest.fixture(scope="session")
def build_trace() -> Callable[..., MadeTrace]:
    """`build_trace(prompts=30, length=20, vocabulary=12, k=12, seed=0)` makes a trace."""
    return make_trace


@pytest.fixture
def trace() -> MadeTrace:
    """A trace in which every token is logged."""
    return make_trace()
