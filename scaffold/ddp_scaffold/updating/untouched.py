"""The project as if nobody had touched it: what the recorded answers once made, and what the update makes of that.

The second could be had by updating the first, which takes copier as long as the update itself, three renderings and
five clones of the template. But where nobody has changed anything, nothing is to be merged: what comes out is what the
new release renders, and the files that an update leaves alone. So it is put together from one rendering, and only where
that might be something else does copier update.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from filecmp import DEFAULT_IGNORES
from pathlib import Path, PurePosixPath
from typing import Any

from .._git import git
from ..template.copier_calls import Answered, CopierRefused, Reach, copy, reach
from ..template.source import Template
from .recorded import Recorded
from .step import Step, commit, explained, take


@dataclass(frozen=True)
class Made:
    """A repository with nothing but what the recorded answers once made."""

    repository: Path
    commit: str
    parts: Mapping[str, Part]  # by answers file; without those whose files others have made as well


@dataclass(frozen=True)
class Part:
    """What one answers file made."""

    release: Template
    answered: Answered
    files: frozenset[str]


def as_made(project: Path, repository: Path, recorded: Sequence[Recorded], template: Template, scratch: Path) -> Made:
    """Fill an empty repository with what the answers in `project` once made. Raises Refused."""
    parts = {}
    for number, each in enumerate(recorded):
        folder = scratch / "made" / each.name if number else repository
        release, data = replace(template, ref=each.commit), _values(project / each.name)
        with explained(each.name, each.commit):
            answered = copy(release, folder, data, {}, answers_file=each.name)
            files = _files(folder)
            if number and any(os.path.lexists(repository / path) for path in files):
                copy(release, repository, data, {}, answers_file=each.name)
                continue
        if number:
            _move(files, folder, repository)
        parts[each.name] = Part(release, answered, files)
    return Made(repository, commit(repository, "as made"), parts)


def update_untouched(made: Made, template: Template, steps: Iterable[Step]) -> str:
    """Take the steps where nobody has touched anything; return the commit. Raises Refused."""
    now = made.commit
    for step in steps:
        if not step.new:
            if not _put_together(made, step, template):
                take(step, made.repository, template)
            now = commit(made.repository, f"with {step.answers_file}")
    return now


def _put_together(made: Made, step: Step, template: Template) -> bool:
    """Do what an update would do; return False, with everything as it was, where that is more than to render."""
    part = made.parts.get(step.answers_file)
    if part is None or step.rendered is None:
        return False
    now, new = _files(made.repository), _files(step.rendered.folder)
    try:
        patterns = reach(template, part.answered, step.rendered.answered)
        if patterns is None:
            return False
        old = frozenset(path for path in part.files if not patterns.left_alone(path))
        if any(map(patterns.only_updates, new - now)):
            old = _rendered_again(made, step, part, patterns)
    except CopierRefused:  # the update will say so
        return False
    # What the old release would have rendered, copier takes for removed by the user, and leaves that so.
    new -= {path for path in old - now if not patterns.kept(path)}
    if not _only_rendered(now, old & now, new, patterns) or _ignored(made.repository):
        return False
    for path in old & now - new:
        (made.repository / path).unlink()
    came = [path for path in new if not (path in now and patterns.kept(path))]
    _move(came, step.rendered.folder, made.repository)
    return True


def _rendered_again(made: Made, step: Step, part: Part, patterns: Reach) -> frozenset[str]:
    """Return the files of the old release as copier renders it in an update."""
    with tempfile.TemporaryDirectory(dir=made.repository.parent) as name:
        data = _values(made.repository / step.answers_file)
        folder = Path(name)
        copy(part.release, folder, data, {}, for_update=True, exclude=patterns.excluded, answers_file=step.answers_file)
        return _files(folder)


def _only_rendered(now: frozenset[str], old: frozenset[str], new: frozenset[str], patterns: Reach) -> bool:
    """Tell whether copier would only replace `old` by `new` files in the project, which has these files `now`."""
    if any(path not in old and not patterns.kept(path) for path in new & now):
        return False  # it would take such a file for added by the user
    if _folders(new) & now or _folders(now) & new:
        return False  # a file where a folder was, or a folder where a file was
    return not any({*DEFAULT_IGNORES} & {*PurePosixPath(path).parts} for path in old - new)  # it would leave these


def _ignored(repository: Path) -> bool:
    """Tell whether an ignore list of the project matches its own files: copier's copies of it are without those."""
    return bool(git("ls-files", "--cached", "--ignored", "--exclude-standard", "-z", cwd=repository))


def _values(answers_file: Path) -> dict[str, Any]:
    import yaml

    content = yaml.safe_load(answers_file.read_text(encoding="utf-8"))
    return {key: value for key, value in content.items() if not key.startswith("_")}


def _files(folder: Path) -> frozenset[str]:
    """Return the paths of all files but git's."""
    found = []
    for place, folders, names in os.walk(folder):
        if place == str(folder) and ".git" in folders:
            folders.remove(".git")
        found += [Path(place, name).relative_to(folder).as_posix() for name in names]
    return frozenset(found)


def _folders(files: Iterable[str]) -> set[str]:
    return {str(folder) for path in files for folder in PurePosixPath(path).parents}


def _move(files: Iterable[str], source: Path, target: Path) -> None:
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).replace(target / path)
