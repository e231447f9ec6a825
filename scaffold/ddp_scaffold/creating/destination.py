"""Where a new project goes: what can be a destination, and how the project gets there, whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .._errors import ScaffoldError, UsageError, show


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
