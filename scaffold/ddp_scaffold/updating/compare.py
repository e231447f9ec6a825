"""What an update does not bring: edits that would go, and changes of the release for files that the project has not.

Neither git nor copier calls that a conflict. The project is compared with what the old release made of the recorded
answers, and with what the same update makes of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from .._errors import ScaffoldError
from .._git import git, git_bytes
from .recorded import Refused


class Entry(NamedTuple):
    """What a commit has at a path."""

    mode: str  # git's: 100644, 100755 or 120000
    blob: str

    @property
    def is_link(self) -> bool:
        return self.mode == "120000"


def entries(repository: Path, commit: str) -> dict[str, Entry]:
    """Return the files of a commit, and what they are."""
    listed = git("ls-tree", "-r", "-z", commit, cwd=repository).split("\0")[:-1]
    return {path: Entry(facts.split()[0], facts.split()[2]) for facts, path in (line.split("\t", 1) for line in listed)}


def paths(repository: Path, commit: str) -> set[str]:
    """Return the files of a commit."""
    return set(git("ls-tree", "-r", "-z", "--name-only", commit, cwd=repository).split("\0")[:-1])


def moves(repository: Path, old: str, new: str) -> dict[str, str]:
    """Return where files of the commit `old` are in `new`, by what they hold, if not where they were.

    That is also where another file stands at the old path now. An empty file is like every other, so none is found.
    """
    words = ("diff", "--find-renames", "-l0", "--no-rename-empty", "--name-status", "-z", old, new)
    try:
        text = git(*words, "--break-rewrites", cwd=repository)
    except ScaffoldError:  # git 2.39: "BUG: diffcore-rename.c: ... failed to find associated dst for broken pair"
        text = git(*words, cwd=repository)  # finds no file whose place another one has taken
    fields = iter(text.split("\0")[:-1])
    found, rewritten, copied = {}, set(), {}
    for status in fields:
        path = next(fields)
        if status.startswith("R"):
            found[path] = next(fields)
        elif status.startswith("C"):
            copied[path] = next(fields)
        elif status.startswith("M") and status != "M":  # with a number: how much of it is new
            rewritten.add(path)
    return found | {path: now for path, now in copied.items() if path in rewritten}


def lost_edits(repository: Path, made: str, ours: str, removed: Iterable[str]) -> list[str]:
    """Return which of the `removed` files the user had changed."""
    theirs = paths(repository, made)
    return [
        path for path in removed if path in theirs and _text(repository, ours, path) != _text(repository, made, path)
    ]


def _text(repository: Path, commit: str, path: str) -> bytes:
    return git_bytes("cat-file", "blob", f"{commit}:{path}", cwd=repository).stdout.replace(b"\r\n", b"\n")


def absent(repository: Path, made: str) -> list[str]:
    """Return the files of the commit `made` that the work tree has not as files: an update does not reach them.

    Raises Refused if a folder of theirs is a link that leaves the project: what copier does there is not ours to do.
    """
    found = []
    for path in sorted(paths(repository, made)):
        for folder in map(repository.joinpath, PurePosixPath(path).parents):
            if folder.is_symlink() and not (folder.is_dir() and folder.resolve().is_relative_to(repository.resolve())):
                raise Refused(
                    f"{folder.relative_to(repository)} is a symbolic link that leads out of the project, or nowhere,"
                    " and the template has files in it",
                    "Put the folder itself there and commit; or remove the link, then updates leave that folder out.",
                )
        file = repository / path
        if file.is_symlink() or not file.is_file():
            found.append(path)
    return found


def reasons(
    project: Path, ours: Mapping[str, Entry], missing: Iterable[str], moved: Mapping[str, str]
) -> dict[str, str]:
    """Return why the project has not these files; `moved` says where the release has them now."""
    why = {}
    for path in missing:
        if path in ours and ours[path].is_link:
            why[path] = "it is a symbolic link"
        else:
            why[path] = "it is in no commit" if (project / path).exists() else "removed"
        why[path] += f"; the release has it as {moved[path]}" if path in moved else ""
    return why


def changed(repository: Path, old: str, new: str) -> set[str]:
    """Return the files that two commits both have, but not the same."""
    words = ("diff", "--no-renames", "--diff-filter=MT", "--name-only", "-z", old, new)
    return set(git(*words, cwd=repository).split("\0")[:-1])


def in_removed_folders(repository: Path, made: str, ours: str, added: Iterable[str]) -> dict[str, str]:
    """Return which of the `added` files are for a folder that the user has removed, and that folder."""
    theirs, mine = _folders(paths(repository, made)), _folders(paths(repository, ours))
    found = {}
    for path in added:
        gone = [str(folder) for folder in PurePosixPath(path).parents if str(folder) in theirs - mine]
        if gone:
            found[path] = gone[-1]
    return found


def _folders(files: Iterable[str]) -> set[str]:
    return {str(folder) for file in files for folder in PurePosixPath(file).parents}


def require_plumbing(made: set[str], ours: set[str], left_out: Iterable[str], moved: dict[str, str]) -> None:
    """Raise Refused if a release changes ddp/, and the project has no file of it where updates put it."""
    for init in sorted(path for path in made if path.endswith("/ddp/__init__.py") and not path.startswith("tests/")):
        folder = PurePosixPath(init).parent
        if _below(folder, ours) or not _below(folder, left_out):
            continue
        places = Counter(PurePosixPath(moved[path]).parent for path in _below(folder, moved))
        now = places.most_common(1)[0][0] if places else None
        what = folder
        if now and now.name == folder.name and not _below(folder.parent, ours):
            what, now = folder.parent, now.parent
        raise Refused(
            f"{folder}/ is not in the project, and what the release changes there would not arrive",
            f"Put it back for the update: mkdir -p {what.parent} && git mv {now or 'FOLDER'} {what}, then commit,"
            " update and commit; after that, move it again.",
        )


def _below(folder: PurePosixPath, files: Iterable[str]) -> list[str]:
    return [file for file in files if file.startswith(f"{folder}/")]
