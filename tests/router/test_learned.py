import dataclasses
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speccascade import LearnedRouter, SpeculativeCascade, rules
from speccascade.cascade import Stats, VerifyBlock, emission_law
from speccascade.cascade.verify import rejection_probability
from speccascade.router.bundle import Bundle, save_bundle
from speccascade.router.config import RouterConfig
from speccascade.router.features import build_features
from speccascade.router.heads import RouterHead

ALPHAS = [-1.0, 0.0, 0.1, 0.4, 2.0]


@pytest.fixture(scope="module", params=["onnx", "torch"])
def router(request: pytest.FixtureRequest, exported: Path) -> LearnedRouter:
    return LearnedRouter.from_pretrained(exported, backend=request.param)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_emitted_law_is_the_target(
    router: LearnedRouter, make_block: Callable[..., VerifyBlock], temperature: float, alpha: float
) -> None:
    block, rule = make_block(batch=8, temperature=temperature), router.with_alpha(alpha)
    target, defer = rule.target(block), rule.defer_mask(block)
    torch.testing.assert_close(emission_law(target, block.draft_probs), target, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        rejection_probability(target, block.draft_probs), defer * block.stats.tv, rtol=0, atol=1e-6
    )
    assert torch.equal(target[defer], block.verifier_probs[defer])
    assert torch.equal(target[~defer], block.draft_probs[~defer])


def test_the_target_does_not_depend_on_the_drafted_tokens(
    router: LearnedRouter, make_block: Callable[..., VerifyBlock]
) -> None:
    block = make_block()
    other = dataclasses.replace(block, tokens=block.tokens.flip(0) + 1)
    assert torch.equal(router.target(block), router.target(other))


def test_limits_of_alpha(router: LearnedRouter, make_stats: Callable[..., Stats]) -> None:
    stats = make_stats(batch=50)
    assert (stats.tv > 0).all()
    assert not router.with_alpha(1e9).defer(stats).any()
    assert router.with_alpha(-1e9).defer(stats).all()
    free = router.with_alpha(0.0).defer(stats)
    assert torch.equal(free, router.gap(stats) > 0)
    assert free.any() and not free.all()


def test_a_larger_alpha_never_defers_more(router: LearnedRouter, make_stats: Callable[..., Stats]) -> None:
    stats = make_stats(batch=50)
    masks = [router.with_alpha(alpha).defer(stats) for alpha in (0.0, 0.1, 0.2, 0.5, 1.0)]
    assert all((more | ~less).all() for more, less in pairwise(masks))
    assert masks[0].sum() > masks[-1].sum()


def test_equal_distributions_are_never_rejected(router: LearnedRouter) -> None:
    probs = torch.randn(2, 3, 10).softmax(dim=-1)
    for alpha in ALPHAS:
        rule = router.with_alpha(alpha)
        block = VerifyBlock.from_probs(probs, probs)
        assert torch.equal(rule.target(block), probs)
        assert (rejection_probability(rule.target(block), probs) == 0).all()
        zero_one = dataclasses.replace(rule, loss="zero_one")
        assert not zero_one.defer(block.stats).any(), "a gap of zero is not above zero"


@pytest.mark.parametrize("alpha", ALPHAS)
def test_edges_of_the_simplex_decide_without_nan(router: LearnedRouter, alpha: float) -> None:
    one_hot, uniform = torch.eye(6), torch.full((6,), 1 / 6)
    draft = torch.stack([one_hot[0], one_hot[0], uniform, uniform, one_hot[2]])[None]
    verifier = torch.stack([one_hot[0], one_hot[1], uniform, one_hot[3], uniform])[None]
    block, rule = VerifyBlock.from_probs(draft, verifier), router.with_alpha(alpha)
    assert torch.isfinite(rule.gap(block.stats)).all()
    torch.testing.assert_close(rule.target(block).sum(dim=-1), torch.ones(1, 5))


def test_auto_takes_the_loss_of_each_position(router: LearnedRouter, make_block: Callable[..., VerifyBlock]) -> None:
    cold, warm = make_block(temperature=0.0), make_block(temperature=1.0)
    zero_one, sampled = (dataclasses.replace(router, loss=loss) for loss in ("zero_one", "sampled"))
    assert torch.equal(router.gap(cold.stats), zero_one.gap(cold.stats))
    assert torch.equal(router.gap(warm.stats), sampled.gap(warm.stats))
    assert not torch.equal(zero_one.gap(warm.stats), sampled.gap(warm.stats))
    mixed = VerifyBlock.from_probs(
        *(torch.cat([getattr(cold, name), getattr(warm, name)]) for name in ("draft_probs", "verifier_probs")),
        *(torch.cat([getattr(cold, name)] * 2) for name in ("draft_confidence", "verifier_confidence")),
    )
    expected = torch.cat([zero_one.gap(cold.stats), sampled.gap(warm.stats)])
    torch.testing.assert_close(router.gap(mixed.stats), expected, rtol=0, atol=1e-6)


