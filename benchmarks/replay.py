"""What replaying traces costs: every setting of twelve rules over made-up positions, and a loop over some as reference.

    python benchmarks/replay.py                                # prints the table, writes results/replay.json
    python benchmarks/replay.py --positions 5000 --out /tmp/other.json

Each rule is replayed at all its settings under the three default losses, with both ends of its rejection, as the test
split is. The reference asks the same rules for one position at a time, on a few positions and one setting. Seconds
depend on the machine and on what else it does; the ratio to the reference is taken in the same run.
"""

import argparse
import json
import resource
import shlex
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speccascade.cascade.statistics import Stats
from speccascade.data.traces import TraceSplit
from speccascade.eval.methods import DEFAULT_LOSSES, plug_in_methods
from speccascade.eval.provenance import describe_machine, describe_run
from speccascade.eval.replay import Replay

METHODS = (
    "chow", "chow_log", "diff", "opt", "bild_star", "verifier_gap", "greedyward", "token_v1", "token_v2", "token_v3",
    "lossy", "ensemble",
)  # fmt: skip
VOCABULARY, PROMPT = 64, 100


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    source = make_split(options.positions, options.top_k)
    before = peak_megabytes()
    replay = Replay(source, options.top_k)
    figures = {method.name: measure(method, replay, options.alphas) for method in plug_in_methods(METHODS)}
    seconds = sum(figures.values())
    reference = measure_reference(source, options.top_k, options.reference, seconds_per_setting(seconds, options))
    result = {
        "seconds": round(seconds, 2),
        "seconds_by_method": {name: round(value, 3) for name, value in figures.items()},
        "peak_megabytes": round(peak_megabytes()),
        "peak_megabytes_before": round(before),
        **reference,
    }
    print(json.dumps(result, indent=2))
    command = {"command": shlex.join(["python", "benchmarks/replay.py", *sys.argv[1:]])}
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    record = describe_run() | command | describe_machine("torch", "numpy") | settings | result
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written: {options.out}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=100_000, help="positions replayed (default: 100000)")
    parser.add_argument("--top-k", type=int, default=16, help="logged tokens of each model (default: 16, 32 columns)")
    parser.add_argument("--alphas", type=int, default=25, help="settings of each rule (default: 25)")
    parser.add_argument("--reference", type=int, default=200, help="positions of the loop (default: 200)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "replay.json")
    return parser.parse_args()


def make_split(positions: int, top_k: int, seed: int = 0) -> TraceSplit:
    """Make positions whose two unions overlap in part, padded to ``2 · top_k`` columns."""
    generator = torch.Generator().manual_seed(seed)
    shared = 3 * torch.randn(positions, VOCABULARY, generator=generator)
    draft, verifier = (
        (shared + scale * torch.randn(positions, VOCABULARY, generator=generator)).softmax(dim=-1)
        for scale in (1.2, 0.8)
    )
    label = torch.multinomial(verifier, 1, generator=generator)
    kept = torch.zeros_like(draft, dtype=torch.bool)
    for probs in (draft, verifier):
        kept.scatter_(-1, probs.topk(top_k, dim=-1).indices, True)
    ids = kept.int().argsort(dim=-1, descending=True, stable=True)[:, : 2 * top_k]
    present = kept.gather(-1, ids)
    prompts = -(-positions // PROMPT)
    stats = Stats(draft, verifier, draft, verifier)
    gain = stats.expected_gain

    def logged(probs: Tensor) -> Tensor:
        return torch.where(present, probs.gather(-1, ids), 0.0)

    return TraceSplit(
        prompt_ids=tuple(f"p{index}" for index in range(prompts)),
        prompt_index=torch.arange(positions) // PROMPT,
        position=torch.arange(positions) % PROMPT,
        label=label.squeeze(-1),
        token=draft.argmax(dim=-1),
        stats=Stats.from_columns(stats.columns(), gain=lambda: gain),
        q_label=draft.gather(-1, label).squeeze(-1),
        p_label=verifier.gather(-1, label).squeeze(-1),
        topk_ids=torch.where(present, ids, -1),
        topk_q=logged(draft),
        topk_p=logged(verifier),
        temperature=1.0,
        top_k=top_k,
    )


def make_rules(method, alphas: int) -> list:
    """Settings spread evenly over the search coordinate of a dial."""
    return [method.build(method.alpha(u), "sampled") for u in np.linspace(0.02, 0.98, alphas)]


def measure(method, replay: Replay, alphas: int) -> float:
    """Seconds for all settings of one rule under all losses."""
    started = time.perf_counter()
    for loss in DEFAULT_LOSSES:
        replay.sums_of_all(make_rules(method, alphas), loss)
    return time.perf_counter() - started


def seconds_per_setting(seconds: float, options: argparse.Namespace) -> float:
    """Seconds a position and setting, all methods together."""
    return seconds / options.positions / options.alphas


def measure_reference(source: TraceSplit, top_k: int, positions: int, batched: float) -> dict[str, float]:
    """Replay single positions one by one: how many times slower that is, and how far its losses lie apart."""
    few = Replay(select(source, slice(0, positions)), top_k)
    singles = [Replay(select(source, slice(place, place + 1)), top_k) for place in range(positions)]
    rules = [make_rules(method, 1)[0] for method in plug_in_methods(METHODS)]
    expected = [few.outcome(rule, loss).loss for rule in rules for loss in DEFAULT_LOSSES]
    started = time.perf_counter()
    found = [
        np.concatenate([one.outcome(rule, loss).loss for one in singles]) for rule in rules for loss in DEFAULT_LOSSES
    ]
    seconds = time.perf_counter() - started
    apart = max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(found, expected, strict=True))
    return {"ratio_to_reference": round(seconds / positions / batched, 1), "largest_difference": apart}


def select(source: TraceSplit, part: slice) -> TraceSplit:
    """Take some positions of a split."""
    held = {field.name: getattr(source, field.name) for field in fields(source)}
    columns = {name: value[part] for name, value in held.items() if isinstance(value, Tensor)}
    return replace(source, stats=source.stats.select(part), **columns)


def peak_megabytes() -> float:
    """Largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
