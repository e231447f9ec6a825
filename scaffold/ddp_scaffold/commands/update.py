"""`ddp-scaffold update`: bring a project to a newer release, change answers, or add a cluster.

`--json` prints one object (version 1):

    {"version": 1, "project": absolute path, "from": tag or commit, "to": tag,
     "gained": [{"version", "date", "text": Markdown}], "new_answers": {question: value},
     "files": [{"path", "change": "added" | "changed" | "removed" | "conflict"}],
     "conflicts": [paths], "lost": [paths], "moved_to": {lost path: where the release has it},
     "carried": {old path: where the project has it now}, "left_out": [{"path", "why"}], "notes": [texts],
     "applied": true or false,
     "test": null, "passed" or "skipped", "diff": text with --dry-run, else null}

or, on failure, {"error": {"message", "hint", "exit_code"}}, with the keys above beside it if edits would be lost.
Keys may be added; none is renamed within version 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import _output

CONFLICTS = 2


def update(
    ctx: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="The project.", show_default=False)] = Path("."),
    to: Annotated[str | None, typer.Option("--to", metavar="V", help="A release; default: the newest.")] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="P", help="Move to this place: a name, or a preset file.")
    ] = None,
    pairs: Annotated[
        list[str] | None, typer.Option("--set", metavar="K=V", help="Change an answer; repeatable.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="NAME", help="--preset and --set are about launch-NAME/.")
    ] = None,
    add: Annotated[
        str | None, typer.Option("--add", metavar="P", help="Add launch-P/ for one more place, beside launch/.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; show the diff.")] = False,
    test: Annotated[
        bool, typer.Option("--test", help="Run the project's tests, if any, afterwards; if they fail, put all back.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; implies -y.")] = False,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            metavar="T",
            envvar="DDP_SCAFFOLD_TEMPLATE",
            help="Take the releases from here. A project of a fork needs it.",
        ),
    ] = None,
) -> None:
    """Bring a project to a newer release of the template, without losing an edit.

    The update is tried in a copy first. You see what the project gains, which files change and which of your edits
    conflict, before anything is touched. Edits in a file that the release has moved go along with it, and a file that
    you have moved gets the release's changes. If an edit of yours would be lost, nothing is done. Afterwards the
    changes are staged, and yours to commit.

    Examples:

    \b
      ddp-scaffold update
      ddp-scaffold update --dry-run
      ddp-scaffold update --preset nersc-perlmutter --set account=m1234
      ddp-scaffold update --add lumi-g --set account=project_465000000

    Exit codes: 0 done, or nothing to do; 1 error; 2 conflicts are left; 3 refused, and the project is as it was;
    130 interrupted.
    """
    from ..updating.report import finish, tell
    from ..updating.request import Request
    from ..updating.update import update as bring

    request = Request(
        directory=directory,
        to=to,
        preset=preset,
        pairs=tuple(pairs or ()),
        cluster=cluster,
        add=add,
        template=template,
        dry_run=dry_run,
        test=test,
        ask=not (yes or as_json) and sys.stdin.isatty() and sys.stdout.isatty(),
        quiet=as_json,
    )
    result = bring(request, ctx.obj, show=(lambda result: None) if as_json else tell)
    if as_json:
        _output.say_json(result.to_json())
    else:
        finish(result)
    if result.conflicts:
        raise typer.Exit(CONFLICTS)
