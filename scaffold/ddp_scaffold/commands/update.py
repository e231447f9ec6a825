"""`ddp-scaffold update`: bring a project to a newer release, change answers, or add a cluster.

`--json` prints one object (version 1):

    {"version": 1, "project": absolute path, "from": tag or commit, "to": tag,
     "gained": [{"version", "date", "text": Markdown}], "new_answers": {question: value},
     "files": [{"path", "change": "added" | "changed" | "removed" | "conflict"}],
     "conflicts": [paths], "lost": [paths], "notes": [texts], "applied": true or false,
     "test": null, "passed" or "skipped", "diff": text with --dry-run, else null}

or, on failure, {"error": {"message", "hint", "exit_code"}}. Keys may be added; none is renamed within version 1.
"""

from __future__ import annotations

import sys
import tempfile
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
        bool, typer.Option("--test", help="Run the project's tests afterwards; if they fail, put all back.")
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
    conflict, before anything is touched. If an edit of yours would be lost, nothing is done. Afterwards the changes are
    staged, and yours to commit.

    Examples:

    \b
      ddp-scaffold update
      ddp-scaffold update --dry-run
      ddp-scaffold update --preset nersc-perlmutter --set account=m1234
      ddp-scaffold update --add lumi-g --set account=project_465000000

    Exit codes: 0 done, or nothing to do; 1 error; 2 conflicts are left; 3 refused, and the project is as it was;
    130 interrupted.
    """
    from .._git import git, require_git
    from ..template import open_template
    from ..updating import trial
    from ..updating.plan import begin, plan
    from ..updating.project_tests import run_tests
    from ..updating.put import put
    from ..updating.recorded import Refused
    from ..updating.report import finish, tell
    from ..updating.source import require_trust
    from ..updating.undo import take_back

    require_git()
    project = directory.expanduser().absolute()
    ask = not (yes or as_json) and sys.stdin.isatty() and sys.stdout.isatty()
    clusters, given, notes = begin(project, preset if add is None else add, pairs or (), dry_run, template)
    require_trust(clusters[0].source, template, ask)
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-update-") as name:
        scratch = Path(name)
        with open_template(template, clusters[0].source) as source:
            steps, result = plan(project, clusters, given, source, scratch, to, cluster, add)
            if not steps:
                finish(result, as_json)
                return
            prefix = git("rev-parse", "--show-prefix", cwd=project).strip()
            committed = git("rev-parse", f"HEAD:{prefix}", cwd=project).strip()
            outcome = trial.run(project, committed, source, steps, scratch)
            lost = trial.lost_edits(outcome, clusters, source, scratch)
        result |= {
            "files": [{"path": path, "change": change} for path, change in sorted(outcome.changes.items())],
            "conflicts": sorted(path for path, change in outcome.changes.items() if change == "conflict"),
            "lost": lost,
            "notes": notes + result["notes"],
        }
        if dry_run:
            result["diff"] = git(
                "diff", "--no-color", "--no-ext-diff", outcome.before, outcome.after, cwd=outcome.repository
            )
        if not as_json:
            tell(result)
        if lost:
            who = result["to"] if result["to"] != result["from"] else "a project with these answers"
            raise Refused(
                f"{who} no longer has {', '.join(lost)}, and your edits there would be lost",
                f"Move what you need of it, then `git rm {lost[0]}`, commit, and run the update again.",
            )
        if not dry_run:
            if ask and not typer.confirm(f"\nUpdate {project}?", default=True):
                raise Refused("declined, nothing was changed", "Run it again when you like.")
            written = put(project, outcome)
            result["applied"] = True
            ctx.obj.written = project
            if test and result["conflicts"]:
                result["test"] = "skipped"
            elif test:
                try:
                    run_tests(project, quiet=as_json)
                except BaseException:
                    top = Path(git("rev-parse", "--show-toplevel", cwd=project).rstrip("\n"))
                    for path in take_back(top, written):
                        _output.note(f"{path} was changed meanwhile, and stays as it is")
                    ctx.obj.written = None
                    raise
                result["test"] = "passed"
        finish(result, as_json)
    if result["conflicts"]:
        raise typer.Exit(CONFLICTS)
