"""The calls of copier. What it raises leaves here in our own words, or as CopierRefused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import ScaffoldError
from .._git import complaint, run_git
from .harmless import NOT_RENDERED, NOTHING_RENDERED, require_harmless
from .prompts import whole_prompts
from .source import Template


class Answered(NamedTuple):
    """What copier made of the answers."""

    facts: Mapping[str, Any]  # the answers, and all that follows from them (computed answers)
    hidden: Set[str]  # questions that were not asked
    worker: Any  # copier's, with the patterns of the template


class Reach(NamedTuple):
    """How the patterns of two releases bear on a path of the project when copier updates from one to the other."""

    left_alone: Callable[[str], bool]  # the old release's, and the new one's: neither changed nor removed
    only_updates: Callable[[str], bool]  # left out by the old release when it makes a project, not when it updates one
    kept: Callable[[str], bool]  # `_skip_if_exists` of the new release
    excluded: Sequence[str]  # patterns of the new release that the old one is rendered with, too


class CopierRefused(Exception):
    """Copier, or Jinja, refuses an answer or the template; the text is theirs, on one line."""


def copy(
    template: Template,
    destination: Path,
    data: Mapping[str, Any],
    suggestions: Mapping[str, str],
    *,
    ask: bool = False,
    render: bool = True,
    for_update: bool = False,
    exclude: Sequence[str] = (),
    answers_file: str | None = None,
) -> Answered:
    """Answer the questions, and render into `destination`; with `render=False` nothing is written.

    With `for_update` it is what an update renders, without the files that only a new project gets. Raises
    CopierRefused, and ScaffoldError if copier or git cannot do their work.
    """
    import copier

    require_harmless(template)
    how = _for_update() if for_update else whole_prompts() if ask else nullcontext()
    with _in_our_words(template), how, modes_left_to_git(destination), compiled_once():
        worker = copier.run_copy(
            template.source,
            destination,
            data=dict(data),
            answers_file=answers_file,
            user_defaults=dict(suggestions),
            settings=copier_settings(),
            vcs_ref=template.ref,
            defaults=not ask,
            exclude=(*exclude, *NOT_RENDERED) if render else NOTHING_RENDERED,
            quiet=True,
            unsafe=False,
        )
    return Answered(worker.answers.combined, worker.answers.hidden, worker)


def reach(template: Template, old: Answered, new: Answered) -> Reach | None:
    """Return how the patterns of the old release, and of the new one, `copy` of which was `for_update`, bear on paths.

    None if only `update` itself can tell: a template does more in an update than to render, or copier has no such
    patterns any more. Raises CopierRefused if the new release's patterns cannot be read with the old answers.
    """
    was, now = old.worker, new.worker
    with _in_our_words(template), _for_update():
        try:
            more = ("tasks", "migrations", "external_data")
            if any(worker.template.config_data.get(name) for worker in (was, now) for name in more):
                return None
            made = was.match_exclude
            excluded = now.template.exclude
            was.exclude = (*excluded, *NOT_RENDERED)
            for cached in ("all_exclusions", "match_exclude"):
                vars(was).pop(cached, None)
            updated = was.match_exclude
            return Reach(updated, lambda path: made(path) and not updated(path), now.match_skip, excluded)
        except AttributeError:
            return None


@contextmanager
def compiled_once() -> Iterator[None]:
    """Let Jinja compile equal strings once. What is compiled keeps nothing of one rendering for the next.

    Copier 9.19 compiles the name of the answers file, and each folder's, anew for each file: a quarter of its time.
    """
    from jinja2 import Environment

    compile_string = Environment.from_string
    compiled: dict[tuple[Environment, str], Any] = {}

    def from_string(self: Environment, source: Any, *args: Any, **named: Any) -> Any:
        if args or named or not isinstance(source, str):
            return compile_string(self, source, *args, **named)
        if (key := (self, source)) not in compiled:
            compiled[key] = compile_string(self, source)
        return compiled[key]

    Environment.from_string = from_string  # type: ignore[method-assign]
    try:
        yield
    finally:
        Environment.from_string = compile_string  # type: ignore[method-assign]


@contextmanager
def _for_update() -> Iterator[None]:
    """Make what copier does the part of an update, for the patterns in `_exclude`; a call inside keeps that.

    `_operation` is private to copier (9.17 to 9.19). Raises CopierRefused where it is gone.
    """
    try:
        from copier._main import _operation
    except ImportError as error:
        raise CopierRefused(str(error)) from error
    token = _operation.set("update")
    try:
        yield
    finally:
        _operation.reset(token)


def update(template: Template, project: Path, data: Mapping[str, Any], answers_file: str) -> None:
    """Bring a project, whose answers file names its template, to `template.ref`.

    Raises CopierRefused, and ScaffoldError if copier or git cannot do their work.
    """
    import copier

    with _in_our_words(template), modes_left_to_git(project), compiled_once():
        copier.run_update(
            project,
            data=dict(data),
            answers_file=answers_file,
            settings=copier_settings(),
            vcs_ref=template.ref,
            exclude=NOT_RENDERED,
            defaults=True,
            overwrite=True,
            quiet=True,
            unsafe=False,
        )


@contextmanager
def modes_left_to_git(folder: Path) -> Iterator[None]:
    """Ask git once, not after each file that copier renders, whether it takes over modes from the disk.

    Only where it does not (core.fileMode is false, as on Windows) copier has to tell it of files that can be executed.
    Its question, a process for each file, took a fifth of an update's time. It is private to copier (9.19.1); where it
    is gone, nothing is asked.
    """
    from copier._main import Worker

    name = "_sync_git_index_executable_bit"
    asking = vars(Worker).get(name)
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    answer = run_git("config", "--type=bool", "--get", "core.fileMode", cwd=there).stdout.strip()
    if asking is None or answer == "false":
        yield
        return
    setattr(Worker, name, lambda *_: None)
    try:
        yield
    finally:
        setattr(Worker, name, asking)


@contextmanager
def _in_our_words(template: Template) -> Iterator[None]:
    from copier.errors import CopierError, DirtyLocalWarning, InteractiveSessionError, ShallowCloneWarning
    from jinja2 import TemplateError
    from plumbum import ProcessExecutionError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DirtyLocalWarning)
            warnings.simplefilter("ignore", ShallowCloneWarning)
            yield
    except KeyboardInterrupt:  # copier's own, CopierAnswersInterrupt, is a CopierError as well
        raise
    except InteractiveSessionError as error:
        raise ScaffoldError("the input ended before the last question", "Answer by --set, or take -y.") from error
    except ProcessExecutionError as error:
        said = complaint(error.stderr) or f"exit code {error.retcode}"
        raise ScaffoldError(f"git failed: {said}", f"Correct what git names; it read {template.repository}.") from error
    except (ValueError, TypeError, CopierError, TemplateError) as error:
        raise CopierRefused(" ".join(str(error).split())) from error


def copier_settings() -> Any:
    """Return the user's settings of copier. Raises ScaffoldError if their file is broken."""
    import copier

    try:
        return copier.load_settings()
    except Exception as error:  # of values that look like dates, numbers or binary, PyYAML raises nearly anything
        raise ScaffoldError(
            f"copier's settings cannot be read: {type(error).__name__}: {' '.join(str(error).split())}",
            "Correct ~/.config/copier/settings.yml, or what COPIER_SETTINGS_PATH names.",
        ) from error
