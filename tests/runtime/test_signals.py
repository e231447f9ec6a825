"""Stop signals to every process of a job: a fork server and workers outlive them, at whatever moment they come."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).with_name("signals_script.py")


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"package": "digits"}, name="digits")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("start_method", "processes"), [("forkserver", 6), pytest.param("spawn", 5, marks=pytest.mark.slow), ("fork", 5)]
)
def test_workers_outlive_signals_to_all(project: Path, tmp_path: Path, start_method: str, processes: int) -> None:
    """The training process, two times two workers, and with forkserver their server, all in reach of the signals."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    own = {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1", "MARK": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), start_method],
        env=clean | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
        start_new_session=True,
    )
    assert ended.returncode == 0, ended.stdout
    found = re.search(r"read everything; (\d+) processes, signal SIG", ended.stdout)
    assert found, ended.stdout
    assert int(found[1]) >= processes, ended.stdout
