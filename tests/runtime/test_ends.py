"""How a run that ended well says why: in its last line, in outcome.json and in report.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

EARLY_STOP = """
import sys
from digits.ddp import Patience, step_done
from digits.ddp.clocks import Clocks
from digits.ddp.metrics import LogSettings
from digits.ddp.session import session
from digits.ddp.start.settings import RunSettings
from digits.ddp.start.stop import PreemptSettings

run = RunSettings(dir=sys.argv[1], id="r", device="cpu")
with session(run, Clocks(), LogSettings(tracker="none"), PreemptSettings()) as going:
    patience = Patience(2, higher_is_better=False)
    for step, loss in enumerate((0.5, 0.25, 0.5, 0.75), 1):
        step_done(step, 0)
        patience.note(going.job, step, loss)
    assert patience.over
"""


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"model": "custom", "package": "digits"})


def run(project: Path, *arguments: str) -> str:
    """What it prints; it must end well."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    env = clean | {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_an_early_stop_is_in_the_report(project: Path, tmp_path: Path) -> None:
    why = "training is done: early stop at step 4: no better value than 0.25 in the last 2 of the evaluations"
    assert f"{why}; report: " in run(project, "-c", EARLY_STOP, str(tmp_path)).splitlines()[-1]
    assert json.loads((tmp_path / "r" / "outcome.json").read_text())["reason"] == why
    report = (tmp_path / "r" / "report.md").read_text()
    assert report.startswith(f"# Run r: ✔ done\n\n{why}.\n")
