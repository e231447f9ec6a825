"""An update on trial: a repository of its own, with the project as its last commit has it, in which copier works.

Nothing of the user's takes part: no hooks, no global ignore list (with one, copier loses edits in files that it
matches: copier-org/copier#2191), no files that are not committed. What comes out is one tree of git, the same that the
project then gets.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import ScaffoldError
from .._git import complaint, git, git_bytes
from ..harmless import NOT_RENDERED
from ..redirect import environment, git_settings
from ..render import copier_settings
from ..template import Template
from .recorded import Recorded, Refused

IDENTITY = {f"GIT_{role}_{key}": "ddp-scaffold" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
PLAIN = {
    "core.excludesFile": os.devnull,
    "core.hooksPath": os.devnull,
    "core.autocrlf": "false",
    "commit.gpgSign": "false",
    "core.quotePath": "false",
    "maintenance.auto": "false",
}


@dataclass(frozen=True)
class Step:
    """What copier does with one answers file."""

    answers_file: str
    data: Mapping[str, Any]
    ref: str  # of the template
    new: bool = False  # a further cluster is added: nothing is updated


@dataclass(frozen=True)
class Outcome:
    """What the trial left in its repository."""

    repository: Path
    before: str  # commit: the project as it is
    after: str  # commit: as it would be
    changes: dict[str, str]  # path in the project: added, changed, removed or conflict
    unmerged: str  # `git ls-files --unmerged -z` of the conflicts


def run(head: Path, tree: str, template: Template, steps: Iterable[Step], scratch: Path) -> Outcome:
    """Try the steps, one after another, on `tree` of the repository in `head`. Raises Refused if one fails."""
    repository = scratch / "project"
    with _plain_git():
        before = _check_out(head, tree, repository)
        _require_no_link_into_git(repository)
        windows = _to_unix_lines(repository)
        unmerged = ""
        for step in steps:
            _take(step, repository, template)
            unmerged += git("ls-files", "--unmerged", "-z", cwd=repository)
            _require_no_rejects(repository)
            _commit(repository, f"with {step.answers_file}")
        _to_windows_lines(repository, windows)
        after = _commit(repository, "after")
        listed = git("diff", "--no-renames", "--name-status", "-z", before, after, cwd=repository).split("\0")
    words = {"A": "added", "D": "removed"}
    changes = {path: words.get(letter, "changed") for letter, path in zip(listed[::2], listed[1::2], strict=False)}
    changes |= {entry.split("\t", 1)[1]: "conflict" for entry in unmerged.split("\0") if entry}
    return Outcome(repository, before, after, changes, unmerged)


def lost_edits(outcome: Outcome, recorded: Iterable[Recorded], template: Template, scratch: Path) -> list[str]:
    """Return the files that the new template no longer has although the user changed them: their edits would go.

    Git sees no conflict there, and neither does copier. Only what goes is compared with a fresh render of the old
    release.
    """
    gone = [path for path, change in outcome.changes.items() if change == "removed"]
    if not gone:
        return []
    theirs: dict[str, bytes] = {}
    with _plain_git():
        for number, project in enumerate(recorded):
            data = _values(outcome.repository, outcome.before, project.name)
            old = scratch / f"old-{number}"
            _copy(old, project.name, data, template, project.commit)
            theirs |= {path: (old / path).read_bytes() for path in gone if (old / path).is_file()}
    return [path for path in gone if path in theirs and _content(outcome, path) != theirs[path].replace(b"\r\n", b"\n")]


def _content(outcome: Outcome, path: str) -> bytes:
    found = git_bytes("cat-file", "blob", f"{outcome.before}:{path}", cwd=outcome.repository)
    return found.stdout.replace(b"\r\n", b"\n")


def _values(repository: Path, commit: str, name: str) -> dict[str, Any]:
    import yaml

    content = yaml.safe_load(git("show", f"{commit}:{name}", cwd=repository))
    return {key: value for key, value in content.items() if not key.startswith("_")}


@contextmanager
def _plain_git() -> Iterator[None]:
    with environment({**git_settings(PLAIN), **IDENTITY, "GIT_LFS_SKIP_SMUDGE": "1"}):
        yield


def _check_out(head: Path, tree: str, repository: Path) -> str:
    """Make `repository` a work tree of `tree`, which it reads from the objects of `head`; return its commit."""
    objects = Path(head, git("rev-parse", "--git-path", "objects", cwd=head).strip()).resolve()
    git("init", "--quiet", "--initial-branch=main", str(repository), cwd=head)
    (repository / ".git" / "objects" / "info" / "alternates").write_text(f"{objects}\n", encoding="utf-8")
    # As committed, byte for byte: what attributes would convert is converted when the result is written.
    (repository / ".git" / "info").mkdir(exist_ok=True)
    (repository / ".git" / "info" / "attributes").write_text("* -text -filter -ident -working-tree-encoding\n")
    commit = git("commit-tree", tree, "-m", "before", cwd=repository).strip()
    git("reset", "--quiet", "--hard", commit, cwd=repository)
    return commit


def _require_no_link_into_git(repository: Path) -> None:
    """Raise Refused if a file of the project could be written through a link into git's directory."""
    for entry in git("ls-files", "--stage", "-z", cwd=repository).split("\0")[:-1]:
        facts, path = entry.split("\t", 1)
        target = os.path.realpath(repository / path) if facts.startswith("120000") else ""
        if ".git" in target.lower().split(os.sep):
            raise Refused(f"{path} is a symbolic link into a .git directory", f"git rm {path}, and commit that.")


