"""Text for people: rich on a terminal, plain in a pipe."""

from __future__ import annotations

import datetime
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from ._errors import WIDTH, ScaffoldError, fill, one_line

NARROWEST = 6  # columns of a cell that is folded; a table that had to fold more is printed as lines


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
    """Print labelled lines under a title; on a terminal in a frame, if that leaves room for it."""
    labels = max(len(label) for label, _ in pairs)
    if not sys.stdout.isatty() or not _fits(max(len(title) + 6, labels + NARROWEST + 6)):
        say(title)
        for label, text in pairs:
            say(f"  {label:<{labels}}  {text}")
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in pairs:
        grid.add_row(Text(label, style="bold"), Text(one_line(text)))
    Console(highlight=False, width=min(WIDTH, shutil.get_terminal_size().columns)).print(
        Panel(grid, title=Text(title), title_align="left", expand=False)
    )


def table(header: Sequence[str], lines: Sequence[Sequence[str]], *, keep_first: bool = False) -> None:
    """Print lines under a header: a rich table on a terminal, aligned plain text in a pipe.

    With `keep_first`, a narrow terminal leaves the first column as wide as it is. Where the columns have no room, each
    line is printed as some lines of `header: cell`.
    """
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    if not sys.stdout.isatty():
        for line in (header, *lines):
            say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    least = [width if keep_first and not column else min(width, NARROWEST) for column, width in enumerate(widths)]
    if not _fits(sum(least) + 3 * len(least) + 1):
        for number, line in enumerate(lines):
            if number and len(header) > 1:
                say()
            for label, cell in zip(header, line, strict=True):
                if cell:
                    say(f"{label}: {cell}")
        return
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


def _fits(columns: int) -> bool:
    """Tell whether the terminal has so many columns. rich would cut off what has no room, or leave it out."""
    return shutil.get_terminal_size().columns >= columns


def commands(title: str, lines: Sequence[str]) -> None:
    """Print lines to copy below a title, each unbroken."""
    say()
    say_filled(title)
    for line in lines:
        say(f"  {line}")


def shell(title: str, lines: Sequence[str]) -> None:
    """Print commands for a shell, which can be copied: on a terminal a long one goes on behind a backslash."""
    broken = [part for line in lines for part in _broken(line)] if sys.stdout.isatty() else lines
    commands(title, broken)


def _broken(command: str) -> list[str]:
    """Return the lines of a command that is too long for one; an option stays with its value."""
    words = shlex.split(command)
    if len(command) + 2 <= WIDTH or shlex.join(words) != command:  # more than words, like `a && b`
        return [command]
    parts: list[str] = []
    for word in words:
        follows = parts and parts[-1].startswith("--") and " " not in parts[-1] and not word.startswith("-")
        parts[-1:] = [f"{parts[-1]} {shlex.quote(word)}"] if follows else [*parts[-1:], shlex.quote(word)]
    lines = [parts[0]]
    for part in parts[1:]:
        if len(f"  {lines[-1]} {part} \\") <= WIDTH:
            lines[-1] += f" {part}"
        else:
            lines[-1:] = [f"{lines[-1]} \\", f"    {part}"]
    return lines


def say_filled(text: str, indent: int = 0, *, err: bool = False) -> None:
    """Print prose: one line in a pipe, and as many as it needs on a terminal, all but the first one indented."""
    stream = sys.stderr if err else sys.stdout
    for line in fill(one_line(text), indent).splitlines() if stream.isatty() else [text]:
        say(line, err=err)


def near(path: str) -> str:
    """Return an absolute path for people: from the current directory if it is below, else from home, else as it is."""
    with suppress(OSError, RuntimeError):  # a directory that was removed, no home
        here, home = Path.cwd(), Path.home()
        if Path(path) == here:
            return "this directory"
        for folder, begin in ((here, ""), (home, "~/")):
            if Path(path).is_relative_to(folder) and Path(path) != folder:
                return begin + Path(path).relative_to(folder).as_posix()
    return path


def note(text: str) -> None:
    """Print a remark. It goes to stderr, so that stdout holds nothing but the result."""
    say_filled(f"note: {text}", indent=6, err=True)


def note_on_terminal(text: str) -> None:
    """Print a remark that only helps a person who waits: the result says the same elsewhere."""
    if sys.stderr.isatty():
        note(text)


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done, in one line that goes away. It shows nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as line:
        yield lambda text: line.update(Text(one_line(text)))
