"""The one exception that commands raise, and the edge at which it becomes two lines and an exit code.

Exit codes: 0 done, 1 error, 2 the command line (or an answer on it) is wrong, 130 interrupted (Ctrl-C,
SIGTERM or SIGHUP). In `update`, 2 says that conflicts are left; what is wrong is refused there, with 3.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

ERROR, USAGE, REFUSED, INTERRUPTED = 1, 2, 3, 130
WIDTH = 78  # columns of what is printed for people on a terminal, if it has as many


class ScaffoldError(Exception):
    """A failure to tell the user: what is wrong, what to do about it, and the exit code.

    `result` is what was found out until then; with --json it is printed beside the error.
    """

    def __init__(
        self, message: str, hint: str, exit_code: int = ERROR, result: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.hint, self.exit_code, self.result = message, hint, exit_code, result or {}


class UsageError(ScaffoldError):
    """The command line or an answer is wrong; `question` is the one that the answer is to, where that is known."""

    def __init__(self, message: str, hint: str, question: str = "") -> None:
        super().__init__(message, hint, USAGE)
        self.question = question


@dataclass
class Session:
    """How this run reports its failures, on the context of Typer."""

    as_json: bool = False
    usage_code: int = USAGE  # the exit code for wrong usage
    debug: bool = False
    written: Path | None = None  # the project, once it is complete at its destination


def show(value: object) -> str:
    """Return a user's value quoted, on one line and short enough for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}...{text[-1]} ({len(str(value))} characters)"


def one_line(text: str) -> str:
    """Return `text` with whatever would end the line, steer a terminal or not encode as an escape sequence."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)


def fill(text: str, indent: int = 0, first: int = 0) -> str:
    """Return `text` for a terminal: lines of at most 78 columns, broken at spaces, all but the first one indented.

    `first` columns of the first line are taken already. A word that is longer stays whole, so that it can be copied.
    """
    wrapped = textwrap.wrap(
        text,
        width=max(20, min(WIDTH, shutil.get_terminal_size().columns)),
        initial_indent=" " * first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrapped)[first:]


def file_path(text: str) -> Path:
    """Parse the path of a file on the command line. An empty one, as of an unset variable, would be `.`."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


class EdgeCommand(TyperCommand):
    """A command with --json, which counts as well where the rest of the command line is wrong."""

    usage_code = USAGE

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options, _ = _parse_leniently(self, ctx, args)
        ctx.obj.as_json = bool(options.get("as_json"))
        return super().parse_args(ctx, args)


class RefusingCommand(EdgeCommand):
    """A command whose exit code 2 means something else: what is wrong is refused."""

    usage_code = REFUSED


class EdgeGroup(TyperGroup):
    """The root command: whatever is raised ends here, Typer's own usage errors too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, rest = _parse_leniently(self, ctx, args)
        ctx.obj.as_json = "--json" in rest  # for a command that does not exist; one that does parses its own options
        command = self.commands.get(next((word for word in rest if not word.startswith("-")), ""))
        ctx.obj.usage_code = getattr(command, "usage_code", USAGE)
        return super().parse_args(ctx, args)

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args) or ["--help"]
        session = Session()
        try:
            with self.make_context("ddp-scaffold", words, obj=session) as context:
                self.invoke(context)
            sys.exit(0)
        except typer.Exit as done:
            sys.exit(done.exit_code)
        except BrokenPipeError:  # the reader has seen enough, as `| head` has
            _give_up_output()
            sys.exit(ERROR)
        except (Exception, KeyboardInterrupt) as cause:
            if session.debug:
                traceback.print_exception(cause)
            error = _explain(cause, session)
            if error.exit_code == USAGE:
                error.exit_code = session.usage_code
            report(error, session.as_json)
            sys.exit(error.exit_code)


def _parse_leniently(
    command: TyperCommand | TyperGroup, ctx: Any, args: Sequence[str]
) -> tuple[Mapping[str, Any], list[str]]:
    """Return the options that are given, and all other words, whatever else is wrong with them."""
    settings = {**command.context_settings, "resilient_parsing": True, "ignore_unknown_options": True}
    lenient = command.context_class(command, parent=ctx.parent, **settings)
    options, rest, _ = command.make_parser(lenient).parse_args(list(args))
    return options, rest


def _explain(cause: BaseException, session: Session) -> ScaffoldError:
    """Return what to tell of an exception."""
    if isinstance(cause, ScaffoldError):
        return cause
    if isinstance(cause, (KeyboardInterrupt, typer.Abort)):
        # A prompt that a signal has ended leaves tasks behind, of which asyncio would complain at the very end.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        state = f"{session.written} is complete" if session.written else "nothing was left behind"
        return ScaffoldError(f"interrupted, {state}", "", INTERRUPTED)
    if isinstance(cause, typer.TyperException):
        path = getattr(getattr(cause, "ctx", None), "command_path", "ddp-scaffold")
        return UsageError(cause.format_message().rstrip("."), f"See `{path} --help`.")
    if isinstance(cause, OSError):
        what = f"{cause.filename}: {cause.strerror}" if cause.filename else str(cause.strerror or cause)
        return ScaffoldError(what, "Correct that here; `ddp-scaffold --debug ...` shows where it happened.")
    return ScaffoldError(
        f"unexpected {type(cause).__name__}: {' '.join(str(cause).split())}",
        "This is a bug: report it with what `ddp-scaffold --debug ...` shows.",
    )


def report(error: ScaffoldError, as_json: bool) -> None:
    """Print an error: JSON goes to stdout, text to stderr, and what cannot be printed nowhere."""
    message, hint = one_line(error.message), one_line(error.hint)
    try:
        if as_json:
            fields = {"message": message, "hint": hint, "exit_code": error.exit_code}
            typer.echo(json.dumps({**error.result, "error": fields}, indent=2, default=str))
            return
    except OSError:  # stdout is what failed: stderr it is
        pass
    with contextlib.suppress(OSError):
        if error.exit_code == INTERRUPTED:  # a prompt's line may be unfinished
            typer.echo(("\n" if sys.stderr.isatty() else "") + message, err=True)
        else:
            lines = [(f"error: {message}", 7), (f"hint: {hint}", 6)]
            typer.echo("\n".join(fill(*line) if sys.stderr.isatty() else line[0] for line in lines), err=True)
    _give_up_output()


def _give_up_output() -> None:
    """Let Python drop output that could not be written; it would try again at its exit, and fail with code 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where the shell closed it (`>&-`)
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
