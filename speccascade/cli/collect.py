"""``speccascade collect``: prompts with references in, traces out; and a look at traces, or one set out of several."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..data.config import CollectConfig
from .options import CommandLine, to_plain, write_config
from .shell import UsageError

__all__ = ["CollectCommand", "run"]

DESCRIPTION = """\
Run drafter and verifier over prompts with references and log, for every position of a reference, what both models
would have said: statistics of both distributions, their top tokens and whether each was right. Traces are a folder
of Parquet files with a manifest; they train routers and replay every rule without a model.
A run that was stopped goes on where it was, and ends with the same bytes as an unbroken one. Started by torchrun or
accelerate launch, each process takes a GPU and its share of the shards; --executor ray does it on many hosts.
--inspect DIR shows what a folder holds, finished or not, and draws it into DIR/inspect.
--merge DIR DIR ... --out DIR makes one set out of several of one pair; what stands in two is kept once.
Neither loads a model."""

EXAMPLE = """\
  speccascade collect --config configs/collect/demo.yaml
  speccascade collect --pair.drafter Qwen/Qwen2.5-0.5B-Instruct --pair.verifier Qwen/Qwen2.5-7B-Instruct \\
      --prompts.source questions.jsonl --out runs/mine/traces
  speccascade collect --inspect runs/mine/traces
  speccascade collect --merge runs/maths/traces runs/code/traces --out runs/both/traces"""


@dataclass(frozen=True)
class CollectCommand(CollectConfig):
    """What to run over what and where the traces go; or which traces to look at or to merge.

    Args:
        inspect: show what this trace folder holds instead of collecting.
        merge: make one trace set out of these folders instead of collecting: DIR DIR ... or [DIR,DIR].
        plots: with --inspect, also draw histograms and calibration curves (PNG and SVG) into DIR/inspect.
        json: with --inspect, print the summary as JSON.
    """

    inspect: Path | None = None
    merge: list[str] | None = None
    plots: bool = True
    json: bool = False


def run(arguments: list[str]) -> None:
    """Parse the arguments; collect, inspect or merge."""
    config = CommandLine("collect", CollectCommand, DESCRIPTION, EXAMPLE).parse(arguments)
    _refuse_idle_options(config)
    if config.inspect is not None:
        _inspect(config.inspect, plots=config.plots, as_json=config.json)
    elif config.merge is not None:
        from ..data.merge import merge

        merge(config.merge, config.out)
    else:
        from ..data.collect import collect
        from ..data.workers import current_worker

        plain = CollectConfig(**{entry.name: getattr(config, entry.name) for entry in fields(CollectConfig)})
        out = Path(plain.out)
        if current_worker().is_first and not (out / "config.yaml").is_file():
            write_config(plain, out)  # a stopped run, too, says how it was started
        collect(plain)
        if current_worker().is_first:
            write_config(plain, out)


def _refuse_idle_options(config: CollectCommand) -> None:
    """Refuse what would be dropped without a word."""
    if config.inspect is not None and config.merge is not None:
        raise UsageError("cannot take --inspect and --merge together: choose one")
    if config.inspect is None and (config.json or not config.plots):
        raise UsageError(f"{'--json' if config.json else '--no-plots'}: only a summary is shown so; give --inspect DIR")
    if config.inspect is None and config.merge is None:
        return
    flag, taken = ("--inspect", ()) if config.inspect is not None else ("--merge", ("out",))
    given, usual = _leaves(config), _leaves(CollectCommand())
    own = ("inspect", "merge", "plots", "json", *taken)
    idle = [name for name in given if name.partition(".")[0] not in own and given[name] != usual.get(name)]
    if idle:
        raise UsageError(f"--{idle[0].replace('_', '-')}: {flag} runs no model and would ignore it; leave it out")
    if config.merge is not None and config.out == CollectConfig.out:
        raise UsageError("--out: needed with --merge, a folder of its own for the merged traces")


def _leaves(config: CollectCommand) -> dict[str, Any]:
    from ..data.plan import flatten

    return flatten(to_plain(config))


def _inspect(folder: Path, plots: bool, as_json: bool) -> None:
    """Print the summary to stdout, and where the figures lie to stderr."""
    from ..data.summary import summarise

    summary = summarise(folder)
    if as_json:
        print(json.dumps(summary.to_record(), indent=2, ensure_ascii=False))
    else:
        from .trace_table import show_summary

        show_summary(summary)
    sys.stdout.flush()
    if plots and summary.rows:
        from ..data.plots import plot_summary

        for path in plot_summary(summary, folder / "inspect"):
            print(f"Figure: {path}", file=sys.stderr)