def test_greedy_statistics_of_a_trace_decide_as_at_temperature_zero(
    router: LearnedRouter, make_block: Callable[..., VerifyBlock]
) -> None:
    live, logged = make_block(temperature=0.0).stats, make_block(temperature=1.0).stats.greedy()
    assert torch.equal(router.defer(live), router.defer(logged))


@pytest.mark.parametrize("shape", [(), (1,), (6,), (1000,), (2, 3), (0,)])
def test_statistics_of_any_shape(router: LearnedRouter, make_stats: Callable[..., Stats], shape: tuple) -> None:
    flat = make_stats(batch=1000, length=1)
    size = int(torch.Size(shape).numel())
    stats = Stats.from_columns({name: value.flatten()[:size].reshape(shape) for name, value in flat.columns().items()})
    gap, defer = router.gap(stats), router.defer(stats)
    assert gap.shape == defer.shape == shape and defer.dtype == torch.bool
    torch.testing.assert_close(gap.flatten(), router.gap(flat).flatten()[:size], rtol=0, atol=1e-6)


def test_the_engine_runs_it_like_any_rule(router: LearnedRouter, tiny_llama: Callable[..., object]) -> None:
    drafter, verifier = tiny_llama(seed=0, layers=1), tiny_llama(seed=1)
    prompt, settings = torch.tensor([[1, 5, 9]]), {"max_new_tokens": 12, "seed": 0, "ledger": True}

    def generate(rule: object, **options: object) -> object:
        return SpeculativeCascade(drafter, verifier, rule=rule, gamma=3).generate(prompt, **settings, **options)

    for temperature in (0.0, 1.0):
        lossless = generate(rules.SpecDecode(), temperature=temperature)
        always = generate(router.with_alpha(-1e9), temperature=temperature)
        assert torch.equal(always.sequences, lossless.sequences)
        never = generate(router.with_alpha(1e9), temperature=temperature)
        assert never.stats.rejected == 0 and never.stats.deferred == 0


def test_both_backends_decide_alike(exported: Path, make_stats: Callable[..., Stats]) -> None:
    stats = make_stats(batch=500)
    onnx, torch_backend = (LearnedRouter.from_pretrained(exported, backend=name) for name in ("onnx", "torch"))
    assert (onnx.gap(stats) - torch_backend.gap(stats)).abs().amax() <= 1e-5
    apart = (onnx.gap(stats) - onnx.alpha * stats.tv).abs() > 1e-5
    assert apart.float().mean() > 0.99
    assert torch.equal(onnx.defer(stats)[apart], torch_backend.defer(stats)[apart])


def test_a_saved_router_decides_as_before(
    router: LearnedRouter, make_stats: Callable[..., Stats], tmp_path: Path
) -> None:
    stats = make_stats(batch=200)
    backend = "torch" if "Torch" in repr(router.head.runtime) else "onnx"
    router.with_alpha(0.15).save_pretrained(tmp_path / "again")
    again = LearnedRouter.from_pretrained(tmp_path / "again", backend=backend)
    assert again.alpha == 0.15
    assert torch.equal(again.gap(stats), router.gap(stats))
    assert torch.equal(again.defer(stats), router.with_alpha(0.15).defer(stats))


