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
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import _output

if TYPE_CHECKING:
    from .._errors import Session
    from ..updating.trial import Outcome

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
    from .._git import require_git
    from ..template.source import open_template
    from ..updating import trial
    from ..updating.lock import only_update
    from ..updating.plan import begin, plan, require_project
    from ..updating.recorded import Refused
    from ..updating.report import finish, tell
    from ..updating.repository import git_directory, tree_of
    from ..updating.source import require_trust

    require_git()
    project = directory.expanduser().absolute()
    ask = not (yes or as_json) and sys.stdin.isatty() and sys.stdout.isatty()
    require_project(project)
    with ExitStack() as held:
        lock = held.enter_context(only_update(git_directory(project)))
        clusters, given, notes = begin(project, preset if add is None else add, pairs or (), dry_run, template)
        require_trust(clusters[0].source, template, ask)
        committed = tree_of(project)
        if dry_run:  # what follows reads what is committed, which nobody changes
            held.close()
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="ddp-scaffold-update-")))
        with open_template(template, clusters[0].source) as source:
            steps, result = plan(project, clusters, given, source, scratch, to, cluster, add)
            if not steps:
                finish(result, as_json)
                return
            outcome = trial.run(project, committed, source, clusters, steps, scratch)
        result |= trial.told(outcome, with_diff=dry_run) | {"notes": notes + result["notes"] + outcome.notes}
        if not as_json:
            tell(result)
        trial.require_nothing_lost(outcome, result)
        if not dry_run:
            if ask and not typer.confirm(f"\nUpdate {project}?", default=True):
                raise Refused("declined, nothing was changed", "Run it again when you like.")
            _write(ctx.obj, project, outcome, result, test, as_json, lock)
        finish(result, as_json)
    if result["conflicts"]:
        raise typer.Exit(CONFLICTS)


def _write(
    session: Session,
    project: Path,
    outcome: Outcome,
    result: dict[str, Any],
    test: bool,
    as_json: bool,
    lock: int | None,
) -> None:
    """Bring the outcome into the project; with `test`, only if its tests pass."""
    from ..updating.project_tests import run_tests
    from ..updating.put import put
    from ..updating.repository import top_of
    from ..updating.undo import take_back

    written = put(project, outcome, lock)
    result["applied"] = True
    session.written = project
    if test and result["conflicts"]:
        result["test"] = "skipped"
    elif test:
        try:
            result["test"] = run_tests(project, quiet=as_json)
        except BaseException:
            for path in take_back(top_of(project)[0], written):
                _output.note(f"{path} was changed meanwhile, and stays as it is")
            session.written = None
            raise
