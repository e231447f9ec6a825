"""Rendering a template into a directory of its own, and moving the result to where the user wants it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._errors import ScaffoldError, UsageError, show
from ._git import complaint
from .harmless import NOT_RENDERED, NOTHING_RENDERED, require_harmless
from .questions import Given, Question
from .template import Template


@dataclass(frozen=True)
class Rendered:
    """What copier made of the answers."""

    answers: dict[str, Any]  # of the questions that were asked, in their order; what the project records
    facts: Mapping[str, Any]  # these, and all that follows from them (computed answers)


class SuggestionRefused(UsageError):
    """The template refuses what was suggested, not given; a person can be asked."""


def answer(
    template: Template,
    destination: Path,
    questions: Mapping[str, Question],
    data: Mapping[str, Any],
    suggestions: Mapping[str, str],
    given: Mapping[str, Given],
    *,
    ask: bool = False,
    render: bool = True,
    answers_file: str | None = None,
) -> Rendered:
    """Answer the questions by `data`, then by asking (or by `suggestions` and defaults), and render the project.

    With `render=False` the questions are all that happens. Raises UsageError for an answer that a validator refuses,
    ScaffoldError if the template cannot be rendered.
    """
    import copier
    from copier.errors import CopierError, DirtyLocalWarning, InteractiveSessionError, ShallowCloneWarning
    from jinja2 import TemplateError
    from plumbum import ProcessExecutionError

    require_harmless(template)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DirtyLocalWarning)
            warnings.simplefilter("ignore", ShallowCloneWarning)
            worker = copier.run_copy(
                template.source,
                destination,
                data=dict(data),
                answers_file=answers_file,
                user_defaults=dict(suggestions),
                settings=copier_settings(),
                vcs_ref=template.ref,
                defaults=not ask,
                exclude=NOT_RENDERED if render else NOTHING_RENDERED,
                quiet=True,
                unsafe=False,
            )
    except KeyboardInterrupt:  # copier's own, CopierAnswersInterrupt, is a CopierError as well
        raise
    except InteractiveSessionError as error:
        raise ScaffoldError("the input ended before the last question", "Answer by --set, or take -y.") from error
    except ProcessExecutionError as error:
        said = complaint(error.stderr) or f"exit code {error.retcode}"
        raise ScaffoldError(f"git failed: {said}", f"Correct what git names; it read {template.repository}.") from error
    except (ValueError, TypeError, CopierError, TemplateError) as error:
        raise _explain(error, given, suggestions) from error

    facts, hidden = worker.answers.combined, worker.answers.hidden
    return Rendered({name: facts[name] for name in questions if name not in hidden}, facts)


def refuse_skipped(given: Mapping[str, Given], rendered: Rendered) -> None:
    """Raise UsageError for an answer to a question that the other answers leave out. Copier would use it just once."""
    for name in given:
        if name not in rendered.answers:
            others = f"preset {rendered.answers['preset']}" if "preset" in rendered.answers else "the other answers"
            raise UsageError(
                f"{given[name].where}: {show(name)} is not asked with {others}",
                f"Leave it out, or change the preset. Asked are: {', '.join(rendered.answers)}.",
            )


def copier_settings() -> Any:
    """Return the user's settings of copier. Raises ScaffoldError if their file is broken."""
    import copier

    try:
        return copier.load_settings()
    except Exception as error:  # of values that look like dates, numbers or binary, PyYAML raises nearly anything
        raise ScaffoldError(
            f"copier's settings cannot be read: {type(error).__name__}: {' '.join(str(error).split())}",
            "Correct that file: the one that COPIER_SETTINGS_PATH names, or ~/.config/copier/settings.yml.",
        ) from error


def example_name(refused: str) -> str:
    """Return a project name like `refused` that is valid: no module is called anything_project."""
    slug = re.sub(r"[^a-z0-9]+", "-", refused.lower()).strip("-0123456789")[:50].strip("-")
    return f"{slug or 'my'}-project"


def _explain(error: Exception, given: Mapping[str, Given], suggestions: Mapping[str, str]) -> ScaffoldError:
    text = " ".join(str(error).split())
    found = re.match(r"(?:Validation error for question|Invalid choice for) '(\w+)': (.*)", text)
    if found:
        name, reason = found.groups()
        if name in given:
            return UsageError(f"{given[name].where}: {show(given[name].text)} {reason}", f"Give {name} another value.")
        if name in suggestions:
            return SuggestionRefused(
                f"DEST: the project name {show(suggestions[name])} {reason}",
                f"Pass --set {name}=NAME, for example --set {name}={example_name(suggestions[name])}.",
            )
        return UsageError(f"{name}: {reason}", f"Pass --set {name}=VALUE.", name)
    required = re.match(r'Question "(\w+)" is required', text)
    if required:
        name = required[1]
        return UsageError(f"{name} has no default", f"Pass --set {name}=VALUE, or run in a terminal without -y.")
    return ScaffoldError(f"the template cannot be rendered: {text}", "`ddp-scaffold --debug ...` shows where.")


