"""Every fault of benchmarks/faults.py in a rendered project on CPU: the run ends, the right rank is named."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults.py"
spec = importlib.util.spec_from_file_location("fault_matrix", SCRIPT)
assert spec is not None
assert spec.loader is not None
matrix = importlib.util.module_from_spec(spec)
sys.modules["fault_matrix"] = matrix
spec.loader.exec_module(matrix)

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"package": "digits"})


@pytest.mark.parametrize("case", matrix.CASES, ids=lambda case: case.name)
def test_the_fault_is_named_and_ends_the_run(case: object, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = argparse.Namespace(project=project, package="digits", device="cpu", ranks=2)
    row = matrix.run(case, options)
    assert row["right"] == "yes", row
