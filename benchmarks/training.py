"""What training costs: positions a second of an epoch, by Lightning from memory and from disk, against a bare loop.

    python benchmarks/training.py                            # prints the table, writes results/training.json
    python benchmarks/training.py --rows 200000 --rounds 1 --out /tmp/other.json

Made-up traces of `--rows` positions with 32 features; the head is the default, an MLP of 64 and 64. The candidates run
in turn within every round, in one process and on one thread, so that a busy machine slows all of them alike; an epoch's
time is that of its training batches, validation left out. Beside the clock's rate stands that of the process's own
time, which others do not slow. Compare ratios within a run, not times between runs.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pty
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from speccascade.cascade.statistics import STAT_FIELDS
from speccascade.data.manifest import Manifest, Shard, TracePlan
from speccascade.data.shards import SCHEMA_VERSION, shard_name, topk_columns, write_shard
from speccascade.eval.provenance import describe_machine, describe_run
from speccascade.router.features import FEATURE_SETS
from speccascade.training.callbacks import EpochLines, TrainingBar
from speccascade.training.cli import quiet_lightning
from speccascade.training.datamodule import TraceDataModule
from speccascade.training.module import RouterModule

FEATURES = 32
SHARD_ROWS = 50_000
VALIDATION_ROWS = 20_000
PROMPT_ROWS = 100
TOP_K = 8
Rates = tuple[float, float]
VOCABULARY = 1000

# Every statistic as it is, and as many of their logarithms as make 32.
FEATURE_SETS["made_up"] = tuple([*STAT_FIELDS, *(f"log1p({name})" for name in STAT_FIELDS)] * 2)[:FEATURES]


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        traces = write_traces(Path(folder), options.rows)
        rates: dict[str, list[Rates]] = {}
        for round_number in range(options.rounds):
            for name, rate in run_round(traces, options.batch_size, options.epochs):
                rates.setdefault(name, []).append(rate)
                print(f"round {round_number + 1}: {name}: {rate[0]:,.0f} positions/s", file=sys.stderr)
    figures = summarise(rates)
    print_table(figures)
    machine = describe_machine("torch", "pytorch-lightning", "pyarrow", "numpy")
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    command = {"command": shlex.join(["python", "benchmarks/training.py", *sys.argv[1:]])}
    record = describe_run() | command | machine | settings | {"features": FEATURES, "figures": figures}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written: {options.out}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="training positions (default: 1,000,000)")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[4096, 16384], help="sizes (default: 4096 16384)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each candidate a round (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all candidates (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    default = Path(__file__).parent / "results" / "training.json"
    parser.add_argument("--out", type=Path, default=default, help="where the figures go")
    return parser.parse_args()


def write_traces(folder: Path, rows: int) -> Path:
    """Random numbers in every column: what they say does not matter for the time that they take."""
    plan = TracePlan(
        schema_version=SCHEMA_VERSION, code_version="benchmark", source="teacher_forced", drafter="small",
        verifier="large", drafter_digest="d", verifier_digest="v", vocabulary_fingerprint="f", vocab_size=VOCABULARY,
        dtype="float32", device="cpu", temperature=1.0, top_k=TOP_K, splits={"train": 0.5, "validation": 0.5},
        collected=["train", "validation"], prompts={}, max_tokens=None, batch_tokens=0, shard_prompts=1,
        examples=-(-rows // SHARD_ROWS) + 1, examples_digest="e",
    )  # fmt: skip
    shards, counts = [], {"validation": VALIDATION_ROWS, "train": rows}
    sizes = [("train", min(SHARD_ROWS, rows - start)) for start in range(0, rows, SHARD_ROWS)]
    for index, (split, count) in enumerate([("validation", VALIDATION_ROWS), *sizes]):
        path = folder / shard_name(index)
        write_shard(path, make_columns(split, count, index), index, plan.digest)
        shards.append(Shard(path.name, count, hashlib.sha256(path.read_bytes()).hexdigest()))
    prompts = {name: -(-count // PROMPT_ROWS) for name, count in counts.items()}
    manifest = Manifest(plan, tuple(shards), rows + VALIDATION_ROWS, counts, prompts)
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder


def make_columns(split: str, count: int, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    union = (np.arange(2 * TOP_K) * (VOCABULARY // (2 * TOP_K)) + generator.integers(50, size=(count, 1))).astype(
        np.int32
    )
    draft, verifier = generator.dirichlet(np.full(2 * TOP_K, 0.3), size=(2, count)).astype(np.float32)
    label = union[np.arange(count), generator.integers(2 * TOP_K, size=count)]
    return {
        "prompt_id": [f"{split}{seed}x{row // PROMPT_ROWS}" for row in range(count)],
        "split": [split] * count,
        "position": np.arange(count, dtype=np.int32),
        "draft_index": np.full(count, -1, dtype=np.int16),
        "token": label,
        "label": label,
        "label_kind": ["gold"] * count,
        "source": ["teacher_forced"] * count,
        **{name: generator.random(count, dtype=np.float32) for name in (*STAT_FIELDS, "q_label", "p_label")},
        **topk_columns(union, draft, verifier, np.ones_like(union, dtype=bool)),
    }


def run_round(traces: Path, batch_sizes: list[int], epochs: int) -> Iterator[tuple[str, Rates]]:
    for size in batch_sizes:
        yield f"bare loop, batch {size}", bare_rate(traces, size, epochs)
        yield f"whole, batch {size}", lightning_rate(traces, size, epochs, "whole", [])
        with terminal():
            bar: list[pl.Callback] = [TrainingBar(), EpochLines()]
            yield f"whole with bar, batch {size}", lightning_rate(traces, size, epochs, "whole", bar)
        yield f"scan, batch {size}", lightning_rate(traces, size, epochs, "scan", [])


class Stopwatch(pl.Callback):
    """Times the batches of every epoch, by the clock and by the process's own time."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []

    def start(self) -> None:
        """Begin an epoch."""
        self._start = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """End it."""
        clock, own = self._start
        self.seconds.append((time.perf_counter() - clock, time.process_time() - own))

    def rates(self, rows: int) -> tuple[float, float]:
        """Median rows a second of the epochs, by either time."""
        clock, own = (rows / statistics.median(seconds) for seconds in zip(*self.seconds, strict=True))
        return clock, own

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin an epoch of Lightning."""
        self.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        """End it with its last batch."""
        if trainer.is_last_batch:
            self.stop()


def make_data(traces: Path, batch_size: int, memory: str) -> TraceDataModule:
    data = TraceDataModule(str(traces), batch_size, "made_up", memory=memory)
    data.setup("fit")
    return data


def lightning_rate(traces: Path, size: int, epochs: int, memory: str, callbacks: list[pl.Callback]) -> Rates:
    data, watch = make_data(traces, size, memory), Stopwatch()
    assert data.train is not None
    with quiet_lightning(), tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=epochs, accelerator="cpu", callbacks=[*callbacks, watch], logger=False, default_root_dir=folder,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(RouterModule(feature_set="made_up"), datamodule=data)
    return watch.rates(len(data.train))


def bare_rate(traces: Path, size: int, epochs: int) -> Rates:
    """The same head, optimiser and batches, with nothing around them."""
    data = make_data(traces, size, "whole")
    assert data.train is not None
    head, watch = RouterModule(feature_set="made_up").head, Stopwatch()
    head.set_normalisation(*data.normalisation())
    optimiser = torch.optim.AdamW(head.parameters(), lr=3e-3, fused=True)
    for _ in range(epochs):
        watch.start()
        for batch in data.train_dataloader().dataset:
            optimiser.zero_grad()
            head.loss(batch).backward()
            optimiser.step()
        watch.stop()
    return watch.rates(len(data.train))


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Make standard error a terminal that nobody looks at, so that bars are drawn."""
    ours, theirs = pty.openpty()
    shown, sys.stderr = sys.stderr, os.fdopen(theirs, "w")
    drain = threading.Thread(target=_drain, args=(ours,), daemon=True)
    drain.start()
    try:
        yield
    finally:
        drawn, sys.stderr = sys.stderr, shown
        drawn.close()
        drain.join(timeout=5)
        os.close(ours)


