"""Token ids: special tokens once whatever adds them, references as the middle of a text, batches as one by one."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from speccascade.data.encoding import EncodedExample, encode_example, encode_examples, encode_prompt, end_token_id
from speccascade.data.prompts import Example, PromptConfig
from speccascade.data.windows import cut_windows

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CORPUS = [
    "Question: how many are there?\nAnswer: 12 eggs\n",
    "def one():\n    return 1\n",
    "Answer: the cat sat.\n\nQuestion: what\nAnswer: that",
] * 5
LETTERS = sorted({*"".join(CORPUS), *"abcdefghijklmnopqrstuvwxyz0123456789.:,?()[]+-*/='\n▁"} - {" "})
CHAT = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}"
    "{% elif m['role'] == 'system' %}{{ '(' + m['content'] + ')' }}{% else %}{{ '[' + m['content'] + ']' }}"
    "{% endif %}{% endfor %}"
)
PLAIN = PromptConfig("rows.jsonl", chat=False)
IN_CHAT = PromptConfig("rows.jsonl")


def train(backend: Tokenizer, texts: list[str], alphabet: list[str]) -> PreTrainedTokenizerFast:
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def byte_level(add_prefix_space: bool = False) -> PreTrainedTokenizerFast:
    """As gpt2 and its heirs: words with the space before them, in bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return train(backend, CORPUS, pre_tokenizers.ByteLevel.alphabet())


def metaspace(prepend: str) -> PreTrainedTokenizerFast:
    """As sentencepiece's: a space is ▁, and one is put before the beginning of a text."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)  # type: ignore[arg-type]
    backend.decoder = decoders.Metaspace()
    return train(backend, CORPUS, LETTERS)


def normalised() -> PreTrainedTokenizerFast:
    """As the first llamas': the space before a text is put there by a normaliser, even where there is one."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return train(backend, [f"▁{word}" for text in CORPUS for word in text.split()], LETTERS)


TOKENIZERS: dict[str, PreTrainedTokenizerFast] = {
    "byte level": byte_level(),
    "byte level, prefixed": byte_level(add_prefix_space=True),
    "metaspace always": metaspace("always"),
    "metaspace first": metaspace("first"),
    "metaspace never": metaspace("never"),
    "normalised": normalised(),
}

EVERY = pytest.mark.parametrize("name", TOKENIZERS)


def with_template(name: str, template: str = CHAT) -> PreTrainedTokenizerFast:
    made = copy.deepcopy(TOKENIZERS[name])
    made.chat_template = template
    return made


def bare_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def text_of(tokenizer: Any, ids: list[int]) -> str:
    """The text that tokens spell, every space of them included."""
    return "".join(tokenizer.convert_ids_to_tokens(ids)).replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n")


@EVERY
@pytest.mark.parametrize(
    ("prompt", "separator", "reference"),
    [
        ("Answer:", " ", "that"),
        ("Answer:", " ", "12 eggs"),
        ("Answer: ", "", "that"),
        ("Answer:\n", "", "that"),
        ("what", "", "that"),
    ],
)
def test_prompt_and_reference_are_tokens_of_the_joined_text(
    name: str, prompt: str, separator: str, reference: str
) -> None:
    tokenizer = TOKENIZERS[name]
    example = Example("id", prompt, reference, separator=separator)
    prompt_ids, reference_ids = encode_example(example, tokenizer, PLAIN)
    joined = bare_ids(tokenizer, prompt + separator + reference)
    if not (prompt.endswith(" ") or prompt == "what"):  # there the joined text has a token across the boundary
        assert prompt_ids + reference_ids[:-1] == joined
    assert text_of(tokenizer, reference_ids[:-1]) == separator + reference
    assert text_of(tokenizer, prompt_ids).removeprefix(" ") == prompt
    assert reference_ids[-1] == tokenizer.eos_token_id


@EVERY
@pytest.mark.parametrize("reference", ["    return 1", "\n    return 1", "\n\nthat", "that\n\n"])
def test_white_space_around_a_reference_is_kept(name: str, reference: str) -> None:
    tokenizer = TOKENIZERS[name]
    _, ids = encode_example(Example("id", "def one():", reference), tokenizer, PLAIN)
    assert text_of(tokenizer, ids[:-1]) == reference


