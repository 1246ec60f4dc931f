"""A live run on tiny random models: the plan, resuming after a kill, the same table, and the report on top of it."""

import json
import re
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from speccascade.data.pairs import Pair, PairIdentity
from speccascade.data.prompts import PromptConfig
from speccascade.eval import sweep
from speccascade.eval.config import EvaluateConfig
from speccascade.eval.methods import DIALS
from speccascade.eval.plan import plan_settings
from speccascade.eval.replay import Replay
from speccascade.eval.report import report
from speccascade.eval.sweep import run_sweep

TIMINGS = ["seconds"]


@pytest.fixture(scope="module")
def pair(tiny_llama, tiny_tokenizer) -> Pair:
    identity = PairIdentity("tiny drafter", "tiny verifier", "d" * 8, "v" * 8, "f" * 8)
    return Pair(tiny_llama(seed=1), tiny_llama(seed=2), tiny_tokenizer, 60, identity)


def manifest(identity: PairIdentity, temperature: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(identity=identity, plan=SimpleNamespace(temperature=temperature))


@pytest.fixture
def config(pair, build_trace, tmp_path, monkeypatch) -> EvaluateConfig:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"what is {n} plus {n}?", "reference": f"it is {2 * n}. #### {2 * n}"} for n in range(12)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    replays = {name: Replay(build_trace(seed=seed), None) for seed, name in enumerate(("validation", "test"))}
    monkeypatch.setattr(sweep, "load_pair", lambda *_, **__: pair)
    recorded = manifest(pair.identity)
    monkeypatch.setattr(
        sweep, "_open_traces", lambda config, hidden: (replays, recorded) if config.traces else ({}, None)
    )
    return EvaluateConfig(
        prompts=PromptConfig(source=str(prompts), chat=False, splits={"test": 1.0}),
        out=str(tmp_path / "run"),
        methods=("verifier", "drafter", "specdecode", "opt", "token_v2"),
        traces="made up",
        budgets=(0.25, 0.75),
        gamma=3,
        temperature=1.0,
        max_new_tokens=9,
        limit=3,
        scorers=("rouge_l", "final_answer"),
        warmup_tokens=2,
    )


def results_of(folder) -> pd.DataFrame:
    return pd.read_parquet(folder / "results.parquet")


def test_one_row_a_method_setting_and_prompt(config):
    results = results_of(run_sweep(config))
    assert results["method"].tolist()[:7] == ["verifier", "drafter", "specdecode", "opt", "opt", "token_v2", "token_v2"]
    assert len(results) == 3 * 7 and results["prompt_id"].nunique() == 3
    cascades = results[~results["method"].isin(["verifier", "drafter"])]
    assert (cascades["accepted"] + cascades["rejected"] + cascades["bonus"] == cascades["new_tokens"]).all()
    assert (results["new_tokens"] <= 9).all() and results["quality"].equals(results["rouge_l"])
    assert (results.loc[results["method"] == "drafter", "verifier_calls"] == 0).all()


def test_settings_spend_the_same_offline_budget(config):
    settings = pd.read_parquet(run_sweep(config) / "settings.parquet").set_index("key")
    lossless = settings.loc["specdecode", "offline_rejection"]
    for share in ("25%", "75%"):
        spent = settings.loc[settings["budgets"] == share, "offline_rejection"] / lossless
        # Chosen on one made-up trace, measured on another of 30 prompts.
        assert len(spent) == 2 and spent.between(float(share[:2]) / 100 - 0.1, float(share[:2]) / 100 + 0.1).all()
    assert settings.loc["verifier", "offline_quality"] == settings.loc["specdecode", "offline_quality"]


