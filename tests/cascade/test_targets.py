"""What verification reads of π, cheaply, equals what a rule's whole target says; and so does the verdict."""

from dataclasses import dataclass

import pytest
import torch

from speccascade import rules
from speccascade.cascade import Sampling, VerifyBlock, logits_to_probs
from speccascade.cascade.blocks import TargetRule
from speccascade.cascade.distribute import distribute
from speccascade.cascade.forms import Certain, FromLogits, Whole
from speccascade.cascade.targets import Plain, read_target
from speccascade.cascade.verify import judge, verify_block

B, T, V = 5, 4, 31
SAMPLINGS = {"T=1": Sampling(), "T=0.5": Sampling(0.5), "T=0": Sampling(0.0), "top-p": Sampling(0.9, top_p=0.8)}
RULES: dict[str, TargetRule] = {
    "specdecode": rules.SpecDecode(),
    "opt": rules.OPT(0.2),
    "chow": rules.Chow(0.4),
    "verifier_gap": rules.VerifierGap(0.3),
    "expected_gain": rules.ExpectedGain(0.2),
    "token_v1": rules.TokenV1(0.1),
    "token_v2": rules.TokenV2(0.1),
    "token_v3": rules.TokenV3(0.4),
    "token_v2, cold": rules.TokenV2(0.1, replacement_temperature=0.3),
    "token_v2, greedy": rules.TokenV2(0.1, replacement_temperature=0),
    "greedyward": rules.Greedyward(0.1),
    "typical": rules.Typical(),
    "top_k": rules.TopK(3),
    "lossy": rules.Lossy(0.3),
    "lossy, beta=1": rules.Lossy(0.3, beta=1.0),
    "learned_lossy": rules.LearnedLossy(0.3),
    "learned_lossy, dear": rules.LearnedLossy(1.5),
    "ensemble": rules.Ensemble(0.4),
}


def build_block(sampling: Sampling, seed: int = 0) -> VerifyBlock:
    """A block as the engine builds it: no more of each distribution is written down than its form needs."""
    generator = torch.Generator().manual_seed(seed)
    verifier = torch.randn(B, T, V, generator=generator) * 2
    draft = verifier + torch.randn(B, T, V, generator=generator)
    q, p = distribute(draft, sampling, "q"), distribute(verifier, sampling, "p")
    q_raw, p_raw = (q, p) if sampling.is_plain else (FromLogits(draft), FromLogits(verifier))
    uniforms = torch.rand(B, T, generator=generator, dtype=torch.float64)
    return VerifyBlock(q, q_raw, p, p_raw, tokens=q.sample(uniforms), positions=torch.arange(T).expand(B, T))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", RULES)
def test_every_reading_equals_the_whole_target(name: str, sampling: Sampling) -> None:
    rule, block = RULES[name], build_block(sampling)
    target, whole = read_target(rule, block), rule.target(block)
    torch.testing.assert_close(target.dense(), whole)
    drafted, expected = (
        probs.gather(-1, block.tokens.unsqueeze(-1)).squeeze(-1) for probs in (block.draft_probs, whole)
    )
    # Where π exceeds q the draft is accepted for sure: how much larger it is is not asked.
    torch.testing.assert_close(torch.minimum(target.at_tokens(), drafted), torch.minimum(expected, drafted))
    for place in range(T):
        torch.testing.assert_close(target.row(torch.full((B,), place)), whole[:, place], atol=1e-6, rtol=1e-5)
    assert torch.equal(target.deferred, Plain(block, whole, rule.defer_mask(block)).deferred)  # type: ignore[attr-defined]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", RULES)
def test_the_verdict_equals_the_plain_one(name: str, sampling: Sampling) -> None:
    rule = RULES[name]
    for seed in range(20):
        block = build_block(sampling, seed)
        uniforms = torch.rand(B, T + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        plain = verify_block(rule.target(block), block.draft_probs, block.tokens, uniforms)
        lengths = torch.full((B,), T)
        accepted, excess = judge(read_target(rule, block), block.draft, block.tokens, uniforms, lengths)
        assert torch.equal(accepted, plain.accepted)
        for row in range(B):
            if accepted[row] < T:
                assert excess is not None
                place = int(accepted[row])
                expected = (rule.target(block)[row, place] - block.draft_probs[row, place]).clamp_min(0)
                torch.testing.assert_close(excess[row], expected, atol=1e-6, rtol=0)


def test_shorter_rows_end_at_their_own_length() -> None:
    same = Whole(logits_to_probs(torch.randn(2, T, V, generator=torch.Generator().manual_seed(1))))
    block = VerifyBlock(
        same, same, same, same, torch.zeros(2, T, dtype=torch.long), torch.zeros(2, T, dtype=torch.long)
    )
    accepted, excess = judge(
        read_target(rules.SpecDecode(), block), same, block.tokens, torch.rand(2, T), torch.tensor([1, 3])
    )
    assert accepted.tolist() == [1, 3]
    assert excess is None


def test_a_draft_that_nothing_could_replace_stands() -> None:
    # π a rounding error below q at the drafted token and above it nowhere: rejecting would leave nothing to draw from.
    q, p = torch.tensor([[[0.25, 0.75]]]), torch.tensor([[[0.25, 0.7499]]])
    block = VerifyBlock.from_probs(q, p, tokens=torch.tensor([[1]]))
    accepted, excess = judge(
        read_target(rules.SpecDecode(), block), block.draft, block.tokens, torch.ones(1, 1), torch.tensor([1])
    )
    assert accepted.tolist() == [1]
    assert excess is None


def test_a_subclass_that_overrides_only_its_target_is_heard() -> None:
    @dataclass(frozen=True)
    class Mine(rules.OPT):
        def target(self, block: VerifyBlock) -> torch.Tensor:
            return torch.full_like(block.draft_probs, 1 / V)

    target = read_target(Mine(0.1), build_block(SAMPLINGS["T=1"]))
    assert torch.equal(target.dense(), torch.full((B, T, V), 1 / V))


def test_a_greedy_block_writes_down_no_distribution() -> None:
    block = build_block(SAMPLINGS["T=0"])
    assert isinstance(block.draft, Certain)
    assert isinstance(block.verifier, Certain)
    read_target(rules.OPT(0.2), block).at_tokens()
    assert "dense" not in vars(block.draft) | vars(block.verifier) | vars(block.draft_raw) | vars(block.verifier_raw)
