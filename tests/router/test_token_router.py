"""Token-level routers: the rules' own π on P̂, exactly emitted, whatever was trained."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from speccascade import LearnedRouter, TokenRouter, rules
from speccascade.cascade import Sampling, VerifyBlock, emission_law
from speccascade.cascade.distribute import distribute
from speccascade.cascade.forms import FromLogits, Whole
from speccascade.cascade.targets import Plain, read_target
from speccascade.cascade.verify import rejection_probability
from speccascade.router.belief import Belief, find_candidates
from speccascade.router.bundle import Bundle, save_bundle
from speccascade.router.config import RouterConfig
from speccascade.router.features import build_features
from speccascade.router.head_base import Head
from speccascade.router.lossy import band_multiplier, solve_multiplier
from speccascade.router.pooled import PooledEstimator
from speccascade.router.runtime import TorchHead
from speccascade.router.token_router import TOKEN_ROUTER_RULES

from ..conftest import opinionated_pooled, pooled_spec

B, T, V = 3, 5, 40
SAMPLINGS = {
    "T=1": Sampling(),
    "T=0.7": Sampling(0.7),
    "T=0": Sampling(0.0),
    "top-p": Sampling(0.9, top_p=0.7),
    "banned": Sampling(suppress_tokens=(0, 1, 2, 3, 4, 5, 6, 7)),
}
ALPHAS = {"greedyward": 0.1, "token_v1": 0.1, "token_v2": 0.1, "token_v3": 0.4, "diff": 0.02, "bild_star": 1.0}


def opinionated() -> PooledEstimator:
    """A head that is far from p°."""
    return opinionated_pooled(pooled_spec(hidden=(8,), top_k=4))


@pytest.fixture(scope="module")
def folder(config: RouterConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "router"
    save_bundle(path, opinionated(), dataclasses.replace(config, default_alpha=0.15))
    return path


@pytest.fixture(scope="module")
def router(folder: Path) -> TokenRouter:
    """Under a token rule, whose α is a share of P̂; the default rule has tests of its own."""
    return TokenRouter.from_pretrained(folder, "greedyward", alpha=0.15)


def untrained(config: RouterConfig, rule: str, alpha: float, top_k: int = 4) -> TokenRouter:
    head = PooledEstimator(pooled_spec(top_k=top_k))
    described = dataclasses.replace(config, **dataclasses.asdict(head.spec))
    return TokenRouter(Bundle(described, {}), TorchHead(head), rule, alpha)


def build_block(sampling: Sampling, seed: int = 0, batch: int = B, vocab: int = V) -> VerifyBlock:
    """A block as the engine builds it."""
    generator = torch.Generator().manual_seed(seed)
    verifier = torch.randn(batch, T, vocab, generator=generator) * 2
    draft = verifier + torch.randn(batch, T, vocab, generator=generator) * 1.5
    banned = list(sampling.suppress_tokens)
    processed = [
        logits.index_fill(-1, torch.tensor(banned, dtype=torch.long), -torch.inf) for logits in (draft, verifier)
    ]
    q, p = (distribute(logits, sampling, "") for logits in processed)
    q_raw, p_raw = (q, p) if sampling.is_plain else (FromLogits(draft), FromLogits(verifier))
    uniforms = torch.rand(batch, T, generator=generator, dtype=torch.float64)
    return VerifyBlock(q, q_raw, p, p_raw, tokens=q.sample(uniforms), positions=torch.arange(T).expand(batch, T))


def alpha_of(rule: str) -> float:
    return ALPHAS.get(rule, 0.3)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("rule", TOKEN_ROUTER_RULES)
def test_the_emitted_law_is_the_target(router: TokenRouter, rule: str, sampling: Sampling) -> None:
    block, routed = build_block(sampling), router.with_rule(rule, alpha_of(rule))
    target = routed.target(block)
    torch.testing.assert_close(target.sum(dim=-1), torch.ones(B, T), atol=3e-6, rtol=0)
    torch.testing.assert_close(emission_law(target, block.draft_probs), target, atol=1e-6, rtol=0)
    barred = (block.draft_probs == 0) & (block.verifier_probs == 0)
    assert (target[barred] == 0).all(), "what neither model may emit must get no mass"
    other = dataclasses.replace(build_block(sampling), tokens=block.tokens.flip(0))
    assert torch.equal(routed.target(other), target), "no token of π may depend on the drafted one"


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("rule", TOKEN_ROUTER_RULES)
def test_it_is_the_rule_on_the_whole_table_of_p_hat(router: TokenRouter, rule: str, sampling: Sampling) -> None:
    """The lean form of P̂ against the same numbers as a table; cut-off tokens lose their claim to be the best."""
    if sampling.suppress_tokens and rule == "bild_star":
        sampling = dataclasses.replace(sampling, suppress_tokens=())  # it reads P̂ of a token that may be banned
    block, routed = build_block(sampling), router.with_rule(rule, alpha_of(rule))
    table = routed.believe(block).verifier_raw.dense
    if not sampling.is_plain and not rule.endswith("_log"):  # entropies are those of P̂ with nothing cut off
        table = table * ((block.draft_probs > 0) | (block.verifier_probs > 0))
    plain = dataclasses.replace(block, verifier_raw=Whole(table))
    torch.testing.assert_close(routed.target(block), routed.inner.target(plain), atol=1e-6, rtol=1e-5)
    assert torch.equal(routed.defer_mask(block), routed.inner.defer_mask(plain))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("rule", ["greedyward", "learned_lossy", "token_v2", "opt"])
def test_every_reading_equals_the_whole_target(router: TokenRouter, rule: str, sampling: Sampling) -> None:
    block, routed = build_block(sampling, seed=1), router.with_rule(rule, alpha_of(rule))
    target, whole = read_target(routed, block), routed.target(block)
    assert not isinstance(target, Plain)
    drafted, expected = (
        probs.gather(-1, block.tokens.unsqueeze(-1)).squeeze(-1) for probs in (block.draft_probs, whole)
    )
    torch.testing.assert_close(torch.minimum(target.at_tokens(), drafted), torch.minimum(expected, drafted))
    for place in range(T):
        torch.testing.assert_close(target.row(torch.full((B,), place)), whole[:, place], atol=1e-6, rtol=1e-5)
    assert torch.equal(target.deferred, routed.defer_mask(block))


@pytest.mark.parametrize("rule", TOKEN_ROUTER_RULES)
def test_untrained_it_is_the_plug_in(config: RouterConfig, rule: str) -> None:
    block, routed = build_block(Sampling()), untrained(config, rule, alpha_of(rule))
    torch.testing.assert_close(
        routed.target(block), rules.get(rule, alpha=alpha_of(rule)).target(block), atol=1e-5, rtol=0
    )
    assert (routed.inner.target(block) != block.draft_probs).any(), "a rule that keeps every draft shows nothing"


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_p_hat_answers_as_its_table_does(router: TokenRouter, sampling: Sampling) -> None:
    block = build_block(sampling, seed=2)
    belief = router.believe(block).verifier_raw
    assert isinstance(belief, Belief)
    table = belief.dense
    reachable = table * ((block.draft_probs > 0) | (block.verifier_probs > 0))
    torch.testing.assert_close(table.sum(dim=-1), torch.ones(B, T))
    torch.testing.assert_close(belief.maximum, reachable.amax(dim=-1))
    assert torch.equal(belief.argmax, reachable.argmax(dim=-1))
    top = reachable.topk(2, dim=-1).values
    torch.testing.assert_close(belief.margin, top[..., 0] - top[..., 1])
    torch.testing.assert_close(belief.entropy, -torch.xlogy(table, table).sum(dim=-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(belief.over(torch.full((B, T, 1), 0.1)), table - 0.1)
    for token in range(0, V, 7):
        torch.testing.assert_close(belief.at(torch.full((B, T), token)), table[..., token])
    places = torch.tensor([2, 0, 4])
    torch.testing.assert_close(belief.pick(places).dense[:, 0], table[torch.arange(B), places])
    torch.testing.assert_close(belief.first(2).dense, table[:, :2])
    torch.testing.assert_close(belief.first(2).to(torch.device("cpu")).maximum, belief.maximum[:, :2])


def test_the_best_token_may_lie_in_the_tail() -> None:
    """P̂ may give the tail so much that one of its tokens is likelier than every candidate."""
    p = Whole(torch.tensor([[[0.3, 0.25, 0.24, 0.21]]]))
    found = find_candidates(p, p, 2)
    assert found.tokens[~found.repeated].tolist() == [0, 1] and float(found.ceiling) == 0.25
    belief = Belief(p, found, torch.where(found.repeated, 0.0, 0.05), torch.tensor([[2.0]]))
    assert int(belief.argmax) == 2 and float(belief.maximum) == pytest.approx(0.48)
    assert float(belief.margin) == pytest.approx(0.06)


def test_live_equals_logged(router: TokenRouter) -> None:
    """From the columns that a trace of the same k holds: ids ascending, each once, padded with zeros."""
    block = build_block(Sampling(), seed=4)
    table = router.believe(block).verifier_raw.dense.flatten(0, 1)
    q, p = block.draft_probs.flatten(0, 1), block.verifier_probs.flatten(0, 1)
    logged = [sorted({*q[row].topk(4).indices.tolist(), *p[row].topk(4).indices.tolist()}) for row in range(B * T)]
    columns, tokens = torch.zeros(2, B * T, 9), torch.full((B * T, 9), -1)
    for row, ids in enumerate(logged):
        columns[:, row, : len(ids)] = torch.stack([q[row, ids], p[row, ids]])
        tokens[row, : len(ids)] = torch.tensor(ids)
    stats = type(block.stats).from_columns({name: one.flatten() for name, one in block.stats.columns().items()})
    belief, tail = router.belief_over(columns[0], columns[1], tokens, stats)
    for row, ids in enumerate(logged):
        torch.testing.assert_close(belief[row, : len(ids)], table[row, ids], atol=1e-6, rtol=1e-4)
        assert (belief[row, len(ids) :] == 0).all()
        assert float(tail[row]) == pytest.approx(1 - float(table[row, ids].sum()), abs=1e-5)


def test_the_head_is_asked_once_for_a_block(router: TokenRouter) -> None:
    calls = []

    def counted(features: Tensor, candidates: Tensor) -> Tensor:
        calls.append(candidates.shape)
        return router.runtime(features, candidates)

    counting, block = (
        dataclasses.replace(router, runtime=counted, beliefs=type(router.beliefs)()),
        build_block(Sampling()),
    )
    for alpha in (0.0, 0.1, 0.5):
        counting.with_alpha(alpha).target(block)
        counting.with_rule("opt", alpha).defer_mask(block)
    assert calls == [(B * T, 8, 2)]
    del block
    assert len(counting.beliefs) == 0, "answers must not outlive the blocks that they are about"


def test_greedy_decoding_is_deterministic_under_greedyward(router: TokenRouter) -> None:
    block = build_block(Sampling(0.0), seed=5)
    target = router.with_alpha(0.05).target(block)
    assert set(target.unique().tolist()) == {0.0, 1.0}
    named = block.draft_probs.bool() | block.verifier_probs.bool()
    assert (target.bool() <= named).all()
    belief = router.believe(block).verifier_raw.dense.masked_fill(~named, 0)
    chosen = (belief * target).sum(dim=-1)
    assert (chosen >= belief.amax(dim=-1) - 0.05 - 1e-6).all(), "never far below the better of the two argmaxes"


def minimiser_cases(count: int = 12, vocab: int = 6) -> list[tuple[np.ndarray, np.ndarray, float]]:
    generator = np.random.default_rng(7)
    cases = []
    for index in range(count):
        q, belief = generator.dirichlet(np.full(vocab, 0.7), size=2)
        cases.append((q, belief, [0.0, 0.1, 0.5, 1.0, 2.0, 5.0][index % 6]))
    return cases


def law_of(rule: str, q: np.ndarray, belief: np.ndarray, alpha: float) -> np.ndarray:
    tables = [torch.tensor(one, dtype=torch.float32).view(1, 1, -1) for one in (q, q, q, belief)]
    return rules.get(rule, alpha=alpha).target(VerifyBlock.from_probs(*tables))[0, 0].double().numpy()


@pytest.mark.parametrize(("q", "belief", "alpha"), [case for case in minimiser_cases() if case[2] <= 1])
def test_greedyward_is_the_minimiser_for_any_belief(q: np.ndarray, belief: np.ndarray, alpha: float) -> None:
    """Against a linear programme in π and u ≥ max(0, q − π): min −π·P̂ + α·Σu."""
    from scipy.optimize import linprog

    size = len(q)
    solution = linprog(
        np.concatenate([-belief, np.full(size, alpha)]),
        A_ub=np.hstack([-np.eye(size), -np.eye(size)]), b_ub=-q,
        A_eq=np.concatenate([np.ones(size), np.zeros(size)])[None], b_eq=[1.0],
    )  # fmt: skip
    target = law_of("greedyward", q, belief, alpha)
    value = -(target @ belief) + alpha * np.maximum(q - target, 0).sum()
    assert value == pytest.approx(solution.fun, abs=2e-6)


@pytest.mark.parametrize(("q", "belief", "alpha"), minimiser_cases())
def test_learned_lossy_is_the_minimiser(q: np.ndarray, belief: np.ndarray, alpha: float) -> None:
    """Against a general solver of the same convex programme: min −Σ P̂ log π + α·Σu, u ≥ max(0, q − π)."""
    from scipy.optimize import minimize

    size = len(q)

    def objective(x: np.ndarray) -> float:
        return float(-(belief * np.log(x[:size])).sum() + alpha * x[size:].sum())

    def gradient(x: np.ndarray) -> np.ndarray:
        return np.concatenate([-belief / x[:size], np.full(size, alpha)])

    constraints = [
        {"type": "eq", "fun": lambda x: x[:size].sum() - 1},
        {"type": "ineq", "fun": lambda x: x[:size] + x[size:] - q},
    ]
    start = np.concatenate([(q + belief) / 2, np.maximum(q - belief, 0)])
    bounds = [(1e-9, 1.0)] * size + [(0.0, 1.0)] * size
    solved = minimize(objective, start, jac=gradient, bounds=bounds, constraints=constraints, method="SLSQP",
                      options={"maxiter": 500, "ftol": 1e-12})  # fmt: skip
    target = law_of("learned_lossy", q, belief, alpha)
    assert target.sum() == pytest.approx(1, abs=1e-6)
    value = -(belief * np.log(target)).sum() + alpha * np.maximum(q - target, 0).sum()
    assert value <= solved.fun + 1e-5, "the solver found something better"


def test_the_bands_limits() -> None:
    q, belief = (torch.randn(2, 1, 4, 9, generator=torch.Generator().manual_seed(0)) * 2).softmax(dim=-1)
    block = VerifyBlock.from_probs(q, belief)
    torch.testing.assert_close(rules.LearnedLossy(0.0).target(block), belief)
    enough = float((belief / q).amax()) + 1e-3
    torch.testing.assert_close(rules.LearnedLossy(enough).target(block), q, atol=2e-6, rtol=0)
    rejected = [
        float(rejection_probability(rules.LearnedLossy(alpha).target(block), q).sum()) for alpha in (0, 0.2, 0.7, 1, 3)
    ]
    assert rejected == sorted(rejected, reverse=True) and rejected[0] > rejected[-1]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 4.0])
def test_at_temperature_zero_the_band_draws_between_the_two_argmaxes(alpha: float) -> None:
    """q at x, p at y: π(y) = P̂(y)/μ, μ the larger root of μ² − (1 + α)μ + αP̂(y) = 0."""
    block = build_block(Sampling(0.0), seed=6)
    target, raw = rules.LearnedLossy(alpha).target(block), block.verifier_raw
    apart = block.draft.argmax != block.verifier.argmax
    assert apart.any() and not apart.all()
    torch.testing.assert_close(target[~apart], block.draft_probs[~apart], atol=1e-6, rtol=0)
    at_x, at_y = raw.at(block.draft.argmax), raw.at(block.verifier.argmax)
    mine = at_y / (at_x + at_y)
    root = ((1 + alpha) + ((1 + alpha) ** 2 - 4 * alpha * mine).sqrt()) / 2
    found = target.gather(-1, block.verifier.argmax.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found[apart], (mine / root)[apart], atol=1e-5, rtol=1e-4)


def test_what_nothing_is_believed_of_takes_what_is_left() -> None:
    """P̂ = 0 on a token of q and a price above every gain elsewhere: its share is free, and Σπ stays 1."""
    q, belief = torch.tensor([[[0.5, 0.3, 0.2]]]), torch.tensor([[[0.0, 0.6, 0.4]]])
    target = rules.LearnedLossy(1.5).target(VerifyBlock.from_probs(q, q, q, belief))[0, 0]
    torch.testing.assert_close(target, torch.tensor([1 / 3, 0.4, 0.4 / 1.5]))


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.4, 1.0, 2.5, 1e4])
def test_the_fast_multiplier_gives_the_plain_ones_law(alpha: float) -> None:
    q, belief = (torch.randn(2, 5, 5000, generator=torch.Generator().manual_seed(1)) * 3).softmax(dim=-1)
    plain = band_multiplier(q, belief, alpha)
    for row in range(5):
        fast = solve_multiplier(q[row], belief[row], alpha)
        laws = [
            torch.minimum(q[row], belief[row] / nu).maximum(belief[row] / (nu + alpha)) for nu in (fast, plain[row])
        ]
        torch.testing.assert_close(laws[0], laws[1], atol=1e-6, rtol=1e-3)


def test_both_backends_and_a_saved_router_agree(folder: Path, router: TokenRouter, tmp_path: Path) -> None:
    router = TokenRouter.from_pretrained(folder)
    assert router.alpha == 0.15 and router.rule == "expected_gain" and router.name == "router-pooled-expected_gain"
    block = build_block(Sampling(0.7), seed=8)
    router.with_rule("expected_gain", 0.05).save_pretrained(tmp_path / "again")
    again = TokenRouter.from_pretrained(tmp_path / "again", backend="torch")
    assert again.alpha == 0.05 and again.rule == "expected_gain"
    dense = [one.believe(block).verifier_raw.dense for one in (router, again)]
    torch.testing.assert_close(*dense, atol=1e-5, rtol=1e-4)
    router.check_pair(vocabulary_fingerprint="f" * 64)
    with pytest.raises(ValueError, match="vocabulary differ"):
        router.check_pair(vocabulary_fingerprint="e" * 64)


def plain_belief(head: Head, block: VerifyBlock, top_k: int = 4) -> Tensor:
    """P̂ ``[B, T, V]`` as a table, position by position: the head on the candidates, and p° scaled elsewhere."""
    q, p = block.draft_confidence, block.verifier_confidence
    features = build_features(block.stats, "verified")
    table = torch.zeros_like(p)
    for row in range(B):
        for place in range(T):
            sides = q[row, place], p[row, place]
            ids = sorted({token for side in sides for token in side.topk(top_k).indices.tolist()})
            pairs = torch.stack([side[ids] for side in sides], dim=-1).unsqueeze(0)
            belief = head(features[row, place].unsqueeze(0), pairs)[0].detach().exp()
            others = [token for token in range(V) if token not in ids]
            table[row, place, ids] = belief[:-1]
            table[row, place, others] = belief[-1] * sides[1][others] / sides[1][others].sum()
    return table


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_it_defers_where_its_belief_expects_more_of_p_than_alpha_tv(folder: Path, sampling: Sampling) -> None:
    """Σ P̂·(p − q) > α·½Σ|p − q|, on the whole table of P̂; at temperature 0 that is P̂(argmax p) − P̂(argmax q)."""
    block, router = build_block(sampling, seed=3), TokenRouter.from_pretrained(folder)
    q, p = block.draft_probs, block.verifier_probs
    belief = plain_belief(router.bundle.head(), block)
    gain, tv = (belief * (p - q)).sum(dim=-1), (p - q).abs().sum(dim=-1) / 2
    if sampling.is_greedy:
        at_p, at_q = (belief.gather(-1, side.argmax(dim=-1, keepdim=True)).squeeze(-1) for side in (p, q))
        torch.testing.assert_close(gain, at_p - at_q)
    plugged = ((block.verifier_confidence * (p - q)).sum(dim=-1) > 0.1 * tv) & (tv > 1e-3)
    decided = []
    for alpha in (-0.4, 0.0, 0.1, 0.5):
        routed, margin = router.with_alpha(alpha), gain - alpha * tv
        clear = margin.abs() > 1e-5
        found = routed.defer_mask(block)
        assert torch.equal(found[clear], (margin > 0)[clear])
        expected = torch.where(found.unsqueeze(-1), p, q)
        assert torch.equal(routed.target(block), expected)
        decided.append(found)
    assert decided[1].any() and not decided[3].all()
    assert not torch.equal(decided[2], plugged), "a belief that decides as p° does shows nothing"
    torch.testing.assert_close(router.believe(block).stats.expected_gain, gain, atol=1e-5, rtol=0)


def test_the_loss_of_the_argmax_is_the_gain_that_verifier_gap_reads(folder: Path) -> None:
    """P̂'s own argmax is not p's: what p would say is what counts."""
    block, router = build_block(Sampling(0.0), seed=3), TokenRouter.from_pretrained(folder)
    believed = router.believe(block)
    assert (believed.verifier_raw.argmax != block.verifier.argmax).any()
    torch.testing.assert_close(believed.stats.argmax_gain, believed.stats.expected_gain)
    for alpha in (0.0, 0.2):
        masks = [router.with_rule(rule, alpha).defer_mask(block) for rule in ("verifier_gap", "expected_gain")]
        assert torch.equal(*masks)


def test_a_budget_belongs_to_the_rule_that_was_calibrated(folder: Path) -> None:
    router = TokenRouter.from_pretrained(folder)
    chosen = router.with_budget(rejection=0.1)
    assert chosen.alpha == 1.0 and chosen.rule == "expected_gain" and chosen.inner.alpha == 1.0
    assert router.with_budget(deferral=0.5, greedy=True).alpha == 0.2
    with pytest.raises(ValueError, match="with_budget: this router is calibrated for 'expected_gain', got rule 'opt'"):
        router.with_rule("opt", 0.2).with_budget(rejection=0.1)
    with pytest.raises(ValueError, match="alpha: expected one for rule 'opt', the bundle's own is for 'expected_gain'"):
        TokenRouter.from_pretrained(folder, "opt")


def test_the_alpha_of_another_rule_does_not_become_the_bundles(router: TokenRouter, tmp_path: Path) -> None:
    router.with_rule("learned_lossy", 1.7).save_pretrained(tmp_path)
    again = TokenRouter.from_pretrained(tmp_path)
    assert again.alpha == 0.15 and again.rule == "expected_gain"


def test_the_card_tells_of_budgets(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    assert "TokenRouter.from_pretrained" in card and "with_budget(rejection=0.10" in card


def test_each_kind_of_bundle_names_its_class(folder: Path, exported: Path) -> None:
    with pytest.raises(ValueError, match="got kind 'pooled': use TokenRouter"):
        LearnedRouter.from_pretrained(folder)
    with pytest.raises(ValueError, match="expected a head of kind 'pooled', got 'mlp': use LearnedRouter"):
        TokenRouter.from_pretrained(exported)


@pytest.mark.parametrize("rule", ["lossy", "chow", "specdecode", "ensemble", "typical"])
def test_rules_that_would_ignore_it_are_refused(router: TokenRouter, rule: str) -> None:
    with pytest.raises(ValueError, match="rule: expected one of greedyward"):
        router.with_rule(rule, 0.1)


def test_the_rule_checks_its_dial(router: TokenRouter) -> None:
    with pytest.raises(ValueError, match="alpha: expected a number in"):
        router.with_alpha(-0.2)
    assert repr(router) == "TokenRouter(tiny/drafter → tiny/verifier, rule='greedyward', alpha=0.15)"
