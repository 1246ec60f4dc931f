"""What a trained router costs at a verify step: statistics, features, head, decision, for one block of positions.

    python benchmarks/router_runtime.py                      # prints the table, writes results/router_runtime.json
    python benchmarks/router_runtime.py --positions 6 --vocab 49152 --out /tmp/other.json

Everything runs in one process on one thread, the candidates in turn within every repetition, so that a busy machine
slows all of them alike. Times are medians and minima in microseconds; compare ratios within a run, not times between
runs.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from speccascade.cascade import Stats, VerifyBlock
from speccascade.cascade.forms import Whole
from speccascade.eval.provenance import describe_machine, describe_run
from speccascade.router import rules
from speccascade.router.bundle import save_bundle
from speccascade.router.config import RouterConfig
from speccascade.router.examples import Examples
from speccascade.router.export import export_onnx
from speccascade.router.features import FEATURE_SETS, build_features
from speccascade.router.heads import make_head
from speccascade.router.learned import LearnedRouter
from speccascade.router.quantise import quantise
from speccascade.router.runtime import OnnxHead

FEATURE_SET = "verified"
Candidates = dict[str, Callable[[], object]]


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        candidates = build_candidates(Path(folder) / "router", options.positions, options.vocab)
        figures = measure(candidates, options.repetitions, options.calls)
    baseline = figures["head: torch eager"]["median_us"]
    for entry in figures.values():
        entry["ratio_to_torch_eager"] = round(entry["median_us"] / baseline, 3)
    print_table(figures)
    machine = describe_machine("torch", "onnx", "onnxruntime", "numpy")
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    command = {"command": shlex.join(["python", "benchmarks/router_runtime.py", *sys.argv[1:]])}
    record = describe_run() | command | machine | {"threads": 1} | settings | {"figures": figures}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written: {options.out}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=6, help="positions in the block (default: 6)")
    parser.add_argument("--vocab", type=int, default=49152, help="size of the vocabulary (default: 49152)")
    parser.add_argument("--repetitions", type=int, default=30, help="rounds over all candidates (default: 30)")
    parser.add_argument("--calls", type=int, default=200, help="calls of the cheap candidates a round (default: 200)")
    default = Path(__file__).parent / "results" / "router_runtime.json"
    parser.add_argument("--out", type=Path, default=default, help="where the figures go")
    return parser.parse_args()


def build_candidates(directory: Path, positions: int, vocab: int) -> Candidates:
    config = RouterConfig("drafter", "verifier", "unknown", "unknown", default_alpha=0.3)
    save_bundle(directory, make_head("mlp", "two_confidence", FEATURE_SET), config)
    on_onnx, in_torch = (LearnedRouter.from_pretrained(directory, backend=name) for name in ("onnx", "torch"))
    block = random_block(positions, vocab)
    columns = block.stats.columns()
    features = build_features(block.stats, FEATURE_SET).reshape(positions, -1)
    array, session = features.numpy(), on_onnx.head.runtime._session
    binding = session.io_binding()

    def with_binding() -> object:
        binding.bind_cpu_input("features", array)
        binding.bind_output("gap", "cpu")
        session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()[0]

    opt = rules.OPT(alpha=0.3)
    boosted = OnnxHead(boosted_trees(directory / "trees.onnx"))
    smaller = quantise((directory / "router.onnx").read_bytes(), [features], tolerance=1.0)
    assert smaller is not None, "a network holds matrices"
    in_int8 = OnnxHead(smaller[0])
    return {
        "head: torch eager": lambda: in_torch.head.runtime(features),
        "head: OnnxHead": lambda: on_onnx.head.runtime(features),
        "head: onnxruntime run alone": lambda: session.run(["gap"], {"features": array}),
        "head: onnxruntime I/O binding alone": with_binding,
        "head: OnnxHead, 200 trees of 31 leaves a loss": lambda: boosted(features),
        "head: OnnxHead, int8 weights": lambda: in_int8(features),
        "features from statistics": lambda: build_features(block.stats, FEATURE_SET),
        "decision: LearnedRouter, onnx": lambda: on_onnx.defer(Stats.from_columns(columns)),
        "decision: LearnedRouter, torch": lambda: in_torch.defer(Stats.from_columns(columns)),
        "decision: OPT": lambda: opt.defer(Stats.from_columns(columns)),
        "statistics that the features read": lambda: read_statistics(block, FEATURE_SET),
        "statistics that OPT reads": lambda: opt.defer(fresh(block)),
    }


def boosted_trees(path: Path) -> Path:
    """A head of trees as large as they are grown by default, on features and gaps of pure chance."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(10_000, len(FEATURE_SETS[FEATURE_SET]), generator=generator)
    correctness = torch.rand(10_000, 2, 2, generator=generator)
    head = make_head("trees", "gap", FEATURE_SET)
    head.fit(Examples(features, correctness, torch.ones(10_000)))
    export_onnx(head, path)
    return path


def random_block(positions: int, vocab: int) -> VerifyBlock:
    """A block at temperature 1 as the engine holds it: probabilities beside their logits."""
    generator = torch.Generator().manual_seed(0)
    draft, verifier = (
        Whole(one.softmax(-1), one) for one in torch.randn(2, 1, positions, vocab, generator=generator) * 6
    )
    tokens = torch.zeros(1, positions, dtype=torch.long)
    return VerifyBlock(draft, draft, verifier, verifier, tokens, tokens)


def fresh(block: VerifyBlock) -> Stats:
    """The block's statistics with nothing computed yet."""
    draft, verifier = (Whole(side.dense, side.logits) for side in (block.draft, block.verifier))
    return Stats(draft, verifier, draft, verifier)


def read_statistics(block: VerifyBlock, feature_set: str) -> None:
    stats = fresh(block)
    for name in FEATURE_SETS[feature_set]:
        getattr(stats, name.rpartition("(")[2].rstrip(")"))


def measure(candidates: Candidates, repetitions: int, calls: int) -> dict[str, dict[str, float]]:
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for repetition in range(repetitions + 1):
        for name, call in candidates.items():
            repeats = max(1, calls // 100) if name.startswith("statistics") else calls
            times = [time_once(call) for _ in range(repeats)]
            if repetition:  # the first round warms caches and allocators up
                seconds[name] += times
    return {
        name: {"median_us": round(statistics.median(times) * 1e6, 1), "minimum_us": round(min(times) * 1e6, 1)}
        for name, times in seconds.items()
    }


def time_once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def print_table(figures: dict[str, dict[str, float]]) -> None:
    print(f"{'':40} {'median µs':>10} {'minimum µs':>11} {'of torch eager':>15}")
    for name, entry in figures.items():
        row = f"{entry['median_us']:10.1f} {entry['minimum_us']:11.1f} {entry['ratio_to_torch_eager']:15.2f}"
        print(f"{name:40} {row}")


if __name__ == "__main__":
    main()
