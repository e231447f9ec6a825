"""Undoing an update, all of it or what was left of it, without touching what others have written meanwhile."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from .._git import git, git_bytes, run_git
from .recorded import Refused
from .repository import git_directory, top_of

NOTE = "ddp-scaffold-update.json"  # in the git directory, while an update is written
WAIT_S = 15.0  # for a git that still writes


@dataclass(frozen=True)
class Written:
    """What an update writes: from one commit to one tree, and the paths in the repository that differ."""

    head: str
    tree: str
    paths: list[str]


def take_back(top: Path, written: Written) -> list[str]:
    """Undo what the update has written; return the paths left alone since somebody else has changed them.

    A file is put back only if it is what the update writes (or gone, or cut short); one with any other content is the
    work of others, who may have saved it meanwhile.
    """
    run_git("update-index", "-q", "--refresh", cwd=top)
    run_git("read-tree", "-m", "-u", written.tree, written.head, cwd=top)  # all of it, unless files differ from both
    old, new = _blobs(top, written.head), _blobs(top, written.tree)
    hidden = {line[2:] for line in git("ls-files", "-t", "-z", cwd=top).split("\0") if line.startswith("S ")}
    back, kept, changed = [], [], []
    for path in written.paths:
        now = _blob(top, path)
        if now == old.get(path) or path in hidden:
            back.append(path)
        elif now is None or now == new.get(path) or _is_cut_short(top, path, new.get(path)):
            back.append(path)
            if path in old:
                changed.append(path)
            else:  # first of all: on a full disk it makes room
                _remove(top, path)
        else:
            kept.append(path)
    if changed:
        _with_paths(top, ["checkout", "--quiet", written.head], changed)
    if back:
        _with_paths(top, ["reset", "--quiet", written.head], [path for path in back if path not in hidden])
    return kept


def recover(project: Path, *, only_tell: bool = False) -> bool:
    """Put back a project whose update was cut off in the middle; tell whether there was one.

    If the project has gone on since (another commit), there is nothing to put back. With `only_tell`, raises Refused.
    """
    note = git_directory(project) / NOTE
    deadline = time.monotonic() + WAIT_S
    while note.exists() and (git_directory(project) / "index.lock").exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # the other one still writes
    if not note.exists():
        return False
    try:
        written = Written(**json.loads(note.read_text(encoding="utf-8")))
    except (ValueError, TypeError):  # cut off itself: then nothing else was begun
        written = None
    if written is None or git("rev-parse", "HEAD", cwd=project).strip() != written.head:
        note.unlink()
        return False
    if only_tell:
        raise Refused(
            "an earlier update was cut off while it wrote", "Run it without --dry-run: it puts all back first."
        )
    (git_directory(project) / "index.lock").unlink(missing_ok=True)
    take_back(top_of(project)[0], written)
    note.unlink()
    return True


def write_note(note: Path, written: Written) -> None:
    aside = note.with_suffix(".new")
    try:
        aside.write_text(json.dumps(asdict(written)), encoding="utf-8")
        os.replace(aside, note)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _blobs(top: Path, tree: str) -> dict[str, str]:
    listed = git("ls-tree", "-r", "-z", "--full-tree", tree, cwd=top).split("\0")[:-1]
    return {path: facts.split()[2] for facts, path in (line.split("\t", 1) for line in listed)}


def _blob(top: Path, path: str) -> str | None:
    """Return the blob that git would make of a file as it is now, or None if it is not there."""
    file = top / path
    if file.is_symlink():
        link = os.readlink(file).encode()
        return git_bytes("hash-object", "--stdin", cwd=top, data=link).stdout.decode().strip()
    return git("hash-object", "--", path, cwd=top).strip() if file.is_file() else None


def _is_cut_short(top: Path, path: str, blob: str | None) -> bool:
    """Tell whether a file is the beginning of what git was writing when it was killed."""
    if blob is None:
        return False
    whole = git_bytes("cat-file", "--filters", f"--path={path}", blob, cwd=top).stdout
    return whole.startswith((top / path).read_bytes())


def _remove(top: Path, path: str) -> None:
    (top / path).unlink(missing_ok=True)
    for parent in (top / path).parents:
        if parent == top:
            break
        with suppress(OSError):  # not empty
            parent.rmdir()


def _with_paths(project: Path, words: list[str], paths: list[str]) -> None:
    for first in range(0, len(paths), 500):  # a command line has a limit
        git("--literal-pathspecs", *words, "--", *paths[first : first + 500], cwd=project)
