"""Are trained routers worth having? Every head and feature set on one real pair, beside every plug-in rule, held out.

Collect the traces of four domains, make one set of them, and run the study:

    for name in code news maths translation; do speccascade collect --config configs/collect/study-$name.yaml; done
    cd runs/study; speccascade collect --merge code news maths translation --out all; cd -
    python benchmarks/study.py heads                # every head on all domains
    python benchmarks/study.py domains              # trained on one domain, tested on every other
    python benchmarks/study.py floor                # how much of the distance is noise that no rule can take away

`heads` trains each router of ROUTERS (a finished one is kept), replays the test split with all of them and all plug-in
rules, and writes results/study_heads.json. α and checkpoints are chosen on the validation split; intervals resample
documents. Nothing is timed.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from speccascade.data.traces import Traces
from speccascade.eval.config import EvaluateConfig
from speccascade.eval.frontier import FrontierConfig, measure_frontiers
from speccascade.eval.methods import plug_in_methods
from speccascade.eval.offline import open_replays, run_offline
from speccascade.eval.provenance import describe_machine, describe_run
from speccascade.router.loading import load_router
from speccascade.training.cli import main as train

RESULTS = Path(__file__).parent / "results"

_SMALL_STEPS = {"data.batch_size": 1024, "model.learning_rate": 0.002, "trainer.max_epochs": 20}
_TOPK = {"model.feature_set": "verified+topk"}
_HIDDEN = {"model.feature_set": "verified+topk+hidden", "model.rank": 64}
_DAMPED = {"model.dropout": 0.3, "model.weight_decay": 0.1}
_POOLED = {"model.kind": "pooled", "model.estimator": "pooled"} | _DAMPED
_TOKENS = {"model.token_rank": 32, "trainer.max_epochs": 4}

ROUTERS: dict[str, dict[str, Any]] = {
    "linear": {"model.kind": "linear"},
    "mlp-draft-only": {"model.feature_set": "draft_only"},
    "mlp": {},
    "mlp-two-confidence": {"model.estimator": "two_confidence"},
    "mlp-cost-sensitive": {"model.estimator": "cost_sensitive"},
    "mlp-topk": _TOPK,
    "mlp-hidden": _HIDDEN | _DAMPED,
    "trees": {"model.kind": "trees"} | _TOPK,
    "attention": {"model.kind": "attention", "model.hidden": [32, 64]},
    "pooled": _POOLED,
    "pooled-topk": _POOLED | _TOPK,
    "pooled-hidden": _POOLED | _HIDDEN,
    "pooled-tokens": _POOLED | _TOPK | _TOKENS,
    "pooled-all": _POOLED | _HIDDEN | _TOKENS,
}


TOLD = ("router-pooled-all", "router-pooled-tokens")
"""Routers whose paired differences from every rule are kept."""

BELIEVING = tuple(f"router-pooled-all-{rule}" for rule in ("greedyward", "token_v2", "token_v3"))
"""Token rules whose rates are kept beside those of the plug-ins."""


def main() -> None:
    options = parse_options()
    if not sys.argv[1:] and not (options.runs / "all").is_dir():
        print(f"left out: no traces in {options.runs / 'all'}; --help says how to collect them")
        return
    figures = PARTS[options.part](options)
    command = {"command": shlex.join(["python", "benchmarks/study.py", *sys.argv[1:]])}
    machine = describe_machine("torch", "pytorch-lightning", "scikit-learn", "numpy")
    record = describe_run() | command | machine | {"seed": options.seed} | figures
    path = RESULTS / f"study_{options.part}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")
    print(f"written: {path}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="heads", choices=PARTS, help="what to study (default: heads)")
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="folder of traces, and for the routers")
    parser.add_argument("--routers", nargs="*", default=list(ROUTERS), help="which of ROUTERS (default: all)")
    parser.add_argument("--domains", nargs="*", default=["code", "news", "maths"], help="folders of traces in --runs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if unknown := set(options.routers) - set(ROUTERS):
        parser.error(f"--routers: expected some of {', '.join(ROUTERS)}; got {', '.join(sorted(unknown))}")
    return options


def study_heads(options: argparse.Namespace) -> dict[str, Any]:
    """Train every head on all domains and measure it on their test splits."""
    traces = options.runs / "all"
    routers = {
        name: train_router(name, traces, options.runs / "routers" / name, options.seed) for name in options.routers
    }
    out = options.runs / "heads"
    config = EvaluateConfig(offline=True, traces=str(traces), router=tuple(map(str, routers.values())), out=str(out))
    run_offline(config)
    offline = json.loads((out / "frontier.json").read_text())
    return {"routers": {name: ROUTERS[name] for name in options.routers}, "offline": condense(offline)}


def condense(offline: dict[str, Any]) -> dict[str, Any]:
    """Keep what the tables of benchmarks/README.md are made of: the whole record takes megabytes."""
    losses = {}
    for loss, found in offline["losses"].items():
        names = ("positions", "prompts", "documents", "drafter_loss", "verifier_loss", "rejection_of_lossless")
        pairs = [row for row in found["comparisons"] if row["router"] in TOLD]
        paired = [{key: value for key, value in row.items() if key != "at_budgets"} for row in pairs]
        losses[loss] = {name: found[name] for name in (*names, "distance_percent")} | {"paired": paired}
    rates = [row for row in offline["rates"] if not row["method"].startswith("router-") or row["method"] in BELIEVING]
    kept = {name: offline[name] for name in ("traces", "chosen_on", "reported_on", "resamples", "calibration", "drift")}
    return kept | {"losses": losses, "rates": rates}


def study_domains(options: argparse.Namespace) -> dict[str, Any]:
    """Train on one domain, test on each: distances and what the drift warning says."""
    rows = []
    for home in options.domains:
        for name in options.routers:
            folder = train_router(name, options.runs / home, options.runs / f"routers-{home}" / name, options.seed)
            for away in options.domains:
                rows.append({"router": name, "trained_on": home, "tested_on": away} | measure(folder, options, away))
                print(json.dumps(rows[-1], default=str))
    return {"transfers": rows}


def measure(router: Path, options: argparse.Namespace, domain: str) -> dict[str, Any]:
    """Distances of a router on one domain's test split, beside the plug-in rules that need no training."""
    out = options.runs / "domains"
    config = EvaluateConfig(
        offline=True,
        methods=("verifier_gap", "expected_gain", "greedyward"),
        traces=str(options.runs / domain),
        router=(str(router),),
        out=str(out),
        frontier=FrontierConfig(resamples=400),
    )
    run_offline(config)
    found = json.loads((out / "frontier.json").read_text())
    drift = load_router(router).drift(Traces.open(options.runs / domain, check=False).split("test").stats)
    distances = {loss: table["distance_percent"] for loss, table in found["losses"].items()}
    return {"drifted": drift.drifted, "drift": drift.describe(), "distance_percent": distances}


