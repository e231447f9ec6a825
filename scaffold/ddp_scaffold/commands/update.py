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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import _output

if TYPE_CHECKING:
    from ..recorded import Recorded
    from ..template import Template
    from ..trial import Step

CONFLICTS = 2


def update(
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
        typer.Option("--template", metavar="T", envvar="DDP_SCAFFOLD_TEMPLATE", help="Take the releases from here."),
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
    from .. import putting, trial
    from .._git import require_git
    from ..recorded import Refused
    from ..smoke import run_tests
    from ..template import open_template

    require_git()
    project = directory.expanduser().absolute()
    clusters, given, notes = _begin(project, preset if add is None else add, pairs or ())
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-update-") as name:
        scratch = Path(name)
        with open_template(template, clusters[0].source) as source:
            steps, result = _plan(project, clusters, given, source, scratch, to, cluster, add)
            if not steps:
                _finish(result, as_json)
                return
            from .._git import git

            prefix = git("rev-parse", "--show-prefix", cwd=project).strip()
            outcome = trial.run(
                project, git("rev-parse", f"HEAD:{prefix}", cwd=project).strip(), source, steps, scratch
            )
            lost = trial.lost_edits(outcome, clusters, source, scratch)
        result |= {
            "files": [{"path": path, "change": change} for path, change in sorted(outcome.changes.items())],
            "conflicts": sorted(path for path, change in outcome.changes.items() if change == "conflict"),
            "lost": lost,
            "notes": notes + result["notes"],
        }
        if dry_run:
            result["diff"] = git("diff", "--no-color", outcome.before, outcome.after, cwd=outcome.repository)
        if not as_json:
            _tell(result)
        if lost:
            raise Refused(
                f"{result['to']} no longer has {', '.join(lost)}, and your edits there would be lost",
                f"Move what you need of it, then `git rm {lost[0]}`, commit, and run the update again.",
            )
        if not dry_run:
            ask = not (yes or as_json) and sys.stdin.isatty() and sys.stdout.isatty()
            if ask and not typer.confirm(f"\nUpdate {project}?", default=True):
                raise Refused("declined, nothing was changed", "Run it again when you like.")
            head = git("rev-parse", "HEAD", cwd=project).strip()
            putting.put(project, outcome)
            result["applied"] = True
            if test and result["conflicts"]:
                result["test"] = "skipped"
            elif test:
                try:
                    run_tests(project, quiet=as_json)
                except BaseException:
                    putting.take_back(project, outcome.changes, head)
                    raise
                result["test"] = "passed"
        _finish(result, as_json)
    if result["conflicts"]:
        raise typer.Exit(CONFLICTS)


def _begin(project: Path, preset: str | None, pairs: Any) -> tuple[list[Recorded], dict[str, Any], list[str]]:
    """Return what the project recorded, what is given, and remarks. Raises Refused for what must be right before."""
    from .. import putting, trial
    from .._errors import UsageError
    from .._git import enclosing_work_tree, git, run_git
    from ..moving import refuse_settled
    from ..questions import from_options
    from ..recorded import Refused, edited_by_hand, read

    clusters = read(project)
    if enclosing_work_tree(project) is None:
        raise Refused(f"{project} is not in a git repository", "git init && git add -A && git commit -m 'Begin' in it.")
    trial.require_commit(project)
    notes = []
    if putting.recover(project):
        notes.append("an earlier update was cut off while it wrote; the project was put back first")
    if changed := putting.dirty(project):
        more = f" and {len(changed) - 1} more" if changed[1:] else ""
        raise Refused(f"{changed[0]}{more}: not committed", "Commit or stash it first (git stash -u), or ignore it.")
    for recorded in clusters:
        if run_git("ls-files", "--error-unmatch", "--", recorded.name, cwd=project).returncode:
            raise Refused(f"{recorded.name} is not committed", f"git add -f {recorded.name} && git commit.")
        edits = edited_by_hand(project, recorded.name)
        if edits is not None:
            options = " ".join(f"--set {pair}" for pair in edits) or "--set KEY=VALUE"
            raise Refused(
                f"{recorded.name} was edited by hand, which reaches no other file",
                f"Put it back as the template wrote it, commit, then: ddp-scaffold update {options}",
            )
    ignored = git("ls-files", "-ci", "--exclude-standard", "-z", cwd=project).split("\0")[:-1]
    if ignored:
        notes.append(f"tracked although an ignore list matches: {', '.join(ignored[:5])}; merged like all others")
    try:
        given = from_options(preset, None, pairs)
    except UsageError as error:
        raise Refused(error.message, error.hint) from error
    refuse_settled(given)
    return clusters, given, notes


def _plan(
    project: Path,
    clusters: list[Recorded],
    given: dict[str, Any],
    source: Template,
    scratch: Path,
    to: str | None,
    cluster: str | None,
    add: str | None,
) -> tuple[list[Step], dict[str, Any]]:
    """Return the steps to take, none if all is done already, and the beginning of the result."""
    from dataclasses import replace

    from ..changelog import gained
    from ..moving import answers_for_cluster, answers_for_update
    from ..recorded import Refused, file_of
    from ..releases import choose, name_of_cluster
    from ..summary import needs
    from ..trial import Step

    main = clusters[0]
    target = choose(source, [recorded.commit for recorded in clusters], main.commit if add else to)
    template = replace(source, ref=target)
    result: dict[str, Any] = {
        "version": 1,
        "project": str(project),
        "from": main.commit,
        "to": target,
        "gained": [],
        "new_answers": {},
        "files": [],
        "conflicts": [],
        "lost": [],
        "notes": [],
        "applied": False,
        "test": None,
        "diff": None,
    }
    if add is not None:
        name = name_of_cluster(add)
        file = file_of(name)
        if (project / file).exists() or (project / f"launch-{name}").exists():
            raise Refused(f"the project has launch-{name}/ already", f"--cluster {name} --set KEY=VALUE changes it.")
        rendered = answers_for_cluster(main, given, template, scratch, file)
        result["notes"] += [f"a job there needs {one}" for one in needs(rendered.facts)]
        return [Step(file, rendered.answers, target, new=True)], result
    names = {recorded.cluster: recorded for recorded in clusters}
    if cluster is not None and cluster not in names:
        known = ", ".join(filter(None, names)) or "none"
        raise Refused(f"--cluster {cluster}: the project has no launch-{cluster}/", f"There are: {known}.")
    steps = []
    for recorded in clusters:
        changes = given if recorded.cluster == (cluster or "") else {}
        if recorded.commit == target and not changes:
            continue
        rendered, new = answers_for_update(recorded, changes, template, scratch)
        steps.append(Step(recorded.name, rendered.answers, target))
        result["new_answers"] |= {name: rendered.answers[name] for name in new}
        if changes:
            result["notes"] += [f"a job there needs {one}" for one in needs(rendered.facts)]
    if any(recorded.commit != target for recorded in clusters):
        entries = gained(template.read("CHANGELOG.md"), main.commit, target) if template.has("CHANGELOG.md") else []
        result["gained"] = [{"version": e.version, "date": e.date, "text": e.text} for e in entries]
    return steps, result


def _tell(result: dict[str, Any]) -> None:
    for note in result["notes"]:
        _output.note(note)
    if result["from"] != result["to"]:
        _output.say(f"From {result['from']} to {result['to']}")
    for entry in result["gained"]:
        _output.say()
        _output.say(f"{entry['version']} ({entry['date']})" if entry["date"] else entry["version"])
        for line in entry["text"].splitlines():
            _output.say(f"  {line}".rstrip())
    if result["new_answers"]:
        answered = [f"{name} = {value}" for name, value in result["new_answers"].items()]
        _output.commands("New questions, answered by their defaults (--set changes them):", answered)
    _output.say()
    if result["files"]:
        _output.table(("change", "file"), [(file["change"], file["path"]) for file in result["files"]], keep_first=True)
    else:
        _output.say("No file changes.")
    if result["diff"] is not None:
        _output.say()
        for line in result["diff"].splitlines():
            _output.say(line)


def _finish(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _output.say_json(result)
        return
    if not result["files"] and not result["applied"]:
        if result["diff"] is None:
            _output.say(f"{result['project']} is at {result['to']}: nothing to do.")
        return
    if not result["applied"]:
        return
    conflicts = result["conflicts"]
    if conflicts:
        edit = [f"$EDITOR {' '.join(conflicts)}", f"git add {' '.join(conflicts)}", "git commit"]
        _output.commands(
            f"Both sides changed the same lines of {len(conflicts)} files. Choose between the markers:", edit
        )
        return
    if result["test"]:
        _output.say(f"\nThe project's tests: {result['test']}.")
    message = f"ddp-scaffold {result['to']}" if result["from"] != result["to"] else "Change answers of ddp-scaffold"
    _output.commands("All changes are staged. Next:", ["git diff --staged", f"git commit -m '{message}'"])
