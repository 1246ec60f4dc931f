"""Live comparison: every method at several settings on the same prompts, answer by answer, resumable.

The prompt is the outermost loop, so that a machine that slows down slows every method alike. Every answer is kept the
moment it is there; what is on disk is never generated again. Quality, counts and text depend on the config alone,
seconds on the machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock, Timeout

from .. import __version__
from ..cascade.distributions import Sampling
from ..cascade.engine import SpeculativeCascade
from ..cascade.single import SingleModel
from ..data.encoding import encode_example, end_token_ids
from ..data.manifest import Manifest
from ..data.pairs import Pair, load_pair
from ..data.progress import Progress, announce
from ..data.prompts import Example, load_examples
from ..data.scorers import find_scorer
from ..data.traces import Traces
from ..router.bundle import bundle_digest
from .config import EvaluateConfig
from .journal import Journal
from .offline import check_router, needs_hidden, open_replays, open_routers, run_offline
from .plan import Setting, check_sampling, plan_settings, replay_settings, samples_as_traced
from .provenance import describe_run
from .replay import Replay
from .tables import write_json, write_table

__all__ = ["evaluate", "run_sweep"]


@dataclass(frozen=True)
class _Prompt:
    """One prompt, ready to run."""

    prompt_id: str
    input_ids: torch.Tensor
    reference: str


def evaluate(config: EvaluateConfig) -> Path:
    """Replay traces if ``config.offline``, else run live; return the folder with the results."""
    return run_offline(config) if config.offline else run_sweep(config)


def run_sweep(config: EvaluateConfig) -> Path:
    """Run what is not done yet and write ``results``, ``settings`` (Parquet) and ``run.json`` into ``config.out``.

    Raises:
        ValueError: a foreign run in ``out``, an unknown method or scorer, no prompts, a router of another pair, or
            αs to choose on traces of another temperature.
        OSError: another run is writing to ``out``.
    """
    for name in config.scorers:
        find_scorer(name)
    out = Path(config.out)
    with _sole_writer(out):
        _run_and_write(config, out)
    return out


@contextmanager
def _sole_writer(out: Path) -> Iterator[None]:
    """Hold the folder's lock: of two runs at once, each would generate what the other has, into one file."""
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise OSError(f"out: another run is writing to {out}") from error
    try:
        yield
    finally:
        lock.release()


def _run_and_write(config: EvaluateConfig, out: Path) -> None:
    routers = open_routers(config.router)
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    replays, recorded = _open_traces(config, needs_hidden(routers.values()))
    digests = {name: bundle_digest(router.bundle)[:8] for name, router in routers.items()}
    greedy = sampling.is_greedy
    settings = plan_settings(
        config.methods, routers, config.alphas, config.budgets, replays.get(config.choose_on), greedy, digests
    )
    comparable = recorded is not None and samples_as_traced(sampling, recorded.plan.temperature)
    if recorded is not None:
        check_sampling(settings, sampling, recorded.plan.temperature)
    pair = load_pair(config.pair, decoding=True)
    _check_pair(config, settings, pair, recorded)
    prompts = _load_prompts(config, pair)
    journal = Journal(out / "answers.jsonl", _identity(config, pair))
    _announce_plan(config, settings, prompts, journal)
    _run_units(config, pair, settings, prompts, journal)
    write_table(out / "results.parquet", _collect_results(config, settings, prompts, journal))
    test = replays.get(config.split) if comparable else None
    write_table(out / "settings.parquet", _describe_settings(config, settings, test, greedy))
    write_json(out / "run.json", _describe(config, pair, len(prompts)))


def _load_prompts(config: EvaluateConfig, pair: Pair) -> list[_Prompt]:
    examples = load_examples(config.prompts, None if config.split == "all" else config.split)[: config.limit]
    if not examples:
        raise ValueError(f"split: expected prompts in {config.split!r} of {config.prompts.source}, found none")
    return [_prepare(example, config, pair) for example in examples]


def _prepare(example: Example, config: EvaluateConfig, pair: Pair) -> _Prompt:
    prompt_ids, reference_ids = encode_example(example, pair.tokenizer, config.prompts)
    reference = example.reference
    if config.cut_reference:
        reference = pair.tokenizer.decode(list(reference_ids)[: config.max_new_tokens], skip_special_tokens=True)
    return _Prompt(example.prompt_id, torch.as_tensor(prompt_ids).view(1, -1), reference)


