"""Which file system a path is on: for when a write to it does not return."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from .directory import Note


def naming(note: Note, path: Path) -> Note:
    """`note`, with the path and its file system: whoever reads it may know nothing but the last one.

    Call it where it may hang, if the file system does: symbolic links are followed. The path alone is noted before.
    """
    note(f"nothing written yet to {path}")
    where = f"{path} ({file_system(os.path.realpath(path))})"
    note(f"nothing written yet to {where}")
    return lambda text: note(f"{text}, to {where}")


def file_system(path: str, table: str = "") -> str:
    """'nfs4 of server:/export at /scratch'; 'unknown file system' without /proc. Does not touch the file system.

    Args:
        path: absolute, without symbolic links.
        table: the mounts (proc_pid_mountinfo(5)), by default those of this process.
    """
    with suppress(OSError):
        table = table or Path("/proc/self/mountinfo").read_text()
    best = ("", "", "")
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        if len(before.split()) < 5 or len(after.split()) < 2:
            continue
        at, kind, source = map(_plain, (before.split()[4], *after.split()[:2]))
        if f"{path}/".startswith(at.rstrip("/") + "/") and len(at) >= len(best[0]):  # the last one covers earlier ones
            best = (at, kind, source)
    return f"{best[1]} of {best[2]} at {best[0]}" if best[0] else "unknown file system"


def _plain(field: str) -> str:
    """Blanks and backslashes stand there as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