def study_floor(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the plug-in rules where they are right: labels drawn from the verifier's own probabilities.

    Where p is the truth nothing can be learned, and VerifierGap (0-1 loss) and ExpectedGain (a sample) are optimal: the
    distance that they keep there is the price of not knowing the label.
    """
    traces = Traces.open(options.runs / "all")
    generator = torch.Generator().manual_seed(options.seed)
    replays = {}
    for name, replay in open_replays(traces, ("validation", "test")).items():
        replays[name] = type(replay)(relabel(replay.source, generator), replay.logged)
    methods = plug_in_methods(["opt", "diff", "verifier_gap", "expected_gain"])
    found = measure_frontiers(methods, replays["validation"], replays["test"]).summary
    return {"distance_percent": {loss: table["distance_percent"] for loss, table in found.items()}}


def relabel(source: Any, generator: torch.Generator) -> Any:
    """Draw every label from p over the logged tokens; where the tail is drawn the label stays what it was."""
    from dataclasses import replace

    tail = (1 - source.topk_p.sum(dim=-1, keepdim=True)).clamp_min(0)
    drawn = torch.multinomial(torch.cat([source.topk_p, tail], dim=-1), 1, generator=generator)[:, 0]
    logged = drawn < source.topk_p.shape[1]
    place = drawn.clamp_max(source.topk_p.shape[1] - 1).unsqueeze(-1)
    fresh = {
        name: torch.where(logged, getattr(source, column).gather(-1, place)[:, 0], getattr(source, name))
        for name, column in (("label", "topk_ids"), ("q_label", "topk_q"), ("p_label", "topk_p"))
    }
    return replace(source, **fresh)


def train_router(name: str, traces: Path, out: Path, seed: int) -> Path:
    """Train one router of ROUTERS, unless it is there."""
    bundle = out / "router"
    if (bundle / "router_config.json").is_file():
        return bundle
    print(f"training {name} on {traces}")
    options = _SMALL_STEPS | ROUTERS[name] | {"data.traces": traces, "out": out, "seed_everything": seed}
    train([f"--{key}={value}" for key, value in options.items()])
    return bundle


PARTS: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "heads": study_heads,
    "domains": study_domains,
    "floor": study_floor,
}

if __name__ == "__main__":
    main()