def _drain(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the other end was closed
        while os.read(descriptor, 1 << 16):
            pass


def summarise(rates: dict[str, list[Rates]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds, and of the ratio to the same round's bare loop of the same batch size."""
    figures = {}
    for name, values in rates.items():
        bare = rates[f"bare loop, {name.rpartition(', ')[2]}"]
        entry = {}
        for which, by in enumerate(("clock", "process")):
            own, base = ([rate[which] for rate in each] for each in (values, bare))
            entry[f"rows_s_by_{by}"] = round(statistics.median(own))
            ratio = statistics.median(value / other for value, other in zip(own, base, strict=True))
            entry[f"ratio_to_bare_by_{by}"] = round(ratio, 3)
        figures[name] = entry
    return figures


def print_table(figures: dict[str, dict[str, float]]) -> None:
    print(f"{'':32} {'rows/s, clock':>14} {'of bare':>8} {'rows/s, process':>16} {'of bare':>8}")
    for name, entry in figures.items():
        clock = f"{entry['rows_s_by_clock']:14,.0f} {entry['ratio_to_bare_by_clock']:8.2f}"
        own = f"{entry['rows_s_by_process']:16,.0f} {entry['ratio_to_bare_by_process']:8.2f}"
        print(f"{name:32} {clock} {own}")


if __name__ == "__main__":
    main()
