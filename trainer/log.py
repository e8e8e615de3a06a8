"""What a person reads: through rich on a terminal, as plain lines elsewhere. Only rank 0 writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from fusions.registry import FusionPlan


class Log:
    """The console of a job."""

    def __init__(self, rank: int | None = None):
        self.silent = (int(os.environ.get("RANK", "0")) if rank is None else rank) != 0
        self.terminal = sys.stdout.isatty()
        self._console: Any = None
        if self.terminal and not self.silent:
            from rich.console import Console  # a quarter of explain.py's time, so only where it is used

            self._console = Console(highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """One line, at once."""
        if self.silent:
            return
        if self._console:
            self._console.print(text, markup=False)
        else:
            print(text, flush=True)

    def table(self, title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table with a header."""
        if self.silent:
            return
        rows = [list(map(str, row)) for row in rows]
        if self._console:
            from rich.table import Table

            table = Table(title=title, title_justify="left", header_style="bold")
            for name in header:
                table.add_column(name, overflow="fold")
            for row in rows:
                table.add_row(*row)
            self._console.print(table)
            return
        widths = [max(len(str(cell)) for cell in column) for column in zip(header, *rows, strict=True)]
        print(title)
        for row in [list(header), *rows]:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        sys.stdout.flush()


def show_plan(log: Log, plan: FusionPlan) -> None:
    """The fusion report: what was asked, what runs, and why."""
    log.table("Fusions", ("fusion", "site", "asked", "runs", "why"), plan.rows())
