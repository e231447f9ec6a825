"""The one exception that commands raise, and the edge at which it becomes two lines and an exit code.

Exit codes: 0 done, 1 error, 2 the command line (or an answer on it) is wrong, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

ERROR, USAGE, INTERRUPTED = 1, 2, 130


class ScaffoldError(Exception):
    """A failure to tell the user: what is wrong, what to do about it, and the exit code."""

    def __init__(self, message: str, hint: str, exit_code: int = ERROR) -> None:
        super().__init__(message)
        self.message, self.hint, self.exit_code = message, hint, exit_code


class UsageError(ScaffoldError):
    """The command line or an answer is wrong."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint, USAGE)


@dataclass
class Session:
    """How this run reports its failures. It hangs on the context of Typer; commands with `--json` set `as_json`."""

    debug: bool = False
    as_json: bool = False


def show(value: object) -> str:
    """Return a user's value quoted, on one line and short enough for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}...{text[-1]} ({len(str(value))} characters)"


class EdgeGroup(TyperGroup):
    """The root command: whatever a command raises ends here."""

    def invoke(self, ctx: Any) -> Any:
        session = ctx.ensure_object(Session)
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, typer.Abort) as interrupt:
            error = ScaffoldError("interrupted, nothing was left behind", "", INTERRUPTED)
            cause: BaseException = interrupt
        except ScaffoldError as known:
            error = cause = known
        except (typer.Exit, typer.TyperException, BrokenPipeError):  # Typer's own business: --help, unknown options
            raise
        except Exception as unexpected:
            summary = " ".join(str(unexpected).split())
            error = ScaffoldError(
                f"unexpected {type(unexpected).__name__}: {summary}",
                "This is a bug; `ddp-scaffold --debug ...` shows the traceback to report with it.",
            )
            cause = unexpected
        if session.debug:
            traceback.print_exception(cause)
        report(error, session.as_json)
        raise typer.Exit(error.exit_code)


def report(error: ScaffoldError, as_json: bool) -> None:
    """Print an error: JSON goes to stdout, text to stderr."""
    if as_json:
        fields = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        typer.echo(json.dumps({"error": fields}, indent=2))
        return
    if error.exit_code == INTERRUPTED:
        typer.echo(("\n" if sys.stderr.isatty() else "") + error.message, err=True)  # a prompt's line may be unfinished
        return
    typer.echo(f"error: {error.message}", err=True)
    typer.echo(f"hint: {error.hint}", err=True)
