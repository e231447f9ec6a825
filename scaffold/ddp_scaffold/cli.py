"""The command line: only registration here, one module a command under `commands/`.

Nothing heavy is imported before a command runs, so that `--help` stays fast: copier, questionary, yaml and rich are
imported inside the functions that need them.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from . import __version__
from ._errors import ERROR, INTERRUPTED, EdgeCommand, EdgeGroup, RefusingCommand, ScaffoldError, report
from ._signals import ending_on_signals
from .commands import check, doctor, explain, new, presets, update

app = typer.Typer(
    name="ddp-scaffold",
    cls=EdgeGroup,
    help="Generate hardened PyTorch DDP training projects and keep them up to date.",
    epilog="Exit codes: 0 done; 1 error; 2 wrong usage or answer; 130 interrupted. Any other is named by its command.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("new", cls=EdgeCommand)(new.new)
app.command("update", cls=RefusingCommand)(update.update)
app.command("check", cls=EdgeCommand)(check.check)
app.command("doctor", cls=EdgeCommand)(doctor.doctor)
app.command("explain", cls=EdgeCommand)(explain.explain)
app.add_typer(presets.app, name="presets")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"ddp-scaffold {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
) -> None:
    ctx.obj.debug = debug


def main() -> None:
    """Run the command line; the process ends with the exit code."""
    for stream in ("stdin", "stderr"):  # None where the shell closed it (`2>&-`)
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "r+"))  # noqa: SIM115 (open to the end of the process)
    if sys.stdout is None:
        report(ScaffoldError("stdout is closed", "Leave it open; `> /dev/null` discards the output."), as_json=False)
        sys.exit(ERROR)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a name that the locale cannot print
    try:
        with ending_on_signals():
            app()
    except SystemExit as end:
        if end.code == INTERRUPTED:  # all is cleaned up; Python would complain of a prompt's coroutine that never began
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
