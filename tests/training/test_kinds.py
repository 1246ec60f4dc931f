"""Every kind of head, from the command line to a bundle that answers as its checkpoint; mixtures that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speccascade.cli import main as speccascade
from speccascade.data.decisions import defer_in_order
from speccascade.data.traces import Traces, TraceSplit
from speccascade.router.learned import LearnedRouter
from speccascade.router.token_router import TokenRouter
from speccascade.training.cli import main
from speccascade.training.estimates import decider, estimate, mean_loss
from speccascade.training.export import find_checkpoint
from speccascade.training.holdout import divide
from speccascade.training.module import RouterModule
from speccascade.training.splits import Reading, TraceTensors, read_split

POSITION_HEADS = {
    "linear": ["--model.kind=linear", "--model.feature_set=draft_only", "--model.losses=[zero_one,sampled,log]"],
    "mlp two_confidence": ["--model.estimator=two_confidence", "--model.feature_set=verified+topk"],
    "mlp hidden": ["--model.feature_set=verified+hidden", "--model.rank=2", "--model.dropout=0.1"],
    "mlp cost_sensitive": ["--model.estimator=cost_sensitive"],
    "trees": ["--model.kind=trees"],
    "attention": ["--model.kind=attention", "--model.context=3"],
    "attention cost_sensitive": ["--model.kind=attention", "--model.estimator=cost_sensitive"],
}
TOKEN_HEADS = {
    "pooled": ["--model.kind=pooled"],
    "pooled hidden": ["--model.kind=pooled", "--model.feature_set=verified+topk+hidden", "--model.rank=2"],
}


@pytest.fixture(scope="module")
def traces(make_traces: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """800 positions of 40 prompts, 8 of which validate, with hidden states of six numbers."""
    return make_traces(tmp_path_factory.mktemp("kinds") / "traces", prompts=40, length=20, hidden=6)


def train(traces: Path, out: Path, options: list[str]) -> RouterModule:
    with torch.random.fork_rng():
        main([
            f"--data.traces={traces}", f"--out={out}", "--trainer.max_epochs=2", "--data.batch_size=200",
            "--model.hidden=[8,8]", "--bundle.calibration.resamples=5", "--bundle.calibration.points=5",
            "--bundle.recalibrate=none", *options,
        ])  # fmt: skip
    return RouterModule.load_from_checkpoint(find_checkpoint(out), map_location="cpu", weights_only=True)


def read(traces: Path, head: torch.nn.Module, split: str) -> tuple[TraceSplit, TraceTensors]:
    """A split as routers see it, and as training does."""
    hidden = head.feature_set.endswith("hidden")
    own = {"candidates": head.kind == "pooled", "whole_prompts": head.context > 0}
    opened = Traces.open(traces)
    return opened.split(split, hidden=hidden), read_split(opened, split, Reading(head.feature_set, **own))


@pytest.mark.parametrize("name", POSITION_HEADS)
def test_a_bundle_of_positions_answers_as_its_checkpoint(name: str, traces: Path, tmp_path: Path) -> None:
    head = train(traces, tmp_path, POSITION_HEADS[name]).head
    router = LearnedRouter.from_pretrained(tmp_path / "router", loss="zero_one")
    split, tensors = read(traces, head, "test")
    order = split.sequences()
    assert (order >= 0).all(), "prompts of one length"
    stats = split.stats.arrange(order)
    if head.estimator == "cost_sensitive":
        decided = decider(head, tensors, "zero_one", tensors.tv)(0.3)
        assert torch.equal(router.with_alpha(0.3).defer(stats), decided[order])
    else:
        gap = estimate(head, tensors)[:, 0]
        assert gap.abs().max() > 0, "something was learned"
        torch.testing.assert_close(router.gap(stats), gap[order], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TOKEN_HEADS)
def test_a_bundle_of_tokens_believes_as_its_checkpoint(name: str, traces: Path, tmp_path: Path) -> None:
    head = train(traces, tmp_path, TOKEN_HEADS[name]).head
    assert (head.estimator, head.losses, head.top_k) == ("pooled", ("log",), 24)
    router = TokenRouter.from_pretrained(tmp_path / "router")
    split, tensors = read(traces, head, "test")
    candidates = tensors.candidates
    assert candidates is not None
    belief, tail = router.belief_over(*candidates.unbind(dim=-1), split.topk_ids, split.stats)
    with torch.inference_mode():
        own = head(tensors.features, candidates).exp()
    torch.testing.assert_close(torch.cat([belief, tail[:, None]], dim=1), own, rtol=1e-4, atol=1e-6)
    assert (own[:, :-1] - candidates[..., 1]).abs().max() > 1e-3, "it moved away from p"


def test_hidden_states_are_read_along_directions_of_the_training_split(traces: Path, tmp_path: Path) -> None:
    """Each stored direction has variance one on it; both models' six numbers become two each."""
    head = train(traces, tmp_path, [*POSITION_HEADS["mlp hidden"], "--bundle.enabled=false"]).head
    _, tensors = read(traces, head, "train")
    with torch.no_grad():
        numbers = head.normalise(tensors.features)[:, -4:]
    torch.testing.assert_close(numbers.var(dim=0), torch.ones(4), rtol=1e-2, atol=1e-2)
    assert [layer.p for layer in head.modules() if isinstance(layer, torch.nn.Dropout)] == [0.1, 0.1]


