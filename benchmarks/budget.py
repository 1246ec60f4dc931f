"""Do quality budgets keep their promise on real traces? How often a chosen α loses more than ε, over many calibrations.

    python benchmarks/budget.py --traces runs/demo/traces --router runs/demo/router
    python benchmarks/budget.py --traces DIR --router DIR --splits validation test --documents 100 --drop 0.02

The documents of the given splits are the pool. Each of the resamples draws calibration documents from it without
replacement, bounds the quality drop at every α of a grid that comes from other documents (of --grid-split), chooses by
fixed-sequence testing, and looks up the drop of the chosen α over the whole pool and over the documents not drawn. The
share of resamples above ε should be at most δ = 1 − confidence. Beside it stands what one would get without a bound,
from the observed drop alone. Nothing is timed.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from speccascade.data.traces import Traces
from speccascade.eval.provenance import describe_machine, describe_run
from speccascade.router.budgets import last_within
from speccascade.router.bundle import load_bundle
from speccascade.training.bounds import mean_upper_bound
from speccascade.training.calibrate import make_grid, make_regime, sums_by_document
from speccascade.training.splits import Reading, read_split

Array = NDArray[np.float64]


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    if not sys.argv[1:] and not options.router.is_dir():
        print(f"left out: no router at {options.router}; `speccascade demo` makes one")
        return
    traces, head = Traces.open(options.traces), load_bundle(options.router).head()
    grid_split = read_split(traces, options.grid_split, reading_of(head))
    figures = []
    for regime in options.regimes:
        alphas = make_grid(head, grid_split, regime, options.points)
        drops, rejection = measure_pool(head, traces, options.splits, regime, sorted(alphas))
        for drop in options.drop:
            found = study(drops, rejection, drop, options)
            figures.append({"regime": regime, "drop": drop, "pool_documents": len(drops)} | found)
            print(json.dumps(figures[-1]))
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    command = {"command": shlex.join(["python", "benchmarks/budget.py", *sys.argv[1:]])}
    machine = describe_machine("torch", "numpy")
    record = describe_run() | command | machine | {"settings": settings, "figures": figures}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2, default=str) + "\n")
    print(f"written: {options.out}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    demo = Path("runs/demo")
    parser.add_argument("--traces", type=Path, default=demo / "traces", help="folder of traces (default: the demo's)")
    parser.add_argument(
        "--router",
        type=Path,
        default=demo / "router",
        help="trained on other splits of them (default: the demo's)",
    )
    parser.add_argument("--splits", nargs="+", default=["test"], help="the pool, unseen in training (default: test)")
    parser.add_argument("--grid-split", default="validation", help="where the grid of α comes from")
    parser.add_argument("--regimes", nargs="+", default=["greedy", "sampled"], choices=["greedy", "sampled"])
    parser.add_argument("--drop", type=float, nargs="+", default=[0.01, 0.02, 0.05], help="budgets ε")
    parser.add_argument("--confidence", type=float, default=0.9, help="1 − δ (default: 0.9)")
    parser.add_argument("--documents", type=int, help="calibration documents a resample (default: half of the pool)")
    parser.add_argument("--resamples", type=int, default=200)
    parser.add_argument("--points", type=int, default=33, help="settings of α")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "budget.json")
    return parser.parse_args()


def reading_of(head: Any) -> Reading:
    return Reading(head.feature_set, candidates=head.kind == "pooled", whole_prompts=bool(head.context))


def measure_pool(head: Any, traces: Traces, splits: list[str], regime: str, alphas: list[float]) -> tuple[Array, Array]:
    """Quality drop of every document at every α ``[D, M]``, and the rejection rate over the pool ``[M]``."""
    drops, spent, positions = [], np.zeros(len(alphas)), 0
    for split in splits:
        tensors = read_split(traces, split, reading_of(head))
        seen = make_regime(head, tensors, regime)
        counts = np.bincount(seen.document).astype(float)
        sums = np.stack([sums_by_document(alpha, seen, len(counts)) for alpha in alphas], axis=1)
        drops.append(sums[:, :, 3] / counts[:, None])
        spent += sums[:, :, 1].sum(axis=0)
        positions += len(tensors)
    return np.concatenate(drops), spent / positions


def study(drops: Array, rejection: Array, budget: float, options: argparse.Namespace) -> dict[str, float | None]:
    """Choose on drawn documents, judge on the pool and on the rest; every share is of all resamples."""
    size = options.documents or len(drops) // 2
    if not 0 < size < len(drops):
        raise SystemExit(f"--documents: expected fewer than the {len(drops)} of the pool, got {size}")
    rng = np.random.default_rng(options.seed)
    above_pool = above_rest = above_plain = reached = 0
    spent = []
    for _ in range(options.resamples):
        order = rng.permutation(len(drops))
        drawn, rest = drops[order[:size]], drops[order[size:]]
        plain = last_within(drawn.mean(axis=0).tolist(), budget)
        above_plain += plain is not None and drops[:, plain].mean() > budget
        last = choose(drawn, budget, options.confidence)
        if last is None:
            continue
        reached += 1
        spent.append(rejection[last])
        above_pool += drops[:, last].mean() > budget
        above_rest += rest[:, last].mean() > budget
    share = options.resamples
    return {
        "documents": size,
        "delta": round(1 - options.confidence, 6),
        "violations_pool": above_pool / share,
        "violations_rest": above_rest / share,
        "violations_without_bound": above_plain / share,
        "within_reach": reached / share,
        "rejection": float(np.mean(spent)) if spent else None,
        "rejection_lossless": float(rejection[0]),
    }


def choose(drawn: Array, budget: float, confidence: float) -> int | None:
    """Fixed-sequence testing from the most deferral on; bounds behind the first failure are not needed."""
    bounds = []
    for column in drawn.T:
        bounds.append(mean_upper_bound(column, confidence, -1.0, 1.0))
        if bounds[-1] > budget:
            break
    return last_within(bounds, budget)


if __name__ == "__main__":
    main()