def _commit(repository: Path, message: str) -> str:
    """Commit whatever is there: all of it is the user's, or the template's."""
    git("add", "--all", "--force", cwd=repository)
    git("commit", "--quiet", "--allow-empty", "--no-verify", "--message", message, cwd=repository)
    return git("rev-parse", "HEAD", cwd=repository).strip()


def _take(step: Step, repository: Path, template: Template) -> None:
    import copier
    from copier.errors import CopierError, DirtyLocalWarning, ShallowCloneWarning
    from jinja2 import TemplateError
    from plumbum import ProcessExecutionError

    try:
        if step.new:
            _copy(repository, step.answers_file, step.data, template, step.ref)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DirtyLocalWarning)
            warnings.simplefilter("ignore", ShallowCloneWarning)
            copier.run_update(
                repository,
                data=dict(step.data),
                answers_file=step.answers_file,
                settings=copier_settings(),
                vcs_ref=step.ref,
                exclude=NOT_RENDERED,
                defaults=True,
                overwrite=True,
                quiet=True,
                unsafe=False,
            )
    except KeyboardInterrupt:  # copier's own is a CopierError as well
        raise
    except ProcessExecutionError as error:
        said = complaint(error.stderr) or f"exit code {error.retcode}"
        raise Refused(f"git failed: {said}", "Nothing was changed. Correct what git names.") from error
    except (ValueError, TypeError, CopierError, TemplateError) as error:
        text = " ".join(str(error).split())
        raise Refused(
            f"{step.answers_file}: the template cannot be brought to {step.ref}: {text}",
            "Nothing was changed; `ddp-scaffold --debug update` shows where it stopped.",
        ) from error


def _copy(destination: Path, answers_file: str, data: Mapping[str, Any], template: Template, ref: str) -> None:
    import copier

    copier.run_copy(
        template.source,
        destination,
        data=dict(data),
        answers_file=answers_file,
        settings=copier_settings(),
        vcs_ref=ref,
        exclude=NOT_RENDERED,
        defaults=True,
        quiet=True,
        unsafe=False,
    )


def _require_no_rejects(repository: Path) -> None:
    """Copier should leave no .rej file with inline conflicts; one that it leaves all the same holds a lost edit."""
    rejected = git("ls-files", "--others", "-z", "--", "*.rej", cwd=repository).split("\0")[:-1]
    if rejected:
        raise Refused(
            f"copier could not merge {rejected[0].removesuffix('.rej')} and would leave the edit in {rejected[0]}",
            "Nothing was changed; this is a bug, please report it with both versions of that file.",
        )


def _to_unix_lines(repository: Path) -> list[str]:
    """Give committed files with Windows line endings the template's, for git compares lines; return their paths."""
    found = []
    for entry in git("ls-files", "--eol", "-z", cwd=repository).split("\0")[:-1]:
        facts, path = entry.split("\t", 1)
        file = repository / path
        if facts.startswith("i/crlf") and file.is_file() and not file.is_symlink():
            file.write_bytes(file.read_bytes().replace(b"\r\n", b"\n"))
            found.append(path)
    if found:
        _commit(repository, "Unix line endings")
    return found


def _to_windows_lines(repository: Path, paths: Iterable[str]) -> None:
    for path in paths:
        file = repository / path
        if file.is_file() and not file.is_symlink():
            file.write_bytes(file.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))


def require_commit(project: Path) -> str:
    """Return the commit that the project is at. Raises ScaffoldError if there is none."""
    try:
        return git("rev-parse", "--verify", "HEAD", cwd=project).strip()
    except ScaffoldError as error:
        raise Refused(f"{project} has no commit yet", "Commit the project first: git add -A && git commit.") from error
