"""A summary of traces on the screen: a table on a terminal, plain lines of fixed width in a batch log."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..data.summary import TraceSummary, plain_lines, tabulate

__all__ = ["show_summary"]


def show_summary(summary: TraceSummary, console: Console | None = None) -> None:
    """Print head and table.

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
        table = Table(box=None, header_style="bold", pad_edge=False)
        for number, title in enumerate(titles):
            table.add_column(title, justify="right" if number else "left", no_wrap=True)
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
