r"""What collecting traces costs beside the forward passes it needs, and whether it keeps its promises on a real pair.

    python benchmarks/collect.py throughput       # against two bare forward passes over the same batches
    python benchmarks/collect.py memory           # resident memory over a million positions
    python benchmarks/collect.py kills            # killed with -9 at twenty random moments, against an unbroken run
    python benchmarks/collect.py invariance       # the same rows with other batches, in float32 and bfloat16
    python benchmarks/collect.py agreement        # rules replayed on logged runs against what they decided in them
    python benchmarks/collect.py throughput --drafter early-exit:22 --verifier embedded:smollm2-135m-instruct

A bare pass is `model(input_ids).logits` under `torch.inference_mode`, over the very batches that collecting makes, and
nothing is done with the logits. It is timed in two ways: one batch at a time with all threads, and as collecting does
it, each core on a batch of its own; the faster of the two is what collecting is compared with. Collecting includes
statistics, top-k, and writing the shards.
"""

import argparse
import hashlib
import json
import multiprocessing
import random
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import torch
import transformers

from speccascade.data.collect import collect
from speccascade.data.config import CascadeConfig, CollectConfig
from speccascade.data.decisions import agreement
from speccascade.data.job import Job, prepare
from speccascade.data.pairs import PairConfig
from speccascade.data.prompts import PromptConfig
from speccascade.data.scoring import make_batches
from speccascade.data.shards import FLOAT_COLUMNS
from speccascade.data.traces import Traces
from speccascade.eval.provenance import describe_machine, describe_run
from speccascade.router import rules


def main() -> None:
    options = parse_options()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        figures = PARTS[options.part](options, Path(folder))
    command = {"command": shlex.join(["python", "benchmarks/collect.py", *sys.argv[1:]])}
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    record = describe_run() | command | describe_machine("torch", "transformers", "pyarrow") | settings
    out = options.out or Path(f"benchmarks/results/collect_{options.part}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record | {"figures": figures}, indent=2, default=str) + "\n")
    print(json.dumps(figures, indent=2))
    print(f"written: {out}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS, nargs="?", default="throughput", help="default: throughput")
    parser.add_argument("--drafter", default="embedded:qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--verifier", default="embedded:qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--source", default="embedded:gsm8k", help="prompts with references (default: embedded:gsm8k)")
    parser.add_argument("--prompts", type=int, default=48, help="how many of them (default: 48)")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3, help="of the throughput part (default: 3)")
    parser.add_argument("--positions", type=int, default=1_000_000, help="of the memory part (default: a million)")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def configure(options: argparse.Namespace, out: Path, **changes: Any) -> CollectConfig:
    config = CollectConfig(
        pair=PairConfig(options.drafter, options.verifier, options.dtype, "cpu"),
        prompts=PromptConfig(options.source, limit=options.prompts, splits={"train": 1.0}),
        out=str(out),
        splits=("train",),
        batch_tokens=options.batch_tokens,
        shard_prompts=16,
    )
    return replace(config, **changes)


def measure_throughput(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of each way, interleaved; ratios within each repeat."""
    job = prepare(configure(options, folder / "traces"))
    (folder / "traces").mkdir()
    batches = pad_batches(job)
    ways: dict[str, Callable[[], None]] = {
        "bare, all threads on a batch": lambda: run_bare(job, batches),
        "bare, a batch on each core": lambda: run_bare_in_parallel(job, batches),
        "collect": lambda: job.write(range(len(job.pieces)), lambda steps, tokens: None),
    }
    run_bare(job, batches[:2])
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    positions = sum(job.sizes)
    bare = [min(pair) for pair in zip(*list(seconds.values())[:2], strict=True)]
    ratios = [fast / ours for fast, ours in zip(bare, seconds["collect"], strict=True)]
    return {
        "positions": positions,
        "tokens read, padding included": sum(batch.numel() for batch in batches),
        "batches": len(batches),
        "seconds": seconds,
        "positions per second": {name: positions / statistics.median(times) for name, times in seconds.items()},
        "throughput against the faster bare pass": {"median": statistics.median(ratios), "each": ratios},
    }


def pad_batches(job: Job) -> list[torch.Tensor]:
    """The batches that collecting makes, padded with each row's last token as it pads them."""
    padded = []
    for piece in job.pieces:
        for batch in make_batches([len(example) for example in piece], job.config.batch_tokens):
            rows = [[*piece[i].prompt_ids, *piece[i].reference_ids[:-1]] for i in batch]
            longest = max(map(len, rows))
            padded.append(torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows]))
    return padded


