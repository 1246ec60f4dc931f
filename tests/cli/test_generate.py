"""``speccascade generate`` on a tiny pair: deciders, prompts, output, and what is refused."""

from __future__ import annotations

import io
import json

import pytest
import yaml

from speccascade.cli import main


@pytest.fixture
def generate(pair_folders, capsys):
    """Run the command on the tiny pair; return its exit code, stdout and stderr."""
    drafter, verifier = pair_folders

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["generate", f"--drafter={drafter}", f"--verifier={verifier}", "--max-new-tokens=12", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_lossless_and_verifier_alone_write_the_same(generate) -> None:
    code, cascade, _ = generate("tom has 3", "--rule", "specdecode", "--gamma", "3")
    assert code == 0
    assert cascade.strip()
    assert generate("tom has 3", "--alone", "verifier") == (0, cascade, "")
    assert generate("tom has 3", "--rule", "specdecode", "--cost-ratio", "0.4") == (0, cascade, "")


def test_seeds_repeat(generate) -> None:
    sampled = [
        generate("tom has 3", "--rule=opt", "--alpha=0.3", "--temperature=1", f"--seed={n}")[1] for n in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_stats_state_every_rate(generate) -> None:
    _, out, err = generate("tom has 3", "--rule=opt", "--alpha=0.3", "--stats")
    for word in ("acceptance", "deferral", "rejection", "calls", "tokens"):
        assert any(line.startswith(word) for line in err.splitlines())
    assert "acceptance" not in out


def test_show_prints_the_text_once_with_a_legend(generate) -> None:
    _, out, _ = generate("tom has 3", "--rule=chow", "--alpha=0.5", "--show")
    assert out.splitlines()[-1].startswith("— ")
    assert "accepted draft" in out


def test_prompts_from_a_file_as_json(generate, tmp_path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("tom has 3\n\nann has 4\n")
    _, out, _ = generate("--file", str(prompts), "--rule=specdecode", "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["prompt"] for record in records] == ["tom has 3", "ann has 4"]
    assert all(record["stats"]["new_tokens"] <= 12 for record in records)


def test_prompt_from_stdin(generate, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("tom has 3\n"))
    piped = generate("--rule=specdecode")
    assert piped == generate("tom has 3", "--rule=specdecode")


def test_out_writes_text_and_the_resolved_config(generate, tmp_path) -> None:
    code, out, _ = generate("tom has 3", "--rule=specdecode", "--out", str(tmp_path / "texts" / "a.txt"))
    assert (code, out) == (0, "")
    assert (tmp_path / "texts" / "a.txt").read_text().strip()
    config = yaml.safe_load((tmp_path / "texts" / "a.txt.config.yaml").read_text())
    assert config["rule"] == "specdecode"
    assert config["prompts"] == ["tom has 3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", "--rule=opt", "--router=somewhere"], "cannot take --rule and --router together: choose one"),
        (["x", "--rule=optt", "--alpha=0.1"], "no rule is called 'optt'"),
        (["x", "--rule=opt"], "rule 'opt': expected a value for alpha"),
        (["x", "--rule=specdecode", "--alpha=0.3"], "takes no parameter, got 'alpha'"),
        (["x", "--rule=opt", "--alpha=0.3", "--budget=0.1"], "cannot take --alpha and --budget together"),
        (["x", "--rule=specdecode", "--budget=0.1"], "--budget: only a router"),
        (["x", "--router=r", "--budget=0.1", "--budget-kind=speed"], "--budget-kind: expected one of rejection, "),
        (["x", "--router=r", "--budget-kind=latency"], "--budget-kind: says what a budget is; give --budget"),
        (["x", "--router=r", "--budget=0.1", "--confidence=0.9"], "--confidence: only a --budget of"),
        (["x", "--router=r", "--budget=0.5", "--budget-kind=latency"], "--budget-kind latency: needs --cost-ratio"),
        (["x", "--alone=both"], "--alone: expected drafter or verifier, got 'both'"),
        (["x", "--router=nowhere"], "expected a folder or a Hub id"),
        (["x", "--rule=specdecode", "--verifier=no/such/model"], "no/such/model"),
        (["x", "--rule=specdecode", "--gamma=0"], "gamma: expected an integer >= 1, got 0"),
        (["--rule=specdecode", "--file=nowhere.txt"], "--file: no such file: 'nowhere.txt'"),
        (["x", "--rule=specdecode", "--temperature=-1"], "temperature"),
        (["x", "--rule=specdecode", "--json", "--show"], "cannot take --json and --show together"),
        (["x", "--router=somewhere", "--rule-options.weight=0.5"], "--rule-options: only a rule takes them"),
        (["x", "--alone=drafter", "--rule-options.weight=0.5"], "--rule-options: only a rule takes them"),
        (["x", "--alone=drafter", "--alpha=0.3"], "--alpha: a model alone defers to nobody"),
        (["x", "--alone=verifier", "--gamma=3"], "--gamma: a model alone drafts nothing"),
        (["x", "--alone=verifier", "--cost-ratio=0.3"], "--cost-ratio: a model alone drafts nothing"),
        (["x", "--rule=specdecode", "--cost-ratio=2"], "cost_ratio: expected a number in (0, 1], got 2"),
        (["x"], "nobody decides: give --rule, --router or --alone"),
    ],
)
def test_refusals_take_one_line(generate, monkeypatch, tmp_path, words, message) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = generate(*words)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("speccascade generate: error: ")
    assert err.count("\n") == 1


def test_no_prompt_is_refused(generate, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, _, err = generate("--rule=specdecode")
    assert (code, err.count("\n")) == (2, 1)
    assert "no prompt" in err
