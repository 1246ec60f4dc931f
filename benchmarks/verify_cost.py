"""What a verify step costs beside the models: probabilities, rule, verdict and the replacement's draw, and its memory.

    python benchmarks/verify_cost.py                 # 49k and 152k tokens, every rule, one thread; about two minutes
    python benchmarks/verify_cost.py --rules opt,token_v2 --vocabs 151936 --repetitions 100

A block of six drafted positions, logits of both models given, q drafted. Measured from the verifier's logits to the
next token, by this package and by a plain form of the same steps (whole tables of q, p and π, `verify_block`), in turn
within every repetition, so that a busy machine slows both alike. Memory is counted by allocation: the most bytes alive
at once during the step, in tables of the block's size, the logits themselves not counted.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from speccascade.cascade.blocks import TargetRule, VerifyBlock
from speccascade.cascade.distribute import distribute
from speccascade.cascade.distributions import Sampling, draw, logits_to_probs
from speccascade.cascade.forms import FromLogits
from speccascade.cascade.targets import read_target
from speccascade.cascade.verify import judge, verify_block
from speccascade.eval.provenance import describe_machine, describe_run
from speccascade.router import rules

RULES: dict[str, TargetRule] = {
    "specdecode": rules.SpecDecode(),
    "chow": rules.Chow(0.3),
    "diff": rules.Diff(0.1),
    "opt": rules.OPT(0.3),
    "opt_log": rules.OPTLog(0.3),
    "verifier_gap": rules.VerifierGap(0.3),
    "expected_gain": rules.ExpectedGain(0.3),
    "token_v1": rules.TokenV1(0.1),
    "token_v2": rules.TokenV2(0.1),
    "token_v3": rules.TokenV3(0.3),
    "greedyward": rules.Greedyward(0.1),
    "lossy": rules.Lossy(0.2),
    "learned_lossy": rules.LearnedLossy(0.3),
}
SAMPLINGS = {"T=1": Sampling(), "T=0.5": Sampling(0.5), "greedy": Sampling(0.0), "T=1, top-p 0.9": Sampling(top_p=0.9)}


class Step:
    """One drafted block, ready to be verified in two ways."""

    def __init__(self, vocab: int, positions: int, sampling: Sampling, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        base = torch.randn(1, positions + 1, vocab, generator=generator) * 6  # a few nats of entropy
        noise = torch.randn(1, positions, vocab, generator=generator) * 0.7
        self.sampling, self.positions = sampling, positions
        self.draft_logits, self.verifier_logits = (base[:, :positions] + noise).to(dtype), base.to(dtype)
        draft = distribute(self.draft_logits, sampling, "the drafter")
        self.tokens = draft.sample(torch.rand(1, positions, generator=generator, dtype=torch.float64))
        self.uniforms = torch.rand(1, positions + 2, generator=generator, dtype=torch.float64)
        self.draft_probs, self.draft_raw = draft.dense, logits_to_probs(self.draft_logits)

    def ours(self, rule: TargetRule) -> Tensor:
        """The step as the engine takes it."""
        plain, length = self.sampling.is_plain, self.positions
        verifier = distribute(self.verifier_logits, self.sampling, "the verifier")
        p = verifier.first(length)
        q = distribute(self.draft_logits, self.sampling, "") if self.sampling.is_greedy else self.draft
        q_raw = q if plain else FromLogits(self.draft_logits)
        p_raw = p if plain else FromLogits(self.verifier_logits[:, :length])
        block = VerifyBlock(q, q_raw, p, p_raw, self.tokens, torch.arange(length)[None])
        ends = torch.tensor([length])
        _, excess = judge(read_target(rule, block), q, self.tokens, self.uniforms, ends)
        if excess is None:
            return verifier.pick(ends).sample(self.uniforms[:, -1:])[:, 0]
        return draw(excess, self.uniforms[:, -2])

    def begin(self) -> None:
        """Forget what an earlier step has computed about the draft."""
        self.draft = distribute(self.draft_logits, self.sampling, "the drafter")

    def plain(self, rule: TargetRule) -> Tensor:
        """The same step by whole tables."""
        probs = logits_to_probs(self.verifier_logits, self.sampling)
        confidence = logits_to_probs(self.verifier_logits)
        positions = torch.arange(self.positions)[None]
        block = VerifyBlock.from_probs(
            self.draft_probs, probs[:, :-1], self.draft_raw, confidence[:, :-1], self.tokens, positions
        )
        target = rule.target(block)
        verdict = verify_block(target, self.draft_probs, self.tokens, self.uniforms[:, :-1])
        bonus = draw(probs[:, -1], self.uniforms[:, -1])
        return torch.where(verdict.replacement >= 0, verdict.replacement, bonus)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    figures = [
        measure(vocab, name, sampling, options)
        for vocab in options.vocabs
        for sampling in SAMPLINGS
        for name in options.rules
    ]
    command = {"command": shlex.join(["python", "benchmarks/verify_cost.py", *sys.argv[1:]])}
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    record = describe_run() | command | describe_machine("torch") | settings | {"threads": 1, "figures": figures}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2, default=str) + "\n")
    print(f"written: {options.out}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=6, help="drafted positions (default: 6)")
    parser.add_argument("--vocabs", type=_integers, default=[49152, 151936], help="separated by commas")
    parser.add_argument("--rules", type=_names, default=list(RULES), help="separated by commas (default: all)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the logits")
    parser.add_argument("--repetitions", type=int, default=25)
    default = Path(__file__).parent / "results" / "verify_cost.json"
    parser.add_argument("--out", type=Path, default=default, help="where the figures go")
    return parser.parse_args()


@torch.inference_mode()
def measure(vocab: int, name: str, sampling: str, options: argparse.Namespace) -> dict[str, object]:
    """Medians and minima of both ways over blocks of several seeds; the tokens that they emit must be the same."""
    rule, dtype = RULES[name], getattr(torch, options.dtype)
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    steps = [Step(vocab, options.positions, SAMPLINGS[sampling], dtype, seed) for seed in range(5)]
    same = 0
    for repetition in range(options.repetitions):
        step = steps[repetition % len(steps)]
        step.begin()
        outcomes = [timed(way, rule, times[label]) for label, way in (("ours", step.ours), ("plain", step.plain))]
        same += bool(torch.equal(*outcomes))
    tables = {label: peak_tables(steps[0], way, rule) for label, way in (("ours", Step.ours), ("plain", Step.plain))}
    entry: dict[str, object] = {"vocab": vocab, "sampling": sampling, "rule": name}
    for label, values in times.items():
        entry |= {
            f"{label}_ms": round(statistics.median(values) * 1e3, 3),
            f"{label}_least_ms": round(min(values) * 1e3, 3),
            f"{label}_peak_tables": round(tables[label], 2),
        }
    ratio = statistics.median(a / b for a, b in zip(times["plain"], times["ours"], strict=True))
    entry |= {"plain_over_ours": round(ratio, 2), "same_token": f"{same}/{options.repetitions}"}
    print(
        f"{vocab:7} {sampling:15} {name:13} ours {entry['ours_ms']:8} ms (least {entry['ours_least_ms']}), plain "
        f"{entry['plain_ms']:8} ms, ratio {entry['plain_over_ours']}, peak {entry['ours_peak_tables']} / "
        f"{entry['plain_peak_tables']} tables, same token {entry['same_token']}",
        flush=True,
    )
    return entry


def timed(way: Callable[[TargetRule], Tensor], rule: TargetRule, into: list[float]) -> Tensor:
    started = time.perf_counter()
    token = way(rule)
    into.append(time.perf_counter() - started)
    return token


def peak_tables(step: Step, way: Callable[[Step, TargetRule], Tensor], rule: TargetRule) -> float:
    """Most bytes alive at once during a step, q included and logits not, in float32 tables [1, positions, V]."""
    step.begin()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        way(step, rule)
    alive = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    table = 4 * step.positions * step.verifier_logits.shape[-1]
    drafted = (
        0 if step.sampling.is_greedy and way is Step.ours else 1 if way is Step.ours or step.sampling.is_plain else 2
    )
    return most / table + drafted


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    unknown = set(text.split(",")) - RULES.keys()
    if unknown:
        raise argparse.ArgumentTypeError(f"expected rules among {', '.join(RULES)}, got {', '.join(sorted(unknown))}")
    return text.split(",")


if __name__ == "__main__":
    main()
