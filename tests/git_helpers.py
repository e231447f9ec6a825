"""Git for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(directory: Path, *args: str) -> str:
    """Run git in `directory` and return its output."""
    return subprocess.run(["git", *args], cwd=directory, check=True, capture_output=True, text=True).stdout