@pytest.mark.parametrize("finished", [1, 8, 15])
def test_a_killed_run_goes_on_and_ends_with_the_same_table(config, tmp_path, monkeypatch, finished):
    whole = results_of(run_sweep(replace(config, out=str(tmp_path / "whole"))))
    generate, calls = sweep._generate, []

    def killed_after(engine, *arguments):
        if len(calls) == finished:
            raise KeyboardInterrupt
        calls.append(engine)
        return generate(engine, *arguments)

    monkeypatch.setattr(sweep, "_generate", killed_after)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(config)
    assert not (tmp_path / "run" / "results.parquet").exists()
    journal = tmp_path / "run" / "answers.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"key": "opt@0.1", "prom')
    calls.clear()
    finished = 10**6
    resumed = results_of(run_sweep(config))
    assert len(calls) == len(whole) - len(json_lines(journal, before=calls)), "an answer was generated twice"
    pd.testing.assert_frame_equal(resumed.drop(columns=TIMINGS), whole.drop(columns=TIMINGS))


def json_lines(journal, before) -> list[dict]:
    """Answers in the journal that were there before the resumed run."""
    records = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    return records[: len(records) - len(before)]


def test_a_finished_run_generates_nothing_more(config, monkeypatch):
    first = results_of(run_sweep(config))
    monkeypatch.setattr(sweep, "_generate", lambda *arguments: pytest.fail("generated again"))
    pd.testing.assert_frame_equal(results_of(run_sweep(config)), first)
    fewer = results_of(run_sweep(replace(config, methods=("verifier", "opt"), limit=2)))
    assert len(fewer) == 2 * 3


def test_no_warm_up_changes_no_answer(config, tmp_path):
    chosen = replace(config, methods=("drafter", "specdecode"), limit=1)
    warm = results_of(run_sweep(chosen))
    cold = results_of(run_sweep(replace(chosen, warmup_tokens=0, out=str(tmp_path / "cold"))))
    pd.testing.assert_frame_equal(cold.drop(columns=TIMINGS), warm.drop(columns=TIMINGS))


def test_same_seed_same_answers_other_seed_others(config, tmp_path):
    texts = [
        results_of(run_sweep(replace(config, seed=seed, out=str(tmp_path / name))))["text"].tolist()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert texts[0] == texts[1] != texts[2]


def test_greedy_specdecode_is_the_verifier_alone_and_the_report_says_which_settings_coincide(config):
    folder = run_sweep(replace(config, temperature=0.0, methods=("verifier", "drafter", "specdecode", "lossy", "opt")))
    texts = results_of(folder).groupby("method")["text"].agg(list)
    assert texts["specdecode"] == texts["verifier"] == texts["lossy"]
    page = report(folder).read_text()
    assert "gave exactly the texts of another one" in page and "At temperature 0 many settings decide alike" in page


OF_CONFIG = {
    "gamma": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_new_tokens": 8, "seed": 1, "cut_reference": True
}  # fmt: skip
OF_PAIR = {"drafter_digest": "e" * 8, "verifier_digest": "e" * 8, "vocabulary_fingerprint": "e" * 8}
OF_MACHINE = ("code_version", "vocab_size", "dtype", "device", "prompts")


@pytest.mark.parametrize("key", [*OF_CONFIG, *OF_PAIR, *OF_MACHINE])
def test_another_run_in_the_folder_is_refused(config, pair, monkeypatch, key):
    config = replace(config, methods=("drafter",), traces=None, limit=1)
    run_sweep(config)
    found = sweep._identity(config, pair)
    if key in OF_CONFIG:
        config = replace(config, **{key: OF_CONFIG[key]})
    elif key in OF_PAIR:
        pair = replace(pair, identity=replace(pair.identity, **{key: OF_PAIR[key]}))
    elif key == "vocab_size":
        pair = replace(pair, vocab_size=59)
    elif key == "prompts":
        config = replace(config, prompts=replace(config.prompts, instruction="Say {prompt}"))
    elif key == "code_version":
        monkeypatch.setattr(sweep, "__version__", "0.0.0")
    else:
        other = deepcopy(pair.verifier).to(torch.float16 if key == "dtype" else "meta")
        pair = replace(pair, verifier=other)
    monkeypatch.setattr(sweep, "load_pair", lambda *_, **__: pair)
    with pytest.raises(ValueError, match=rf"holds a run with {key}={re.escape(repr(found[key]))}, this one has"):
        run_sweep(config)


def test_every_key_of_a_run_is_tried_above(config, pair):
    assert {*OF_CONFIG, *OF_PAIR, *OF_MACHINE} == set(sweep._identity(config, pair))


def test_two_runs_at_once_in_one_folder_are_refused(config, monkeypatch):
    generate = sweep._generate

    def meanwhile(*arguments):
        with pytest.raises(OSError, match="out: another run is writing to"):
            run_sweep(config)
        return generate(*arguments)

    config = replace(config, methods=("drafter",), limit=1)
    monkeypatch.setattr(sweep, "_generate", meanwhile)
    run_sweep(config)


def test_traces_of_another_pair_are_refused(config, pair, monkeypatch):
    other = replace(pair.identity, drafter="other", drafter_digest="e" * 8)
    monkeypatch.setattr(sweep, "_open_traces", lambda config, hidden: ({}, manifest(other)))
    with pytest.raises(
        ValueError, match=r"about other → tiny verifier, the pair given is tiny drafter .* drafter digest"
    ):
        run_sweep(replace(config, methods=("verifier",)))


def test_alphas_given_by_hand_need_no_traces(config):
    chosen = replace(config, traces=None, methods=("opt", "specdecode"), alphas={"opt": [0.1, 0.4]})
    assert results_of(run_sweep(chosen))["alpha"].dropna().unique().tolist() == [0.1, 0.4]
    with pytest.raises(ValueError, match="alphas: expected settings for 'diff', or traces"):
        run_sweep(replace(chosen, methods=("diff",)))


@pytest.mark.parametrize(
    "change", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.7, "methods": ("token_v2",)}]
)
def test_budgets_are_refused_where_the_traces_sampled_otherwise(config, change):
    with pytest.raises(ValueError, match="temperature: expected 0 or the traces' 1, with nothing cut off"):
        run_sweep(replace(config, **{"methods": ("opt",), **change}))


