r"""Tokens per second of lossless speculative decoding: this package against transformers' own assisted generation.

    python benchmarks/assisted_generation.py                # a small pair, greedy and T = 1; minutes on two cores
    python benchmarks/assisted_generation.py --quick        # one prompt of each kind, greedy
    python benchmarks/assisted_generation.py --drafter embedded:qwen2.5-coder-0.5b-instruct \
        --verifier embedded:qwen2.5-coder-1.5b-instruct --dtype bfloat16 --prompts 4 --repeats 3 \
        --settings greedy,T=1,T=0.5,T=1:top_p=0.9,T=0.5:top_p=0.9 --out study.json

Both sides use the same two models in memory, the same γ (`num_assistant_tokens`, constant schedule), the same sampling
(top-k off) and the same prompts, one process, methods in turn for every prompt. Verifier calls are counted by a forward
hook, the reading of the prompt included. transformers is measured

* as shipped: drafting stops early below its default confidence (`assistant_confidence_threshold`), and the drafter's
  temperature and top-p are applied twice;
* with the confidence threshold 0, so that it too drafts γ tokens;
* and each of them with temperature and top-p applied once, by a patch in this file.

In bfloat16 both are also measured with packed weights (`speccascade.cascade.pack_weights`): packing is a change to the
model, and whoever packs it speeds both up.

This package leaves the padding rows of the head out of the vocabulary; transformers does not. A machine that is busy
otherwise slows all methods, but not evenly: compare ratios within a run.
"""

import argparse
import copy
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from speccascade.cascade import AdaptiveGamma, SingleModel, SpeculativeCascade
from speccascade.cascade.packing import can_pack, pack_weights
from speccascade.data.encoding import encode_prompt, end_token_ids
from speccascade.data.pairs import Pair, PairConfig, load_pair
from speccascade.data.prompts import PromptConfig, load_examples
from speccascade.eval.provenance import describe_machine, describe_run
from speccascade.router import rules

SOURCES = {
    "humaneval": PromptConfig("embedded:humaneval", instruction="Complete this Python function:\n\n{prompt}"),
    "gsm8k": PromptConfig("embedded:gsm8k"),
}
OPEN = (
    "Write the opening of a short story about a lighthouse keeper who finds a letter.",
    "Describe a walk through a market in a town that you have never seen.",
    "Write a letter from an old sailor to the child who asked him about the sea.",
    "Tell what the last evening of a travelling circus might have been like.",
)
OURS, HF, PACKED = "speccascade", "transformers", ", packed"
WARPERS = (transformers.TemperatureLogitsWarper, transformers.TopKLogitsWarper, transformers.TopPLogitsWarper)


