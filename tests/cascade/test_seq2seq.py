"""Encoder-decoders of the T5 family: equal to plain decoding token for token, and the target's law when sampled."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from speccascade.cascade import (
    ModelDrafter,
    PromptLookupDrafter,
    SingleModel,
    SpeculativeCascade,
    VerifyBlock,
    early_exit,
    logits_to_probs,
)
from speccascade.cascade.distributions import Sampling
from speccascade.cascade.seq2seq import EncoderDecoderLM

VOCAB, NEW = 64, 60
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {}),
    "t5, decoder deeper": ("T5", {"num_decoder_layers": 4}),
    "t5, decoder shallower": ("T5", {"num_layers": 3, "num_decoder_layers": 1}),
    "t5 v1.1": ("T5", GATED),
    "t5, eager": ("T5", {"attn_implementation": "eager"}),
    "mt5": ("MT5", GATED),
    "umt5": ("UMT5", GATED),
    "longt5, local": ("LongT5", GATED | {"local_radius": 4}),
    "longt5, global": (
        "LongT5",
        GATED | {"local_radius": 4, "global_block_size": 4, "encoder_attention_type": "transient-global"},
    ),
}


class Lossless:
    def target(self, block: VerifyBlock) -> torch.Tensor:
        return block.verifier_probs


class Halfway:
    """A target of its own: neither model's distribution, and different at every position."""

    def target(self, block: VerifyBlock) -> torch.Tensor:
        weight = (block.positions % 3).unsqueeze(-1) / 2
        return block.draft_probs * (1 - weight) + block.verifier_probs * weight


SPREADS = {
    "relative_attention_bias.weight": 3.0,
    ".q.weight": 0.1,
    ".k.weight": 0.1,
    "SelfAttention.v.weight": 1.2,
    "SelfAttention.o.weight": 1.2,
    "EncDecAttention.v.weight": 0.4,
    "EncDecAttention.o.weight": 0.4,
    "DenseReluDense.wo.weight": 0.3,
    "lm_head.weight": 1.0,
    "shared.weight": 0.1,
}


def build(family: str = "t5", seed: int = 1, **settings: Any) -> PreTrainedModel:
    """A random model whose tokens go on changing, and depend on the prompt and on the distances of earlier tokens."""
    prefix, own = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**COMMON | own | settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
        for name, parameter in model.named_parameters():
            spread = next((spread for ending, spread in SPREADS.items() if name.endswith(ending)), None)
            if spread is not None:
                parameter.data.normal_(std=spread)
    return model


