"""``speccascade collect``: prompts with references in, traces out."""

from __future__ import annotations

from pathlib import Path

from .options import CommandLine, write_config

__all__ = ["run"]

DESCRIPTION = """\
Run drafter and verifier over prompts with references and log, for every position of a reference, what both models
would have said: statistics of both distributions, their top tokens and whether each was right. Traces are a folder
of Parquet files with a manifest; they train routers and replay every rule without a model.
A run that was stopped goes on where it was, and ends with the same bytes as an unbroken one. Started by torchrun or
accelerate launch, each process takes a GPU and its share of the shards; --executor ray does it on many hosts."""

EXAMPLE = """\
  speccascade collect --config configs/collect/demo.yaml
  speccascade collect --pair.drafter Qwen/Qwen2.5-0.5B-Instruct --pair.verifier Qwen/Qwen2.5-7B-Instruct \\
      --prompts.source questions.jsonl --out runs/mine/traces"""


def run(arguments: list[str]) -> None:
    """Parse the arguments and collect."""
    from ..data.collect import collect
    from ..data.config import CollectConfig
    from ..data.workers import current_worker

    config = CommandLine("collect", CollectConfig, DESCRIPTION, EXAMPLE).parse(arguments)
    collect(config)
    if current_worker().is_first:
        write_config(config, Path(config.out))