@pytest.mark.parametrize("change", [{"temperature": 0.7}, {"temperature": 0.0, "top_p": 0.9, "top_k": 5}])
def test_alphas_given_by_hand_and_greedy_decoding_are_free(config, change):
    by_hand = {"opt": [0.1]} if change["temperature"] else {}
    folder = run_sweep(replace(config, methods=("opt",), limit=1, alphas=by_hand, **change))
    compared = "offline_quality" in pd.read_parquet(folder / "settings.parquet")
    assert compared == (change["temperature"] == 0), "what traces at another temperature say is not shown beside it"


def test_every_method_that_is_offered_can_be_built():
    with pytest.raises(ValueError, match="expected one of") as refused:
        plan_settings(["?"], {}, {}, (), None, True, {})
    offered = str(refused.value).partition("one of ")[2].partition(", got")[0].split(", ")
    alphas = {name: [0.5] for name in DIALS}
    assert len(plan_settings(offered, {}, alphas, (), None, True, {})) == len(offered) - len(["router"])
    assert "typical" in offered and "top_k" not in offered


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("optt",)}, "methods: expected one of .*'optt'; did you mean 'opt'"),
        ({"methods": ("top_k",)}, "methods: .* nothing but a dial, got 'top_k', which also needs a value for k; known"),
        ({"alphas": {"optt": [0.1]}}, "alphas: expected one of .*'optt'; did you mean 'opt'"),
        ({"alphas": {"specdecode": [0.1]}}, "alphas: expected one of .*, got 'specdecode'"),
        ({"alphas": {"typical": [0.1]}}, "alphas: expected one of .*, got 'typical'"),
        ({"scorers": ("bleu",)}, "scorer: expected one of"),
        ({"split": "tset"}, "split: .*tset"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_runs(config, change, message):
    with pytest.raises(ValueError, match=message):
        run_sweep(replace(config, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"gamma": 0},
        {"limit": 0},
        {"repeats": 0},
        {"budgets": (1.2,)},
        {"scorers": ()},
        {"max_new_tokens": 0},
        {"warmup_tokens": -1},
    ],
)
def test_a_config_that_cannot_run_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        EvaluateConfig(**change)


def test_a_reference_is_cut_to_the_length_of_an_answer_if_asked(config):
    results = results_of(run_sweep(replace(config, cut_reference=True)))
    assert results["reference"].str.len().max() <= 9
