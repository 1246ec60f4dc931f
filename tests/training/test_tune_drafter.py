"""A drafter made from a tiny verifier: an ordinary folder, the same for the same seed, never half-made."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from speccascade.data.prompts import PromptConfig
from speccascade.training.tune_drafter import PROVENANCE_FILE, TuneDrafterConfig, learning_rate_at, tune_drafter


@pytest.fixture(scope="module")
def config(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable[..., Any], tiny_tokenizer: Any
) -> TuneDrafterConfig:
    root = tmp_path_factory.mktemp("tune")
    tiny_llama(layers=4).save_pretrained(root / "verifier")
    tiny_tokenizer.save_pretrained(root / "verifier")
    rows = [{"prompt": f"what is {i} + {i}?", "reference": f"it is {2 * i}. " * (1 + i % 3)} for i in range(40)]
    (root / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TuneDrafterConfig(
        out=root / "drafter",
        verifier=str(root / "verifier"),
        prompts=PromptConfig(source=str(root / "sums.jsonl"), chat=False, splits={"tune": 0.6, "validation": 0.4}),
        layers=2,
        steps=60,
        batch_size=4,
        learning_rate=5e-3,
        gold_weight=0.0,
        dtype="float32",
        device="cpu",
        check_examples=8,
    )


@pytest.fixture(scope="module")
def drafter(config: TuneDrafterConfig) -> Path:
    return tune_drafter(config)


def test_the_folder_loads_as_an_ordinary_model(drafter: Path, config: TuneDrafterConfig) -> None:
    model = AutoModelForCausalLM.from_pretrained(drafter)
    assert len(model.model.layers) == 2
    tokenizer, original = AutoTokenizer.from_pretrained(drafter), AutoTokenizer.from_pretrained(config.verifier)
    assert tokenizer.get_vocab() == original.get_vocab()
    output = model.generate(
        **tokenizer("what is 1 + 1?", return_tensors="pt", return_token_type_ids=False), max_new_tokens=3
    )
    assert output.shape[1] > 3


def test_provenance_tells_what_was_done_and_that_it_helped(drafter: Path, config: TuneDrafterConfig) -> None:
    provenance = json.loads((drafter / PROVENANCE_FILE).read_text())
    assert len(provenance["layers_kept"]) == 2
    assert provenance["settings"]["steps"] == 60
    assert 0 < provenance["cost_ratio"]["parameters"] < 1
    assert provenance["after"]["tv"] < provenance["before"]["tv"]
    assert provenance["after"]["agreement"] > provenance["before"]["agreement"]
    assert provenance["loss_last"] < provenance["loss_first"]


def test_references_make_it_right_where_the_verifier_is_not(config: TuneDrafterConfig, tmp_path: Path) -> None:
    out = tune_drafter(replace(config, out=tmp_path / "gold", gold_weight=0.7))
    after = json.loads((out / PROVENANCE_FILE).read_text())["after"]
    assert after["drafter_accuracy"] > after["verifier_accuracy"] + 0.3
    assert after["drafter_right_alone"] > 0.3


def test_the_same_seed_gives_the_same_weights_and_another_does_not(
    drafter: Path, config: TuneDrafterConfig, tmp_path: Path
) -> None:
    weights = load_file(drafter / "model.safetensors")
    same, other = (
        load_file(tune_drafter(replace(config, out=tmp_path / str(seed), seed=seed)) / "model.safetensors")
        for seed in (0, 1)
    )
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert any(not torch.equal(weights[name], other[name]) for name in weights)


def test_a_given_list_of_layers_is_taken(config: TuneDrafterConfig, tmp_path: Path) -> None:
    out = tune_drafter(replace(config, out=tmp_path / "listed", layers=[0, 3], steps=1))
    assert json.loads((out / PROVENANCE_FILE).read_text())["layers_kept"] == [0, 3]


def test_a_finished_drafter_is_kept_and_another_is_not_overwritten(drafter: Path, config: TuneDrafterConfig) -> None:
    stamp = (drafter / "model.safetensors").stat().st_mtime_ns
    assert tune_drafter(config) == drafter
    assert (drafter / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match=r"made with another steps.*--overwrite"):
        tune_drafter(replace(config, steps=2))
    assert (drafter / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_changed_file_under_the_same_name_makes_another_drafter(
    config: TuneDrafterConfig, tmp_path: Path, tiny_llama: Callable[..., Any]
) -> None:
    shutil.copytree(config.verifier, tmp_path / "verifier")
    questions = tmp_path / "sums.jsonl"
    shutil.copyfile(str(config.prompts.source), questions)
    prompts = replace(config.prompts, source=str(questions))
    mine = replace(config, out=tmp_path / "d", verifier=str(tmp_path / "verifier"), prompts=prompts, steps=1)
    tune_drafter(mine)
    questions.write_text(questions.read_text().replace("it is", "that is"))
    with pytest.raises(ValueError, match=r"made with another examples; .*--overwrite"):
        tune_drafter(mine)
    before = (mine.out / PROVENANCE_FILE).read_text()
    tune_drafter(replace(mine, overwrite=True))
    made = (mine.out / PROVENANCE_FILE).read_text()
    assert made != before
    tune_drafter(replace(mine, overwrite=True))
    assert (mine.out / PROVENANCE_FILE).read_text() == made, "nothing changed, so it is kept"
    tiny_llama(seed=5, layers=4).save_pretrained(tmp_path / "verifier")
    with pytest.raises(ValueError, match="made with another verifier_weights; "):
        tune_drafter(mine)


def test_what_is_no_drafter_is_never_overwritten(config: TuneDrafterConfig, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="out:"):
            tune_drafter(replace(config, out=tmp_path, overwrite=overwrite))
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_killed_run_leaves_nothing_and_the_next_starts_over(
    config: TuneDrafterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "drafter"

    def die(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", die)
        with pytest.raises(KeyboardInterrupt):
            tune_drafter(replace(config, out=out, steps=1))
    assert not out.exists()
    assert (tune_drafter(replace(config, out=out, steps=1)) / PROVENANCE_FILE).is_file()


def test_bad_settings_are_named(config: TuneDrafterConfig) -> None:
    with pytest.raises(ValueError, match="steps: expected at least 1, got 0"):
        replace(config, steps=0)
    with pytest.raises(ValueError, match=r"gold_weight: expected a number from 0 to 1, got 1\.5"):
        replace(config, gold_weight=1.5)
    with pytest.raises(ValueError, match="layers: expected 1 to 4, got 9"):
        tune_drafter(replace(config, out=config.out.with_name("nine"), layers=9))
    with pytest.raises(ValueError, match="expected at least one example"):
        tune_drafter(replace(config, out=config.out.with_name("short"), max_tokens=2))


def test_the_rate_rises_then_falls_to_nearly_nothing(config: TuneDrafterConfig) -> None:
    rates = [learning_rate_at(step, replace(config, steps=50, warmup=10, learning_rate=1.0)) for step in range(50)]
    assert rates[0] == pytest.approx(0.1)
    assert 0.85 < max(rates) <= 1
    assert rates[-1] < 0.01
    assert rates[10:] == sorted(rates[10:], reverse=True)