@torch.inference_mode()
def run_bare(job: Job, batches: Sequence[torch.Tensor]) -> None:
    for batch in batches:
        for model in (job.pair.drafter, job.pair.verifier):
            _ = model(input_ids=batch, use_cache=False).logits


def run_bare_in_parallel(job: Job, batches: Sequence[torch.Tensor]) -> None:
    cores = torch.get_num_threads()
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(lambda batch: run_bare(job, [batch]), batches))
    torch.set_num_threads(cores)


def measure_memory(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Resident memory while a tiny random pair goes through a million positions of made-up prompts."""
    drafter, verifier, tokenizer = build_tiny_pair()
    for name, model in (("drafter", drafter), ("verifier", verifier)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    length = 200
    with (folder / "prompts.jsonl").open("w") as file:
        for index in range(options.positions // length):
            letters = [chr(97 + (index * 7 + step * step) % 26) for step in range(length)]
            file.write(json.dumps({"prompt": f"number {index}", "reference": "".join(letters)}) + "\n")
    config = CollectConfig(
        pair=PairConfig(str(folder / "drafter"), str(folder / "verifier"), "float32", "cpu"),
        prompts=PromptConfig(str(folder / "prompts.jsonl"), chat=False, splits={"train": 1.0}),
        out=str(folder / "traces"),
        splits=("train",),
    )
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    job = prepare(config)
    Path(config.out).mkdir()
    prepared = process.memory_info().rss
    samples: list[tuple[int, float]] = []
    done = 0

    def advance(steps: int, tokens: int) -> None:
        nonlocal done
        step = max(options.positions // 50, 1)
        if done // step != (done + tokens) // step:
            samples.append((done + tokens, process.memory_info().rss / 1e6))
        done += tokens

    started = time.perf_counter()
    job.write(range(len(job.pieces)), advance)
    seconds = time.perf_counter() - started
    size = sum(path.stat().st_size for path in Path(config.out).glob("*.parquet"))
    quarter = len(samples) // 4
    early = statistics.median(mb for _, mb in samples[quarter : 2 * quarter])
    late = statistics.median(mb for _, mb in samples[-quarter:])
    return {
        "positions": done,
        "seconds": seconds,
        "bytes a position": size / done,
        "MB before": before / 1e6,
        "MB with all prompts tokenised": prepared / 1e6,
        "MB in the second quarter": early,
        "MB in the last quarter": late,
        "growth a position in bytes": (late - early) * 1e6 / (done / 2),
        "samples": samples,
    }


def build_tiny_pair() -> tuple[Any, Any, Any]:
    """Two small random llamas over the bytes of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {"<s>": 0, "</s>": 1} | {character: index for index, character in enumerate(characters, start=2)}
    backend = Tokenizer(models.BPE(vocab=table, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    torch.manual_seed(0)
    pair = []
    for layers in (1, 2):
        settings = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=len(table), num_hidden_layers=layers, **settings)
        pair.append(transformers.LlamaForCausalLM(config).eval())
    return pair[0], pair[1], tokenizer


def measure_kills(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Kill runs with -9 at random moments until so many were hit at work; compare the files with an unbroken run's."""
    unbroken = configure(options, folder / "unbroken", shard_prompts=2, max_tokens=64)
    started = time.perf_counter()
    if run_apart(unbroken, None) != 0:
        raise RuntimeError("the unbroken run failed")
    whole = time.perf_counter() - started
    expected = digest_files(Path(unbroken.out))
    broken = replace(unbroken, out=str(folder / "broken"))
    chance, moments, finished = random.Random(options.seed), [], 0
    while len(moments) < options.kills:
        delay = chance.uniform(0, whole)
        if run_apart(broken, delay) == -signal.SIGKILL:
            moments.append((round(delay, 2), len(list(Path(broken.out).glob("*.parquet")))))
            continue
        finished += 1
        if digest_files(Path(broken.out)) != expected:
            raise RuntimeError(f"after {len(moments)} kills the files differ from an unbroken run's")
        shutil.rmtree(broken.out)
    if run_apart(broken, None) != 0 or digest_files(Path(broken.out)) != expected:
        raise RuntimeError(f"after {len(moments)} kills the files differ from an unbroken run's")
    return {
        "shards": len(expected) - 2,
        "seconds of the unbroken run": whole,
        "kills": len(moments),
        "moments in seconds, and shards finished by then": moments,
        "runs that ended before their moment": finished,
        "identical": True,
    }


def run_apart(config: CollectConfig, delay: float | None) -> int | None:
    process = multiprocessing.get_context("spawn").Process(target=collect, args=(config,))
    process.start()
    process.join(delay)
    if process.is_alive():
        process.kill()
    process.join()
    return process.exitcode


def digest_files(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".parquet", ".json"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def measure_invariance(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Largest and typical difference of the logged values when nothing but the batches changes."""
    figures: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        pair = PairConfig(options.drafter, options.verifier, dtype, "cpu")
        tables = []
        for tokens in (512, options.batch_tokens):
            config = configure(options, folder / f"{dtype}-{tokens}", pair=pair, batch_tokens=tokens)
            collect(config)
            tables.append([pq.read_table(path) for path in sorted(Path(config.out).glob("*.parquet"))])
        figures[dtype] = compare_tables(*tables)
    return figures


def compare_tables(one: Sequence[Any], two: Sequence[Any]) -> dict[str, Any]:
    def join(tables: Sequence[Any], name: str) -> np.ndarray[Any, Any]:
        return np.concatenate([table[name].to_numpy() for table in tables])

    differences = {name: np.abs(join(one, name) - join(two, name)) for name in FLOAT_COLUMNS}
    return {
        "positions": len(join(one, "label")),
        "same labels": bool((join(one, "label") == join(two, "label")).all()),
        "share of other drafter argmaxes": float((join(one, "token") != join(two, "token")).mean()),
        "columns": {name: describe_gap(gap, join(one, name)) for name, gap in differences.items()},
    }


def describe_gap(gap: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> dict[str, float]:
    return {
        "largest": float(gap.max()),
        "largest, relative above one": float((gap / np.maximum(np.abs(values), 1)).max()),
        "median": float(np.median(gap)),
        "99.9%": float(np.quantile(gap, 0.999)),
    }


def measure_agreement(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Positions of real runs, and at how many of them the rule decides from the trace as it did in the run."""
    figures: dict[str, Any] = {}
    for name, parameters in AGREEMENT_RULES.items():
        for temperature in (0.0, 1.0):
            cascade = CascadeConfig(rule=name, rule_options=parameters, gamma=4, max_new_tokens=32)
            out = folder / f"{name}-{temperature}"
            config = configure(options, out, source="cascade", cascade=cascade, temperature=temperature)
            collect(replace(config, batch_tokens=CollectConfig.batch_tokens))
            split = Traces.open(out).split("train")
            assert split.deferred is not None
            agreeing, positions = agreement(rules.get(name, **parameters), split)
            deferral = float(split.deferred.float().mean())
            figures[f"{name} T={temperature:g}"] = {"positions": positions, "agreeing": agreeing, "deferral": deferral}
    return figures


AGREEMENT_RULES: dict[str, dict[str, float]] = {
    "chow": {"alpha": 0.4},
    "diff": {"alpha": 0.1},
    "opt": {"alpha": 0.2},
    "verifier_gap": {"alpha": 0.3},
    "token_v1": {"alpha": 0.3},
    "token_v3": {"alpha": 0.5},
    "greedyward": {"alpha": 0.2},
    "lossy": {"alpha": 0.1},
}

PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "throughput": measure_throughput,
    "memory": measure_memory,
    "kills": measure_kills,
    "invariance": measure_invariance,
    "agreement": measure_agreement,
}

if __name__ == "__main__":
    main()
