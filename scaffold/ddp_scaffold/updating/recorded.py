"""What a project recorded about itself: `.copier-answers.yml`, and one more such file for each further cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import _output
from .._errors import REFUSED, ScaffoldError
from ..template.given import Given, from_file

MAIN = ".copier-answers.yml"


class Refused(ScaffoldError):
    """An update that is not begun, or taken back: the project is as it was."""

    def __init__(self, message: str, hint: str, result: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, hint, REFUSED, result)


@dataclass(frozen=True)
class Recorded:
    """One answers file."""

    name: str  # of the file
    source: str  # of the template, `_src_path`
    commit: str  # of the template: a release tag, or a commit that was no release
    answers: dict[str, Given]
    renamed: Mapping[str, Given] = field(default_factory=dict)  # answers that a renamed package has changed since

    @property
    def folder(self) -> str:
        """The launch folder that it makes, by the rule that stands in copier.yml."""
        return _folder(self.name)

    @property
    def cluster(self) -> str:
        """The name of a further cluster; empty for the project's own."""
        return _folder(self.name).removeprefix("launch").removeprefix("-")


def _folder(name: str) -> str:
    return "launch" + re.sub(r"^[.]copier-answers|[.]ya?ml$", "", name).replace(".", "-")


def file_of(cluster: str) -> str:
    """Return the name of the answers file of a further cluster."""
    return MAIN.replace(".yml", f".{cluster}.yml")


def read(project: Path) -> list[Recorded]:
    """Return the answers files of a project, its own first. Raises Refused if it has none that can be used."""
    if not (project / MAIN).is_file():
        raise Refused(
            f"no project of ddp-scaffold: no {MAIN} in {_output.near(str(project))}",
            "Name a project, or adopt this one: ddp-scaffold new --into-existing.",
        )
    found = sorted(path.name for path in project.glob(file_of("*")))
    others = [name for name in found if (project / _folder(name)).is_dir()]  # a copy that somebody keeps is no cluster
    return [_read(project / name) for name in (MAIN, *others)]


def _read(path: Path) -> Recorded:
    import yaml

    from ..presets.yaml_text import BoundedText

    given = from_file(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), BoundedText)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {error}", "Put back the last good version of it.") from error
    source, commit = content.get("_src_path"), content.get("_commit")
    if not isinstance(source, str) or not isinstance(commit, str):
        missing = "_src_path" if not isinstance(source, str) else "_commit"
        raise Refused(
            f"{path} has no {missing}, so nobody knows which template the project was made from",
            f"Put back the last version of it that had one (git log -p -- {path.name}).",
        )
    if not re.fullmatch(r"v?\d+(\.\d+)*.*|[0-9a-f]{7,64}|.+-g[0-9a-f]{7,64}", commit):
        raise Refused(f"{path}: _commit is {commit!r}, no release", "Put back what it was: git log -p shows that.")
    try:
        yaml.safe_load(path.read_text(encoding="utf-8"))  # as copier reads it
    except Exception as error:  # of values that look like dates, numbers or binary, PyYAML raises nearly anything
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise Refused(
            f"{where}: {getattr(error, 'problem', None) or error}", "Put back the last good version of it."
        ) from error
    return Recorded(path.name, source, commit, given)
