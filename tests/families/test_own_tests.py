"""The tests of each family's project: its model; several ranks equal to one process; exact resume."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from family_runs import FAMILIES

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
Family = Callable[..., Path]


@pytest.mark.parametrize(
    "model", [model for model in FAMILIES if model != "diffusion"]
)  # whose tests all run elsewhere
def test_its_own_tests_pass(model: str, family: Family) -> None:
    """Its model; several ranks equal to one process; a resumed run equal to the bit."""
    project = family(model)
    tests = ["tests/test_contract.py", "tests/example", "tests/test_parity.py"]
    tests += ["tests/test_train.py::test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit"]
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
