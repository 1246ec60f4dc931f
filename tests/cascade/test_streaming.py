"""transformers' text streamers, fed by the engine from another thread: their text is that of the finished sequence."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TextIteratorStreamer

from speccascade.cascade import SpeculativeCascade, VerifyBlock, early_exit


class Halfway:
    def target(self, block: VerifyBlock) -> torch.Tensor:
        return (block.draft_probs + block.verifier_probs) / 2


@pytest.mark.parametrize("skip_prompt", [True, False])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_streamed_text_is_the_decoded_sequence(
    tiny_llama: Callable[..., LlamaForCausalLM],
    tiny_tokenizer: PreTrainedTokenizerFast,
    skip_prompt: bool,
    skip_special_tokens: bool,
) -> None:
    verifier = tiny_llama(seed=0, layers=3)
    cascade = SpeculativeCascade(early_exit(verifier, 2), verifier, Halfway(), gamma=4)
    prompt = tiny_tokenizer("two and two, is", return_tensors="pt").input_ids
    settings = {"max_new_tokens": 60, "temperature": 1.0, "seed": 4, "eos_token_id": 2}
    streamer = TextIteratorStreamer(
        tiny_tokenizer, skip_prompt=skip_prompt, timeout=60, skip_special_tokens=skip_special_tokens
    )
    results = list[Any]()
    worker = Thread(target=lambda: results.append(cascade.generate(prompt, streamer=streamer, **settings)))
    worker.start()
    pieces = list(streamer)
    worker.join()
    sequence = results[0].sequences[0, prompt.shape[1] if skip_prompt else 0 :]
    assert "".join(pieces) == tiny_tokenizer.decode(sequence, skip_special_tokens=skip_special_tokens)
    assert sum(map(bool, pieces)) > 1, "everything came at once"
    assert torch.equal(cascade.generate(prompt, **settings).sequences, results[0].sequences)
