"""Prompts and references as token ids: each tokenised once, special tokens exactly once, loss on the reference alone.

A reference goes on where its prompt stops, so it is tokenised as the middle of a text: a tokenizer that puts a space
before the beginning of every text puts none there. In a chat the template says what stands before and after an answer;
otherwise the text is the system text, the solved examples, the prompt and its reference, one after the other.

Knows nothing of traces or rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from .prompts import Example, PromptConfig, split_of

__all__ = ["EncodedExample", "encode_example", "encode_examples", "encode_prompt", "end_token_id", "end_token_ids"]

Ids = np.ndarray[Any, np.dtype[np.int32]]

_BATCH = 256
_MARK = "answer"
_ANCHORS = ("\n", "a", ";")
"""Stand before a reference while it is tokenised, where a tokenizer treats the beginning of a text as special."""


@dataclass(frozen=True, eq=False)
class EncodedExample:
    """A prompt and its reference as token ids; the `example` itself only where its answers will be scored.

    The ids are kept as int32: ``[P]`` of the prompt, ``[R]`` of the reference. Sequences of ints are converted.
    """

    prompt_id: str
    split: str
    prompt_ids: Ids
    reference_ids: Ids
    example: Example | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "reference_ids"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.int32))

    def __len__(self) -> int:
        """Number of tokens that a model reads: the last token of the reference is only predicted."""
        return len(self.prompt_ids) + len(self.reference_ids) - 1


def encode_prompt(prompt: str, tokenizer: Any, config: PromptConfig, shots: Sequence[Example] = ()) -> list[int]:
    """Token ids of a prompt, ready to be continued, with the config's system text and solved examples before it.

    Raises:
        ValueError: `chat` is asked for and the tokenizer has no chat template, or its template takes no system message.
    """
    text = _prompt_text(prompt, shots, tokenizer, config)
    return _prompt_ids(tokenizer, [text], config)[0]


def encode_example(example: Example, tokenizer: Any, config: PromptConfig) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the reference, which ends with the end token exactly once if the text ends there.

    Raises:
        ValueError: nothing is left of the reference, or the tokenizer has no end token.
    """
    return next(_encode([example], tokenizer, config))


def encode_examples(
    examples: Iterable[Example], tokenizer: Any, config: PromptConfig, *, keep_examples: bool = False
) -> Iterator[EncodedExample]:
    """Encode examples lazily, some hundred at a time; the ids are those of `encode_example`.

    Args:
        examples: what `read_examples` gives.
        tokenizer: of the pair.
        config: what the examples were read with.
        keep_examples: leave each example in its record.

    Raises:
        ValueError: as `encode_example`.
    """
    remaining = iter(examples)
    while batch := list(islice(remaining, _BATCH)):
        for example, (prompt, reference) in zip(batch, _encode(batch, tokenizer, config), strict=True):
            split = split_of(example.prompt_id, config.splits)
            kept = example if keep_examples else None
            ids = np.array(prompt, np.int32), np.array(reference, np.int32)
            yield EncodedExample(example.prompt_id, split, *ids, kept)


def end_token_id(tokenizer: Any, config: PromptConfig) -> int:
    """Id of the token that ends an answer: in a chat what the template puts after one, else end of text."""
    if config.preset.chat:
        text = _chat_text(tokenizer, [_turn("user", "?"), _turn("assistant", _MARK)])
        closing = _ids(tokenizer, [text.rpartition(_MARK)[2].lstrip()])[0]
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