def test_a_router_is_uploaded_as_it_is_saved(
    router: LearnedRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = {}

    class Api:
        def __init__(self, token: str | None) -> None:
            pass

        def create_repo(self, repo_id: str, **options: object) -> object:
            return type("Url", (str,), {"repo_id": repo_id})(f"https://hub/{repo_id}")

        def upload_folder(self, repo_id: str, folder_path: str, **options: object) -> None:
            uploads[repo_id] = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert router.push_to_hub("someone/router") == "https://hub/someone/router"
    router.save_pretrained(tmp_path)
    assert uploads["someone/router"] == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_the_default_alpha_is_the_bundles(exported: Path) -> None:
    assert LearnedRouter.from_pretrained(exported).alpha == 0.3
    assert LearnedRouter.from_pretrained(exported, alpha=0.0).alpha == 0.0
    assert LearnedRouter.from_pretrained(str(exported), alpha=-2.0).alpha == -2.0


@pytest.mark.parametrize(
    ("budget", "alpha"),
    [
        ({"rejection": 0.2}, 0.2),
        ({"rejection": 1.0}, 0.2),
        ({"rejection": 0.10}, 1.0),
        ({"rejection": 0.08}, 1.0),
        ({"rejection": 0.05}, 1.0),
        ({"deferral": 0.25}, 1.0),
        ({"deferral": 0.5, "greedy": True}, 0.2),
    ],
)
def test_a_budget_finds_the_best_row_within_it(router: LearnedRouter, budget: dict, alpha: float) -> None:
    assert router.with_budget(**budget).alpha == alpha


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"rejection": 0.01}, r"rejection: expected a budget within reach of the calibration, 0\.05 to 0\.3"),
        ({"rejection": 0.01, "greedy": True}, r"the calibration, 0\.05 to 0\.15; got 0\.01"),
        ({"deferral": 1.5}, r"deferral: expected a number in \[0, 1\], got 1\.5"),
        ({}, "expected one of rejection, deferral, latency, quality_drop, got none"),
        ({"rejection": 0.1, "deferral": 0.1}, "expected one of rejection, .*, got rejection and deferral"),
    ],
)
def test_a_budget_out_of_reach_is_refused(router: LearnedRouter, budget: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router.with_budget(**budget)


def test_a_router_without_calibration_has_no_budget(router: LearnedRouter) -> None:
    bare = Bundle(dataclasses.replace(router.config, calibration={}), router.bundle.files)
    with pytest.raises(ValueError, match="holds no 'sampled' calibration; set alpha instead"):
        dataclasses.replace(router, bundle=bare).with_budget(rejection=0.1)


def test_its_own_pair_is_welcome_under_any_name(router: LearnedRouter) -> None:
    router.check_pair(vocabulary_fingerprint="f" * 64)
    router.check_pair(vocabulary_fingerprint="f" * 64, drafter="./copy", drafter_digest="a" * 64)


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"vocabulary_fingerprint": "e" * 64}, "vocabulary differ"),
        ({"vocabulary_fingerprint": ""}, "vocabulary differ"),
        ({"vocabulary_fingerprint": "f" * 64, "drafter_digest": "c" * 64}, "drafter weights differ"),
        ({"vocabulary_fingerprint": "f" * 64, "verifier_digest": "c" * 64}, "verifier weights differ"),
    ],
)
def test_a_foreign_pair_is_refused_by_name(router: LearnedRouter, facts: dict, what: str) -> None:
    with pytest.raises(ValueError, match=what) as refusal:
        router.check_pair(drafter="gpt2", verifier="gpt2-xl", **facts)
    for name in ("tiny/drafter", "tiny/verifier", "gpt2", "gpt2-xl"):
        assert name in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": float("nan")}, "alpha: expected a number"),
        ({"loss": "zero-one"}, "loss: expected one of auto, zero_one, sampled, log, got 'zero-one'; did you mean"),
        ({"backend": "onyx"}, "backend: .*did you mean 'onnx'"),
    ],
)
def test_bad_arguments_are_refused(exported: Path, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnedRouter.from_pretrained(exported, **arguments)


def test_the_head_is_asked_once_for_each_record(router: LearnedRouter, make_block: Callable[..., VerifyBlock]) -> None:
    calls = []

    def counted(features: Tensor) -> Tensor:
        calls.append(features.shape)
        return runtime(features)

    memory = type(router.head)(counted, "verified")
    runtime, counting = router.head.runtime, dataclasses.replace(router, head=memory)
    block, other = make_block(seed=5), make_block(seed=6)
    expected = [router.with_alpha(alpha).defer(block.stats) for alpha in ALPHAS]
    for alpha, mask in zip(ALPHAS, expected, strict=True):
        rule = counting.with_alpha(alpha)
        rule.target(block)
        assert torch.equal(rule.defer_mask(block), mask)
    assert calls == [(12, 16)]
    assert torch.equal(counting.gap(other.stats), router.gap(other.stats)) and len(calls) == 2
    del block, other, rule
    assert len(memory._gaps) == 0, "answers must not outlive the records that they are about"


def test_it_tells_who_it_is(router: LearnedRouter) -> None:
    text = repr(router.with_alpha(0.25))
    assert text == "LearnedRouter(tiny/drafter → tiny/verifier, mlp two_confidence, alpha=0.25, loss='auto')"
    assert router.name == "router-mlp-two_confidence"


@pytest.fixture(scope="module", params=["onnx", "torch"])
def make_router(
    request: pytest.FixtureRequest,
    weighted_head: Callable[..., RouterHead],
    config: RouterConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., LearnedRouter]:
    """`make_router(kind, estimator, feature_set, losses, **options of from_pretrained)`."""
    folder = tmp_path_factory.mktemp("routers")

    def make(kind: str, estimator: str, feature_set: str, losses: tuple[str, ...], **options: Any) -> LearnedRouter:
        directory = folder / "-".join((kind, estimator, feature_set, *losses))
        if not directory.exists():
            save_bundle(directory, weighted_head(kind, estimator, feature_set, losses=losses), config)
        return LearnedRouter.from_pretrained(directory, backend=request.param, **options)

    return make


def test_a_router_that_is_told_alpha_decides_by_its_margin(
    make_router: Callable[..., LearnedRouter],
    weighted_head: Callable[..., RouterHead],
    make_block: Callable[..., VerifyBlock],
) -> None:
    """At several α in turn and back again, so that no answer of another α is remembered."""
    router = make_router("mlp", "cost_sensitive", "verified", ("zero_one", "sampled"))
    head = weighted_head("mlp", "cost_sensitive", "verified")
    masks = []
    for temperature, column in ((0.0, 0), (1.0, 1)):
        block = make_block(batch=30, temperature=temperature)
        features = build_features(block.stats, "verified")
        for alpha in (0.1, 3.0, 0.1, -0.5):
            margin = head(features, torch.full(features.shape[:-1], alpha))[..., column]
            decision = router.with_alpha(alpha).defer(block.stats)
            clear = margin.abs() > 1e-4
            assert clear.float().mean() > 0.9
            assert torch.equal(decision[clear], (margin > 0)[clear])
            masks.append(decision)
    assert torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])
    with pytest.raises(ValueError, match="gap: expected a router that estimates one, got estimator 'cost_sensitive'"):
        router.gap(block.stats)


