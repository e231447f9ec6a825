"""Updating a project: from what the user asks for to changes in the work tree, all of them or none."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import typer

from .. import _output
from .._errors import Session
from .._git import require_git
from ..template.source import open_template
from . import trial
from .lock import only_update
from .plan import begin, plan, require_project
from .project_tests import run_tests
from .put import put
from .recorded import Refused
from .repository import git_directory, top_of, tree_of
from .request import Request
from .result import Result, require_nothing_lost
from .source import require_trust
from .undo import take_back


def update(request: Request, session: Session, show: Callable[[Result], None]) -> Result:
    """Update the project, or only find out what that would do with `dry_run`; `show` comes before anything is touched.

    Raises Refused, with the project as it was.
    """
    require_git()
    project = request.directory.expanduser().absolute()
    require_project(project)
    with ExitStack() as held:
        lock = held.enter_context(only_update(git_directory(project)))
        clusters, given, notes = begin(project, request)
        require_trust(clusters[0].source, request.template, request.ask)
        committed = tree_of(project)
        if request.dry_run:  # what follows reads what is committed, which nobody changes
            held.close()
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="ddp-scaffold-update-")))
        with open_template(request.template, clusters[0].source) as source:
            steps, news = plan(project, request, clusters, given, source, scratch)
            news = replace(news, notes=(*notes, *news.notes))
            if not steps:
                return Result(news)
            outcome = trial.run(project, committed, source, clusters, steps, scratch)
        result = Result(news, outcome, trial.diff(outcome) if request.dry_run else None)
        show(result)
        require_nothing_lost(result)
        return result if request.dry_run else _write(request, session, project, result, outcome, lock)


def _write(
    request: Request, session: Session, project: Path, result: Result, outcome: trial.Outcome, lock: int | None
) -> Result:
    """Bring the outcome into the project; with `test`, only if its tests pass."""
    if request.ask and not typer.confirm(f"\nUpdate {project}?", default=True):
        raise Refused("declined, nothing was changed", "Run it again when you like.")
    written = put(project, outcome, lock)
    result = replace(result, applied=True)
    session.written = project
    if not request.test:
        return result
    if result.conflicts:
        return replace(result, tested="skipped")
    try:
        return replace(result, tested=run_tests(project, quiet=request.quiet))
    except BaseException:
        for path in take_back(top_of(project)[0], written):
            _output.note(f"{path} was changed meanwhile, and stays as it is")
        session.written = None
        raise
