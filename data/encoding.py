"""Prompts and references as token ids: each tokenised once, special tokens exactly once, loss on the reference alone.

Knows nothing of traces or rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .prompts import Example, PromptConfig

__all__ = ["EncodedExample", "encode_example", "encode_prompt", "end_token_id", "end_token_ids"]


@dataclass(frozen=True)
class EncodedExample:
    """A prompt and its reference as token ids; the `example` itself only where its answers will be scored."""

    prompt_id: str
    split: str
    prompt_ids: list[int]
    reference_ids: list[int]
    example: Example | None = None

    def __len__(self) -> int:
        """Number of tokens that a model reads: the last token of the reference is only predicted."""
        return len(self.prompt_ids) + len(self.reference_ids) - 1


def encode_prompt(prompt: str, tokenizer: Any, config: PromptConfig) -> list[int]:
    """Token ids of a prompt, ready to be continued; special tokens exactly once.

    Raises:
        ValueError: `chat` is asked for and the tokenizer has no chat template.
    """
    if config.chat:
        text = _chat_text(tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)
        return _ids(tokenizer, text)
    ids = [int(i) for i in tokenizer(prompt)["input_ids"]]
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]  # the text brought its own beginning-of-text token
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]  # some tokenizers close every text; this one goes on
    return ids


def encode_example(example: Example, tokenizer: Any, config: PromptConfig) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the reference, which ends with the end token exactly once.

    Raises:
        ValueError: nothing is left of the reference, or the tokenizer has no end token.
    """
    prompt_ids = encode_prompt(example.prompt, tokenizer, config)
    reference_ids = _ids(tokenizer, example.reference)
    end = end_token_id(tokenizer, config)
    if reference_ids and reference_ids[-1] == end:
        reference_ids = reference_ids[:-1]
    if not reference_ids:
        raise ValueError(f"reference: expected text, got nothing in prompt {example.prompt_id}")
    if not prompt_ids:
        raise ValueError(f"prompt: expected at least one token, got none in prompt {example.prompt_id}")
    return prompt_ids, [*reference_ids, end]


def end_token_id(tokenizer: Any, config: PromptConfig) -> int:
    """Id of the token that ends an answer: in a chat what the template puts after one, else end of text."""
    if config.chat:
        mark = "answer"
        text = _chat_text(tokenizer, [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}])
        closing = _ids(tokenizer, text.rpartition(mark)[2].lstrip())
        if closing and closing[0] in tokenizer.all_special_ids:
            return closing[0]
    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer: expected an end-of-text token, got one without")
    return int(tokenizer.eos_token_id)


def end_token_ids(tokenizer: Any, config: PromptConfig, model: Any) -> list[int]:
    """Ids of every token that ends an answer: by the template, and by the model's own generation config."""
    stated = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    many = stated if isinstance(stated, (list, tuple)) else [stated]
    return sorted({end_token_id(tokenizer, config), *(int(token) for token in many if token is not None)})


def _chat_text(tokenizer: Any, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat: the tokenizer has no chat template; set chat to false and write the instruction out")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    return str(text)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
