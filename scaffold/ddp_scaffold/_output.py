"""Text for people: rich on a terminal, plain in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer


def rows(title: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Print labelled lines under a title."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for label, text in pairs:
            table.add_row(Text(label, style="bold"), Text(text))
        Console(highlight=False).print(Panel(table, title=Text(title), title_align="left", expand=False))
        return
    typer.echo(title)
    width = max(len(label) for label, _ in pairs)
    for label, text in pairs:
        typer.echo(f"  {label:<{width}}  {text}")


def commands(title: str, lines: Sequence[str]) -> None:
    """Print commands to copy, each on one unbroken line."""
    typer.echo(f"\n{title}")
    for line in lines:
        typer.echo(f"  {line}")


def note(text: str) -> None:
    """Print a remark. It goes to stderr, so that stdout holds nothing but the result."""
    typer.echo(f"note: {text}", err=True)
