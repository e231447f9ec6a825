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


@pytest.fixture(scope="module")
def trained(project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The arguments of training that has made four steps, and has kept its best checkpoint."""
    arguments = ["-m", "digits.train", "--run.device", "cpu", "--run.id", "r", "--log.tracker", "none"]
    arguments += ["--run.dir", str(tmp_path_factory.mktemp("runs")), "--checkpoint.every_steps", "2"]
    arguments += ["--checkpoint.keep_best", "true", "--eval.every_steps", "2", "--sample.every_steps", "0"]
    assert "training is done; report: " in run(project, *arguments, "--train.steps", "4").splitlines()[-1]
    return tuple(arguments)


def run_dir(arguments: tuple[str, ...]) -> Path:
    return Path(arguments[arguments.index("--run.dir") + 1], "r")


@pytest.mark.parametrize("steps", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_has_no_step_left_to_make_says_so(project: Path, trained: tuple[str, ...], steps: int) -> None:
    """Fewer were asked for than it had made already, or as many."""
    why = f"training is done: no step was made, as the checkpoint is of step 4, and train.steps is {steps}"
    said = run(project, *trained, "--train.steps", str(steps))
    assert f"{why}; report: " in said.splitlines()[-1]
    assert f"\n\n{why}.\n" in (run_dir(trained) / "report.md").read_text()


def test_the_report_names_the_best_checkpoint(trained: tuple[str, ...]) -> None:
    rows = map(json.loads, (run_dir(trained) / "metrics.jsonl").read_text().splitlines())
    found = {row["step"]: row["val_accuracy"] for row in rows if "val_accuracy" in row}
    best = max(found, key=lambda step: found[step])
    report = (run_dir(trained) / "report.md").read_text()
    where = f"in checkpoints/step_{best:08d}."
    assert f"\nBest checkpoint: step {best}, val_accuracy {found[best]:.5g} (higher is better), {where}\n" in report


def test_an_early_stop_is_in_the_report(project: Path, tmp_path: Path) -> None:
    why = "training is done: early stop at step 4: no better value than 0.25 in the last 2 of the evaluations"
    assert f"{why}; report: " in run(project, "-c", EARLY_STOP, str(tmp_path)).splitlines()[-1]
    assert json.loads((tmp_path / "r" / "outcome.json").read_text())["reason"] == why
    report = (tmp_path / "r" / "report.md").read_text()
    assert report.startswith(f"# Run r: ✔ done\n\n{why}.\n")