def _encode(examples: Sequence[Example], tokenizer: Any, config: PromptConfig) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids of prompts and references, in two calls of the tokenizer."""
    lead = _answer_lead(tokenizer) if config.preset.chat else ""
    end = end_token_id(tokenizer, config)
    texts = [_prompt_text(example.prompt, example.shots, tokenizer, config) for example in examples]
    prompts = _prompt_ids(tokenizer, texts, config)
    leads = [lead if config.preset.chat else example.separator for example in examples]
    references = _continuation_ids(tokenizer, [lead + e.reference for lead, e in zip(leads, examples, strict=True)])
    for example, prompt_ids, reference_ids in zip(examples, prompts, references, strict=True):
        if example.ends and reference_ids[-1:] == [end]:
            reference_ids = reference_ids[:-1]
        if not reference_ids or not example.reference:
            raise ValueError(f"reference: expected text, got nothing in prompt {example.prompt_id}")
        if not prompt_ids:
            raise ValueError(f"prompt: expected at least one token, got none in prompt {example.prompt_id}")
        yield prompt_ids, [*reference_ids, end] if example.ends else reference_ids


def _prompt_text(prompt: str, shots: Sequence[Example], tokenizer: Any, config: PromptConfig) -> str:
    """Everything before the reference as one text."""
    preset = config.preset
    if not preset.chat:
        shown = [f"{shot.prompt}{shot.separator}{shot.reference}" for shot in shots]
        return preset.shot_separator.join([*([config.system] if config.system else []), *shown, prompt])
    turns = [_turn("system", config.system)] if config.system else []
    for shot in shots:
        turns += [_turn("user", shot.prompt), _turn("assistant", shot.reference)]
    text = _chat_text(tokenizer, [*turns, _turn("user", prompt)], add_generation_prompt=True)
    if config.system and config.system.strip() not in text:
        raise ValueError("system: the tokenizer's chat template leaves system messages out; put it in the instruction")
    return text


def _prompt_ids(tokenizer: Any, texts: Sequence[str], config: PromptConfig) -> list[list[int]]:
    """Token ids of prompts: a template writes its special tokens itself, other texts get what stands before a text."""
    many = _ids(tokenizer, texts)
    if config.preset.chat:
        return many
    opening = _opening_ids(tokenizer)
    return [ids if ids[: len(opening)] == opening else [*opening, *ids] for ids in many]


def _opening_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text of its own accord; what it puts after one has no place in a prompt."""
    bare = _ids(tokenizer, [_MARK])[0]
    dressed = [int(i) for i in tokenizer(_MARK)["input_ids"]]
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return dressed[:start]
    raise ValueError(f"tokenizer: expected special tokens around a text, got other ids for it: {dressed} and {bare}")


def _continuation_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts that go on where others stop."""
    many = _ids(tokenizer, texts)
    if not _treats_beginnings_apart(tokenizer):
        return many
    todo = list(range(len(texts)))
    for anchor in _ANCHORS:
        if not todo:
            break
        anchored = tokenizer(
            [anchor + texts[i] for i in todo], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        merged = []
        for i, ids, offsets in zip(todo, anchored["input_ids"], anchored["offset_mapping"], strict=True):
            if any(start < len(anchor) < end for start, end in offsets):
                merged.append(i)  # one token holds the anchor and the text's first character
            else:
                many[i] = [int(token) for token, (_, end) in zip(ids, offsets, strict=True) if end > len(anchor)]
        todo = merged
    return many


def _treats_beginnings_apart(tokenizer: Any) -> bool:
    """Whether a word gets other tokens where a text begins than in its middle, as with a space put before it."""
    if not getattr(tokenizer, "is_fast", False):
        return False  # without offsets there is no telling what belongs to the anchor
    probes = ["a", "x", "1", "The", " a", _MARK]
    alone, after = _ids(tokenizer, probes), _ids(tokenizer, [_ANCHORS[0] + probe for probe in probes])
    return any(inside[-len(first) :] != first for first, inside in zip(alone, after, strict=True) if first)


def _answer_lead(tokenizer: Any) -> str:
    """White space that the chat template puts between its generation prompt and an answer, such as one space."""
    asked = _chat_text(tokenizer, [_turn("user", "?")], add_generation_prompt=True)
    answered = _chat_text(tokenizer, [_turn("user", "?"), _turn("assistant", _MARK)])
    lead = answered[len(asked) :].partition(_MARK)[0] if answered.startswith(asked) else ""
    return lead if lead.isspace() else ""


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _chat_text(tokenizer: Any, turns: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat: the tokenizer has no chat template; set chat to false and write the instruction out")
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        named = "system" if turns[0]["role"] == "system" else "chat"
        asked = "a system message" if named == "system" else "these turns"
        raise ValueError(f"{named}: the tokenizer's chat template refuses {asked}: {error}") from error
    return str(text)


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, without any special token that is not written in them."""
    many = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return [[int(i) for i in ids] for ids in many]