def test_alpha_is_asked_once_for_a_record(
    make_router: Callable[..., LearnedRouter], make_block: Callable[..., VerifyBlock]
) -> None:
    router, block, asked = make_router("mlp", "cost_sensitive", "verified", ("zero_one", "sampled")), make_block(), []

    def counted(features: Tensor, alpha: Tensor) -> Tensor:
        asked.append(float(alpha[0]))
        return router.head.runtime(features, alpha)

    counting = dataclasses.replace(router, head=type(router.head)(counted, "verified"))
    for alpha in (0.5, 0.5, 2.0):
        counting.with_alpha(alpha).target(block)
        counting.with_alpha(alpha).defer_mask(block)
    assert asked == [0.5, 2.0]


@pytest.mark.parametrize("estimator", ["gap", "cost_sensitive"])
def test_what_is_surely_kept_is_never_deferred(
    estimator: str, make_router: Callable[..., LearnedRouter], make_block: Callable[..., VerifyBlock]
) -> None:
    router = make_router("linear", estimator, "draft_only", ("zero_one", "sampled"))
    for alpha in (0.0, 0.4):
        for temperature in (0.0, 1.0):
            stats = make_block(batch=40, temperature=temperature).stats
            rule = router.with_alpha(alpha)
            assert rule.surely_kept(stats).any()
            assert not (rule.surely_kept(stats) & rule.defer(stats)).any()


def test_the_only_loss_is_the_one_in_force(
    make_router: Callable[..., LearnedRouter], make_stats: Callable[..., Stats]
) -> None:
    router = make_router("trees", "gap", "verified", ("log",))
    stats = make_stats()
    assert torch.equal(router.gap(stats), router.head(stats)[..., 0])
    assert torch.equal(router.gap(stats), dataclasses.replace(router, loss="log").gap(stats))
    with pytest.raises(ValueError, match="loss: expected one that this router learned, log; got 'sampled'"):
        dataclasses.replace(router, loss="sampled")


def test_auto_needs_both_of_its_losses(make_router: Callable[..., LearnedRouter]) -> None:
    losses = ("sampled", "log")
    with pytest.raises(ValueError, match="loss: 'auto' needs zero_one and sampled, this router learned sampled, log"):
        make_router("linear", "gap", "verified", losses)
    assert make_router("linear", "gap", "verified", losses, loss="log").loss == "log"


def test_columns_are_found_by_name(
    make_router: Callable[..., LearnedRouter], make_block: Callable[..., VerifyBlock]
) -> None:
    router = make_router("linear", "gap", "verified", ("log", "sampled", "zero_one"))
    for temperature, column in ((0.0, 2), (1.0, 1)):
        stats = make_block(temperature=temperature).stats
        assert torch.equal(router.gap(stats), router.head(stats)[..., column])
    assert torch.equal(dataclasses.replace(router, loss="log").gap(stats), router.head(stats)[..., 0])
