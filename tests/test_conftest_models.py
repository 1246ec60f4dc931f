"""The tiny models that the other tests stand on."""

from __future__ import annotations

import torch


def test_models_repeat_by_seed_and_differ_between_seeds(tiny_llama) -> None:
    ids = torch.tensor([[1, 5, 9]])
    first, again, other = (tiny_llama(seed)(ids).logits for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_tokenizer_round_trip_and_special_ids(tiny_llama, tiny_tokenizer) -> None:
    text = "tom has 3 pens, and 4+5=9?"
    ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tiny_tokenizer.decode(ids) == text
    assert len(ids) == len(text)
    assert max(ids) < tiny_llama().config.vocab_size
    assert (tiny_tokenizer.pad_token_id, tiny_tokenizer.bos_token_id, tiny_tokenizer.eos_token_id) == (0, 1, 2)
