"""Whether what an update writes has room: a disk or a quota that is full half-way leaves half an update."""

from __future__ import annotations

import os
from pathlib import Path

from .._git import FULL, git
from .trial import Outcome

BLOCK = 4096  # what a small file takes


def shortage(folder: Path, outcome: Outcome) -> str:
    """Return what to say if the git directory `folder` has no room for an update, by trying: no call tells a quota.

    That is the new files, their objects, the old files once more if they must be put back, and two copies of the index.
    """
    size = 2 * (folder / "index").stat().st_size + 16 * BLOCK
    for commit, times in ((outcome.before, 1), (outcome.after, 2)):
        for line in git("ls-tree", "-r", "-l", "-z", commit, cwd=outcome.repository).split("\0")[:-1]:
            facts, path = line.split("\t", 1)
            if path in outcome.changes and facts.split()[3].isdigit():  # not that of a submodule
                size += times * (int(facts.split()[3]) // BLOCK + 1) * BLOCK
    ballast = folder / "ddp-scaffold-space"
    try:
        with ballast.open("wb") as file:
            file.write(os.urandom(size))  # nothing that a file system could make smaller
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in FULL:
            raise
        return f"{folder}: {error.strerror}, and the update needs {size // 1000} kB"
    finally:
        ballast.unlink(missing_ok=True)
    return ""
