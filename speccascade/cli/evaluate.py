"""``speccascade evaluate``: methods against each other, from traces or live."""

from __future__ import annotations

from .options import CommandLine, write_config

__all__ = ["run"]

DESCRIPTION = """\
Compare every rule and your routers on prompts that none of them was fitted to.
--offline replays traces: the whole frontier of quality against rejections, with intervals, in seconds and without
any model. Otherwise both models answer the prompts live, with every method at settings that spend the same budget;
a run that was stopped goes on where it was. `speccascade report` makes tables and plots of both."""

EXAMPLE = """\
  speccascade evaluate --config configs/evaluate/demo.yaml --offline
  speccascade evaluate --config configs/evaluate/demo.yaml
  speccascade evaluate --traces runs/mine/traces --router [runs/mine/router] --out runs/mine/evaluate --limit 50"""


def run(arguments: list[str]) -> None:
    """Parse the arguments and compare."""
    from ..eval.config import EvaluateConfig
    from ..eval.sweep import evaluate

    config = CommandLine("evaluate", EvaluateConfig, DESCRIPTION, EXAMPLE).parse(arguments)
    write_config(config, evaluate(config), "config.offline.yaml" if config.offline else "config.yaml")