@dataclass(frozen=True)
class Setting:
    """How tokens are drawn; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """Read 'greedy', 'T=0.5' or 'T=0.5:top_p=0.9'."""
        if text == "greedy":
            return cls()
        given = dict(part.split("=", 1) for part in text.split(":"))
        return cls(temperature=float(given.pop("T")), **{name: float(value) for name, value in given.items()})

    def __str__(self) -> str:
        if self.temperature == 0:
            return "greedy"
        return f"T={self.temperature:g}" + (f":top_p={self.top_p:g}" if self.top_p < 1 else "")

    @property
    def warps(self) -> bool:
        """Whether transformers draws with a warper at all, and so can apply it twice."""
        return self.temperature not in (0, 1) or self.top_p < 1


@dataclass(frozen=True)
class Run:
    """One continuation of one prompt by one method.

    `agrees_for`: under greedy decoding, the number of first tokens that are those of this package's verifier alone.
    """

    setting: str
    repeat: int
    prompt: str
    method: str
    tokens: int
    verifier_calls: int
    seconds: float
    agrees_for: int | None = None


Generate = Callable[[torch.Tensor, Setting, int], list[int]]


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    pair = load_pair(PairConfig(options.drafter, options.verifier, options.dtype, "cpu"))
    prompts = read_prompts(pair, options.prompts)
    models = prepare_models(pair)
    methods = build_methods(pair, models, options)
    runs = measure(pair, models, prompts, methods, options)
    figures = summarise(runs)
    print_table(figures)
    command = {"command": shlex.join(["python", "benchmarks/assisted_generation.py", *sys.argv[1:]])}
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    # With scikit-learn transformers adapts its confidence threshold.
    machine = describe_machine("torch", "transformers", "scikit-learn")
    details = {"dtypes": [str(pair.drafter.dtype), str(pair.verifier.dtype)], "identity": asdict(pair.identity)}
    record = describe_run() | command | machine | settings | details
    record |= {"figures": figures, "runs": [asdict(run) for run in runs]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2, default=str) + "\n")
    print(f"written: {options.out}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tuned = "runs/demo/drafter" if Path("runs/demo/drafter").is_dir() else "early-exit:22"
    parser.add_argument("--drafter", default=tuned, help="default: runs/demo/drafter if made, else early-exit:22")
    parser.add_argument("--verifier", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=1, help="prompts of each kind (default: 1)")
    parser.add_argument("--new-tokens", type=int, default=32, help="at most so many a prompt (default: 32)")
    parser.add_argument("--gamma", type=int, default=5, help="tokens drafted a round (default: 5)")
    parser.add_argument("--cost-ratio", type=float, default=0.4, help="drafter's step ÷ verifier's, for adaptive γ")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--settings", default="greedy,T=1,T=0.5:top_p=0.9", help="separated by commas")
    parser.add_argument("--methods", default="", help="only these, separated by semicolons (default: all)")
    parser.add_argument("--repeats", type=int, default=2, help="rounds over all prompts (default: 2)")
    parser.add_argument("--quick", action="store_true", help="greedy, one prompt of each kind, 16 tokens, once")
    default = Path(__file__).parent / "results" / "assisted_generation.json"
    parser.add_argument("--out", type=Path, default=default, help="where the figures go")
    options = parser.parse_args()
    if options.quick:
        options.settings, options.prompts, options.new_tokens, options.repeats = "greedy", 1, 16, 1
    return options


def read_prompts(pair: Pair, count: int) -> dict[str, torch.Tensor]:
    """Chat prompts as token ids: from the middle of each data set, and open ones, where many tokens will do."""
    plain = PromptConfig()
    prompts = {
        f"open/{number + 1}": torch.tensor([encode_prompt(text, pair.tokenizer, plain)])
        for number, text in enumerate(OPEN[:count])
    }
    for name, config in SOURCES.items():
        examples = load_examples(config)
        for number in range(count):
            example = examples[(number + 1) * len(examples) // (count + 1)]
            prompts[f"{name}/{example.prompt_id}"] = torch.tensor(
                [encode_prompt(example.prompt, pair.tokenizer, config)]
            )
    return prompts


@dataclass(frozen=True)
class Models:
    """A drafter and a verifier, plain or with packed weights."""

    drafter: transformers.PreTrainedModel
    verifier: transformers.PreTrainedModel


def prepare_models(pair: Pair) -> dict[str, Models]:
    """The pair as it was loaded and, where this processor has such kernels, a packed view of it."""
    # Its own copy: an early exit shares the verifier's, and the two must not be set together.
    pair.drafter.generation_config = copy.deepcopy(pair.drafter.generation_config)
    models = {"": Models(pair.drafter, pair.verifier)}
    if can_pack(pair.drafter) and can_pack(pair.verifier):
        models[PACKED] = Models(pack_weights(pair.drafter), pack_weights(pair.verifier))
    return models


def build_methods(pair: Pair, models: dict[str, Models], options: argparse.Namespace) -> dict[str, Generate]:
    ends = end_token_ids(pair.tokenizer, SOURCES["gsm8k"], pair.verifier)
    limits = {"max_new_tokens": options.new_tokens, "eos_token_id": ends}

    def ours(generator: SpeculativeCascade | SingleModel) -> Generate:
        def generate(ids: torch.Tensor, setting: Setting, seed: int) -> list[int]:
            result = generator.generate(ids, **limits, temperature=setting.temperature, top_p=setting.top_p, seed=seed)
            return result.sequences[0, ids.shape[1] :][: result.stats.new_tokens].tolist()

        return generate

    def hf(run: Models, threshold: float | None = None, once: bool = False, assisted: bool = True) -> Generate:
        def generate(ids: torch.Tensor, setting: Setting, seed: int) -> list[int]:
            torch.manual_seed(seed)
            drafting = run.drafter.generation_config
            drafting.num_assistant_tokens, drafting.num_assistant_tokens_schedule = options.gamma, "constant"
            drafting.assistant_confidence_threshold = threshold
            config = transformers.GenerationConfig(**limits, **sampling_of(setting), pad_token_id=ends[0])
            with warpers_once(once):
                sequences = run.verifier.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=config,
                    assistant_model=run.drafter if assisted else None,
                )
            return sequences[0, ids.shape[1] :].tolist()

        return generate

    methods = dict[str, Generate]()
    for mark, run in models.items():
        cascade = SpeculativeCascade(
            run.drafter, run.verifier, rules.SpecDecode(), options.gamma, vocab_size=pair.vocab_size
        )
        pace = AdaptiveGamma(options.cost_ratio, maximum=options.gamma)
        adaptive = SpeculativeCascade(run.drafter, run.verifier, rules.SpecDecode(), pace, vocab_size=pair.vocab_size)
        methods |= {
            f"{OURS}{mark}": ours(cascade),
            f"{OURS}, adaptive γ{mark}": ours(adaptive),
            f"{HF}, as shipped{mark}": hf(run),
            f"{HF}, threshold 0{mark}": hf(run, threshold=0.0),
            f"{HF}, threshold 0, warpers once{mark}": hf(run, threshold=0.0, once=True),
            f"verifier alone, {OURS}{mark}": ours(SingleModel(run.verifier, vocab_size=pair.vocab_size)),
            f"verifier alone, {HF}{mark}": hf(run, assisted=False),
        }
    wanted = [name.strip() for name in options.methods.split(";")] if options.methods else list(methods)
    unknown = [name for name in wanted if name not in methods]
    if unknown:
        raise SystemExit(f"--methods: expected some of {'; '.join(methods)}; got {unknown[0]!r}")
    return {name: methods[name] for name in wanted}


def sampling_of(setting: Setting) -> dict[str, object]:
    if setting.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": setting.temperature, "top_p": setting.top_p, "top_k": 0}


@contextmanager
def warpers_once(wanted: bool) -> Iterator[None]:
    """Let the drafter warp its logits once.

    The candidate generator hands the verifier's warpers to the drafter's `generate`, which makes a second set from the
    same settings: temperature T acts as T². Without the first set it acts as T.
    """
    original = AssistedCandidateGenerator.__init__

    def init(self: AssistedCandidateGenerator, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        self.logits_processor = [p for p in self.logits_processor if not isinstance(p, WARPERS)]

    if wanted:
        AssistedCandidateGenerator.__init__ = init
    try:
        yield
    finally:
        AssistedCandidateGenerator.__init__ = original


def measure(
    pair: Pair,
    models: dict[str, Models],
    prompts: dict[str, torch.Tensor],
    methods: dict[str, Generate],
    options: argparse.Namespace,
) -> list[Run]:
    settings = [Setting.parse(text) for text in options.settings.split(",")]
    plan = [
        (repeat, setting, prompt, method)
        for repeat in range(options.repeats)
        for setting in settings
        for number, prompt in enumerate(prompts)
        for method in turned(applicable(methods, setting), number + repeat)
    ]
    for method in list(methods.values())[:2]:  # caches and allocators warm up
        method(next(iter(prompts.values())), settings[0], 0)
    runs = list[Run]()
    references: dict[str, list[int]] = {}
    alone = SingleModel(pair.verifier, vocab_size=pair.vocab_size)
    with count_calls([run.verifier for run in models.values()]) as calls:
        for done, (repeat, setting, prompt, method) in enumerate(plan, start=1):
            calls.clear()
            started = time.perf_counter()
            tokens = methods[method](prompts[prompt], setting, repeat)
            seconds = time.perf_counter() - started
            counted, agrees = len(calls), None
            if setting.temperature == 0:
                if prompt not in references:
                    written = alone.generate(prompts[prompt], max_new_tokens=options.new_tokens).sequences
                    references[prompt] = written[0, prompts[prompt].shape[1] :].tolist()
                agrees = common_prefix(tokens, references[prompt])
            runs.append(Run(str(setting), repeat, prompt, method, len(tokens), counted, seconds, agrees))
            print(
                f"{done}/{len(plan)} {setting} {prompt} {method}: {len(tokens)} tokens, {counted} verifier calls, "
                f"{seconds:.2f} s",
                file=sys.stderr,
                flush=True,
            )
    return runs


def common_prefix(tokens: list[int], reference: list[int]) -> int:
    pairs = enumerate(zip(tokens, reference, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(tokens), len(reference)))


def applicable(methods: dict[str, Generate], setting: Setting) -> list[str]:
    """Methods that differ under a setting: without warpers there is nothing to apply twice."""
    return [name for name in methods if setting.warps or "warpers once" not in name]


def turned(names: list[str], by: int) -> list[str]:
    """The same names, another one first: no method always runs after the same neighbour."""
    return names[by % len(names) :] + names[: by % len(names)]


@contextmanager
def count_calls(models: list[transformers.PreTrainedModel]) -> Iterator[list[int]]:
    """Collect one item for each forward pass of these models (not of an early exit that shares a hook)."""
    calls = list[int]()

    def count(module: torch.nn.Module, *_: object) -> None:
        if any(module is model for model in models):
            calls.append(1)

    hooks = [model.register_forward_hook(count) for model in models]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def summarise(runs: list[Run]) -> dict[str, dict[str, dict[str, float]]]:
    """Figures of each setting and method: medians over the repeats, each over all prompts together."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for setting, method in dict.fromkeys((run.setting, run.method) for run in runs):
        mine = totals(runs, setting, method)
        speeds = [tokens / seconds for tokens, _, seconds in mine]
        calls = sum(count for _, count, _ in mine)
        entry = {
            "tokens_per_second": round(statistics.median(speeds), 3),
            "slowest": round(min(speeds), 3),
            "fastest": round(max(speeds), 3),
            "tokens_per_verifier_call": round(sum(tokens for tokens, _, _ in mine) / calls, 3),
            "seconds_per_verifier_call": round(sum(seconds for _, _, seconds in mine) / calls, 3),
            "seconds": round(statistics.median(seconds for _, _, seconds in mine), 2),
        }
        for name, rival in (("ours", OURS), ("packed", f"{OURS}{PACKED}")):
            ratios = [(t / s) / speed for (t, _, s), speed in zip(totals(runs, setting, rival), speeds, strict=False)]
            if ratios:
                entry[f"{name}_over_this"] = round(statistics.median(ratios), 3)
                entry[f"{name}_over_this_least"] = round(min(ratios), 3)
                entry[f"{name}_over_this_most"] = round(max(ratios), 3)
        figures.setdefault(setting, {})[method] = entry
    return figures


