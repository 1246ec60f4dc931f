"""Each scalar equals its definition, live and read back."""

import pytest
import torch

from speccascade.cascade.distributions import Sampling, logits_to_probs
from speccascade.cascade.forms import Certain, Distribution, FromLogits, Whole
from speccascade.cascade.leading import Leading, find_leading
from speccascade.cascade.statistics import STAT_FIELDS, Stats

N, V = 40, 23


def distributions(sampling: Sampling) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    draft, verifier = (torch.randn(N, V, generator=generator) * 2 for _ in range(2))
    return (
        logits_to_probs(draft, sampling),
        logits_to_probs(verifier, sampling),
        logits_to_probs(draft),
        logits_to_probs(verifier),
    )


def by_definition(q: list[float], p: list[float], q0: list[float], p0: list[float]) -> dict[str, float]:
    import math

    def entropy(x: list[float]) -> float:
        return -sum(v * math.log(v) for v in x if v > 0)

    def margin(x: list[float]) -> float:
        first, second = sorted(x, reverse=True)[:2]
        return first - second

    def tv(x: list[float], y: list[float]) -> float:
        return 0.5 * sum(abs(a - b) for a, b in zip(x, y, strict=True))

    return {
        "draft_max": max(q0),
        "verifier_max": max(p0),
        "draft_margin": margin(q0),
        "verifier_margin": margin(p0),
        "draft_entropy": entropy(q0),
        "verifier_entropy": entropy(p0),
        "verifier_at_draft": p0[q0.index(max(q0))],
        "draft_at_verifier": q0[p0.index(max(p0))],
        "argmax_agree": float(q0.index(max(q0)) == p0.index(max(p0))),
        "tv_raw": tv(p0, q0),
        "kl": sum(b * math.log(b / a) for a, b in zip(q0, p0, strict=True)),
        "tv": tv(p, q),
        "draft_max_processed": max(q),
        "verifier_max_processed": max(p),
        "draft_entropy_processed": entropy(q),
        "verifier_entropy_processed": entropy(p),
        "verifier_at_draft_processed": p[q.index(max(q))],
    }


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5), Sampling(0.8, top_k=6), Sampling(1.2, top_p=0.7)])
def test_every_field_equals_its_definition(sampling: Sampling) -> None:
    parts = distributions(sampling)
    columns = Stats(*parts).columns()
    assert tuple(columns) == STAT_FIELDS
    for row in range(N):
        expected = by_definition(*(part[row].tolist() for part in parts))
        got = {name: float(column[row]) for name, column in columns.items()}
        assert got == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.0), Sampling(0.5), Sampling(1.2, top_p=0.7), Sampling(suppress_tokens=(0, 7))]
)
def test_gains_equal_their_definitions_and_stay_with_their_positions(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(5)
    draft, verifier = (torch.randn(N, V, generator=generator) * 2 for _ in range(2))
    banned = torch.tensor(sampling.suppress_tokens, dtype=torch.long)
    q, p = (logits_to_probs(logits.index_fill(-1, banned, -torch.inf), sampling) for logits in (draft, verifier))
    stats = Stats(q, p, logits_to_probs(draft), logits_to_probs(verifier))
    for row in range(N):
        belief, q_row, p_row = logits_to_probs(verifier)[row].tolist(), q[row].tolist(), p[row].tolist()
        sampled = sum(chance * (b - a) for chance, a, b in zip(belief, q_row, p_row, strict=True))
        best = belief[p_row.index(max(p_row))] - belief[q_row.index(max(q_row))]
        assert float(stats.expected_gain[row]) == pytest.approx(sampled, abs=1e-6)
        assert float(stats.argmax_gain[row]) == pytest.approx(best, abs=1e-6)
    part, laid = stats.select(slice(3, 9)), stats.arrange(torch.tensor([[4, -1]]))
    for name in ("expected_gain", "argmax_gain"):
        whole = getattr(stats, name)
        assert torch.equal(getattr(part, name), whole[3:9])
        assert torch.equal(getattr(laid, name)[0, :1], whole[4:5]) and bool(getattr(laid, name)[0, 1].isnan())
        assert torch.equal(getattr(stats.greedy(), name), stats.argmax_gain)
    if sampling.is_greedy:
        torch.testing.assert_close(stats.expected_gain, stats.argmax_gain)


def test_the_gain_of_the_argmax_follows_from_the_scalars_alone() -> None:
    stats = Stats(*distributions(Sampling(0.5)))
    torch.testing.assert_close(Stats.from_columns(stats.columns()).argmax_gain, stats.argmax_gain)


def test_greedy_equals_the_statistics_of_the_one_hot_limit() -> None:
    plain = Stats(*distributions(Sampling()))
    one_hot = Stats(*distributions(Sampling(temperature=0)))
    for name, column in plain.greedy().columns().items():
        torch.testing.assert_close(column, getattr(one_hot, name), msg=name)


def test_columns_round_trip_and_select() -> None:
    stats = Stats(*distributions(Sampling()))
    again = Stats.from_columns(stats.columns())
    assert all(torch.equal(getattr(again, name), getattr(stats, name)) for name in STAT_FIELDS)
    assert torch.equal(again.select(slice(3, 9)).tv, stats.tv[3:9])


def test_missing_and_unknown_columns_are_named() -> None:
    columns = Stats(*distributions(Sampling())).columns()
    columns["tvv"] = columns.pop("tv")
    with pytest.raises(ValueError, match=r"missing \['tv'\], unknown \['tvv'\]"):
        Stats.from_columns(columns)


def test_stats_are_frozen_and_lazy() -> None:
    stats = Stats(*distributions(Sampling()))
    assert "nothing yet" in repr(stats)
    assert stats.tv is stats.tv
    assert "tv" in repr(stats)
    with pytest.raises(AttributeError, match="frozen"):
        stats.tv = torch.zeros(N)  # type: ignore[misc]


def test_extremes_stay_finite() -> None:
    one_hot = torch.eye(V)[:1]
    other = torch.eye(V)[1:2]
    uniform = torch.full((1, V), 1 / V)
    for q in (one_hot, uniform):
        for p in (one_hot, other, uniform):
            for name, column in Stats(q, p, q, p).columns().items():
                assert column.isfinite().all(), name
    assert Stats(one_hot, other, one_hot, other).tv == 1


def plain_leading(q: torch.Tensor, p: torch.Tensor, count: int) -> Leading:
    """By sorting the whole of one position, the most probable first, among equals the lower id."""

    def side(own: list[float], other: list[float]) -> list[list[float]]:
        order = sorted(range(len(own)), key=lambda token: (-own[token], token))[:count]
        pad = [0.0] * (count - len(order))
        return [[own[token] for token in order] + pad, [other[token] for token in order] + pad]

    return Leading(*(torch.tensor(values) for values in (*side(q.tolist(), p.tolist()), *side(p.tolist(), q.tolist()))))


@pytest.mark.parametrize("vocab", [5, 23, 3000])
@pytest.mark.parametrize("with_equals", [False, True])
def test_leading_tokens_equal_a_plain_sort_in_every_form(vocab: int, with_equals: bool) -> None:
    generator = torch.Generator().manual_seed(vocab)
    draft, verifier = (torch.randn(3, 4, vocab, generator=generator) * 2 for _ in range(2))
    if with_equals:  # a few at many places
        step = 0.05 if vocab > 1000 else 1.0
        draft, verifier = ((logits / step).round() * step for logits in (draft, verifier))
        assert bool((draft.topk(min(8, vocab)).values.diff(dim=-1) == 0).any())
    q, p = logits_to_probs(draft), logits_to_probs(verifier)
    token = verifier.argmax(dim=-1)
    pairs: list[tuple[Distribution, Distribution, torch.Tensor]] = [
        (Whole(q), Whole(p), p),
        (FromLogits(draft), FromLogits(verifier), p),
        (FromLogits(draft), Certain(token, vocab), Certain(token, vocab).dense),
    ]
    for draft_side, verifier_side, dense in pairs:
        found = find_leading(draft_side, verifier_side, 8)
        for row in range(3):
            for place in range(4):
                expected = plain_leading(q[row, place], dense[row, place], 8)
                for name, values in found._asdict().items():
                    torch.testing.assert_close(values[row, place], getattr(expected, name), msg=name)


def test_leading_tokens_and_hidden_states_are_remembered_and_stay_with_their_positions() -> None:
    parts = distributions(Sampling(0.5))
    hidden = torch.randn(N, 3), torch.randn(N, 4)
    stats = Stats(*parts, hidden=hidden)
    leading = stats.leading(4)
    assert stats.leading(4) is leading
    torch.testing.assert_close(leading.draft_top[:, 0], stats.draft_max, msg="raw confidences, whatever is sampled")
    torch.testing.assert_close(leading.draft_at_verifier_top[:, 0], stats.draft_at_verifier)
    part = stats.greedy().select(slice(3, 9))
    assert all(torch.equal(a, b[3:9]) for a, b in zip(part.leading(4), leading, strict=True))
    assert all(torch.equal(a, b[3:9]) for a, b in zip(part.hidden, hidden, strict=True))


def test_what_was_not_given_is_named() -> None:
    stats = Stats(*distributions(Sampling()))
    read_back = Stats.from_columns(stats.columns())
    for missing in (read_back, read_back.select(slice(3)), read_back.greedy()):
        with pytest.raises(ValueError, match="leading: expected positions with both models' 4 most probable tokens"):
            missing.leading(4)
        with pytest.raises(ValueError, match="hidden: expected positions with the hidden states of both models"):
            _ = missing.hidden
    with pytest.raises(ValueError, match="count: expected an integer >= 1, got 0"):
        stats.leading(0)
