"""Which two models may stand in one cascade, and which name, digest and fault each of them has."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speccascade.cascade.packing import can_pack
from speccascade.data import pairs
from speccascade.data.pairs import PairConfig, load_model, load_pair, vocabulary_fingerprint


@pytest.fixture
def config(pair_folders: tuple[Path, Path]) -> PairConfig:
    return PairConfig(drafter=str(pair_folders[0]), verifier=str(pair_folders[1]), device="cpu")


def test_a_pair_knows_its_models(config: PairConfig, tiny_tokenizer: Any) -> None:
    pair = load_pair(config)
    assert pair.drafter.config.num_hidden_layers == 1
    assert pair.verifier.config.num_hidden_layers == 2
    assert pair.vocab_size == len(tiny_tokenizer) < pair.verifier.config.vocab_size
    assert (pair.identity.drafter, pair.identity.verifier) == (config.drafter, config.verifier)
    assert pair.identity.vocabulary_fingerprint == vocabulary_fingerprint(tiny_tokenizer)
    assert not pair.drafter.training
    assert load_pair(config).identity == pair.identity


def test_digests_follow_the_weights_not_the_folder(config: PairConfig, tmp_path: Path, tiny_llama: Any) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(config.verifier, moved)
    same = load_pair(replace(config, verifier=str(moved))).identity
    assert same.verifier_digest == load_pair(config).identity.verifier_digest
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-3
    model.save_pretrained(moved)
    assert load_pair(replace(config, verifier=str(moved))).identity.verifier_digest != same.verifier_digest


def test_early_exit_shares_the_verifiers_weights(config: PairConfig) -> None:
    pair = load_pair(replace(config, drafter="early-exit:1"))
    assert pair.drafter.model.layers[0] is pair.verifier.model.layers[0]
    assert len(pair.drafter.model.layers) == 1
    assert pair.identity.drafter == "early-exit:1"
    assert pair.identity.drafter_digest != pair.identity.verifier_digest


@pytest.mark.parametrize("drafter", ["early-exit", "early-exit:", "early-exit:x", "early-exit:-1"])
def test_a_malformed_early_exit_is_refused(config: PairConfig, drafter: str) -> None:
    with pytest.raises(
        ValueError, match="drafter: expected 'early-exit:K' with K layers, such as 'early-exit:8', got "
    ):
        load_pair(replace(config, drafter=drafter))


def test_early_exit_beyond_the_model_is_refused(config: PairConfig) -> None:
    with pytest.raises(ValueError, match="layers: expected 1 to 1 of the model's 2, got 2"):
        load_pair(replace(config, drafter="early-exit:2"))


def save_with_tokenizer(folder: Path, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_different_tokenizers_are_refused_by_the_first_difference(
    config: PairConfig, tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    table = dict(tiny_tokenizer.get_vocab())
    table["a"], table["b"] = table["b"], table["a"]
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(table, unk_token="<unk>")), unk_token="<unk>", eos_token="</s>"
    )
    drafter = save_with_tokenizer(tmp_path / "other", tiny_llama(layers=1), other)
    first = min(tiny_tokenizer.get_vocab()[letter] for letter in "ab")
    with pytest.raises(
        ValueError, match=f"different tokenizers: id {first} is 'b' in the drafter and 'a' in the verifier"
    ):
        load_pair(replace(config, drafter=drafter))


def test_a_tokenizer_with_one_more_token_is_refused(
    config: PairConfig, tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    import copy

    longer = copy.deepcopy(tiny_tokenizer)
    longer.add_tokens(["<extra>"])
    drafter = save_with_tokenizer(tmp_path / "longer", tiny_llama(layers=1), longer)
    with pytest.raises(ValueError, match=r"id \d+ is '<extra>' in the drafter and missing in the verifier"):
        load_pair(replace(config, drafter=drafter))


def test_heads_of_different_heights_share_the_real_ids(
    config: PairConfig, tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    drafter = save_with_tokenizer(tmp_path / "taller", tiny_llama(layers=1, vocab=80), tiny_tokenizer)
    assert load_pair(replace(config, drafter=drafter)).vocab_size == len(tiny_tokenizer)


def test_a_head_shorter_than_the_vocabulary_limits_the_ids(
    config: PairConfig, tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    drafter = save_with_tokenizer(tmp_path / "shorter", tiny_llama(layers=1, vocab=50), tiny_tokenizer)
    assert load_pair(replace(config, drafter=drafter)).vocab_size == 50


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"verifier": "./nowhere"},
            FileNotFoundError,
            "verifier: expected a folder, .* got './nowhere': no such folder",
        ),
        ({"verifier": "no-such-model"}, FileNotFoundError, "verifier 'no-such-model' cannot be loaded: "),
        ({"drafter": "a/b/c"}, FileNotFoundError, "drafter: expected a folder, .* got 'a/b/c': no such folder"),
        ({"verifier": "embedded:smollm2-135m"}, ValueError, "did you mean 'smollm2-135m-instruct'"),
        ({"dtype": "int8"}, ValueError, "dtype: expected auto, float32, bfloat16, float16, got 'int8'"),
        ({"device": "gpu"}, ValueError, "device: expected auto, cpu or an available device, got 'gpu'"),
    ],
)
def test_what_cannot_be_loaded_is_named_on_one_line(
    config: PairConfig, changes: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        load_pair(replace(config, **changes))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_named(config: PairConfig, tmp_path: Path, tiny_llama: Any) -> None:
    tiny_llama(layers=1).save_pretrained(tmp_path / "bare")
    with pytest.raises(FileNotFoundError, match=r"tokenizer of the drafter '.*bare' cannot be loaded: "):
        load_pair(replace(config, drafter=str(tmp_path / "bare")))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a decoder-only model, got the encoder-decoder t5"):
        load_model(str(tmp_path))


def test_auto_is_bfloat16_where_it_is_fast_and_float32_for_small_models_elsewhere(
    config: PairConfig, tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = save_with_tokenizer(tmp_path / "half", tiny_llama().bfloat16(), tiny_tokenizer)
    config = replace(config, verifier=half, drafter="early-exit:1")
    for fast, small, dtype in (
        (True, 10, torch.bfloat16),
        (False, pairs.SMALL_MODEL, torch.float32),
        (False, 10, torch.bfloat16),
    ):
        monkeypatch.setattr(pairs, "_has_fast_bfloat16", lambda fast=fast: fast)
        monkeypatch.setattr(pairs, "SMALL_MODEL", small)
        assert load_pair(config).verifier.dtype == dtype
        assert load_pair(replace(config, dtype="float32")).verifier.dtype == torch.float32


def test_a_pair_that_only_decodes_is_packed_where_that_is_possible(
    config: PairConfig, tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    half = save_with_tokenizer(tmp_path / "half", tiny_llama(layers=3).bfloat16(), tiny_tokenizer)
    plain, packed = (
        load_pair(replace(config, verifier=half, drafter="early-exit:1", dtype="bfloat16"), decoding=decoding)
        for decoding in (False, True)
    )
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(packed.drafter(ids).logits, plain.drafter(ids).logits)
    assert (type(packed.verifier.lm_head) is torch.nn.Linear) != can_pack(plain.verifier)