def totals(runs: list[Run], setting: str, method: str) -> list[tuple[int, int, float]]:
    """Tokens, verifier calls and seconds of each repeat, over all prompts."""
    mine = [run for run in runs if (run.setting, run.method) == (setting, method)]
    repeats = sorted({run.repeat for run in mine})
    return [
        (
            sum(run.tokens for run in mine if run.repeat == repeat),
            sum(run.verifier_calls for run in mine if run.repeat == repeat),
            sum(run.seconds for run in mine if run.repeat == repeat),
        )
        for repeat in repeats
    ]


def print_table(figures: dict[str, dict[str, dict[str, float]]]) -> None:
    for setting, methods in figures.items():
        columns = (
            f"{'(spread)':>15} {'a call':>7} {'s a call':>9} {'seconds':>8} {'ours ÷ this':>12} {'packed ÷ this':>14}"
        )
        print(f"\n{setting:49} {'tokens/s':>9} {columns}")
        for method, entry in methods.items():
            spread = f"{entry['slowest']:.2f}–{entry['fastest']:.2f}"
            row = f"{entry['tokens_per_second']:9.2f} {spread:>15} {entry['tokens_per_verifier_call']:7.2f}"
            row += f" {entry['seconds_per_verifier_call']:9.3f} {entry['seconds']:8.2f}"
            ratios = (entry.get(f"{name}_over_this", float("nan")) for name in ("ours", "packed"))
            print(f"  {method:47} {row} " + " ".join(f"{ratio:{12 + 2 * n}.2f}" for n, ratio in enumerate(ratios)))


if __name__ == "__main__":
    main()
