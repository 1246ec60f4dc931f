"""Penalties and bans: the law of transformers for one model alone, at every position of a block, for both models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)

from speccascade.cascade import SingleModel, SpeculativeCascade, VerifyBlock, early_exit
from speccascade.cascade.distributions import Sampling, logits_to_probs
from speccascade.cascade.processing import process_logits

PROMPT = torch.tensor([[3, 14, 15, 9, 26]])
SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"bad_words_ids": [[7], [9, 26], [26, 5, 8]]},
    {"suppress_tokens": [4, 11, 30]},
    {"repetition_penalty": 1.3, "bad_words_ids": [[12]], "suppress_tokens": [40]},
]


class Lossless:
    def target(self, block: VerifyBlock) -> torch.Tensor:
        return block.verifier_probs


@pytest.mark.parametrize("length", [1, 4])
def test_each_position_equals_transformers_processors(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, length, 31, generator=generator) * 3
    histories = [[1, 5, 5, 9, 2, 8, 3, 4][: 4 + length], [7, 30, 0, 9, 2, 1, 1, 6, 5][: 5 + length]]
    sampling = Sampling(0.7, min_p=0.1, repetition_penalty=1.4, bad_words=((8,), (9, 2), (5, 5)), suppress_tokens=(3,))
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            NoBadWordsLogitsProcessor([[8], [9, 2], [5, 5]]),
            SuppressTokensLogitsProcessor([3]),
            TemperatureLogitsWarper(0.7),
            MinPLogitsWarper(0.1),
        ]
    )
    ours = logits_to_probs(process_logits(logits, histories, sampling), sampling)
    for row in range(2):
        for place in range(length):
            prefix = histories[row][: len(histories[row]) - (length - 1 - place)]
            expected = theirs(torch.tensor([prefix]), logits[row, place][None].clone()).softmax(-1)[0]
            torch.testing.assert_close(ours[row, place], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_greedy_decoding_equals_transformers(
    tiny_llama: Callable[..., LlamaForCausalLM], settings: dict[str, Any]
) -> None:
    verifier = tiny_llama(seed=0, layers=4)
    plain = verifier.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=40, do_sample=False, eos_token_id=None,
        pad_token_id=0, **settings,
    )  # fmt: skip
    assert torch.equal(SingleModel(verifier).generate(PROMPT, max_new_tokens=40, **settings).sequences, plain)
    cascade = SpeculativeCascade(early_exit(verifier, 3), verifier, Lossless(), gamma=4)
    out = cascade.generate(PROMPT, max_new_tokens=40, **settings)
    assert torch.equal(out.sequences, plain)
    assert out.stats.accepted > 0
    assert out.stats.rejected > 0, "penalties must survive a roll-back"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"bad_words_ids": [[]]}, "bad_words"),
    ],
)
def test_settings_out_of_range_are_named(
    tiny_llama: Callable[..., LlamaForCausalLM], settings: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        SingleModel(tiny_llama()).generate(PROMPT, **settings)
