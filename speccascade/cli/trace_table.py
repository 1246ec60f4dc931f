"""A summary of traces on the screen: a table on a terminal, plain lines of fixed width in a batch log."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..data.summary import TraceSummary, plain_lines, tabulate

__all__ = ["show_summary"]

GAP = 2
"""Spaces between columns."""


def show_summary(summary: TraceSummary, console: Console | None = None) -> None:
    """Print head and table; a split a line, or where that is too wide for the terminal, a split a column.

    Args:
        summary: what to show.
        console: where to print; default: stdout.
    """
    console = console or Console(highlight=False)
    if not console.is_terminal:
        for line in plain_lines(summary):
            console.print(line, soft_wrap=True, markup=False)
        return
    for line in summary.head():
        console.print(line, soft_wrap=True, markup=False)
    titles, rows = tabulate(summary)
    if rows:
        lines = [titles, *rows]
        wide = sum(max(map(len, column)) + GAP for column in zip(*lines, strict=True)) > console.width
        console.print(_table([list(line) for line in zip(*lines, strict=True)] if wide else lines))


def _table(lines: list[list[str]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    for number, title in enumerate(lines[0]):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for cells in lines[1:]:
        table.add_row(*cells)
    return table
