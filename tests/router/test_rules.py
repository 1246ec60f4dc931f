"""Every rule emits its own target, rejects what the formulas say, and has the limits it should."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from speccascade import rules
from speccascade.cascade import Sampling, Stats, VerifyBlock, emission_law, logits_to_probs
from speccascade.cascade.verify import rejection_probability
from speccascade.router.lossy import lossy_beta, solve_scale

B, T, V = 3, 40, 19
SAMPLINGS = {
    "T=1": Sampling(),
    "T=0": Sampling(temperature=0),
    "T=0.5": Sampling(0.5),
    "top-k": Sampling(1.0, top_k=5),
    "top-p": Sampling(0.8, top_p=0.6),
}
POSITION = {
    "chow": (0.0, 0.3, 1.0),
    "chow_log": (0.0, 1.2),
    "diff": (-1.0, 0.0, 0.2),
    "diff_log": (-0.5, 0.0, 0.7),
    "opt": (-2.0, 0.0, 0.3, 4.0),
    "opt_log": (0.0, 0.8),
    "bild_star": (0.0, 1.5),
    "verifier_gap": (0.0, 0.4),
    "expected_gain": (-0.5, 0.0, 0.4),
}
TOKEN = {
    "token_v1": (-0.3, 0.0, 0.4),
    "token_v2": (-0.3, 0.0, 0.4),
    "token_v3": (-0.1, 0.0, 0.5, 0.95),
    "greedyward": (0.0, 0.2, 1.0),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("specdecode", {}),
    *((name, {"alpha": alpha}) for name, alphas in (POSITION | TOKEN).items() for alpha in alphas),
    *(
        (name, {"alpha": alpha, "replacement_temperature": temperature})
        for name in ("token_v1", "token_v2", "token_v3")
        for alpha in TOKEN[name]
        for temperature in (0, 0.3, 2.0)
    ),
    *((name, {"alpha": 0.2, "confidence": "processed"}) for name in TOKEN),
    *(("lossy", {"alpha": alpha}) for alpha in (0.0, 0.2, 0.9)),
    *(("learned_lossy", {"alpha": alpha}) for alpha in (0.0, 0.4, 1.0, 2.5, 1e6)),
    *(("ensemble", {"weight": weight}) for weight in (0.0, 0.4, 1.0)),
    *(("typical", {"epsilon": epsilon, "delta": delta}) for epsilon, delta in ((0.2, 0.3), (0.9, 5.0))),
    *(("top_k", {"k": k}) for k in (1, 3, 100)),
]


def test_every_rule_stands_in_these_cases() -> None:
    assert {name for name, _ in CASES} == set(rules.RULES)


def random_block(sampling: Sampling, seed: int = 0, spread: float = 2.0) -> VerifyBlock:
    """Two related models at random positions, some of which agree closely and some not at all."""
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randn(B, T, V, generator=generator) * spread
    closeness = torch.rand(B, T, 1, generator=generator)
    verifier = closeness * draft + (1 - closeness) * torch.randn(B, T, V, generator=generator) * spread
    return VerifyBlock.from_probs(
        draft_probs=logits_to_probs(draft, sampling),
        verifier_probs=logits_to_probs(verifier, sampling),
        draft_confidence=logits_to_probs(draft),
        verifier_confidence=logits_to_probs(verifier),
        tokens=torch.randint(V, (B, T), generator=generator),
        positions=torch.arange(T).expand(B, T),
    )


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize(("name", "parameters"), CASES, ids=lambda value: str(value))
def test_the_emitted_law_is_the_target(name: str, parameters: dict[str, Any], sampling: Sampling) -> None:
    block = random_block(sampling)
    target = rules.get(name, **parameters).target(block)
    torch.testing.assert_close(target.sum(-1), torch.ones(B, T), atol=2e-6, rtol=0)
    assert (target >= 0).all()
    torch.testing.assert_close(emission_law(target, block.draft_probs), target, atol=1e-6, rtol=0)
    tv = 0.5 * (block.draft_probs - target).abs().sum(-1)
    torch.testing.assert_close(rejection_probability(target, block.draft_probs), tv, atol=2e-6, rtol=0)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize(("name", "alpha"), [(n, a) for n, alphas in POSITION.items() for a in alphas])
def test_position_rules_reject_tv_where_they_defer(name: str, alpha: float, sampling: Sampling) -> None:
    block = random_block(sampling)
    rule: Any = rules.get(name, alpha=alpha)
    rejected = rejection_probability(rule.target(block), block.draft_probs)
    expected = rule.defer_mask(block).float() * block.stats.tv
    torch.testing.assert_close(rejected, expected, atol=2e-6, rtol=0)
    assert (rejected <= block.stats.tv + 2e-6).all(), "no position rule rejects more than lossless decoding"


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize(("name", "alpha"), [(n, a) for n in ("token_v1", "token_v2", "token_v3") for a in TOKEN[n]])
def test_token_rules_reject_what_the_formula_says(name: str, alpha: float, sampling: Sampling) -> None:
    block = random_block(sampling)
    rule: Any = rules.get(name, alpha=alpha)
    replaced = rule.replaced(block)
    q, p = block.draft_probs, block.verifier_probs
    eta = (q * replaced).sum(-1, keepdim=True)
    formula = torch.where(replaced, (q - eta * p).clamp_min(0), 0).sum(-1)
    torch.testing.assert_close(rejection_probability(rule.target(block), q), formula, atol=2e-6, rtol=0)


DECISIONS: dict[str, Callable[[dict[str, list[float]], float], bool]] = {
    "chow": lambda x, a: max(x["q0"]) < 1 - a,
    "chow_log": lambda x, a: entropy(x["q0"]) > a,
    "diff": lambda x, a: max(x["q0"]) < max(x["p0"]) - a,
    "diff_log": lambda x, a: entropy(x["q0"]) > entropy(x["p0"]) + a,
    "opt": lambda x, a: max(x["q0"]) < max(x["p0"]) - a * half_l1(x["p"], x["q"]),
    "opt_log": lambda x, a: entropy(x["q0"]) > entropy(x["p0"]) + a * half_l1(x["p"], x["q"]),
    "bild_star": lambda x, a: -math.log(x["p0"][x["q0"].index(max(x["q0"]))]) > a,
    "verifier_gap": lambda x, a: max(x["p0"]) - x["p0"][x["q0"].index(max(x["q0"]))] > a * half_l1(x["p"], x["q"]),
    "expected_gain": lambda x, a: (
        sum(b * (p - q) for b, p, q in zip(x["p0"], x["p"], x["q"], strict=True)) > a * half_l1(x["p"], x["q"])
    ),
}


def entropy(probs: list[float]) -> float:
    return -sum(value * math.log(value) for value in probs if value > 0)


def half_l1(p: list[float], q: list[float]) -> float:
    return 0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("name", DECISIONS)
def test_position_decisions_equal_their_definitions(name: str) -> None:
    block = random_block(SAMPLINGS["T=0.5"], seed=3)
    for alpha in (0.05, 0.31, 0.77):
        decided = rules.get(name, alpha=alpha).defer_mask(block)  # type: ignore[attr-defined]
        for row in range(B):
            for place in range(T):
                at = {
                    "q": block.draft_probs[row, place].tolist(),
                    "p": block.verifier_probs[row, place].tolist(),
                    "q0": block.draft_confidence[row, place].tolist(),
                    "p0": block.verifier_confidence[row, place].tolist(),
                }
                assert bool(decided[row, place]) == DECISIONS[name](at, alpha)


@pytest.mark.parametrize(
    ("name", "replaced"),
    [
        ("token_v1", lambda q, p, a: q < p.max() - a),
        ("token_v2", lambda q, p, a: p < p.max() - a),
        ("token_v3", lambda q, p, a: p < (1 - a) * p.max()),
    ],
)
def test_token_targets_equal_their_definition(name: str, replaced: Callable[..., torch.Tensor]) -> None:
    block = random_block(SAMPLINGS["top-p"], seed=4)
    target = rules.get(name, alpha=0.2).target(block)
    for row in range(B):
        for place in range(T):
            q, p = block.draft_probs[row, place], block.verifier_probs[row, place]
            r = replaced(block.draft_confidence[row, place], block.verifier_confidence[row, place], 0.2).float()
            torch.testing.assert_close(target[row, place], q * (1 - r) + p * (r * q).sum(), atol=1e-6, rtol=0)


def test_limits_of_the_rules() -> None:
    block = random_block(SAMPLINGS["T=1"])
    q, p, stats = block.draft_probs, block.verifier_probs, block.stats
    assert torch.equal(rules.SpecDecode().target(block), p)
    assert rules.Chow(0).defer(stats).all()
    assert not rules.Chow(1).defer(stats).any()
    assert rules.Diff(-1).defer(stats).all()
    assert not rules.Diff(1).defer(stats).any()
    assert torch.equal(rules.OPT(0).defer(stats), rules.Diff(0).defer(stats))
    assert not rules.VerifierGap(1e9).defer(stats).any()
    torch.testing.assert_close(rules.TokenV3(alpha=-0.01).target(block), p)
    torch.testing.assert_close(rules.Ensemble(1.0).target(block), p)
    assert torch.equal(rules.Ensemble(0.0).target(block), q)
    torch.testing.assert_close(rules.TopK(V).target(block), q)
    torch.testing.assert_close(rules.Lossy(0).target(block), p, atol=1e-6, rtol=0)


def test_token_v3_at_zero_is_not_lossless() -> None:
    block = random_block(SAMPLINGS["T=1"])
    best = block.verifier_probs.argmax(-1, keepdim=True)
    q, p = (probs.gather(-1, best) for probs in (block.draft_probs, block.verifier_probs))
    target = rules.TokenV3(0).target(block).gather(-1, best)
    torch.testing.assert_close(target, q + p * (1 - q), atol=1e-6, rtol=0)


@pytest.mark.parametrize("alpha", [-0.4, 0.0, 0.1, 0.6])
def test_opt_diff_and_token_v1_emit_the_same_at_temperature_zero(alpha: float) -> None:
    block = random_block(SAMPLINGS["T=0"])
    targets = [rules.get(name, alpha=alpha).target(block) for name in ("opt", "diff", "token_v1")]
    if alpha >= 0:  # below zero OPT asks for less where the argmaxes agree, and there all three emit the same anyway
        assert torch.equal(targets[0], targets[1])
    assert torch.equal(targets[1], targets[2])


@pytest.mark.parametrize("name", ["specdecode", *POSITION, *TOKEN, "lossy"])
def test_equal_distributions_and_disjoint_supports(name: str) -> None:
    alpha = {} if name == "specdecode" else {"alpha": 0.1}
    rule = rules.get(name, **alpha)
    same = random_block(SAMPLINGS["T=1"]).draft_probs
    # A token rule may still move mass where p = q; a position rule and lossless decoding never reject there.
    equal = VerifyBlock.from_probs(same, same)
    target = rule.target(equal)
    assert target.isfinite().all()
    if name not in TOKEN:
        assert torch.equal(target, same)
        assert rejection_probability(target, same).abs().sum() == 0
    q = torch.tensor([[[0.4, 0.6, 0.0, 0.0]]])
    p = torch.tensor([[[0.0, 0.0, 0.7, 0.3]]])
    disjoint = VerifyBlock.from_probs(q, p)
    target = rule.target(disjoint)
    assert target.isfinite().all()
    torch.testing.assert_close(emission_law(target, q), target, atol=1e-6, rtol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3, 0.8, 0.99])
def test_lossy_beta_solves_its_equation_and_is_at_least_one(alpha: float) -> None:
    for sampling in SAMPLINGS.values():
        block = random_block(sampling, seed=6)
        q, p = (x.double() / x.double().sum(-1, keepdim=True) for x in (block.draft_probs, block.verifier_probs))
        beta = lossy_beta(q, p, alpha)
        assert (beta >= 1 - 1e-12).all()
        left = (p / beta.unsqueeze(-1) - q).clamp_min(0).sum(-1)
        right = (q - p / (1 - alpha)).clamp_min(0).sum(-1)
        torch.testing.assert_close(left, right, atol=1e-12, rtol=0)
        one_by_one = [solve_scale(*pair, alpha) for pair in zip(q.flatten(0, 1), p.flatten(0, 1), strict=True)]
        torch.testing.assert_close(torch.tensor(one_by_one).double(), (1 / beta).flatten(), atol=1e-7, rtol=0)


def test_lossy_at_temperature_zero_matches_argmaxes_whatever_alpha() -> None:
    block = random_block(SAMPLINGS["T=0"])
    for alpha in (0.0, 0.5, 0.99):
        torch.testing.assert_close(rules.Lossy(alpha).target(block), block.verifier_probs)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9])
def test_lossy_with_beta_one_accepts_and_replaces_as_written(alpha: float, sampling: Sampling) -> None:
    block = random_block(sampling)
    q, p = block.draft_probs, block.verifier_probs
    target = rules.Lossy(alpha, beta=1.0).target(block)
    assert alpha == 0 or sampling.is_greedy or (target.sum(-1) > 1).any(), "beta = 1 is no distribution"
    accepted = torch.minimum(q, p / (1 - alpha))
    excess = (p - q).clamp_min(0)
    law = accepted + (1 - accepted.sum(-1, keepdim=True)) * excess / excess.sum(-1, keepdim=True).clamp_min(1e-30)
    torch.testing.assert_close(emission_law(target, q), law, atol=1e-6, rtol=0)


def test_opt_regret_is_bounded_by_calibration_at_the_two_argmaxes() -> None:
    """L_spec(OPT) − min L_spec ≤ |P(v_q) − q(v_q)| + |P(v_p) − p(v_p)| for the 0-1 loss (Lemma 5)."""
    alpha = 0.4
    block = random_block(SAMPLINGS["T=1"], seed=8)
    truth = logits_to_probs(torch.randn(B, T, V, generator=torch.Generator().manual_seed(9)) * 2)
    q, p, tv = block.draft_probs, block.verifier_probs, block.stats.tv
    at_draft, at_verifier = (truth.gather(-1, x.argmax(-1, keepdim=True)).squeeze(-1) for x in (q, p))
    stay, defer = 1 - at_draft, 1 - at_verifier + alpha * tv
    chosen = torch.where(rules.OPT(alpha).defer(block.stats), defer, stay)
    regret = chosen - torch.minimum(stay, defer)
    bound = (at_draft - q.amax(-1)).abs() + (at_verifier - p.amax(-1)).abs()
    assert (regret <= bound + 1e-6).all()
    assert (regret > 0).any(), "a test on which OPT is never wrong shows nothing"


def test_greedyward_minimises_the_loss_of_a_sample_plus_alpha_tv() -> None:
    """Against a linear programme: min over π of −Σ π·p + α·½‖π − q‖₁ on the simplex."""
    from scipy.optimize import linprog

    alpha, block = 0.15, random_block(SAMPLINGS["T=1"], seed=11)
    target = rules.Greedyward(alpha).target(block)
    for place in range(0, T, 5):
        q, p = block.draft_probs[0, place].double(), block.verifier_probs[0, place].double()
        # variables: π and u ≥ |π − q|; cost −p·π + α/2·Σu
        eye = torch.eye(V, dtype=torch.float64)
        upper = torch.cat([torch.cat([eye, -eye], 1), torch.cat([-eye, -eye], 1)])
        solution = linprog(
            torch.cat([-p, torch.full((V,), alpha / 2, dtype=torch.float64)]).numpy(),
            A_ub=upper.numpy(),
            b_ub=torch.cat([q, -q]).numpy(),
            A_eq=torch.cat([torch.ones(1, V), torch.zeros(1, V)], 1).numpy(),
            b_eq=[1.0],
        )
        ours = target[0, place].double()
        value = float(-(ours * p).sum() + alpha * 0.5 * (ours - q).abs().sum())
        assert value == pytest.approx(solution.fun, abs=1e-6)


@pytest.mark.parametrize("name", ["opt", "diff", "chow", "verifier_gap", "bild_star", "opt_log"])
def test_processed_confidence_reads_the_distributions_as_sampled(name: str) -> None:
    block = random_block(SAMPLINGS["T=0.5"], seed=2)
    processed = VerifyBlock.from_probs(block.draft_probs, block.verifier_probs)
    alpha = 0.21
    assert torch.equal(
        rules.get(name, alpha=alpha, confidence="processed").defer_mask(block),  # type: ignore[attr-defined]
        rules.get(name, alpha=alpha).defer_mask(processed),  # type: ignore[attr-defined]
    )


def test_tv_ablation_reads_the_raw_distributions() -> None:
    block = random_block(SAMPLINGS["T=0.5"], seed=2)
    stats = block.stats
    expected = stats.verifier_max - stats.draft_max > 0.3 * stats.tv_raw
    assert torch.equal(rules.OPT(0.3, tv="raw").defer(stats), expected)
    assert not torch.equal(rules.OPT(0.3).defer(stats), expected)


def test_the_same_decision_from_columns_as_live() -> None:
    block = random_block(SAMPLINGS["T=0.5"], seed=2)
    columns = {name: column.flatten() for name, column in block.stats.columns().items()}
    offline = Stats.from_columns(columns, gain=block.stats.expected_gain.flatten)
    for name, alphas in POSITION.items():
        rule: Any = rules.get(name, alpha=alphas[-1])
        assert torch.equal(rule.defer(offline), rule.defer_mask(block).flatten())


def test_fixed_mask_and_deferral_of_tokens() -> None:
    block = random_block(SAMPLINGS["T=1"])
    mask = torch.arange(T) % 2 == 0
    target = rules.Fixed(mask).target(block)
    assert torch.equal(target[:, ::2], block.verifier_probs[:, ::2])
    assert torch.equal(target[:, 1::2], block.draft_probs[:, 1::2])
    token_rule = rules.TokenV2(0.1)
    replaced = token_rule.replaced(block)
    for row, place in ((0, 0), (1, 7), (2, 39)):
        assert bool(token_rule.defer_mask(block)[row, place]) == bool(replaced[row, place, block.tokens[row, place]])


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("opts", {"alpha": 1}, r"no rule is called 'opts'; did you mean 'opt'\?.*Known: specdecode, chow"),
        ("chow", {"alpha": 1.2}, r"alpha: expected a number in \[0, 1\], got 1.2"),
        ("opt", {}, "expected a value for alpha"),
        ("opt", {"alfa": 1}, r"takes alpha, confidence, tv, got 'alfa'; did you mean 'alpha'\?"),
        ("opt", {"alpha": math.nan}, "alpha"),
        ("specdecode", {"alpha": 1}, "takes no parameter"),
        ("lossy", {"alpha": 1.0}, r"\[0, 1\)"),
        ("lossy", {"alpha": 0.1, "beta": 0.5}, "beta"),
        ("greedyward", {"alpha": -0.1}, "alpha"),
        ("top_k", {"k": 0}, "k: expected"),
        ("ensemble", {"weight": 2}, "weight"),
    ],
)
def test_wrong_names_and_values_are_refused_by_name(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rules.get(name, **parameters)


def test_expected_gain_is_verifier_gap_where_both_are_one_hot() -> None:
    block = random_block(Sampling(0.0), seed=4)
    stats = block.stats
    torch.testing.assert_close(stats.expected_gain, stats.verifier_max - stats.verifier_at_draft, atol=2e-7, rtol=0)
    sampled = random_block(SAMPLINGS["T=1"], seed=4).stats
    torch.testing.assert_close(sampled.greedy().expected_gain, sampled.verifier_max - sampled.verifier_at_draft)


def test_scalars_alone_cannot_tell_the_expected_gain() -> None:
    stats = Stats.from_columns(random_block(SAMPLINGS["T=1"]).stats.columns())
    with pytest.raises(ValueError, match="expected_gain: expected positions with both models' likely tokens"):
        rules.ExpectedGain(0.3).defer(stats)
