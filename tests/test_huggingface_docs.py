"""The examples of docs/huggingface.md run as they stand, on tiny models in place of those that they name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import speccascade

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "huggingface.md").read_text(encoding="utf-8")
EXAMPLES: list[str] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def namespace(
    monkeypatch: pytest.MonkeyPatch,
    tiny_llama: Callable[..., LlamaForCausalLM],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> dict[str, Any]:
    def load_model(name: str) -> LlamaForCausalLM:
        return tiny_llama(seed=1) if "135M" in name else tiny_llama(seed=0, layers=3)

    def load_tokenizer(name: str, padding_side: str) -> PreTrainedTokenizerFast:
        monkeypatch.setattr(tiny_tokenizer, "padding_side", padding_side)
        return tiny_tokenizer

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load_tokenizer)
    return {}


def test_examples_run_one_after_the_other(
    namespace: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, count, stream, bind, pack = EXAMPLES
    exec(load, namespace)
    inputs, sequences = namespace["inputs"], namespace["sequences"]
    assert not inputs["attention_mask"].all(), "the example should show prompts of two lengths"
    cascade = speccascade.SpeculativeCascade(
        namespace["drafter"], namespace["verifier"], speccascade.rules.OPT(alpha=0.3)
    )
    expected = cascade.generate(
        inputs["input_ids"], inputs["attention_mask"], max_new_tokens=64, eos_token_id=2, pad_token_id=0
    )
    assert torch.equal(sequences, expected.sequences)
    exec(count, namespace)
    assert namespace["out"].stats.new_tokens == sum(map(len, namespace["out"].ledger))
    capsys.readouterr()
    exec(stream, namespace)
    printed = capsys.readouterr().out
    prompt, tokenizer = namespace["prompt"], namespace["tokenizer"]
    whole = namespace["cascade"].generate(prompt, max_new_tokens=64).sequences[0]
    assert printed == tokenizer.decode(whole[prompt.shape[1] :])
    exec(bind, namespace)
    assert namespace["sequences"].shape[1] > prompt.shape[1]
    packed = []
    monkeypatch.setattr("speccascade.cascade.pack_weights", lambda model: packed.append(model) or model)
    exec(pack, namespace)
    assert packed == [namespace["drafter"], namespace["verifier"]]
