import dataclasses
from collections.abc import Callable

import pytest
import torch

from speccascade.cascade import STAT_FIELDS, Stats, VerifyBlock
from speccascade.router import features
from speccascade.router.features import (
    FEATURE_SETS,
    build_features,
    feature_index,
    feature_names,
    feature_width,
    needs_hidden,
    schema_digest,
)

VOCAB = 1000
HIDDEN_SIZES = (5, 7)


def sizes_of(feature_set: str) -> tuple[int, int] | None:
    return HIDDEN_SIZES if needs_hidden(feature_set) else None


def random_hidden(shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    draft, verifier = (torch.randn(*shape, size, generator=generator) for size in HIDDEN_SIZES)
    return draft, verifier


def with_hidden(block: VerifyBlock) -> Stats:
    sides = block.draft, block.verifier, block.draft_raw, block.verifier_raw
    return Stats(*sides, hidden=random_hidden(block.tokens.shape))


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
    values = build_features(Stats(draft, verifier, draft, verifier, random_hidden(torch.Size())), feature_set)
    names = feature_names(feature_set, sizes_of(feature_set))
    assert values.dtype == torch.float32
    assert values.shape == (len(names),) == (feature_width(feature_set, sizes_of(feature_set)),)
    assert torch.isfinite(values).all(), f"{case}: {dict(zip(names, values.tolist(), strict=True))}"


def test_infinite_divergence_is_clamped_and_missing_stays_missing(make_stats: Callable[..., Stats]) -> None:
    columns = make_stats().columns()
    infinite = Stats.from_columns(columns | {"kl": torch.full_like(columns["kl"], torch.inf)})
    assert torch.isfinite(build_features(infinite, "verified")).all()
    missing = Stats.from_columns(columns | {"kl": torch.full_like(columns["kl"], torch.nan)})
    nan = build_features(missing, "verified").isnan()
    assert nan[..., feature_index("verified", "log1p(kl)")].all()
    assert nan.sum() == nan[..., 0].numel()


@pytest.mark.parametrize("feature_set", FEATURE_SETS)
def test_live_and_logged_statistics_give_the_same_features(
    feature_set: str, make_block: Callable[..., VerifyBlock]
) -> None:
    live = with_hidden(make_block(temperature=0.7))
    columns = {name: column.clone() for name, column in live.columns().items()}
    logged = Stats.from_columns(columns, live.leading, live.hidden)
    assert torch.equal(build_features(live, feature_set), build_features(logged, feature_set))


@pytest.mark.parametrize("feature_set", FEATURE_SETS)
def test_features_do_not_change_with_the_temperature(feature_set: str, make_block: Callable[..., VerifyBlock]) -> None:
    warm, cold = with_hidden(make_block(temperature=1.0)), with_hidden(make_block(temperature=0.0))
    assert torch.equal(build_features(warm, feature_set), build_features(cold, feature_set))
    assert torch.equal(build_features(warm, feature_set), build_features(warm.greedy(), feature_set))


@pytest.mark.parametrize("feature_set", FEATURE_SETS)
def test_every_feature_is_what_its_name_says(feature_set: str, make_block: Callable[..., VerifyBlock]) -> None:
    stats = with_hidden(make_block())
    meaning = {"identity": lambda x: x, "logit": torch.logit, "log1p": torch.log1p}
    vectors = stats.leading(features.TOP_TOKENS)._asdict() | dict(
        zip(("draft_hidden", "verifier_hidden"), stats.hidden, strict=True)
    )
    values = build_features(stats, feature_set)
    for position, name in enumerate(feature_names(feature_set, sizes_of(feature_set))):
        transform, _, rest = name.rpartition("(")
        column, _, place = rest.rstrip(")").partition("[")
        assert not column.endswith("processed") and column != "tv", "features must hold at every temperature"
        if place:
            read = vectors[column][..., int(place.rstrip("]"))]
        else:
            assert column in STAT_FIELDS
            read = getattr(stats, column)
        expected = meaning[transform or "identity"](read)
        inside = expected.abs() < 13
        torch.testing.assert_close(values[..., position][inside], expected[inside], rtol=1e-5, atol=1e-5)


def test_the_sizes_of_hidden_states_are_asked_for_where_they_are_read() -> None:
    assert feature_names("verified+hidden", (2, 1)) == (
        *FEATURE_SETS["verified"], "draft_hidden[0]", "draft_hidden[1]", "verifier_hidden[0]",
    )  # fmt: skip
    assert feature_width("verified+topk") == 16 + 4 * features.TOP_TOKENS
    for given in (None, (), (4,), (4, 0), (4, 4, 4)):
        with pytest.raises(ValueError, match=r"hidden_sizes: expected 2 sizes >= 1 for 'verified\+hidden'"):
            feature_width("verified+hidden", given)
    with pytest.raises(ValueError, match=r"hidden_sizes: expected 0 sizes >= 1 for 'verified', got \[4, 4\]"):
        feature_width("verified", (4, 4))


def test_what_the_statistics_do_not_hold_is_named(make_stats: Callable[..., Stats]) -> None:
    scalars = Stats.from_columns(make_stats().columns())
    with pytest.raises(ValueError, match="leading: expected positions with both models' 8 most probable tokens"):
        build_features(scalars, "verified+topk")
    with pytest.raises(ValueError, match="hidden: expected positions with the hidden states of both models"):
        build_features(scalars, "verified+hidden")


def test_the_features_of_released_sets_keep_their_meaning() -> None:
    assert schema_digest("draft_only") == "a165c377a52b3b11a066e7321bdf6c97bb5a3436d3f3b87de1d4e636a72be0db"
    assert schema_digest("verified") == "c121aa3f07a9aa23693cc80d8a43cf9948b07b8f99d3ff2aeb9c6a4ba193299c"


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
