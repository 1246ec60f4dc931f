r"""How close the engine comes to what its forward passes allow, and what a batch brings.

    python benchmarks/engine.py                      # the small pair: efficiency at batch 1, then batch 8 against 1
    python benchmarks/engine.py --drafter embedded:qwen2.5-coder-0.5b-instruct \
        --verifier embedded:qwen2.5-coder-1.5b-instruct --dtype bfloat16 --pack --skip-batch --out study.json

Efficiency: the speed-up reached over the verifier alone, divided by the speed-up that Leviathan et al. (2023) compute
from the acceptance a and the cost ratio c: E / (γ·c + v), E = (1 − a^(γ+1)) / (1 − a). Acceptance and forward times are
those of the same run; v, which they take as 1, is the time of a verifying pass over that of the verifier's own steps.
Beside it: the same with E measured (tokens a round), and the share of the time that the models' forward passes take.
The reading of the prompt is left out everywhere. The models decode greedily and lossless, so every row must be that of
the verifier alone.

Batching: tokens per second of one batch of prompts of different lengths over those of the same prompts one by one.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from speccascade.cascade import SingleModel, SpeculativeCascade, pack_weights
from speccascade.cascade.generation import GenerationLoop
from speccascade.data.encoding import encode_prompt
from speccascade.data.pairs import Pair, PairConfig, load_pair
from speccascade.data.prompts import PromptConfig, load_examples
from speccascade.eval.provenance import describe_machine, describe_run
from speccascade.router import rules


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    pair = load_pair(PairConfig(options.drafter, options.verifier, options.dtype, "cpu"))
    drafter, verifier = pair.drafter, pair.verifier
    if options.pack:
        drafter, verifier = pack_weights(drafter), pack_weights(verifier)
    cascade = SpeculativeCascade(drafter, verifier, rules.SpecDecode(), options.gamma, vocab_size=pair.vocab_size)
    alone = SingleModel(verifier, vocab_size=pair.vocab_size)
    prompts = read_prompts(pair, options.batch)
    figures: dict[str, object] = {}
    if not options.skip_efficiency:
        figures["efficiency"] = measure_efficiency(cascade, alone, prompts[: options.prompts], options)
    if not options.skip_batch:
        figures["batch"] = measure_batch(cascade, alone, prompts, options)
    command = {"command": shlex.join(["python", "benchmarks/engine.py", *sys.argv[1:]])}
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    details = {"dtypes": [str(drafter.dtype), str(verifier.dtype)], "identity": asdict(pair.identity)}
    machine = describe_machine("torch", "transformers")
    record = describe_run() | command | machine | settings | details | {"figures": figures}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2, default=str) + "\n")
    print(f"written: {options.out}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tuned = "runs/demo/drafter" if Path("runs/demo/drafter").is_dir() else "early-exit:22"
    parser.add_argument("--drafter", default=tuned, help="default: runs/demo/drafter if made, else early-exit:22")
    parser.add_argument("--verifier", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pack", action="store_true", help="pack the weights (bfloat16 on a CPU)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=3, help="prompts of the efficiency part (default: 3)")
    parser.add_argument("--batch", type=int, default=8, help="rows of the batch (default: 8)")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-efficiency", action="store_true")
    parser.add_argument("--skip-batch", action="store_true")
    default = Path(__file__).parent / "results" / "engine.json"
    parser.add_argument("--out", type=Path, default=default, help="where the figures go")
    return parser.parse_args()


def read_prompts(pair: Pair, count: int) -> list[list[int]]:
    config = PromptConfig("embedded:gsm8k")
    examples = load_examples(config)
    chosen = [examples[(number + 1) * len(examples) // (count + 1)] for number in range(count)]
    return [encode_prompt(example.prompt, pair.tokenizer, config) for example in chosen]


def measure_efficiency(
    cascade: SpeculativeCascade, alone: SingleModel, prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, float]:
    """Medians over the repeats; cascade and verifier alone in turn for every prompt."""
    found = list[dict[str, float]]()
    warm_up(cascade, alone, prompts[0])
    for repeat in range(options.repeats):
        runs: dict[str, list[Decoding]] = {"cascade": [], "alone": []}
        for prompt in prompts:
            ids = torch.tensor([prompt])
            for name, loop in (("cascade", cascade), ("alone", alone)):
                runs[name].append(decode(loop, ids, options.new_tokens, cascade, alone))
        found.append(compare(runs, options.gamma))
        print(f"efficiency, repeat {repeat + 1}: {found[-1]}", flush=True)
    return {name: round(statistics.median(one[name] for one in found), 4) for name in found[0]}


@dataclass(frozen=True)
class Decoding:
    """One continuation of one prompt after its first round, which reads the prompt and is left out of every figure."""

    seconds: float
    tokens: int
    drafting: list[float]
    verifying: list[float]
    acceptance: tuple[int, int]


class FirstRound:
    """A streamer that notes when the first round ended, and how many tokens it wrote."""

    def __init__(self) -> None:
        self.puts = list[tuple[float, int]]()

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then each round's tokens."""
        self.puts.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """Learn that nothing more comes."""


