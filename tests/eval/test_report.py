"""From replayed traces to page, record and figures."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from speccascade.eval import offline
from speccascade.eval.config import EvaluateConfig
from speccascade.eval.frontier import FrontierConfig
from speccascade.eval.methods import Method, colder_methods, plug_in_methods
from speccascade.eval.replay import Replay
from speccascade.eval.report import gather, report
from speccascade.eval.sweep import evaluate

METHODS = len(plug_in_methods()) + len(colder_methods()) + 1  # the router


@dataclass(frozen=True)
class Gap:
    """A stand-in for a trained router."""

    alpha: float

    def gap(self, stats):
        return stats.verifier_max - stats.verifier_at_draft

    def defer(self, stats):
        return self.gap(stats) > self.alpha * stats.tv


@pytest.fixture
def folder(build_trace, tmp_path, monkeypatch) -> Path:
    replays = {name: Replay(build_trace(seed=seed), None) for seed, name in enumerate(("validation", "test"))}
    plan = SimpleNamespace(
        prompts={"source": "embedded:gsm8k"}, drafter="tiny", verifier="embedded:smollm2-135m-instruct",
        temperature=1.0, top_k=12, code_version="0",
    )  # fmt: skip
    traces = SimpleNamespace(manifest=SimpleNamespace(plan=plan, rows=1200, digest="abc", identity=None))
    learned = ("zero_one", "sampled", "greedy")
    router = Method("router", "Router", "router", -math.inf, math.inf, lambda alpha, loss: Gap(alpha), learned)
    monkeypatch.setattr(offline.Traces, "open", lambda directory: traces)
    monkeypatch.setattr(offline, "open_replays", lambda traces, splits, *rest, **options: replays)
    monkeypatch.setattr(offline, "open_routers", lambda directories: {"router": router})
    frontier = FrontierConfig(points=7, resamples=40)
    return evaluate(EvaluateConfig(traces="made up", out=str(tmp_path), offline=True, frontier=frontier))


def test_the_offline_report_is_whole(folder):
    page = report(folder).read_text(encoding="utf-8")
    record = json.loads((folder / "report.json").read_text())
    assert record["models"]["licences"] == {"embedded:smollm2-135m-instruct": "Apache-2.0"}
    assert record["data"] == {"source": "embedded:gsm8k", "licence": "MIT"}
    assert len(record["frontiers"]) == 3 * METHODS
    for figure in record["figures"]:
        assert f"]({figure})" in page
        for path in (folder / figure, (folder / figure).with_suffix(".svg")):
            assert path.stat().st_size > 3000
    assert {Path(figure).stem for figure in record["figures"]} == {
        "frontier_zero_one", "frontier_sampled", "frontier_greedy", "distances", "reliability",
        "regret_zero_one", "regret_sampled", "regret_greedy",
    }  # fmt: skip
    for loss in ("zero_one", "sampled", "greedy"):
        for sentence in record["losses"][loss]["verdict"]:
            assert sentence in page
    assert "GSM8K" not in page and "(MIT)" in page and "Calibration error of the drafter's confidence" in page


def test_figures_do_not_change_from_one_report_to_the_next(folder):
    report(folder)
    first = {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}
    report(folder)
    assert {path.name: path.read_bytes() for path in (folder / "figures").iterdir()} == first


def test_tables_open_elsewhere(folder):
    import pyarrow.parquet

    points = pyarrow.parquet.read_table(folder / "frontier.parquet")
    assert {"loss", "method", "alpha", "rejection", "rejection_high", "quality", "chosen"} <= set(points.column_names)
    assert gather(folder).frontiers["method"].nunique() == METHODS


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected results\.parquet or frontier\.json"):
        report(tmp_path)


def test_offline_needs_traces(tmp_path):
    with pytest.raises(ValueError, match="traces: expected a folder of traces to replay, got none"):
        evaluate(EvaluateConfig(offline=True, out=str(tmp_path)))
