"""Text for people: rich on a terminal, plain in a pipe."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence

import typer

from ._errors import ScaffoldError, one_line


def say(text: str = "", *, err: bool = False) -> None:
    """Print one line. Raises ScaffoldError if it cannot be written, BrokenPipeError if nobody reads it any more."""
    try:
        typer.echo(one_line(text), err=err)
    except BrokenPipeError:
        raise
    except OSError as error:
        stream = "stderr" if err else "stdout"
        raise ScaffoldError(
            f"{stream} cannot be written: {error.strerror}", "All else is done; print it to another place."
        ) from error


def say_json(value: object) -> None:
    """Print an object as JSON, in ASCII; days, which YAML has and JSON has not, as text."""
    for line in json.dumps(value, indent=2, default=_day).splitlines():
        say(line)


def _day(value: object) -> str:
    if isinstance(value, datetime.date):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not for JSON")


def rows(title: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Print labelled lines under a title."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for label, text in pairs:
            table.add_row(Text(label, style="bold"), Text(one_line(text)))
        Console(highlight=False).print(Panel(table, title=Text(title), title_align="left", expand=False))
        return
    say(title)
    width = max(len(label) for label, _ in pairs)
    for label, text in pairs:
        say(f"  {label:<{width}}  {text}")


def table(header: Sequence[str], lines: Sequence[Sequence[str]], *, keep_first: bool = False) -> None:
    """Print lines under a header: a rich table on a terminal, aligned plain text in a pipe.

    With `keep_first`, a narrow terminal leaves the first column as wide as it is.
    """
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table(*header)
        for column in grid.columns:
            column.overflow = "fold"  # a long path goes on in the next line
        grid.columns[0].no_wrap = keep_first
        for line in lines:
            grid.add_row(*(Text(one_line(cell)) for cell in line))
        Console(highlight=False).print(grid)
        return
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    for line in (header, *lines):
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def commands(title: str, lines: Sequence[str]) -> None:
    """Print commands to copy, each on one unbroken line."""
    say()
    say(title)
    for line in lines:
        say(f"  {line}")


def note(text: str) -> None:
    """Print a remark. It goes to stderr, so that stdout holds nothing but the result."""
    say(f"note: {text}", err=True)
