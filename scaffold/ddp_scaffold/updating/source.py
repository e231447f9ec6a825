"""Whether the template that a project names is one to update from: the file that names it came with the project."""

from __future__ import annotations

import shlex

import typer

from ..template.source import is_public
from .recorded import MAIN, Refused


def require_trust(source: str, override: str | None, ask: bool) -> None:
    """Raise Refused unless the recorded source is the public one, is named by `--template`, or a person says yes.

    A template writes files that a project then runs, so whoever clones a project would run code of whatever it names.
    """
    if is_public(source) or override is not None:
        return
    if ask and typer.confirm(f"{MAIN} names another template than ddp-scaffold's: {source!r}. Update from it?"):
        return
    raise Refused(
        f"{MAIN} names another template than ddp-scaffold's: {source!r}",
        f"If you trust whoever wrote that, name it: --template {shlex.quote(source)}, or DDP_SCAFFOLD_TEMPLATE.",
    )
