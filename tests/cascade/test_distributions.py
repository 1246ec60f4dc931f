"""One route from logits to probabilities, and draws that follow them."""

import math

import pytest
import torch
from scipy.stats import chi2
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from speccascade.cascade.distributions import (
    Sampling,
    draw,
    draw_uniforms,
    logits_to_probs,
    plain_draw,
    residual,
    total_variation,
)


def some_logits(rows: int = 50, vocab: int = 31, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_temperature_zero_is_one_hot_at_the_lowest_argmax() -> None:
    probs = logits_to_probs(torch.tensor([[1.0, 5.0, 5.0, -2.0]]), Sampling(temperature=0))
    assert probs.tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_processing_equals_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = some_logits()
    expected = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    probs = logits_to_probs(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(probs, expected.softmax(-1), atol=1e-6, rtol=1e-5)


def test_bfloat16_logits_give_float32_probabilities() -> None:
    logits = some_logits().bfloat16()
    probs = logits_to_probs(logits)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, logits.float().softmax(-1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_name_model_and_row(bad: float) -> None:
    logits = some_logits()
    logits[7, 3] = bad
    with pytest.raises(ValueError, match=r"the drafter tiny.*row \(7,\)"):
        logits_to_probs(logits, source="the drafter tiny")


def test_a_row_without_any_possible_token_is_refused_but_masked_tokens_are_not() -> None:
    masked = torch.tensor([[0.0, -math.inf, 1.0]])
    assert logits_to_probs(masked)[0, 1] == 0
    with pytest.raises(ValueError, match="only -inf"):
        logits_to_probs(torch.full((1, 3), -math.inf))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected a finite number >= 0, got -1.0"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_settings_out_of_range_are_named(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)  # type: ignore[arg-type]


def test_residual_of_equal_distributions_is_zero_not_nan() -> None:
    probs = logits_to_probs(some_logits())
    assert residual(probs, probs).abs().sum() == 0


def test_residual_and_total_variation_of_disjoint_supports() -> None:
    q, p = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.25, 0.75])
    assert total_variation(p, q) == 1
    torch.testing.assert_close(residual(p, q), p)


def test_draw_follows_the_weights() -> None:
    weights = torch.tensor([0.0, 0.5, 1.5, 0.0, 2.0, 0.0])  # need not sum to one
    count = 40_000
    tokens = draw(weights.expand(count, -1), torch.rand(count, generator=torch.Generator().manual_seed(3)))
    observed = tokens.bincount(minlength=6).double()
    assert observed[[0, 3, 5]].sum() == 0, "a token of weight zero was drawn"
    expected = weights[[1, 2, 4]].double() / weights.sum() * count
    statistic = float(((observed[[1, 2, 4]] - expected) ** 2 / expected).sum())
    assert statistic < chi2.ppf(1 - 1e-6, df=2), f"chi-square {statistic:.1f}: odds of a false alarm are 1e-6"


def test_the_largest_uniform_still_draws_a_possible_token() -> None:
    weights = torch.tensor([[0.2, 0.3, 0.0]])
    below_one = torch.nextafter(torch.tensor([1.0]), torch.tensor([0.0]))
    assert draw(weights, below_one).tolist() == [1]
    assert draw(weights, torch.zeros(1)).tolist() == [0]


def test_uniforms_of_a_row_do_not_depend_on_its_neighbours() -> None:
    rows = [torch.Generator().manual_seed(seed) for seed in (5, 6, 7)]
    together = draw_uniforms(rows, 4)
    alone = draw_uniforms([torch.Generator().manual_seed(6)], 4)
    assert torch.equal(together[1:2], alone)


def sorted_nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The plain form: order every token, keep them until their mass reaches top_p."""
    descending, order = probs.sort(dim=-1, descending=True, stable=True)
    kept = descending.masked_fill(descending.cumsum(dim=-1) - descending >= top_p, 0)
    kept = torch.zeros_like(probs).scatter_(-1, order, kept)
    return kept / kept.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize(("vocab", "scale"), [(7, 2.0), (600, 0.0), (40_000, 5.0), (40_000, 2.0), (40_000, 0.01)])
def test_the_nucleus_equals_that_of_a_full_sort(vocab: int, scale: float, top_p: float) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    for values in (logits, logits.bfloat16()):  # in bfloat16 many are equal, and the lowest ids are kept
        expected = sorted_nucleus(logits_to_probs(values), top_p)
        got = logits_to_probs(values, Sampling(top_p=top_p))
        assert torch.equal(got > 0, expected > 0)
        torch.testing.assert_close(got, expected)


def test_a_token_of_weight_zero_is_not_drawn_at_the_edges() -> None:
    weights = torch.zeros(1, 150_000)
    weights[0, [10, 149_990]] = torch.tensor([1e-3, 0.7])
    for uniform in (0.0, 1e-3 / 0.701, 1 - 2**-53):
        assert int(draw(weights, torch.tensor([uniform], dtype=torch.float64))) in (10, 149_990)


@pytest.mark.parametrize("vocab", [1023, 1024, 1025, 49_152, 151_936])
def test_blocks_draw_what_a_plain_search_draws(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    probs = logits_to_probs(torch.randn(5, 40 if vocab < 2000 else 4, vocab, generator=generator) * 4)
    probs[..., ::3] = 0
    uniforms = torch.rand(probs.shape[:-1], generator=generator, dtype=torch.float64)
    tokens = draw(probs, uniforms)
    assert torch.equal(tokens, plain_draw(probs, uniforms))
    assert (probs.gather(-1, tokens.unsqueeze(-1)) > 0).all()
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for edge in edges:
        ends = draw(probs, torch.full_like(uniforms, edge))
        assert (probs.gather(-1, ends.unsqueeze(-1)) > 0).all()


def test_blocks_follow_their_weights() -> None:
    """Twelve tokens with weight, spread over the blocks of a large vocabulary: false alarms have odds of 1e-6."""
    places = torch.arange(12) * 97 + 5
    weights = torch.zeros(1, 1200)
    weights[0, places] = torch.linspace(0.1, 1.2, 12)
    draws = 20_000
    uniforms = torch.rand(draws, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    counts = draw(weights.expand(draws, -1), uniforms).bincount(minlength=1200)[places].double()
    expected = weights[0, places].double() / weights.double().sum() * draws
    assert counts.sum() == draws
    assert float(((counts - expected) ** 2 / expected).sum()) < chi2.ppf(1 - 1e-6, df=11)


def test_a_row_without_weight_disturbs_no_other() -> None:
    weights = torch.zeros(2, 5000)
    weights[1, 4321] = 1.0
    assert int(draw(weights, torch.tensor([0.5, 0.5], dtype=torch.float64))[1]) == 4321
