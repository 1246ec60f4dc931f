"""What is learned of single tokens: nothing before training, a formula after it, and the same in ONNX."""

from pathlib import Path

import pytest
import torch

from speccascade.router.bundle import load_bundle, save_bundle
from speccascade.router.config import RouterConfig
from speccascade.router.examples import Examples
from speccascade.router.heads import HeadSpec, build_head
from speccascade.router.pooled import PooledEstimator
from speccascade.router.token_table import TokenTable

SPEC = HeadSpec("pooled", "pooled", "verified", (8,), ("log",), top_k=4, token_rank=3)
KNOWN, VOCABULARY = torch.tensor([2, 5, 11]), 20


def build(seed: int = 0) -> PooledEstimator:
    head = build_head(SPEC)
    assert isinstance(head, PooledEstimator) and head.table is not None
    head.table.set_tokens(KNOWN, VOCABULARY, seed)
    return head.eval()


def disturb(head: PooledEstimator, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in head.parameters():
            value.add_(0.2 * torch.randn(value.shape, generator=generator))


def inputs(count: int = 6, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:7].sort().values for _ in range(count)])
    probs = torch.rand(count, 8, 2, generator=generator)
    candidates = (probs / probs.sum(dim=1, keepdim=True))[:, :7]
    return torch.randn(count, 16, generator=generator), candidates, tokens


def test_untrained_it_believes_the_verifier() -> None:
    features, candidates, tokens = inputs()
    torch.testing.assert_close(build()(features, candidates, tokens).exp()[:, :-1], candidates[..., 1])


def test_scores_change_by_query_times_vector_plus_bias() -> None:
    head = build()
    disturb(head)
    table = head.table
    assert table is not None
    columns, tokens = torch.randn(4, 16), torch.tensor([[2, 3, 5], [11, 2, 0], [7, 8, 9], [5, 5, 19]])
    query = (columns @ table.query.weight.T).detach()
    for place, row in enumerate(tokens.tolist()):
        for slot, token in enumerate(row):
            at = KNOWN.tolist().index(token) + 1 if token in KNOWN.tolist() else None
            expected = 0.0 if at is None else float((query[place] @ table.vectors[at] + table.biases[at]).detach())
            assert float(table(columns, tokens)[place, slot].detach()) == pytest.approx(expected, abs=1e-5)


def test_a_token_that_is_likelier_than_the_models_say_is_learned() -> None:
    """The truth is token 5 at every other position, whatever q and p hold; without a table nobody can know."""
    features, candidates, tokens = inputs(400)
    tokens = torch.where(tokens == 5, 6, tokens).sort(dim=1).values
    tokens[:, 3] = 5
    truth = torch.where(torch.arange(400) % 2 == 0, 3, torch.randint(7, (400,)))
    examples = Examples(features, torch.zeros(400, 2, 2), torch.ones(400), None, candidates, truth, tokens)
    head = build().train()
    optimiser = torch.optim.Adam(head.table.parameters(), lr=0.05)  # type: ignore[union-attr]
    before = float(head.loss(examples).detach())
    for _ in range(100):
        optimiser.zero_grad()
        head.loss(examples).backward()
        optimiser.step()
    assert float(head.loss(examples).detach()) < before - 0.2
    assert float(head.table.biases[2].detach()) > 0.5, "the bias of token 5"  # type: ignore[union-attr]


def test_a_bundle_gives_the_table_back(tmp_path: Path) -> None:
    head = build()
    disturb(head)
    save_bundle(tmp_path, head, RouterConfig("small", "large", "f" * 64, "d" * 64, default_alpha=0.1))
    bundle = load_bundle(tmp_path)
    expected = head(*inputs())
    torch.testing.assert_close(bundle.head()(*inputs()), expected, atol=1e-6, rtol=0)
    for backend in ("onnx", "torch"):
        torch.testing.assert_close(bundle.runtime(backend)(*inputs()), expected, atol=1e-5, rtol=0)


def test_ids_are_given_to_those_that_read_them() -> None:
    features, candidates, tokens = inputs()
    with pytest.raises(ValueError, match="tokens: expected their ids"):
        build()(features, candidates)
    plain = build_head(HeadSpec("pooled", "pooled", "verified", (8,), ("log",), top_k=4))
    with pytest.raises(ValueError, match="tokens: expected none"):
        plain(features, candidates, tokens)


@pytest.mark.parametrize(
    ("tokens", "message"), [([3, 20], "expected ids in"), ([-1, 2], "expected ids in"), ([4, 4], "each once")]
)
def test_tokens_are_distinct_ids_of_the_vocabulary(tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTable(4, 2).set_tokens(torch.tensor(tokens), VOCABULARY)


def test_only_heads_that_read_tokens_have_a_table() -> None:
    with pytest.raises(ValueError, match="token_rank: expected 0, or above 0 for kind 'pooled' alone, got 3"):
        HeadSpec("mlp", "gap", "verified", (8,), token_rank=3)


def test_a_token_beyond_the_table_is_unknown() -> None:
    """A model may have more rows of logits than the vocabulary that the table was made for."""
    table = build().table
    assert table is not None
    with torch.no_grad():
        table.biases.fill_(1.0)
    scores = table(torch.zeros(1, 16), torch.tensor([[2, VOCABULARY, VOCABULARY + 100]]))
    assert scores.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rows", torch.full((VOCABULARY,), 4, dtype=torch.int32)),
        ("rows", torch.full((VOCABULARY,), -1, dtype=torch.int32)),
        ("rows", torch.zeros(VOCABULARY)),
        ("rows", torch.zeros((), dtype=torch.int32)),
        ("vectors", torch.zeros(4, 2)),
        ("vectors", torch.zeros(4)),
        ("biases", torch.zeros(3)),
    ],
)
def test_a_table_whose_parts_do_not_fit_is_refused(name: str, values: torch.Tensor) -> None:
    table = TokenTable(16, 3)
    table.set_tokens(KNOWN, VOCABULARY)
    with pytest.raises(ValueError, match="token table: expected"):
        TokenTable(16, 3).load_state_dict(table.state_dict() | {name: values})
