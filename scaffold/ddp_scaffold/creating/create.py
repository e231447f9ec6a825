"""Creating a project: from what the user gave to files at the destination, or none."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from .. import _output
from .._errors import ScaffoldError, Session
from .._git import enclosing_work_tree, first_commit, require_git
from ..adopting import existing
from ..adopting.suggest import suggest
from ..template import own_preset
from ..template.given import Given, from_file
from ..template.questions import Question, check, from_options, load_questions
from ..template.render import answer, refuse_skipped
from ..template.source import Template, open_template
from . import wizard
from .destination import check_destination, list_files, publishing
from .summary import Project, describe, equivalent_command, show


@dataclass(frozen=True)
class Request:
    """What the command line says."""

    dest: str
    preset: str | None
    model: str | None
    pairs: tuple[str, ...]
    answers: Path | None
    template: str | None
    into_existing: bool
    dry_run: bool
    ask: bool


def create(request: Request, session: Session) -> Project:
    """Write the project, or only say what it would be with `dry_run`; with `ask`, after questions and a summary.

    Raises ScaffoldError, UsageError for what the user gave.
    """
    given = _given(request)
    require_git()
    into_existing = request.into_existing
    destination = existing.check_repository(request.dest) if into_existing else check_destination(request.dest)
    with ExitStack() as held:
        source = held.enter_context(open_template(request.template))
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="ddp-scaffold-")))
        questions = load_questions(source.read("copier.yml"), source.read)
        start = _start(request, given, destination, source, questions)
        if request.ask:
            first_try = partial(answer, source, scratch / "early", questions, render=False)
            start = wizard.prepare(start, questions, first_try, destination.name)
        # Rendered aside: until all is well and confirmed, the destination is not touched.
        staged = scratch / "project"
        project = _render(request, start, destination, source, questions, staged)
        _note_uncommitted(source)
        for text in project.adoption.notes if project.adoption else ():
            _output.note(text)
        if request.ask:
            show(project)
            if not request.dry_run:
                _confirm(project)
        elif project.adoption and not request.dry_run:
            existing.refuse_unfit(project.adoption)
        if not request.dry_run:
            _write(request, project, staged, destination, session)
    return project


def _given(request: Request) -> dict[str, Given]:
    """Return the answers on the command line and in the answers file; the command line wins."""
    given = from_options(request.preset, request.model, request.pairs)
    return given if request.answers is None else own_preset.replace(from_file(request.answers), given)


def _start(
    request: Request,
    given: Mapping[str, Given],
    destination: Path,
    source: Template,
    questions: Mapping[str, Question],
) -> wizard.Start:
    """Return what is known before the first question. Raises UsageError for an answer that does not fit."""
    given = existing.whose_code(given, questions, request.into_existing)
    data = check(given, questions)
    own = request.preset if request.preset is not None and own_preset.is_file(request.preset) else None
    if own is None and "preset" in given:
        own_preset.check_recorded(given["preset"].text, data.get(own_preset.ANSWER), given)
    guessed = suggest(destination, source.read) if request.into_existing else {"project_name": destination.name}
    suggestions = {name: value for name, value in guessed.items() if name not in data}
    return wizard.Start(given, data, suggestions, own)


def _render(
    request: Request,
    start: wizard.Start,
    destination: Path,
    source: Template,
    questions: Mapping[str, Question],
    staged: Path,
) -> Project:
    """Ask the open questions, render into `staged`, and return what came of it."""
    rendered = answer(source, staged, questions, start.data, start.suggestions, start.given, ask=request.ask)
    refuse_skipped(start.given, rendered)
    files, kept = list_files(staged), list[str]()
    advice = None
    if request.into_existing:
        advice = existing.look(destination, rendered.answers, files)
        patch = existing.write_patch(staged, advice)
        files, kept = existing.sort_files(sorted([*files, *patch]), destination, rendered.answers)
    command = equivalent_command(
        request.dest, destination.name, request.template, questions, rendered, start.own, source.read
    )
    project = describe(request.dest, destination, staged, files, rendered, command)
    if advice is None:
        return project
    start_command = project.next[-1]
    return project.adopted(
        existing.describe(request.dest, destination, kept, project.answers, project.files, start_command, advice)
    )


def _note_uncommitted(source: Template) -> None:
    if source.has_uncommitted_changes():
        used = "used, under a commit that does not exist" if source.work_tree else "not used"
        _output.note(f"the template in {source.repository} has uncommitted changes; they are {used}")


def _confirm(project: Project) -> None:
    """Raise ScaffoldError unless the user agrees."""
    destination = _output.near(project.destination)
    far = len(destination) > 40
    unfit = bool(project.adoption and project.adoption.notes)
    question = f"\n{destination}\nWrite" if far else "\nWrite"
    if not typer.confirm(
        f"{question} {len(project.files)} files to {'it' if far else destination}?", default=not unfit
    ):
        raise ScaffoldError("declined, nothing was written", "Run it again with other answers.")


def _write(request: Request, project: Project, staged: Path, destination: Path, session: Session) -> None:
    """Bring the rendered project to its destination, and say what is left to commit."""
    if request.into_existing:
        existing.put(staged, destination, project.files)
        session.written = destination
        _output.note("nothing is committed: do that, ddp-scaffold update needs it")
        return
    check_destination(request.dest)  # once more: the questions take their time
    outer = enclosing_work_tree(destination)
    with publishing(staged, destination) as copy:
        if outer is None:
            first_commit(copy, f"Start from ddp-scaffold {project.template.commit}")
    session.written = destination
    if outer is not None:
        _output.note(f"{_output.near(str(outer))} is a git work tree: commit the project; updates need that")
