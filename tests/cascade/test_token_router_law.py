"""Chi-square of whole sequences through the engine under a token-level router, against its own π worked out by hand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from speccascade import TokenRouter
from speccascade.cascade import ModelDrafter, SpeculativeCascade, VerifyBlock, logits_to_probs
from speccascade.cascade.distributions import Sampling
from speccascade.router.bundle import Bundle
from speccascade.router.config import RouterConfig
from speccascade.router.features import build_features
from speccascade.router.head_base import HeadSpec
from speccascade.router.runtime import TorchHead

from ..conftest import opinionated_pooled, pooled_spec
from .conftest import Check, TableLM, sequence_law

PROMPT, DRAWS = [1, 3, 2], 3000
RULES = [("greedyward", 0.4), ("learned_lossy", 0.3), ("opt", 0.1), ("expected_gain", 0.1)]
SAMPLINGS = {"T=1": Sampling(), "T=0.7": Sampling(0.7), "top-p": Sampling(1.2, top_p=0.8)}


def build_router(rule: str, alpha: float, spec: HeadSpec | None = None) -> TokenRouter:
    """A head that is far from p°."""
    head = opinionated_pooled(spec or pooled_spec(hidden=(8,), top_k=2))
    facts = {"drafter": "a", "verifier": "b", "vocabulary_fingerprint": "", "trace_digest": "", "default_alpha": 0.1}
    return TokenRouter(Bundle(RouterConfig(**facts, **asdict(head.spec)), {}), TorchHead(head), rule, alpha)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(("rule", "alpha"), RULES)
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
    law = sequence_law(at, PROMPT, 4, "verifier")
    assert sum(mass * DRAWS >= 5 for mass in law.values()) > 5, "a law of few sequences shows nothing"
    check_follows(counts, law, DRAWS)


SIZES = (16, 32)  # of the hidden states
READING = pooled_spec("verified+topk+hidden", hidden=(8,), top_k=2, hidden_sizes=SIZES, rank=3)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_router_that_reads_hidden_states_emits_what_its_formula_says(
    temperature: float, tiny_llama: Callable[..., LlamaForCausalLM], check_follows: Check
) -> None:
    """π from plain forwards: p where Σ P̂·(p − q) > α·D_TV, P̂ from the head on the states that these give."""
    drafter, verifier = (
        tiny_llama(seed=seed, layers=1, vocab=4, hidden=size) for seed, size in enumerate(SIZES, start=1)
    )
    router, alpha = build_router("expected_gain", 0.1, READING), 0.1
    head = router.runtime.head  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(7)
    head.set_directions(*(torch.linalg.qr(torch.randn(size, 3, generator=generator))[0] for size in SIZES))
    decisions = set[bool]()

    @cache
    def after(prefix: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        with torch.inference_mode():
            outs = [model(torch.tensor([prefix]), output_hidden_states=True) for model in (drafter, verifier)]
        q0, p0 = (out.logits[:, -1:].softmax(dim=-1) for out in outs)
        q, p = ((out.logits[:, -1:] / temperature).softmax(dim=-1) for out in outs)
        states = [out.hidden_states[-1][:, -1:] for out in outs]
        block = replace(
            VerifyBlock.from_probs(q, p, q0, p0), draft_hidden=states[0].clone(), verifier_hidden=states[1].clone()
        )
        ids = sorted({*q0.topk(2).indices.flatten().tolist(), *p0.topk(2).indices.flatten().tolist()})
        pairs = torch.stack([q0[0, 0, ids], p0[0, 0, ids]], dim=-1).unsqueeze(0)
        found = head(build_features(block.stats, READING.feature_set)[0], pairs)[0].exp()
        belief = p0[0, 0] * found[-1] / (1 - p0[0, 0, ids].sum()).clamp_min(1e-6)
        belief[ids] = found[:-1]
        q, p = q[0, 0].double(), p[0, 0].double()
        margin = float((belief * (p - q)).sum()) - alpha * float((p - q).abs().sum()) / 2
        assert abs(margin) > 1e-5, "too near to call"
        decisions.add(margin > 0)
        return q, p, p if margin > 0 else q

    def at(prefix: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        return after(tuple(prefix))

    law = sequence_law(at, PROMPT, 4, "target")
    assert decisions == {True, False}
    cascade = SpeculativeCascade(drafter, verifier, router, gamma=2, bonus="target")
    prompts = torch.tensor([PROMPT]).expand(DRAWS, -1)
    out = cascade.generate(prompts, max_new_tokens=3, seed=0, temperature=temperature)
    check_follows(Counter(tuple(row) for row in out.sequences[:, -3:].tolist()), law, DRAWS)
