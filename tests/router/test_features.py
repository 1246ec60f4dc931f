import dataclasses
from collections.abc import Callable

import pytest
import torch

from speccascade.cascade import STAT_FIELDS, Stats
from speccascade.router import features
from speccascade.router.features import FEATURE_SETS, build_features, feature_index, schema_digest

VOCAB = 1000


def edge_pairs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    corner, other = torch.eye(VOCAB)[0], torch.eye(VOCAB)[1]
    uniform = torch.full((VOCAB,), 1 / VOCAB)
    halves = torch.zeros(2, VOCAB)
    halves[0, : VOCAB // 2] = halves[1, VOCAB // 2 :] = 2 / VOCAB
    return {
        "one-hot, agreeing": (corner, corner),
        "one-hot, disjoint": (corner, other),
        "uniform": (uniform, uniform),
        "one-hot against uniform": (corner, uniform),
        "disjoint halves": (halves[0], halves[1]),
        "almost one-hot": (torch.lerp(corner, uniform, 1e-7), torch.lerp(other, uniform, 1e-7)),
    }


@pytest.mark.parametrize("feature_set", FEATURE_SETS)
@pytest.mark.parametrize("case", edge_pairs())
def test_edges_of_the_simplex_give_finite_features(feature_set: str, case: str) -> None:
    draft, verifier = edge_pairs()[case]
    values = build_features(Stats(draft, verifier, draft, verifier), feature_set)
    assert values.dtype == torch.float32
    assert values.shape == (len(FEATURE_SETS[feature_set]),)
    assert torch.isfinite(values).all(), f"{case}: {dict(zip(FEATURE_SETS[feature_set], values.tolist(), strict=True))}"


def test_infinite_divergence_is_clamped_and_missing_stays_missing(make_stats: Callable[..., Stats]) -> None:
    columns = make_stats().columns()
    infinite = Stats.from_columns(columns | {"kl": torch.full_like(columns["kl"], torch.inf)})
    assert torch.isfinite(build_features(infinite, "verified")).all()
    missing = Stats.from_columns(columns | {"kl": torch.full_like(columns["kl"], torch.nan)})
    nan = build_features(missing, "verified").isnan()
    assert nan[..., feature_index("verified", "log1p(kl)")].all()
    assert nan.sum() == nan[..., 0].numel()


@pytest.mark.parametrize("feature_set", FEATURE_SETS)
def test_live_and_logged_statistics_give_the_same_features(feature_set: str, make_stats: Callable[..., Stats]) -> None:
    live = make_stats(temperature=0.7)
    logged = Stats.from_columns({name: column.clone() for name, column in live.columns().items()})
    assert torch.equal(build_features(live, feature_set), build_features(logged, feature_set))


@pytest.mark.parametrize("feature_set", FEATURE_SETS)
def test_features_do_not_change_with_the_temperature(feature_set: str, make_stats: Callable[..., Stats]) -> None:
    warm, cold = make_stats(temperature=1.0), make_stats(temperature=0.0)
    assert torch.equal(build_features(warm, feature_set), build_features(cold, feature_set))
    assert torch.equal(build_features(warm, feature_set), build_features(warm.greedy(), feature_set))


def test_every_feature_names_a_statistic_and_is_what_its_name_says(make_stats: Callable[..., Stats]) -> None:
    stats = make_stats()
    meaning = {"identity": lambda x: x, "logit": torch.logit, "log1p": torch.log1p}
    for feature_set, names in FEATURE_SETS.items():
        values = build_features(stats, feature_set)
        for position, name in enumerate(names):
            transform, _, rest = name.rpartition("(")
            column = rest.rstrip(")")
            assert column in STAT_FIELDS
            assert not column.endswith("processed") and column != "tv", "features must hold at every temperature"
            expected = meaning[transform or "identity"](getattr(stats, column))
            inside = expected.abs() < 13
            torch.testing.assert_close(values[..., position][inside], expected[inside], rtol=1e-5, atol=1e-5)


def test_draft_only_reads_the_drafter_alone(make_stats: Callable[..., Stats]) -> None:
    known = {"draft_max", "draft_margin", "draft_entropy"}
    columns = {
        name: column if name in known else torch.full_like(column, torch.nan)
        for name, column in make_stats().columns().items()
    }
    assert torch.isfinite(build_features(Stats.from_columns(columns), "draft_only")).all()


def test_the_digest_follows_names_order_transforms_clamps_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    names = FEATURE_SETS["draft_only"]
    seen = {schema_digest("draft_only"), schema_digest("verified")}
    for changed in (names[:-1], names[::-1], ("logit(draft_max)", *names[1:]), (*names, "kl")):
        monkeypatch.setitem(FEATURE_SETS, "draft_only", changed)
        seen.add(schema_digest("draft_only"))
    monkeypatch.setitem(FEATURE_SETS, "draft_only", names)
    for constant in ("SCHEMA_VERSION", "PROBABILITY_FLOOR", "NATS_CEILING"):
        with monkeypatch.context() as patch:
            patch.setattr(features, constant, getattr(features, constant) * 2)
            seen.add(schema_digest("draft_only"))
    assert len(seen) == 9


def test_an_unknown_set_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"feature_set: .*verified.*got 'verifed'; did you mean 'verified'\?"):
        schema_digest("verifed")


def test_a_feature_of_the_drafted_token_cannot_be_named() -> None:
    assert {field.name for field in dataclasses.fields(features._Feature)} == {"column", "transform"}
    assert not any("token" in name for name in STAT_FIELDS)