def list_files(project: Path) -> list[str]:
    """Return the files below `project`, relative and sorted, as POSIX paths."""
    return sorted(path.relative_to(project).as_posix() for path in project.rglob("*") if not path.is_dir())


def check_destination(text: str) -> Path:
    """Return the absolute path of a destination that can be written: absent, or an empty directory.

    A directory that holds only `.git`, as after cloning an empty repository, counts as empty. A link to a directory is
    one, under the name of the link. Raises ScaffoldError.
    """
    if not text:
        raise UsageError("DEST is empty", "Name the directory to make.")
    if not text.isprintable():
        raise UsageError(f"DEST {show(text)} holds a character that cannot be printed", "Choose another name.")
    try:
        typed = Path(text).expanduser().absolute()
        if dangling := next((p for p in (typed, *typed.parents) if p.is_symlink() and not p.exists()), None):
            raise ScaffoldError(
                f"{show(str(dangling))} is a link that leads nowhere", "Remove it, or choose another destination."
            )
        path = typed.resolve() if typed.name == ".." else typed.parent.resolve() / typed.name
        if ".git" in (part.lower() for part in path.parts):
            raise ScaffoldError(f"{show(text)} is inside a .git directory", "Choose another destination.")
        if path.is_dir():
            others = [entry.name for entry in path.iterdir() if entry.name != ".git"]
            if others:
                raise ScaffoldError(
                    f"{show(text)} is not empty: it holds {show(min(others))}" + (" and more" if others[1:] else ""),
                    "Choose another destination; ddp-scaffold never writes over files.",
                )
        elif path.exists():
            raise ScaffoldError(f"{show(text)} exists and is not a directory", "Choose another destination.")
        parent = next(p for p in (path, *path.parents) if p.exists())
    except (OSError, RuntimeError) as error:  # too long, ~nobody, a working directory that was removed
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ScaffoldError(f"{show(text)} cannot be a destination: {reason}", "Choose another destination.") from error
    if not parent.is_dir():
        raise ScaffoldError(f"{show(str(parent))} is not a directory", "Choose another destination.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ScaffoldError(f"{show(str(parent))} cannot be written by you", "Choose another destination.")
    return path


@contextmanager
def publishing(staged: Path, destination: Path) -> Iterator[Path]:
    """Yield a copy of `staged` beside `destination`; when the block ends well, it becomes the destination.

    Others may write there at any time, so nothing is replaced, and nothing is removed that was not made here: an
    absent destination comes into being by one rename, and an empty directory is filled entry by entry (it may be a
    mount point or the working directory of a shell, which a rename would take away). Raises ScaffoldError.
    """
    base = destination if destination.is_dir() else destination.parent
    made: list[Path] = []
    try:
        for directory in reversed([path for path in (base, *base.parents) if not path.is_dir()]):
            with suppress(FileExistsError):
                directory.mkdir()
                made.append(directory)
        with tempfile.TemporaryDirectory(prefix=".ddp-scaffold-", dir=base) as own:
            project = Path(own, "project")
            shutil.copytree(staged, project, symlinks=True)
            yield project
            if base == destination:
                _fill(destination, project, Path(own))
            else:
                os.rename(project, destination)
    except BaseException as error:
        for directory in reversed(made):
            with suppress(OSError):  # not empty: others use it
                directory.rmdir()
        if isinstance(error, OSError):
            taken = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
            reason = "others wrote to it meanwhile" if taken else error.strerror
            raise ScaffoldError(
                f"{destination} cannot be written: {reason}",
                "Nothing of this run was left behind; choose another destination.",
            ) from error
        raise


def _fill(directory: Path, project: Path, own: Path) -> None:
    """Move the entries of `project` into `directory`, or none of them: FileExistsError if it has one of that name.

    Each is claimed by making it empty, which only one process can do, and then replaced by a rename.
    """
    claimed: list[Path] = []
    try:
        for entry in sorted(project.iterdir()):
            target = directory / entry.name
            if entry.is_dir() and not entry.is_symlink():
                target.mkdir()
            else:
                target.touch(exist_ok=False)
            claimed.append(target)
            os.rename(entry, target)
    except BaseException:
        back = own / "back"
        back.mkdir()
        for target in claimed:
            os.rename(target, back / target.name)
        raise
