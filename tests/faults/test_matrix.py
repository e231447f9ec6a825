"""Every fault of a generated project's own matrix, on CPU: the run ends as it must, and the right rank is named."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.flaky(reruns=1, reason="clocks of a few seconds, on a machine that may have other work"),
]
MATRIX = Path(__file__).parents[2] / "templates/project/tests/matrix"
CASES: list[Any] = runpy.run_path(str(MATRIX / "cases.py"))["cases"]()
REPORTED = {23, 24, 25}  # what people have reported in public: reports_*.yaml
# One of each kind of end, those that take the shortest; the others are slow. A page of the site runs one of row 1.
CROSS_SECTION = {
    "SIGKILL while the state is written, restarted",
    "port in use",
}


def parameters() -> list[Any]:
    """The name of each case; `make test` runs the cross-section."""
    slow = pytest.mark.slow
    return [pytest.param(case.name, marks=[] if case.name in CROSS_SECTION else [slow]) for case in CASES]


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"package": "digits"})


@pytest.mark.parametrize("name", parameters())
def test_the_fault_is_named_and_ends_the_run(name: str, project: Path) -> None:
    command = [sys.executable, "tests/matrix/run.py", "--only", name]
    ended = subprocess.run(command, cwd=project, env=os.environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| yes |" in ended.stdout


def test_every_row_has_its_case() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(names) >= CROSS_SECTION
    # 17, 18 and 21 need two hosts: tests/slurm
    assert {case.row for case in CASES} - REPORTED == set(range(23)) - {17, 18, 21}
