"""Chi-square of whole sequences through the engine under a token-level router, against its own π worked out by hand."""

from collections import Counter
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from speccascade import TokenRouter
from speccascade.cascade import ModelDrafter, SpeculativeCascade, VerifyBlock, logits_to_probs
from speccascade.cascade.distributions import Sampling
from speccascade.router.bundle import Bundle
from speccascade.router.config import RouterConfig
from speccascade.router.pooled import PooledEstimator
from speccascade.router.runtime import TorchHead

from ..conftest import pooled_spec
from .conftest import Check, TableLM, sequence_law

PROMPT, DRAWS = [1, 3, 2], 3000
SAMPLINGS = {"T=1": Sampling(), "T=0.7": Sampling(0.7), "top-p": Sampling(1.2, top_p=0.8)}


def build_router(rule: str, alpha: float) -> TokenRouter:
    """A head that is far from p°."""
    head, generator = PooledEstimator(pooled_spec(hidden=(8,), top_k=2)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for values in head.parameters():
            values.add_(torch.randn(values.shape, generator=generator) * 0.4)
    facts = {"drafter": "a", "verifier": "b", "vocabulary_fingerprint": "", "trace_digest": "", "default_alpha": 0.1}
    return TokenRouter(Bundle(RouterConfig(**facts, **asdict(head.spec)), {}), TorchHead(head), rule, alpha)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(("rule", "alpha"), [("greedyward", 0.1), ("learned_lossy", 0.3), ("opt", 0.1)])
def test_sequences_follow_the_target(rule: str, alpha: float, sampling: Sampling, check_follows: Check) -> None:
    drafter, verifier, router = TableLM(3, 4), TableLM(4, 4), build_router(rule, alpha)
    cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, router, gamma=2)

    def at(prefix: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        logits = [model.logits_after(prefix).view(1, 1, -1) for model in (drafter, verifier)]
        q, p = (logits_to_probs(one, sampling) for one in logits)
        raw = (None, None) if sampling.is_plain else tuple(logits_to_probs(one) for one in logits)
        block = VerifyBlock.from_probs(q, p, *raw)
        return q[0, 0].double(), p[0, 0].double(), router.target(block)[0, 0].double()

    settings = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    out = cascade.generate(torch.tensor([PROMPT]).expand(DRAWS, -1), max_new_tokens=3, seed=0, **settings)
    counts = Counter(tuple(row) for row in out.sequences[:, -3:].tolist())
    check_follows(counts, sequence_law(at, PROMPT, 4, "verifier"), DRAWS)