def build_pair(family: str = "t5", noise: float = 0.03, **settings: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A verifier, and a drafter that is the verifier with a little noise: it agrees often, but not always."""
    drafter, verifier = (build(family, **settings) for _ in range(2))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in drafter.parameters():
            parameter += noise * torch.randn_like(parameter)
    return drafter, verifier


def ragged_prompts(side: str = "right") -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator) for length in (5, 12, 1, 9)]
    ids, mask = torch.zeros(2, len(prompts), 12, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        place = slice(0, len(prompt)) if side == "right" else slice(12 - len(prompt), 12)
        ids[row, place] = prompt
        mask[row, place] = 1
    return prompts, ids, mask


def decode_plainly(model: PreTrainedModel, prompt: torch.Tensor, new: int = NEW, **settings: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | settings
    # The cache that transformers makes has as many layers as the encoder.
    arguments["use_cache"] = model.config.num_decoder_layers <= model.config.num_layers
    ones = torch.ones_like(prompt[None])
    tokens: torch.Tensor = model.generate(prompt[None], attention_mask=ones, max_new_tokens=new, **arguments)
    return tokens[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches_equal_plain_decoding(family: str) -> None:
    drafter, verifier = build_pair(family)
    prompts, ids, mask = ragged_prompts()
    out = SpeculativeCascade(drafter, verifier, Lossless(), gamma=4).generate(ids, mask, max_new_tokens=NEW)
    alone = SingleModel(verifier).generate(ids, mask, max_new_tokens=NEW)
    assert out.prompt_length == alone.prompt_length == 1
    for row, prompt in enumerate(prompts):
        plain = decode_plainly(verifier, prompt)
        assert len(set(plain[20:].tolist())) > 2, "the reference must not come to rest"
        assert torch.equal(out.sequences[row], plain)
        assert torch.equal(alone.sequences[row], plain)
    assert 0 < out.stats.acceptance_rate < 1, "both acceptance and roll-back must occur"
    assert len({part.rounds for part in out.stats.per_sequence}) > 1, "rows must advance unequally"


@pytest.mark.parametrize("family", ["t5", "t5 v1.1", "umt5"])
def test_single_prompts_equal_plain_decoding(family: str) -> None:
    drafter, verifier = build_pair(family)
    for prompt in ragged_prompts()[0]:
        out = SpeculativeCascade(drafter, verifier, Lossless()).generate(prompt[None], max_new_tokens=NEW)
        assert torch.equal(out.sequences[0], decode_plainly(verifier, prompt))


def test_padding_may_stand_at_either_side() -> None:
    cascade = SpeculativeCascade(*build_pair(), Lossless())
    right, left = (cascade.generate(*ragged_prompts(side)[1:], max_new_tokens=30) for side in ("right", "left"))
    assert torch.equal(right.sequences, left.sequences)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    prompts, ids, mask = ragged_prompts()
    cascade = SpeculativeCascade(*build_pair("t5 v1.1", noise=0.1), Halfway(), gamma=3, bonus="target")
    settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "eos_token_id": 7}
    together = cascade.generate(ids, mask, seed=[21, 22, 23, 24], ledger=True, **settings)
    assert together.ledger is not None
    for row, prompt in enumerate(prompts):
        single = cascade.generate(prompt[None], seed=21 + row, ledger=True, **settings)
        part = together.stats.per_sequence[row]
        assert together.sequences[row, : 1 + part.new_tokens].tolist() == single.sequences[0].tolist()
        assert (single.stats.accepted, single.stats.rounds) == (part.accepted, part.rounds)
        assert single.ledger is not None
        assert [e.writer for e in single.ledger[0]] == [e.writer for e in together.ledger[row]]
    assert len({part.new_tokens for part in together.stats.per_sequence}) > 1, "rows must end at different times"


def test_rows_end_at_their_end_tokens() -> None:
    drafter, verifier = build_pair()
    prompts, ids, mask = ragged_prompts()
    ends = [int(decode_plainly(verifier, prompts[row])[at]) for row, at in ((0, 7), (1, 23))]
    out = SpeculativeCascade(drafter, verifier, Lossless()).generate(
        ids, mask, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=0
    )
    for row, prompt in enumerate(prompts):
        plain = decode_plainly(verifier, prompt, eos_token_id=ends)
        assert torch.equal(out.sequences[row, : len(plain)], plain)
        assert not out.sequences[row, len(plain) :].any()
    assert len({part.new_tokens for part in out.stats.per_sequence}) > 1


def test_penalties_read_the_decoder_alone_as_in_transformers() -> None:
    drafter, verifier = build_pair()
    prompts, ids, mask = ragged_prompts()
    bad = [[int(decode_plainly(verifier, prompts[1])[3])], [0, int(decode_plainly(verifier, prompts[0])[1])]]
    settings: dict[str, Any] = {"repetition_penalty": 1.4, "bad_words_ids": bad, "suppress_tokens": [9, 11]}
    cascade = SpeculativeCascade(drafter, verifier, Lossless())
    out = cascade.generate(ids, mask, max_new_tokens=NEW, **settings)
    for row, prompt in enumerate(prompts):
        assert torch.equal(out.sequences[row], decode_plainly(verifier, prompt, **settings))


def test_a_cascade_drafts_for_a_larger_model() -> None:
    (small, middle), large = build_pair(noise=0.05), build_pair(noise=0.02)[0]
    prompts, ids, mask = ragged_prompts()
    inner = SpeculativeCascade(small, middle, Halfway(), gamma=2)
    out = SpeculativeCascade(inner, large, Lossless(), gamma=4).generate(ids, mask, max_new_tokens=40)
    for row, prompt in enumerate(prompts):
        assert torch.equal(out.sequences[row], decode_plainly(large, prompt, 40))
    assert 0 < out.stats.acceptance_rate < 1


def test_the_streamer_gets_what_transformers_would_give_it() -> None:
    class Tape:
        def __init__(self) -> None:
            self.seen = list[int]()

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.seen.append(-1)

    (drafter, verifier), prompt = build_pair(), ragged_prompts()[0][0]
    mine, theirs = Tape(), Tape()
    SpeculativeCascade(drafter, verifier, Lossless()).generate(prompt[None], max_new_tokens=20, streamer=mine)
    decode_plainly(verifier, prompt, 20, streamer=theirs)
    assert mine.seen == theirs.seen


Check = Callable[[Counter[tuple[int, ...]], dict[tuple[int, ...], float], int], None]


def sequence_law(
    drafter: PreTrainedModel, verifier: PreTrainedModel, prompt: torch.Tensor, vocab: int, bonus: str
) -> dict[tuple[int, ...], float]:
    """The law of three tokens with γ = 2: positions 0 and 1 follow π; position 2 is a bonus with the probability that
    both drafts were accepted, else it follows π."""

    def at(prefix: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        decoded = torch.tensor([[0, *prefix]])
        with torch.no_grad():
            logits = [model(prompt[None], decoder_input_ids=decoded).logits[:, -1:] for model in (drafter, verifier)]
        q, p = (logits_to_probs(each, Sampling()) for each in logits)
        block = VerifyBlock.from_probs(q, p, positions=torch.tensor([[decoded.shape[1]]]))
        return q[0, 0].double(), p[0, 0].double(), Halfway().target(block)[0, 0].double()

    law = {}
    q0, _, pi0 = at([])
    for a in range(vocab):
        q1, _, pi1 = at([a])
        for b in range(vocab):
            _, p2, pi2 = at([a, b])
            both_accepted = float(min(q0[a], pi0[a]) * min(q1[b], pi1[b]))
            otherwise = float(pi0[a] * pi1[b]) - both_accepted
            after = p2 if bonus == "verifier" else pi2
            for c in range(vocab):
                law[a, b, c] = both_accepted * float(after[c]) + otherwise * float(pi2[c])
    return law


@pytest.mark.parametrize("bonus", ["verifier", "target"])
def test_sampled_sequences_follow_the_target(bonus: str, check_follows: Check) -> None:
    vocab, draws, batch = 4, 1500, 100
    drafter, verifier = build(seed=1, vocab_size=vocab), build("t5 v1.1", seed=2, vocab_size=vocab)
    prompts = [torch.tensor([1, 3, 2, 1, 1]), torch.tensor([2, 3])]
    ids = torch.tensor([[1, 3, 2, 1, 1], [2, 3, 0, 0, 0]] * (batch // 2))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]] * (batch // 2))
    cascade = SpeculativeCascade(drafter, verifier, Halfway(), gamma=2, bonus=bonus)  # type: ignore[arg-type]
    counts: list[Counter[tuple[int, ...]]] = [Counter(), Counter()]
    for seed in range(0, 2 * draws, batch):
        out = cascade.generate(ids, mask, max_new_tokens=3, temperature=1.0, seed=seed)
        for row, tokens in enumerate(out.sequences[:, 1:].tolist()):
            counts[row % 2][tuple(tokens)] += 1
    for prompt, count in zip(prompts, counts, strict=True):
        check_follows(count, sequence_law(drafter, verifier, prompt, vocab, bonus), draws)


def test_a_lookup_drafts_from_the_decoders_own_tokens() -> None:
    verifier = build()
    prompts, ids, mask = ragged_prompts()
    cascade = SpeculativeCascade(PromptLookupDrafter(VOCAB), verifier, Lossless())
    out = cascade.generate(ids, mask, max_new_tokens=NEW, temperature=0.0)
    for row, prompt in enumerate(prompts):
        assert torch.equal(out.sequences[row], decode_plainly(verifier, prompt))


def test_the_encoder_runs_once_a_call() -> None:
    drafter, verifier = build_pair()
    calls = Counter[str]()
    for name, model in (("drafter", drafter), ("verifier", verifier)):
        model.get_encoder().register_forward_hook(lambda *_, name=name: calls.update([name]))
    _, ids, mask = ragged_prompts()
    SpeculativeCascade(drafter, verifier, Lossless()).generate(ids, mask, max_new_tokens=20)
    assert calls == {"drafter": 1, "verifier": 1}


def test_pairs_that_do_not_read_the_same_rows_are_refused(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    t5, llama = build(), tiny_llama()
    with pytest.raises(ValueError, match=r"drafter Llama.*: expected encoder-decoder that starts with token 0 as the"):
        SpeculativeCascade(llama, t5, Lossless())
    with pytest.raises(ValueError, match=r"drafter T5.*: expected decoder-only as the verifier Llama"):
        SpeculativeCascade(t5, llama, Lossless())
    other = build(decoder_start_token_id=5)
    with pytest.raises(ValueError, match=r"starts with token 0 as the verifier.*got .*starts with token 5"):
        SpeculativeCascade(ModelDrafter(EncoderDecoderLM(other)), t5, Lossless())
    inner = SpeculativeCascade(t5, build(seed=2), Lossless())
    with pytest.raises(ValueError, match="expected decoder-only"):
        SpeculativeCascade(inner, llama, Lossless())


def test_what_cannot_be_run_is_refused_by_name() -> None:
    bart = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1,
                                encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
                                decoder_ffn_dim=16)
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"relative positions \(longt5, mt5, t5, umt5\), got the encoder-decoder bart"):
        SingleModel(bart)
    with pytest.raises(ValueError, match="expected a decoder with a list of layers, got T5ForConditionalGeneration"):
        early_exit(build(), 1)
    startless = T5ForConditionalGeneration(T5Config(**COMMON | {"decoder_start_token_id": None}))
    with pytest.raises(ValueError, match="decoder_start_token_id: expected one token id below 64, got None"):
        SingleModel(startless)


@pytest.mark.parametrize("mask", [[[1, 0, 1]], [[0, 0, 0]]])
def test_masks_that_are_not_padding_are_named(mask: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="attention_mask: expected one run of ones"):
        SingleModel(build()).generate(torch.tensor([[3, 4, 5]]), torch.tensor(mask))
