"""A bundle is loaded as what it says it is."""

from pathlib import Path

import pytest

from speccascade.router.bundle import save_bundle
from speccascade.router.config import RouterConfig
from speccascade.router.heads import HeadSpec, build_head
from speccascade.router.learned import LearnedRouter
from speccascade.router.loading import load_router
from speccascade.router.token_router import CALIBRATED_RULE, TokenRouter

SPECS = {
    "linear": HeadSpec("linear", "gap", "verified"),
    "pooled": HeadSpec("pooled", "pooled", "verified", (8,), ("log",), top_k=4),
}


@pytest.fixture(params=SPECS)
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    state = RouterConfig("small", "large", "f" * 64, "d" * 64, default_alpha=0.25)
    save_bundle(tmp_path, build_head(SPECS[request.param]), state)
    return request.param, tmp_path


def test_the_bundle_says_which_router_it_is(bundle: tuple[str, Path]) -> None:
    kind, folder = bundle
    router = load_router(folder)
    assert type(router) is (TokenRouter if kind == "pooled" else LearnedRouter)
    assert router.alpha == 0.25 and load_router(folder, 0.5).alpha == 0.5


def test_the_bundle_says_what_its_alpha_means(bundle: tuple[str, Path]) -> None:
    kind, folder = bundle
    assert ("with another rule" in load_router(folder).config.alpha_meaning) == (kind == "pooled")


def test_a_rule_is_for_beliefs_alone(bundle: tuple[str, Path]) -> None:
    kind, folder = bundle
    if kind == "pooled":
        router = load_router(folder, 0.1, "greedyward")
        assert isinstance(router, TokenRouter) and router.rule == "greedyward"
        assert load_router(folder).rule == CALIBRATED_RULE  # type: ignore[union-attr]
    else:
        with pytest.raises(ValueError, match="rule: expected none for a router that decides whole positions"):
            load_router(folder, 0.1, "greedyward")
