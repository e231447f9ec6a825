"""Rendering a template into a directory of its own, and moving the result to where the user wants it."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._errors import ScaffoldError, UsageError, show
from .questions import Given, Question
from .template import Template


@dataclass(frozen=True)
class Rendered:
    """What copier made of the answers."""

    answers: dict[str, Any]  # of the questions that were asked, in their order; what the project records
    facts: Mapping[str, Any]  # these, and all that follows from them (computed answers)


def answer(
    template: Template,
    destination: Path,
    questions: Mapping[str, Question],
    data: Mapping[str, Any],
    suggestions: Mapping[str, Any],
    given: Mapping[str, Given],
    *,
    ask: bool = False,
    render: bool = True,
) -> Rendered:
    """Answer the questions by `data`, then by asking (or by `suggestions` and defaults), and render the project.

    With `render=False` the questions are all that happens. Raises UsageError for an answer that a validator refuses,
    ScaffoldError if the template cannot be rendered.
    """
    import copier
    from copier.errors import CopierError, DirtyLocalWarning, InteractiveSessionError, ShallowCloneWarning
    from jinja2 import TemplateError
    from plumbum import ProcessExecutionError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DirtyLocalWarning)
            warnings.simplefilter("ignore", ShallowCloneWarning)
            worker = copier.run_copy(
                template.source,
                destination,
                data=dict(data),
                user_defaults=dict(suggestions),
                vcs_ref=template.ref,
                defaults=not ask,
                exclude=() if render else ("**",),
                quiet=True,
                unsafe=False,
            )
    except KeyboardInterrupt:  # copier's own, CopierAnswersInterrupt, is a CopierError as well
        raise
    except InteractiveSessionError as error:
        raise ScaffoldError("the input ended before the last question", "Answer by --set, or take -y.") from error
    except ProcessExecutionError as error:
        said = error.stderr.strip().splitlines() or [str(error.retcode)]
        raise ScaffoldError(f"git failed: {said[-1]}", f"The template is {template.source}.") from error
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


def _explain(error: Exception, given: Mapping[str, Given], suggestions: Mapping[str, Any]) -> ScaffoldError:
    text = " ".join(str(error).split())
    found = re.match(r"(?:Validation error for question|Invalid choice for) '(\w+)': (.*)", text)
    if found:
        name, reason = found.groups()
        if name in given:
            return UsageError(f"{given[name].where}: {show(given[name].text)} {reason}", f"Give {name} another value.")
        if name in suggestions:
            slug = re.sub(r"[^a-z0-9]+", "-", str(suggestions[name]).lower()).strip("-0123456789")[:60].strip("-")
            return UsageError(
                f"DEST: the project name {show(suggestions[name])} {reason}",
                f"Pass --set {name}=NAME" + (f", for example --set {name}={slug}." if slug else "."),
            )
        return UsageError(f"{name}: {reason}", f"Pass --set {name}=VALUE.")
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

    A directory that holds only `.git`, as after cloning an empty repository, counts as empty. Raises ScaffoldError.
    """
    if not text:
        raise UsageError("DEST is empty", "Name the directory to make.")
    try:
        path = Path(text).expanduser().resolve()
        if path.is_dir():
            others = [entry.name for entry in path.iterdir() if entry.name != ".git"]
            if others:
                raise ScaffoldError(
                    f"{show(text)} is not empty: it holds {show(min(others))}" + (" and more" if others[1:] else ""),
                    "Choose another destination; ddp-scaffold never writes over files.",
                )
        elif path.is_symlink() or path.exists():
            raise ScaffoldError(f"{show(text)} exists and is not a directory", "Choose another destination.")
        parent = next(p for p in (path, *path.parents) if p.exists())
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, a loop of links
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ScaffoldError(f"{show(text)} cannot be a destination: {reason}", "Choose another destination.") from error
    if not parent.is_dir():
        raise ScaffoldError(f"{show(str(parent))} is not a directory", "Choose another destination.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ScaffoldError(f"{show(str(parent))} cannot be written by you", "Choose another destination.")
    return path


@contextmanager
def published(staged: Path, destination: Path) -> Iterator[None]:
    """Move what is in `staged` to `destination`; a failure there or inside the block removes all that was made."""
    made = [path for path in (destination, *destination.parents) if not path.exists()]
    before = set() if made else set(destination.iterdir())
    try:
        destination.mkdir(parents=True, exist_ok=not made)
        for entry in staged.iterdir():
            shutil.move(entry, destination / entry.name)
        yield
    except BaseException as error:
        if made:
            shutil.rmtree(made[-1], ignore_errors=True)
        else:
            for entry in set(destination.iterdir()) - before:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if isinstance(error, OSError):
            raise ScaffoldError(
                f"{destination} cannot be written: {error.strerror}",
                "Nothing was left behind; choose another destination.",
            ) from error
        raise
