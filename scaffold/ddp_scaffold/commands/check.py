"""`ddp-scaffold check`: what will hang, give wrong results or change nothing, found before it runs.

`--json` prints a list of `{"file", "line", "column", "rule", "severity", "message", "fix", "docs"}`, and `cell`
for a notebook; severity is hang, wrong-result, lost-work, slow, placebo or hygiene. Keys may be added.

In a repository that was adopted, the text ends with what is left of that. Lines that must change count as findings.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .. import _output
from .._errors import USAGE, ScaffoldError

FOUND, FAILED = 1, USAGE


class Format(str, Enum):
    """How findings are printed."""

    text = "text"
    json = "json"
    sarif = "sarif"
    github = "github"


def check(
    ctx: typer.Context,
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]...", help="Files and folders (default: this folder).")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How findings are printed.")] = Format.text,
    as_json: Annotated[bool, typer.Option("--json", help="As --format json.")] = False,
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="RULES", help="Only these: ids, beginnings of ids, names or severities."),
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", metavar="RULES", help="Without these.")] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help=("Make the changes that cannot do harm, and print the rest."))
    ] = False,
    variables: Annotated[
        bool,
        typer.Option("--variables", help="Hold the table of variables against the torch installed at PATH instead."),
    ] = False,
) -> None:
    """Check training code and scripts for what hangs, gives wrong results, loses work, or changes nothing.

    Files are read, and never run or imported. `# ddp: ignore[RULE]` in a line leaves it out, and so do `select` and
    `ignore` below `[tool.ddp-scaffold.check]` in pyproject.toml.

    Exit codes: 0 clean; 1 findings; 2 error.
    """
    if as_json and form not in (Format.text, Format.json):
        raise ScaffoldError(f"--json and --format {form.value} ask for different things", "Give one of them.", USAGE)
    form = Format.json if as_json else form
    ctx.obj.as_json = form in (Format.json, Format.sarif)
    try:
        count = _variables(paths or [], form) if variables else _check(paths or [Path()], form, select, ignore, fix)
    except ScaffoldError as error:
        raise ScaffoldError(error.message, error.hint, FAILED) from error
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise ScaffoldError(reason, "Correct that here, and check again.", FAILED) from error
    if count:
        raise typer.Exit(FOUND)


def _check(paths: list[Path], form: Format, select: list[str] | None, ignore: list[str] | None, fix: bool) -> int:
    """Check, print, and return how many findings there are."""
    from ..check import formats
    from ..check.fixing import fix as apply
    from ..check.run import check as run
    from ..check.run import selection_of

    selection = selection_of(select or [], ignore or [], paths)
    checked = run(paths, selection)
    if fix and checked.findings:
        settled = apply(checked.files, checked.findings)
        _output.note(f"{settled} of {len(checked.findings)} findings are settled by --fix")
        checked = run(paths, selection) if settled else checked
    for file in checked.unread:
        _output.note(f"{file.path} was not read: {file.unread}")
    if form is Format.json:
        _output.say_json(formats.as_json(checked))
    elif form is Format.sarif:
        _output.say_json(formats.as_sarif(checked))
    else:
        for line in formats.as_github(checked) if form is Format.github else formats.as_text(checked):
            _output.say(line)
    return len(checked.findings) + (_left(paths) if form is Format.text and not select else 0)


def _left(paths: list[Path]) -> int:
    """Print what is left to do in a repository that has been adopted; return how many lines must change."""
    from ..adopting.remaining import remaining
    from ..creating.summary import show_places

    count = 0
    for one in remaining(paths):
        must = [change for change in one.advice.changes if change.must]
        may = [change for change in one.advice.changes if not change.must]
        count += len(must)
        _output.say()
        for text in [one.advice.loop, *one.advice.unknown]:
            if text:
                _output.note(text)
        _output.say_filled(f"Adopting: {len(must)} lines must change yet, and {len(may)} may: docs/adopting.md")
        show_places([*must, *may])
    return count


def _variables(paths: list[Path], form: Format) -> int:
    """Print where the table and an installed torch differ, and return how often."""
    from ..check.installed import compare, find_torch

    report = compare(find_torch(paths))
    if form is Format.text:
        _output.say(f"torch {report.torch} in {report.folder}: {report.checked} names held against it")
        for line in report.differences:
            _output.say(f"  {line.name}: {line.text}")
        for text in report.unknown:
            _output.say(f"  not checked: {text}")
        count = len(report.differences)
        _output.say(f"{count or 'nothing'} differ{'s' * (count < 2)}")
    else:
        _output.say_json(report.to_json())
    return len(report.differences)
