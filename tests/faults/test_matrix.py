"""Every fault of a generated project's own matrix, on CPU: the run ends as it must, and the right rank is named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch")
# Clocks of a few seconds, on a machine that may have other work: what fails once is tried once more, and -ra tells.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.flaky(reruns=1)]
CASES: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[2] / "templates/project/tests/matrix/cases.yaml").read_text()
)


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"package": "digits"})


@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_the_fault_is_named_and_ends_the_run(name: str, project: Path) -> None:
    command = [sys.executable, "tests/matrix/run.py", "--only", name]
    ended = subprocess.run(command, cwd=project, env=os.environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| yes |" in ended.stdout


def test_every_row_has_its_case() -> None:
    assert len({case["name"] for case in CASES}) == len(CASES)
    # 17, 18 and 21 need two hosts: tests/slurm
    assert {case["row"] for case in CASES} == set(range(23)) - {17, 18, 21}