def decode(
    loop: GenerationLoop, ids: torch.Tensor, new_tokens: int, cascade: SpeculativeCascade, alone: SingleModel
) -> Decoding:
    first = FirstRound()
    with stopwatch(cascade.drafter.model.model) as drafting, stopwatch(alone.model.model) as verifying:
        out = loop.generate(ids, max_new_tokens=new_tokens, streamer=first)
        ended = time.perf_counter()
    _, (begun, written), *_ = first.puts
    return Decoding(
        ended - begun,
        out.stats.new_tokens - written,
        [seconds for start, seconds in drafting if start >= begun],
        [seconds for start, seconds in verifying if start >= begun],
        (out.stats.accepted, out.stats.examined),
    )


def compare(runs: dict[str, list[Decoding]], gamma: int) -> dict[str, float]:
    ours, alone = runs["cascade"], runs["alone"]
    steps, passes, singles = (
        [seconds for run in of for seconds in getattr(run, kind)]
        for of, kind in ((ours, "drafting"), (ours, "verifying"), (alone, "verifying"))
    )
    speed, alone_speed = (sum(run.tokens for run in of) / sum(run.seconds for run in of) for of in (ours, alone))
    step, verify, single = (statistics.mean(times) for times in (steps, passes, singles))
    acceptance = sum(run.acceptance[0] for run in ours) / sum(run.acceptance[1] for run in ours)
    tokens_a_round = sum(run.tokens for run in ours) / len(passes)
    expected = (1 - acceptance ** (gamma + 1)) / (1 - acceptance) if acceptance < 1 else gamma + 1
    cost, reached = (gamma * step + verify) / single, speed / alone_speed
    return {
        "tokens_per_second": speed,
        "verifier_alone_tokens_per_second": alone_speed,
        "acceptance": acceptance,
        "tokens_a_round": tokens_a_round,
        "drafter_step_ms": step * 1e3,
        "verifying_pass_ms": verify * 1e3,
        "verifier_step_ms": single * 1e3,
        "reached": reached,
        "ideal": expected / cost,
        "efficiency": reached / (expected / cost),
        "efficiency_of_measured_tokens": reached / (tokens_a_round / cost),
        "share_in_forward_passes": (sum(steps) + sum(passes)) / sum(run.seconds for run in ours),
        "share_in_forward_passes_alone": sum(singles) / sum(run.seconds for run in alone),
    }


def measure_batch(
    cascade: SpeculativeCascade, alone: SingleModel, prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, object]:
    """One batch against the same prompts one by one."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ratios, speeds, same, as_alone = list[float](), list[tuple[float, float]](), 0, 0
    warm_up(cascade, alone, prompts[0])
    for repeat in range(options.repeats):
        together = cascade.generate(ids, mask, max_new_tokens=options.new_tokens)
        singles = [cascade.generate(torch.tensor([prompt]), max_new_tokens=options.new_tokens) for prompt in prompts]
        one_by_one = sum(out.stats.new_tokens for out in singles) / sum(out.stats.seconds for out in singles)
        speeds.append((together.stats.tokens_per_second, one_by_one))
        ratios.append(together.stats.tokens_per_second / one_by_one)
        print(f"batch of {len(prompts)}, repeat {repeat + 1}: {ratios[-1]:.2f} times one by one", flush=True)
        rows = [row[longest:].tolist() for row in together.sequences]
        same = sum(
            row == out.sequences[0, len(prompt) :].tolist()
            for row, out, prompt in zip(rows, singles, prompts, strict=True)
        )
    verifier = alone.generate(ids, mask, max_new_tokens=options.new_tokens).sequences[:, longest:].tolist()
    as_alone = sum(row == expected for row, expected in zip(rows, verifier, strict=True))
    return {
        "rows": len(prompts),
        "tokens_per_second": round(statistics.median(batched for batched, _ in speeds), 3),
        "one_by_one_tokens_per_second": round(statistics.median(single for _, single in speeds), 3),
        "ratio": round(statistics.median(ratios), 3),
        "least_ratio": round(min(ratios), 3),
        "rows_as_one_by_one": f"{same}/{len(prompts)}",
        "rows_as_the_verifier_alone": f"{as_alone}/{len(prompts)}",
    }


def warm_up(cascade: SpeculativeCascade, alone: SingleModel, prompt: list[int]) -> None:
    for loop in (cascade, alone):
        loop.generate(torch.tensor([prompt]), max_new_tokens=8)


@contextmanager
def stopwatch(model: torch.nn.Module) -> Iterator[list[tuple[float, float]]]:
    """Collect when each forward pass began, and its seconds."""
    times, begun = list[tuple[float, float]](), list[float]()

    def begin(*_: object) -> None:
        begun.append(time.perf_counter())

    def end(*_: object) -> None:
        start = begun.pop()
        times.append((start, time.perf_counter() - start))

    hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    try:
        yield times
    finally:
        for hook in hooks:
            hook.remove()


if __name__ == "__main__":
    main()