def test_a_head_that_reads_order_is_calibrated_in_order(traces: Path, tmp_path: Path) -> None:
    """Rates of the table are those of the bundle on whole held-back prompts; in another order they are not."""
    head = train(traces, tmp_path, [*POSITION_HEADS["attention"], "--trainer.max_epochs=20"]).head
    router = LearnedRouter.from_pretrained(tmp_path / "router")
    split, tensors = read(traces, head, "validation")
    _, back = divide(tensors, 0.5)
    assert back is not None
    held = torch.isin(split.prompt_index, back.prompt_index)
    for row in router.config.calibration["sampled"]:
        chosen = router.with_alpha(row.alpha)
        defer = defer_in_order(chosen, split.stats, split.sequences())[held].float()
        assert float(defer.mean()) == pytest.approx(row.deferral, abs=1e-5)
        assert float((defer * split.stats.tv[held]).mean()) == pytest.approx(row.rejection, abs=1e-4)
    backwards = estimate(head, back.take(torch.arange(len(back)).flip(0))).flip(0)
    assert not torch.allclose(backwards, estimate(head, back), atol=1e-3), "the order matters to this head"
    assert router.config.figures["validation_loss"] == pytest.approx(mean_loss(head, back), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["--model.kind=pooled", "--model.estimator=gap"], "estimator: expected 'pooled' for kind 'pooled' alone"),
        (["--model.kind=mlp", "--model.estimator=pooled"], "estimator: expected 'pooled' for kind 'pooled' alone"),
        (["--model.kind=attention", "--model.hidden=[64]"], "hidden: expected two widths"),
        (["--model.context=4"], "context: expected 0 for kind 'mlp'"),
        (["--model.rank=2"], "rank: expected 0 for features without hidden states, got 2"),
        (["--model.feature_set=verified+hidden", "--model.rank=7"], "rank: expected 0 to 6, got 7"),
        (["--model.kind=linear", "--model.dropout=0.1"], "dropout: expected 0 for kind 'linear'"),
        (["--model.kind=trees", "--data.memory=scan"], "memory: expected 'whole' for a head of kind 'trees'"),
        (["--model.kind=attention", "--data.memory=scan"], "memory: expected 'whole' or 'auto'"),
        (["--model.kind=pooled", "--data.labels=outcome"], "labels: expected 'gold' for a head that reads candidate"),
        (["--model.kind=pooled", "--bundle.recalibrate=isotonic"], "recalibrate: expected none or auto"),
        (["--model.estimator=two_confidence", "--model.losses=[log]"], "losses: two_confidence learns chances"),
    ],
)
def test_what_does_not_go_together_is_refused_on_one_line(
    options: list[str], answer: str, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speccascade(["train", f"--data.traces={traces}", f"--out={tmp_path / 'out'}", *options]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1 and errors[0].startswith("speccascade train: error: ")
    assert re.search(answer, errors[0]), errors[0]
    assert not (tmp_path / "out" / "checkpoints").exists(), "refused before it is trained"


def test_hidden_features_need_hidden_states(
    make_traces: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_traces(tmp_path / "traces", prompts=10, length=5)
    assert speccascade(["train", f"--data.traces={folder}", "--model.feature_set=verified+hidden"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "hidden: expected traces collected with hidden=true" in line
