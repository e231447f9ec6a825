"""The command line: only registration here, one module a command under `commands/`.

Nothing heavy is imported before a command runs, so that `--help` stays fast: copier, questionary, yaml and rich are
imported inside the functions that need them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from . import __version__
from ._errors import EdgeGroup, Session
from .commands import new, presets

app = typer.Typer(
    name="ddp-scaffold",
    cls=EdgeGroup,
    help="Generate hardened PyTorch DDP training projects and keep them up to date.",
    epilog="Exit codes: 0 done; 1 error; 2 wrong usage or answer; 130 interrupted. Any other is named by its command.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("new")(new.new)
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
    ctx.ensure_object(Session).debug = debug


def main() -> None:
    """Run the command line; the process ends with the exit code."""
    app()
