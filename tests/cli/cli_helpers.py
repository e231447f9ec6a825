"""What the tests of the command line share, apart from fixtures."""

from __future__ import annotations

import sys
from pathlib import Path

from typer.testing import Result

SCAFFOLD = [sys.executable, "-m", "ddp_scaffold"]


def tree(project: Path) -> dict[str, bytes]:
    """Return the content of every file but git's."""
    files = (path for path in project.rglob("*") if path.is_file())
    return {str(path.relative_to(project)): path.read_bytes() for path in files if ".git" not in path.parts}


def refused(result: Result, work: Path, exit_code: int, *words: str) -> None:
    """Assert one line of error with these words, one line of hint, no traceback, and nothing left behind."""
    lines = result.stderr.splitlines()
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    assert len(lines) == 2, result.stderr
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    assert len(lines[1]) > len("hint: ")
    for word in words:
        assert word in result.stderr
    assert list(work.iterdir()) == []
