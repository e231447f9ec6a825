"""`--fix`: the changes that cannot do harm, each to one line. What needs a decision is left to the user."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from .files import SourceFile
from .findings import Finding
from .shell.ends import SPACED
from .variables import load_table

LONE_EXPORT = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Z]\w*)=(?:[\w.:/-]*|\"[^\"$`]*\"|'[^']*')[ \t]*(?:#.*)?$")


def _without_spaces(line: str, finding: Finding) -> str | None:
    match = SPACED.match(line)
    return f"{match.group(1)}{match.group(2) or ''}{match.group(3)}={match.group(5)}" if match else line


def _without_line(line: str, finding: Finding) -> str | None:
    """None, for a line that sets nothing but a variable that nothing reads."""
    match = LONE_EXPORT.match(line)
    return None if match and match.group(1) in finding.message else line


def _renamed(line: str, finding: Finding) -> str | None:
    match = re.compile(r"\w+").match(line, finding.column - 1)
    variable = load_table().variables.get(match.group()) if match else None
    if match is None or variable is None or not variable.renamed_to:
        return line
    return line[: match.start()] + variable.renamed_to + line[match.end() :]


def _torchrun(line: str, finding: Finding) -> str | None:
    """Only with --use_env: without it the program is given --local-rank, and may need it."""
    if not re.search(r"--use[_-]env\b", line):
        return line
    line = re.sub(r"python[\d.]*\s+(?:-u\s+)?-m\s+torch\.distributed\.launch", "torchrun", line, count=1)
    return re.sub(r"\s--use[_-]env\b", "", line, count=1)


FIXES: dict[str, Callable[[str, Finding], str | None]] = {
    "DDP553": _without_line,
    "DDP554": _without_line,
    "DDP559": _without_spaces,
    "DDP653": _torchrun,
    "DDP655": _renamed,
}


def fix(files: Sequence[SourceFile], findings: Sequence[Finding]) -> int:
    """Change the files, and return how many findings that settles.

    Only scripts and environment files: a line of theirs can go without anything else. A line that has changed since it
    was read, and a file that is not UTF-8 with LF, are left alone. Raises OSError if a file cannot be written.
    """
    kinds = {file.path: file for file in files if file.kind in ("shell", "env")}
    count = 0
    for path in sorted({one.file for one in findings if one.file in kinds and one.rule in FIXES}):
        text = kinds[path].text
        if Path(path).is_symlink() or Path(path).read_bytes() != text.encode():
            continue
        lines: list[str | None] = list(text.split("\n"))
        changed = 0
        for one in findings:
            line = lines[one.line - 1] if one.file == path and one.rule in FIXES else None
            if line is None:
                continue
            new = FIXES[one.rule](line, one)
            if new != line and not (new is None and _continued(lines, one.line - 1)):
                lines[one.line - 1] = new
                changed += 1
        if changed:
            _write(Path(path), "\n".join(line for line in lines if line is not None))
            count += changed
    return count


def _continued(lines: Sequence[str | None], number: int) -> bool:
    """Whether a line belongs to the one above it, or is all that stands between `then` and `fi`."""
    above = (lines[number - 1] or "") if number else ""
    below = (lines[number + 1] or "") if number + 1 < len(lines) else ""
    alone = re.search(r"(?:\bthen|\bdo|\belse|\{)\s*$", above) and re.match(r"\s*(?:fi|done|else|elif|\})(?!\w)", below)
    return above.endswith("\\") or bool(alone)


def _write(path: Path, text: str) -> None:
    """Replace a file at once, with the mode that it has."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
        os.chmod(name, path.stat().st_mode & 0o7777)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
