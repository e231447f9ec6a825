"""Before an update: what must be right, and what is to be done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from .._errors import ScaffoldError, UsageError
from .._git import enclosing_work_tree, git, run_git
from ..presets.facts import needs
from ..template.given import Given
from ..template.harmless import require_harmless
from ..template.questions import from_options
from ..template.render import Rendered
from ..template.source import Template
from . import package, trial
from .answers import answers_for_cluster, answers_for_update, refuse_settled
from .changelog import Entry, gained, version
from .edits import refuse_edits
from .recorded import MAIN, Recorded, Refused, file_of, read
from .repository import dirty, under_way, with_conflicts
from .request import Request
from .result import News
from .step import Step, plain_git
from .target import choose, name_of_cluster
from .undo import recover

FIRST_WITH_CLUSTERS = Version("0.2.0")


def begin(project: Path, request: Request) -> tuple[list[Recorded], dict[str, Given], list[str]]:
    """Return what the project recorded, what is given, and remarks. Raises Refused for what must be right before."""
    notes = []
    if recover(project, only_tell=request.dry_run):
        notes.append("an earlier update was cut off while it wrote; the project was put back first")
    if what := under_way(project):
        raise Refused(f"{what} is under way in this repository", "End it first, or give it up: git status says how.")
    clusters = read(project)
    if len({recorded.source for recorded in clusters}) > 1:
        raise Refused("the answers files name different templates", "Give them the same _src_path, and commit that.")
    if changed := dirty(project):
        more = f" and {len(changed) - 1} more" if changed[1:] else ""
        raise Refused(f"{changed[0]}{more}: not committed", "Commit or stash it first (git stash -u), or ignore it.")
    if marked := with_conflicts(project):
        raise Refused(
            f"{', '.join(marked)}: committed with the marks of a conflict of an earlier update",
            "Choose between the marks (<<<<<<<, =======, >>>>>>>), take them out, and commit.",
        )
    for recorded in clusters:
        if run_git("ls-files", "--error-unmatch", "--", recorded.name, cwd=project).returncode:
            raise Refused(f"{recorded.name} is not committed", f"git add -f {recorded.name} && git commit.")
        refuse_edits(project, recorded, request.template)
    ignored = git("ls-files", "-ci", "--exclude-standard", "-z", cwd=project).split("\0")[:-1]
    if ignored:
        notes.append(f"tracked although an ignore list matches: {', '.join(ignored[:5])}; merged like all others")
    try:
        given = from_options(request.preset if request.add is None else request.add, None, request.pairs)
    except UsageError as error:
        raise Refused(error.message, error.hint) from error
    refuse_settled(given)
    renamed = package.renamed(project, clusters[0])
    return [replace(recorded, renamed=renamed) for recorded in clusters], given, notes


def require_project(project: Path) -> None:
    """Raise Refused unless there is a project, in a git repository with a commit."""
    if not (project / MAIN).is_file():
        read(project)  # says what is missing
    try:
        tracked = enclosing_work_tree(project)
    except ScaffoldError as error:
        raise Refused(error.message, error.hint) from error
    if tracked is None:
        raise Refused(f"{project} is not in a git repository", "git init && git add -A && git commit -m 'Begin' in it.")
    trial.require_commit(project)


def plan(
    project: Path,
    request: Request,
    clusters: list[Recorded],
    given: dict[str, Given],
    source: Template,
    scratch: Path,
) -> tuple[list[Step], News]:
    """Return the steps to take, none if all is done already, and what can be told of them."""
    main = clusters[0]
    target = choose(source, [recorded.commit for recorded in clusters], main.commit if request.add else request.to)
    try:
        for ref in {target, *(recorded.commit for recorded in clusters)}:
            require_harmless(replace(source, ref=ref))
    except ScaffoldError as error:
        raise Refused(error.message, error.hint) from error
    template = replace(source, ref=target)
    news = News(project, main.commit, target)
    if main.renamed:
        answers = ", ".join(f"{name}: {now.text}" for name, now in main.renamed.items())
        news = replace(news, notes=(f"the package was renamed; recorded from now on: {answers}",))
    if request.add is None:
        return _steps(request.cluster or "", clusters, given, template, scratch, news)
    if request.to is not None or request.cluster is not None:
        raise Refused("--add goes with neither --to nor --cluster", "A cluster is added at the project's release.")
    return _further_cluster(project, main, given, template, scratch, request.add, news)


def _steps(
    cluster: str, clusters: list[Recorded], given: dict[str, Given], template: Template, scratch: Path, news: News
) -> tuple[list[Step], News]:
    """Return a step for each answers file that the release or what is given changes."""
    known = [recorded.cluster for recorded in clusters]
    if cluster not in known:
        others = ", ".join(filter(None, known)) or "none"
        raise Refused(f"--cluster {cluster}: the project has no launch-{cluster}/", f"There are: {others}.")
    steps, new_answers, notes = [], dict[str, Any](), list(news.notes)
    for recorded in clusters:
        changes = given if recorded.cluster == cluster else {}
        if recorded.commit == template.ref and not changes and not recorded.renamed:
            continue
        with plain_git():
            rendered, new = answers_for_update(recorded, changes, template, scratch)
        steps.append(Step(recorded.name, rendered.answers, template.ref, rendered=rendered.update))
        new_answers |= {name: rendered.answers[name] for name in new}
        notes += _needs(rendered) if changes else []
    entries = list[Entry]()
    if any(recorded.commit != template.ref for recorded in clusters) and template.has("CHANGELOG.md"):
        entries = gained(template.read("CHANGELOG.md"), news.since, news.until)
    return steps, replace(news, gained=tuple(entries), new_answers=new_answers, notes=tuple(notes))


def _further_cluster(
    project: Path,
    main: Recorded,
    given: dict[str, Given],
    template: Template,
    scratch: Path,
    place: str,
    news: News,
) -> tuple[list[Step], News]:
    """Return the step that adds launch-`place`/ beside what is there."""
    if (release := version(main.commit)) and release < FIRST_WITH_CLUSTERS:
        raise Refused(f"a project of {main.commit} has one cluster", "Update it first, commit, then add the other.")
    name = name_of_cluster(place)
    file = file_of(name)
    if (project / file).exists() or (project / f"launch-{name}").exists():
        raise Refused(f"the project has launch-{name}/ already", f"--cluster {name} --set KEY=VALUE changes it.")
    rendered = answers_for_cluster(main, given, template, scratch, file)
    step = Step(file, rendered.answers, template.ref, new=True)
    return [step], replace(news, notes=(*news.notes, *_needs(rendered)))


def _needs(rendered: Rendered) -> list[str]:
    return [f"a job there needs {one}" for one in needs(rendered.facts)]
