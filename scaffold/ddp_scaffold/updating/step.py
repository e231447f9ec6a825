"""One step of an update: what copier does with one answers file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._errors import ScaffoldError
from .._git import git
from ..template.copier_calls import CopierRefused, copy, update
from ..template.redirect import environment, git_settings
from ..template.render import RenderedUpdate
from ..template.source import Template
from .recorded import Refused

IDENTITY = {f"GIT_{role}_{key}": "ddp-scaffold" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
PLAIN = {
    "core.excludesFile": os.devnull,
    "core.hooksPath": os.devnull,
    "core.autocrlf": "false",
    "commit.gpgSign": "false",
    "core.quotePath": "true",  # copier reads names as git quotes them; others break it
    "maintenance.auto": "false",
}


@dataclass(frozen=True)
class Step:
    """What is to become of one answers file."""

    answers_file: str
    data: Mapping[str, Any]
    ref: str  # of the template
    new: bool = False  # a further cluster is added: nothing is updated
    rendered: RenderedUpdate | None = None  # what copier will render, if it could be rendered apart


@contextmanager
def plain_git() -> Iterator[None]:
    """Keep the user's git configuration out of what git and copier do inside."""
    with environment({**git_settings(PLAIN), **IDENTITY, "GIT_LFS_SKIP_SMUDGE": "1"}):
        yield


def take(step: Step, repository: Path, template: Template) -> None:
    """Let copier take the step. Raises Refused for what goes wrong in it."""
    target = replace(template, ref=step.ref)
    with explained(step.answers_file, step.ref):
        if step.new:
            copy(target, repository, step.data, {}, answers_file=step.answers_file)
        else:
            update(target, repository, step.data, step.answers_file)


def commit(repository: Path, message: str) -> str:
    """Commit whatever is there: all of it is the user's, or the template's."""
    git("add", "--all", "--force", cwd=repository)
    git("commit", "--quiet", "--allow-empty", "--no-verify", "--message", message, cwd=repository)
    return git("rev-parse", "HEAD", cwd=repository).strip()


@contextmanager
def explained(answers_file: str, ref: str) -> Iterator[None]:
    """Raise Refused for what goes wrong in copier."""
    try:
        yield
    except CopierRefused as error:
        raise Refused(
            f"{answers_file}: the template cannot be brought to {ref}: {error}",
            "Nothing was changed; `ddp-scaffold --debug update` shows where it stopped.",
        ) from error
    except Refused:
        raise
    except ScaffoldError as error:
        raise Refused(error.message, f"Nothing was changed. {error.hint}") from error