@EVERY
@settings(max_examples=30, deadline=None)
@given(text=st.text(alphabet="ab 1.\n", min_size=2, max_size=60))
def test_windows_of_a_text_lose_and_gain_nothing(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = []
    for prompt, reference, ends in cut_windows(text, window=12, prompt=4):
        _, ids = encode_example(Example("id", prompt, reference, ends=ends), tokenizer, PLAIN)
        assert (ids[-1] == tokenizer.eos_token_id) is ends
        pieces.append((reference, text_of(tokenizer, ids[: len(ids) - ends])))
    assert [found for _, found in pieces] == [reference for reference, _ in pieces]


DRESSES = {
    "nothing": "$A",
    "bos": "<s> $A",
    "eos": "$A </s>",
    "both": "<s> $A </s>",
    "two before": "<pad> <s> $A",
    "cls and sep twice": "<s> $A </s> </s>",
}


@EVERY
@pytest.mark.parametrize("dress", DRESSES)
def test_a_prompt_gets_what_stands_before_a_text_and_never_what_stands_after(name: str, dress: str) -> None:
    tokenizer = copy.deepcopy(TOKENIZERS[name])
    special = [(token, SPECIAL.index(token)) for token in ("<pad>", "<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=DRESSES[dress], special_tokens=special)
    before = DRESSES[dress].split(" $A")[0].split() if " $A" in DRESSES[dress] else []
    prompt_ids, reference_ids = encode_example(Example("id", "Answer:", "that", separator=" "), tokenizer, PLAIN)
    assert prompt_ids == [SPECIAL.index(token) for token in before] + bare_ids(tokenizer, "Answer:")
    written = encode_prompt("".join(before) + "Answer:", tokenizer, PLAIN)
    assert [i for i in written if i < len(SPECIAL)] == [SPECIAL.index(token) for token in before]
    assert [i for i in reference_ids if i < len(SPECIAL)] == [tokenizer.eos_token_id]
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = CHAT
    prompt_ids, reference_ids = encode_example(Example("id", "what", "that"), chatty, IN_CHAT)
    assert [i for i in prompt_ids if i < len(SPECIAL)] == [1]
    assert [i for i in reference_ids if i < len(SPECIAL)] == [2]


@EVERY
def test_an_answer_in_a_chat_begins_as_the_template_begins_it(name: str) -> None:
    tokenizer = with_template(name)
    prompt_ids, reference_ids = encode_example(Example("id", "what", "that", separator="~"), tokenizer, IN_CHAT)
    assert prompt_ids + reference_ids == bare_ids(tokenizer, "<s>[what] that</s>")


def test_a_template_that_writes_more_than_white_space_before_an_answer_keeps_it_to_itself() -> None:
    tokenizer = with_template("byte level", CHAT.replace("' ' + m['content']", "'(none)' + m['content']"))
    _, reference_ids = encode_example(Example("id", "what", "that"), tokenizer, IN_CHAT)
    assert tokenizer.decode(reference_ids) == "that</s>"


SHOTS = (Example("a", "how", "so", separator=" "), Example("b", "why\n", "thus"))
SHOWN = Example("id", "what", "that", separator=" ", shots=SHOTS)


def test_solved_examples_are_turns_of_a_chat_after_the_system_message() -> None:
    tokenizer = with_template("byte level")
    prompt_ids, reference_ids = encode_example(SHOWN, tokenizer, replace(IN_CHAT, system="be brief"))
    assert tokenizer.decode(prompt_ids) == "<s>(be brief)[how] so</s>[why\n] thus</s>[what]"
    assert tokenizer.decode(reference_ids) == " that</s>"


def test_solved_examples_are_text_before_a_plain_prompt() -> None:
    tokenizer = TOKENIZERS["byte level"]
    config = replace(PLAIN, system="be brief", shot_separator=" / ")
    prompt_ids, reference_ids = encode_example(SHOWN, tokenizer, config)
    assert tokenizer.decode(prompt_ids) == "be brief / how so / why\nthus / what"
    assert tokenizer.decode(reference_ids) == " that</s>"
    assert encode_prompt("what", tokenizer, config, SHOTS) == prompt_ids


@pytest.mark.parametrize(
    ("branch", "message"),
    [
        (
            "{{ raise_exception('no system here') }}",
            "system: the tokenizer's chat template refuses a system message: no s",
        ),
        ("{{ '' }}", "system: the tokenizer's chat template leaves system messages out; put it in the instruction"),
    ],
)
def test_a_template_without_system_messages_is_named(branch: str, message: str) -> None:
    tokenizer = with_template("byte level", CHAT.replace("{{ '(' + m['content'] + ')' }}", branch))
    assert encode_example(SHOWN, tokenizer, IN_CHAT)
    with pytest.raises(ValueError, match=message):
        encode_example(SHOWN, tokenizer, replace(IN_CHAT, system="be brief"))


def test_a_template_that_refuses_the_turns_is_named() -> None:
    tokenizer = with_template("byte level", "{{ raise_exception('never') }}")
    with pytest.raises(ValueError, match="chat: the tokenizer's chat template refuses these turns: never"):
        encode_example(SHOWN, tokenizer, IN_CHAT)


@pytest.mark.parametrize("chat", [True, False])
@EVERY
def test_a_batch_gives_the_ids_of_each_alone(name: str, chat: bool) -> None:
    tokenizer = with_template(name)
    config = replace(PLAIN, chat=chat, splits={"train": 0.5, "test": 0.5})
    examples = [
        Example(
            f"{i:016x}", f"ask {i}" * (1 + i % 3), "\n" * (i % 2) + f"say {i}", {"i": i}, " " * (i % 3), ends=i % 5 > 0
        )
        for i in range(300)
    ]
    together = list(encode_examples(iter(examples), tokenizer, config))
    assert [item.prompt_id for item in together] == [example.prompt_id for example in examples]
    assert {item.split for item in together} == {"train", "test"}
    for item, example in zip(together, examples, strict=True):
        prompt_ids, reference_ids = encode_example(example, tokenizer, config)
        assert (item.prompt_ids.tolist(), item.reference_ids.tolist()) == (prompt_ids, reference_ids)
        assert item.prompt_ids.dtype == item.reference_ids.dtype == np.int32
        assert item.example is None
        assert len(item) == len(prompt_ids) + len(reference_ids) - 1
    assert next(encode_examples(examples, tokenizer, config, keep_examples=True)).example is examples[0]


def test_examples_are_encoded_as_they_are_asked_for() -> None:
    def endless() -> Any:
        number = 0
        while True:
            yield Example(f"{number:016x}", f"ask {number}", "that")
            number += 1

    encoded = encode_examples(endless(), TOKENIZERS["byte level"], PLAIN)
    assert [next(encoded).prompt_id for _ in range(3)] == [f"{number:016x}" for number in range(3)]


def test_token_ids_take_four_bytes_each() -> None:
    one = EncodedExample("a", "train", [1, 2], [3])  # type: ignore[arg-type]
    assert one.prompt_ids.nbytes == 8


def test_an_empty_prompt_or_reference_is_refused_by_its_prompt() -> None:
    tokenizer = TOKENIZERS["byte level"]
    with pytest.raises(ValueError, match="prompt: expected at least one token, got none in prompt id"):
        encode_example(Example("id", "", "that"), tokenizer, PLAIN)
    with pytest.raises(ValueError, match="reference: expected text, got nothing in prompt id"):
        encode_example(Example("id", "what", "", separator=" "), tokenizer, PLAIN)


def test_plain_text_ends_with_the_end_of_text_even_where_there_is_a_template() -> None:
    tokenizer = with_template("byte level", CHAT.replace("'</s>'", "'<unk>'"))
    assert end_token_id(tokenizer, IN_CHAT) == 3
    text = PromptConfig("rows.jsonl", "text")
    prompt_ids, reference_ids = encode_example(Example("id", "what", " that"), tokenizer, text)
    assert tokenizer.decode(prompt_ids + reference_ids) == "what that</s>"
