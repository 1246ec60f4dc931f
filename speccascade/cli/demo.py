"""``speccascade demo``: the whole path on a small real pair, each stage from the config of its own command.

What a stage makes carries the key of everything that it was made from; a second run reuses what has the same key,
goes on where a stage was stopped, and does again only what a changed config, seed or earlier stage makes stale.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..data.progress import describe_seconds
from .options import CommandLine, to_plain, write_config
from .shell import find_config

__all__ = ["DemoConfig", "Stage", "run", "run_stages"]

DESCRIPTION = """\
Do everything once on a small real pair, without a GPU, an account or a model hub: SmolLM2-135M-Instruct verifies,
some of its own layers, tuned on the task, draft, and grade-school maths questions (GSM8K) are the task.
Stages: fetch, tune-drafter, collect, train and export, evaluate offline, evaluate live, report. Each reads
configs/COMMAND/demo.yaml as its own command would, and shows what it does and how long it took.
A second run reuses what is finished."""

EXAMPLE = """\
  speccascade demo
  speccascade demo --out runs/other-seed --seed 1"""

COMMANDS = ("tune-drafter", "collect", "train", "evaluate")


@dataclass(frozen=True)
class DemoConfig:
    """Where to put everything, and from which configs.

    Args:
        out: folder for models, traces, router and results.
        seed: of tuning, training, sampling and resampling.
        configs: folder with COMMAND/demo.yaml for tune-drafter, collect, train and evaluate.
        fresh: do every stage again.
    """

    out: Path = Path("runs/demo")
    seed: int = 0
    configs: Path = Path("configs")
    fresh: bool = False


@dataclass(frozen=True)
class Stage:
    """One step of the demo.

    Args:
        name: how its record is called.
        title: what it does, for the screen.
        config: everything that decides its outcome beside the stages before it.
        outputs: what it makes, relative to the demo's folder; removed before it is done again.
        action: does it.
        resumes: whether the action goes on by itself from what a stopped run left.
    """

    name: str
    title: str
    config: Any
    outputs: tuple[str, ...]
    action: Callable[[], object]
    resumes: bool = False


def run(arguments: list[str]) -> None:
    """Parse the arguments and go through all stages."""
    config = CommandLine("demo", DemoConfig, DESCRIPTION, EXAMPLE).parse(arguments)
    for command in COMMANDS:
        find_config(config.configs / command / "demo.yaml")
    write_config(config, config.out, "demo.yaml")
    started = time.perf_counter()
    run_stages(config.out, plan_stages(config), fresh=config.fresh)
    from .report import show_report

    show_report(config.out / "evaluate")
    say(f"Everything took {describe_seconds(time.perf_counter() - started)}. Now try:")
    router = config.out / "router"
    say(f'  speccascade generate --router {router} --show --stats "A farmer has 12 cows and buys 5. How many has he?"')


def plan_stages(config: DemoConfig) -> list[Stage]:
    """List the stages with their resolved configs; nothing is loaded or run yet."""
    from ..data.collect import collect
    from ..data.config import CollectConfig
    from ..data.embedded import fetch, gsm8k
    from ..eval.config import EvaluateConfig
    from ..eval.offline import run_offline
    from ..eval.report import report
    from ..eval.sweep import run_sweep
    from ..training.tune_drafter import TuneDrafterConfig, tune_drafter

    out = config.out
    drafter, traces, router, results = (out / name for name in ("drafter", "traces", "router", "evaluate"))
    tune = _read(config, "tune-drafter", TuneDrafterConfig, out=drafter, seed=config.seed, overwrite=True)
    pair = {"pair.drafter": drafter}
    log = _read(config, "collect", CollectConfig, out=traces, **pair)
    seed = {"seed": config.seed, "frontier.seed": config.seed}
    places = {"traces": traces, "router": f"[{router}]", "out": results}
    live = _read(config, "evaluate", EvaluateConfig, **pair, **places, **seed)
    offline = _read(config, "evaluate", EvaluateConfig, **pair, **places, **seed, offline="true")
    train_file = find_config(config.configs / "train" / "demo.yaml")
    train = [f"--config={train_file}", f"--data.traces={traces}", f"--out={out}", f"--seed_everything={config.seed}"]

    def fetch_all() -> None:
        if tune.verifier.startswith("embedded:"):
            fetch(tune.verifier.removeprefix("embedded:"))
        if tune.prompts.source == "embedded:gsm8k":
            gsm8k()

    def collect_and_note() -> None:
        collect(log)
        write_config(log, traces)

    def train_and_export() -> None:
        from ..training.cli import main

        main(train)

    def run_live() -> None:
        write_config(live, run_sweep(live))

    sources = {"model": tune.verifier, "prompts": tune.prompts.source}
    training = {"arguments": train[1:], "file": train_file.read_text(encoding="utf-8")}
    return [
        Stage("fetch", "Fetch the model and the questions", sources, (), fetch_all),
        Stage("tune-drafter", "Tune a drafter", tune, ("drafter",), lambda: write_config(tune, tune_drafter(tune))),
        Stage("collect", "Collect traces", log, ("traces",), collect_and_note, resumes=True),
        Stage("train", "Train and export the router", training, ("checkpoints", "logs", "router"), train_and_export),
        Stage("offline", "Replay every method offline", offline, ("evaluate",), lambda: run_offline(offline)),
        Stage("live", "Run the methods live", live, ("evaluate/results.parquet",), run_live, resumes=True),
        Stage("report", "Write the report", {}, ("evaluate/report.md",), lambda: report(results)),
    ]


def run_stages(out: Path, stages: list[Stage], fresh: bool = False) -> list[str]:
    """Go through the stages in order and return the names of those that were done, not reused.

    A stage is reused if its key, which covers its config, the code's version and all stages before it, is the recorded
    one. One that was stopped is started over, or goes on if it can; what belongs to another key is removed first.
    """
    done, key = [], __version__
    for number, stage in enumerate(stages, start=1):
        key = _digest([key, stage.name, to_plain(stage.config)])
        record_file = out / "stages" / f"{stage.name}.json"
        record = {} if fresh else _load(record_file)
        label = f"[{number}/{len(stages)}] {stage.title}"
        there = all((out / output).exists() for output in stage.outputs)
        if record.get("key") == key and record.get("seconds") is not None and there:
            say(f"{label}: reused (took {describe_seconds(record['seconds'])} when it was made)")
            continue
        if not (stage.resumes and record.get("key") == key):
            for output in stage.outputs:
                _remove(out / output)
        say(f"{label} ...")
        _save(record_file, {"key": key})
        started = time.perf_counter()
        stage.action()
        seconds = time.perf_counter() - started
        _save(record_file, {"key": key, "seconds": seconds})
        say(f"{label}: done in {describe_seconds(seconds)}")
        done.append(stage.name)
    return done


def say(message: str) -> None:
    """Tell the user on stderr how far the demo is."""
    print(message, file=sys.stderr, flush=True)


def _read(config: DemoConfig, command: str, config_class: type[Any], **overrides: Any) -> Any:
    """Parse ``configs/COMMAND/demo.yaml`` as the command itself would, with the demo's folders and seed."""
    file = find_config(config.configs / command / "demo.yaml")
    flags = [f"--{name}={value}" for name, value in overrides.items()]
    return CommandLine(command, config_class, "", "").parse([f"--config={file}", *flags])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _remove(output: Path) -> None:
    """Remove a folder with all that is in it, or a file; nothing there is fine."""
    if output.is_dir():
        shutil.rmtree(output)
    else:
        output.unlink(missing_ok=True)


def _load(path: Path) -> dict[str, Any]:
    """Read a stage's record; a missing or damaged one counts as none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _save(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
    partial.replace(path)
