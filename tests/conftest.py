"""What all tests share: checked shapes, one thread, no network, and tiny random models built in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
from jaxtyping import install_import_hook

# Checks every annotated shape and type in these two packages (an int passes for a float); comes before their import.
install_import_hook(
    ["speccascade.cascade", "speccascade.router"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from speccascade.router.head_base import HeadSpec
from speccascade.router.pooled import PooledEstimator

torch.set_num_threads(1)


def pooled_spec(
    feature_set: str = "verified",
    hidden: Sequence[int] = (64, 64),
    top_k: int = 16,
    hidden_sizes: tuple[int, ...] = (),
    rank: int = 0,
) -> HeadSpec:
    """What describes a head of kind ``pooled``."""
    return HeadSpec("pooled", "pooled", feature_set, tuple(hidden), ("log",), 0, top_k, hidden_sizes, rank)


def opinionated_pooled(spec: HeadSpec, seed: int = 0, spread: float = 0.4) -> PooledEstimator:
    """A pooled head that is far from p°, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = PooledEstimator(spec)
        with torch.no_grad():
            for values in head.parameters():
                values.add_(torch.randn(values.shape) * spread)
    return head.eval()


def build_llama(seed: int = 0, layers: int = 2, vocab: int = 64, hidden: int = 32) -> LlamaForCausalLM:
    """A random llama in float32 whose distributions are far from uniform, so that rules have something to decide."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def build_tokenizer(vocab: int = 64) -> PreTrainedTokenizerFast:
    """A tokenizer over single characters: pad 0, bos 1, eos 2, unk 3, then letters, digits and signs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = " \nabcdefghijklmnopqrstuvwxyz0123456789.,?!+-*/=$#:()<>'\"|_"
    table = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    for character in characters[: vocab - len(table)]:
        table[character] = len(table)
    backend = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """`tiny_llama(seed=0, layers=2, vocab=64, hidden=32)` builds a model."""
    return build_llama


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer that goes with `tiny_llama` at its default vocabulary."""
    return build_tokenizer()