def _open_traces(config: EvaluateConfig, hidden: bool) -> tuple[dict[str, Replay], Manifest | None]:
    """The splits to choose α on and, where the traces have it, to compare with; and what the traces are about."""
    if config.traces is None:
        return {}, None
    traces = Traces.open(config.traces)
    compared = [config.split] if config.split in traces.splits else []
    return open_replays(traces, (config.choose_on, *compared), hidden), traces.manifest


def _check_pair(config: EvaluateConfig, settings: Sequence[Setting], pair: Pair, recorded: Manifest | None) -> None:
    """Refuse traces and routers of another pair: an α that was chosen for it would mean nothing here."""
    for setting in settings:
        check_router(setting.rule, pair.identity)
    if recorded is None:
        return
    traced = recorded.identity
    for name in ("vocabulary_fingerprint", "drafter_digest", "verifier_digest"):
        if getattr(traced, name) != getattr(pair.identity, name):
            raise ValueError(
                f"traces: {config.traces} is about {traced.drafter} → {traced.verifier}, the pair given is "
                f"{pair.identity.drafter} → {pair.identity.verifier}: the {name.replace('_', ' ')} differs"
            )


def _identity(config: EvaluateConfig, pair: Pair) -> dict[str, Any]:
    """Everything that decides an answer, apart from the setting and the prompt; keys as in `TracePlan`."""
    names = ("gamma", "temperature", "top_p", "top_k", "max_new_tokens", "seed", "cut_reference")
    prompts = {name: value for name, value in asdict(config.prompts).items() if name not in ("limit", "splits")}
    return {
        "code_version": __version__,
        "drafter_digest": pair.identity.drafter_digest,
        "verifier_digest": pair.identity.verifier_digest,
        "vocabulary_fingerprint": pair.identity.vocabulary_fingerprint,
        "vocab_size": pair.vocab_size,
        "dtype": str(pair.verifier.dtype).removeprefix("torch."),
        "device": pair.verifier.device.type,
        "prompts": prompts,
        **{name: getattr(config, name) for name in names},
    }


def _announce_plan(
    config: EvaluateConfig, settings: Sequence[Setting], prompts: Sequence[_Prompt], journal: Journal
) -> None:
    units = list(_units(config, settings, prompts))
    left = sum(unit not in journal for _, _, unit in units)
    methods = len({setting.method for setting in settings})
    announce(
        f"plan: {methods} methods in {len(settings)} settings x {len(prompts)} prompts x {config.repeats} "
        f"repeat(s) = {len(units)} answers of at most {config.max_new_tokens} tokens, {len(units) - left} done already"
    )
    for setting in settings:
        shares = ", ".join(f"{share:.0%}" for share in setting.budgets)
        dial = "" if setting.alpha is None else f"  α = {setting.alpha:.4g}"
        announce(f"  {setting.label:<16}{dial}{f'  (rejection budget {shares} of lossless)' if shares else ''}")


def _units(
    config: EvaluateConfig, settings: Sequence[Setting], prompts: Sequence[_Prompt]
) -> Iterator[tuple[_Prompt, Setting, tuple[str, str, int]]]:
    for prompt in prompts:
        for repeat in range(config.repeats):
            for setting in settings:
                yield prompt, setting, (setting.key, prompt.prompt_id, repeat)


def _run_units(
    config: EvaluateConfig, pair: Pair, settings: Sequence[Setting], prompts: Sequence[_Prompt], journal: Journal
) -> None:
    units = list(_units(config, settings, prompts))
    engines = {setting.key: _build_engine(setting, config, pair) for setting in settings}
    waiting = [unit for unit in units if unit[2] not in journal]
    if waiting and config.warmup_tokens:
        _warm_up(config, settings, engines, prompts[0])
    with Progress("live run", len(units) * config.max_new_tokens, unit="tokens at most") as progress:
        progress.skip((len(units) - len(waiting)) * config.max_new_tokens)
        for prompt, setting, (key, prompt_id, repeat) in waiting:
            result = _generate(engines[key], config, pair, prompt, _unit_seed(config.seed, prompt_id, repeat))
            stats = result.stats
            counts = {
                name: getattr(stats, name)
                for name in ("rounds", "drafted", "accepted", "rejected", "deferred", "bonus")
            }  # fmt: skip
            text = pair.tokenizer.decode(result.sequences[0, result.prompt_length :], skip_special_tokens=True)
            journal.add(
                {
                    "key": setting.key,
                    "prompt_id": prompt_id,
                    "repeat": repeat,
                    "text": text,
                    **counts,
                    "verifier_calls": stats.verifier_calls,
                    "drafter_calls": stats.drafter_calls,
                    "new_tokens": stats.new_tokens,
                    "seconds": stats.seconds,
                }
            )
            progress.advance(config.max_new_tokens)


