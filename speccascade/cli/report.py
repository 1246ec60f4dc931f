"""``speccascade report``: results to tables and plots."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .options import CommandLine

__all__ = ["ReportConfig", "run", "show_report"]

DESCRIPTION = """\
Read what `speccascade evaluate` wrote into a folder, live, offline or both, and write beside it report.md with
every table, report.json, and the figures as PNG and SVG. Measures nothing itself; shows the live table here."""

EXAMPLE = """\
  speccascade report runs/demo/evaluate"""


@dataclass(frozen=True)
class ReportConfig:
    """Which results to report.

    Args:
        results: the folder that `speccascade evaluate` wrote into (its --out).
    """

    results: Path = Path("runs/demo/evaluate")


def run(arguments: list[str]) -> None:
    """Parse the arguments, write the report and show its table."""
    config = CommandLine("report", ReportConfig, DESCRIPTION, EXAMPLE, positional="results").parse(arguments)
    from ..eval.report import report

    report(config.results)
    show_report(config.results)


def show_report(results: Path) -> None:
    """Print the live table of a reported folder to stdout, and to stderr where the rest lies."""
    from rich.console import Console

    from ..eval.report import gather
    from ..eval.terminal import render_live_table

    findings = gather(results)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 160)
    if len(findings.live):
        console.print(render_live_table(findings.live, findings.record["live_run"]["scorers"][0]))
    for found in findings.record["losses"].values():
        for sentence in found["verdict"]:
            console.print(f"* {sentence}", soft_wrap=True)
    sys.stdout.flush()
    print(f"Report: {results / 'report.md'}\nFigures: {results / 'figures'}", file=sys.stderr)
