"""Each form of a distribution answers as the plain table does."""

import pytest
import torch

from speccascade.cascade import Sampling, logits_to_probs
from speccascade.cascade.closeness import distance, overlap
from speccascade.cascade.distribute import distribute, join
from speccascade.cascade.extremes import find_argmax, find_largest, plain_second_largest, second_largest
from speccascade.cascade.forms import Certain, Distribution, FromLogits, Whole, cross_entropy

B, T = 3, 4


def logits_of(vocab: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(B, T, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def forms(vocab: int, seed: int, dtype: torch.dtype) -> dict[str, Distribution]:
    logits = logits_of(vocab, seed, dtype)
    return {
        "whole": Whole(logits_to_probs(logits)),
        "whole with logits": Whole(logits_to_probs(logits), logits),
        "from logits": FromLogits(logits),
        "certain": Certain(logits.argmax(dim=-1), vocab),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [2, 7, 5000, 200_000])
def test_every_answer_equals_that_of_the_table(vocab: int, dtype: torch.dtype) -> None:
    tokens = torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(2))
    others = forms(vocab, 1, dtype)
    for name, form in forms(vocab, 0, dtype).items():
        table = form.dense
        close = {"atol": 2e-6, "rtol": 2e-6}
        ordered = table.sort(dim=-1, descending=True).values
        torch.testing.assert_close(form.maximum, ordered[..., 0], **close)
        torch.testing.assert_close(form.margin, ordered[..., 0] - ordered[..., 1], **close)
        torch.testing.assert_close(form.at(form.argmax), ordered[..., 0], **close)
        torch.testing.assert_close(form.entropy, torch.special.entr(table).sum(-1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(form.at(tokens), table.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), **close)
        torch.testing.assert_close(form.row(torch.tensor([3, 0, 2])), table[[0, 1, 2], [3, 0, 2]], **close)
        torch.testing.assert_close(form.first(2).dense, table[:, :2], **close)
        assert form.shape == (B, T)
        for other_name, other in others.items():
            plain = 0.5 * (table - other.dense).abs().sum(dim=-1)
            torch.testing.assert_close(distance(form, other), plain, atol=1e-5, rtol=0, msg=f"{name}, {other_name}")
            both = (table * other.dense).sum(dim=-1)
            torch.testing.assert_close(overlap(form, other), both, **close, msg=f"{name}, {other_name}")
            floor = torch.finfo(torch.float32).tiny
            surprise = -(table * other.dense.clamp_min(floor).log()).sum(dim=-1)
            torch.testing.assert_close(cross_entropy(form, other), surprise, atol=1e-4, rtol=1e-5)


def test_equals_choose_the_lowest_id_and_leave_no_margin() -> None:
    scores = torch.zeros(2, 3000)
    scores[0, [700, 2999]] = 1.0
    scores[1, 2999] = 1.0
    for argmax in (find_argmax(scores), scores.argmax(dim=-1)):
        assert argmax.tolist() == [700, 2999]
    for second in (second_largest(scores), plain_second_largest(scores)):
        assert second.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("vocab", [1023, 1024, 1025, 4096, 49_152])
def test_blocks_find_what_a_plain_search_finds(vocab: int) -> None:
    scores = torch.randn(50, vocab, generator=torch.Generator().manual_seed(vocab)).round(decimals=1)  # with equals
    assert torch.equal(find_argmax(scores), scores.argmax(dim=-1))
    assert torch.equal(second_largest(scores), plain_second_largest(scores))


@pytest.mark.parametrize("vocab", [40, 1023, 1025, 4096, 4097, 49_152])
@pytest.mark.parametrize("count", [2, 16])
def test_the_largest_are_those_of_a_plain_search(vocab: int, count: int) -> None:
    scores = torch.randn(50, vocab, generator=torch.Generator().manual_seed(vocab)).round(decimals=2)  # with equals
    values, tokens = find_largest(scores, count)
    assert torch.equal(values, scores.topk(count, dim=-1).values)
    assert torch.equal(scores.gather(1, tokens), values)
    assert all(len(set(row)) == count for row in tokens.tolist())


@pytest.mark.parametrize("vocab", [40, 4096])
def test_what_the_top_tells_is_what_a_search_finds(vocab: int) -> None:
    probs = logits_to_probs(logits_of(vocab).round())  # rounded: many equals, first and later
    probs[0, 0] = 1 / vocab
    searched, told = Whole(probs), Whole(probs)
    values, tokens = told.top(4)
    assert torch.equal(tokens[..., 0], probs.argmax(dim=-1))
    assert torch.equal(probs.gather(-1, tokens), values)
    assert all(len(set(row)) == 4 for row in tokens.view(-1, 4).tolist())
    for name in ("maximum", "argmax", "margin"):
        assert name in vars(told)
        assert torch.equal(getattr(told, name), getattr(searched, name)), name


def test_forms_of_each_temperature() -> None:
    logits = logits_of(50)
    assert isinstance(distribute(logits, Sampling(0.0), "x"), Certain)
    for sampling in (Sampling(), Sampling(0.5), Sampling(0.8, top_p=0.7), Sampling(top_k=4), Sampling(min_p=0.2)):
        torch.testing.assert_close(distribute(logits, sampling, "x").dense, logits_to_probs(logits, sampling))
    broken = logits.clone()
    broken[1, 2, 3] = torch.nan
    for sampling in (Sampling(), Sampling(0.0)):
        with pytest.raises(ValueError, match=r"logits of x: .* at row \(1, 2\)"):
            distribute(broken, sampling, "x")


@pytest.mark.parametrize("name", ["whole", "whole with logits", "from logits", "certain"])
def test_joined_positions_keep_their_form(name: str) -> None:
    form = forms(9, 0, torch.float32)[name]
    parts = [form.pick(torch.full((B,), place)) for place in range(T)]
    joined = join(parts)
    assert type(joined) is type(form)
    torch.testing.assert_close(joined.dense, form.dense)
    torch.testing.assert_close(joined.entropy, form.entropy, atol=1e-6, rtol=1e-6)


def test_banned_tokens_of_minus_infinity_cost_nothing() -> None:
    logits = logits_of(9)
    logits[..., 3] = -torch.inf
    plain = Whole(logits_to_probs(logits))
    torch.testing.assert_close(Whole(plain.dense, logits).entropy, plain.entropy)
    torch.testing.assert_close(FromLogits(logits).entropy, plain.entropy)