def _build_engine(setting: Setting, config: EvaluateConfig, pair: Pair) -> SpeculativeCascade | SingleModel:
    if setting.rule is not None:
        return SpeculativeCascade(
            pair.drafter, pair.verifier, setting.rule, gamma=config.gamma, vocab_size=pair.vocab_size
        )
    if setting.method == "drafter":
        return SingleModel(pair.drafter, role="drafter", vocab_size=pair.vocab_size)
    return SingleModel(pair.verifier, role="verifier", vocab_size=pair.vocab_size)


def _generate(
    engine: SpeculativeCascade | SingleModel, config: EvaluateConfig, pair: Pair, prompt: _Prompt, seed: int
) -> Any:
    return engine.generate(
        prompt.input_ids,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        eos_token_id=end_token_ids(pair.tokenizer, config.prompts, pair.verifier),
        seed=seed,
    )


def _warm_up(
    config: EvaluateConfig,
    settings: Sequence[Setting],
    engines: Mapping[str, SpeculativeCascade | SingleModel],
    prompt: _Prompt,
) -> None:
    """Run one engine of each kind for a few tokens, so that nothing pays for first-time set-up while timed."""
    kinds = {setting.kind if setting.rule is not None else setting.method: setting.key for setting in settings}
    for key in kinds.values():
        engines[key].generate(
            prompt.input_ids, max_new_tokens=config.warmup_tokens, temperature=config.temperature, seed=0
        )


def _unit_seed(seed: int, prompt_id: str, repeat: int) -> int:
    """The same for every method, so that methods that agree emit the same tokens."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}/{repeat}".encode()).digest()[:7], "big")


def _collect_results(
    config: EvaluateConfig, settings: Sequence[Setting], prompts: Sequence[_Prompt], journal: Journal
) -> pd.DataFrame:
    """One row a method × setting × prompt × repeat, in the order of the plan whatever the order of the work."""
    rows: list[dict[str, Any]] = []
    for prompt, setting, unit in _units(config, settings, prompts):
        answer = journal.answers[unit]
        grades = {name: find_scorer(name)(answer["text"], prompt.reference) for name in config.scorers}
        counts = {name: value for name, value in answer.items() if name not in ("key", "prompt_id", "repeat", "text")}
        rows.append(
            {
                "key": setting.key,
                "method": setting.method,
                "label": setting.label,
                "kind": setting.kind,
                "alpha": float("nan") if setting.alpha is None else setting.alpha,
                "prompt_id": prompt.prompt_id,
                "repeat": answer["repeat"],
                "quality": grades[config.scorers[0]],
                **grades,
                **counts,
                "text": answer["text"],
                "reference": prompt.reference,
            }
        )
    return pd.DataFrame(rows)


def _describe_settings(
    config: EvaluateConfig, settings: Sequence[Setting], test: Replay | None, greedy: bool
) -> pd.DataFrame:
    """One row a setting, with what the traces say about it where there are traces."""
    table = pd.DataFrame(
        {
            "key": [setting.key for setting in settings],
            "method": [setting.method for setting in settings],
            "label": [setting.label for setting in settings],
            "kind": [setting.kind for setting in settings],
            "alpha": [float("nan") if setting.alpha is None else setting.alpha for setting in settings],
            "budgets": [", ".join(f"{share:.0%}" for share in setting.budgets) for setting in settings],
        }
    )
    if test is None:
        return table
    offline = replay_settings(
        settings, test, "greedy" if greedy else "sampled", config.frontier.resamples, config.frontier.seed
    )
    return table.merge(offline, on="key", how="left", sort=False)


def _describe(config: EvaluateConfig, pair: Pair, prompts: int) -> dict[str, Any]:
    parameters = [sum(weight.numel() for weight in model.parameters()) for model in (pair.drafter, pair.verifier)]
    return {
        **describe_run(),
        "drafter": pair.identity.drafter,
        "verifier": pair.identity.verifier,
        "drafter_parameters": parameters[0],
        "verifier_parameters": parameters[1],
        "source": config.prompts.source,
        "split": config.split,
        "prompts": prompts,
        "repeats": config.repeats,
        "gamma": config.gamma,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "scorers": list(config.scorers),
        "threads": torch.get_num_threads(),
    }
