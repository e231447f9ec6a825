"""The project's own tests, run by the project's own Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .._errors import show
from .recorded import Refused
from .result import Tested

NO_TESTS = 5  # pytest's exit code if it has collected none


def python_of(project: Path) -> str:
    """Return the Python that has what the project needs: of VENV or .venv, else the one on the PATH."""
    for directory in filter(None, (os.environ.get("VENV"), str(project / ".venv"))):
        python = Path(directory, "bin", "python")
        if os.access(python, os.X_OK):
            return str(python)
    return shutil.which("python") or shutil.which("python3") or sys.executable


def run_tests(project: Path, *, quiet: bool) -> Tested:
    """Run `python -m pytest` in the project; return "passed", or "skipped" if it has no tests.

    Raises Refused if a test fails, or if there is no pytest.
    """
    command = [python_of(project), "-m", "pytest", "-q", "-x"]
    output = subprocess.PIPE if quiet else None
    try:
        done = subprocess.run(
            command, cwd=project, stdout=output, stderr=subprocess.STDOUT if quiet else None, check=False
        )
    except OSError as error:
        raise Refused(
            f"the project's tests cannot be run: {show(command[0])}: {error.strerror}", "The update was taken back."
        ) from error
    if done.returncode == NO_TESTS:
        return "skipped"
    if done.returncode:
        raise Refused(
            f"the project's tests failed after the update (exit code {done.returncode})",
            f"It was taken back. See them without --test: {' '.join(command)}.",
        )
    return "passed"
