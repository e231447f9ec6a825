"""How a run that ended well says why: in its last line, in outcome.json and in report.md."""

from __future__ import annotations

import importlib
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

ONE_SAMPLE = """
import sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from digits.ddp import make_loader, rehearse
from digits.ddp.clocks import Clocks
from digits.ddp.loader import LoaderSettings
from digits.ddp.metrics import LogSettings
from digits.ddp.session import session
from digits.ddp.start.settings import RunSettings
from digits.ddp.start.stop import PreemptSettings

run = RunSettings(dir=sys.argv[1], id="r", device="cpu")
with session(run, Clocks(), LogSettings(tracker="none"), PreemptSettings()) as going:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    data = torch.utils.data.TensorDataset(torch.ones(9, 2))
    loader = make_loader(data, going.job, LoaderSettings(), batch_size=4)
    make_loader(data, going.job, LoaderSettings(), batch_size=4, full=True)
    make_loader(data, going.job, LoaderSettings(drop_last=True), batch_size=4)

    def step():
        loss = model(torch.ones(4, 2)).sum() * float("nan")
        loss.backward()
        return loss.detach()

    rehearse(going.job, [model], step)
    for (batch,) in loader:
        model(batch)
"""


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"model": "custom", "package": "digits"})


def start(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    env = clean | {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=100, check=False)


def run(project: Path, *arguments: str) -> str:
    """What it prints; it must end well."""
    done = start(project, *arguments)
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


def test_what_ends_an_epoch_and_a_loss_that_is_not_finite_are_told_before_the_first_step(
    project: Path, tmp_path: Path
) -> None:
    done = start(project, "-c", ONE_SAMPLE, str(tmp_path))
    warned = [line for line in done.stderr.splitlines() if "batch of one sample" in line]
    assert len(warned) == 1  # not where it is left out
    assert "for which BatchNorm1d (1) raises" in warned[0]
    assert "rehearsal: the loss of the first batch is NaN or infinite on all ranks, before any step" in done.stderr
    outcome = json.loads((tmp_path / "r" / "outcome.json").read_text())
    assert outcome["kind"] == "rank_exception"
    assert "Expected more than 1 value per channel" in outcome["reason"]
    assert "loader.drop_last" in outcome["advice"]


@pytest.mark.parametrize(
    ("losses", "said", "ranks"),
    [
        ((0, 3, 0), "; so was the loss itself, on rank 1 of 3 only", [1]),
        ((2, 2, 2), "; so was the loss itself, on all ranks", []),
        ((4,), "; so was the loss itself", []),
        ((0, 0), "; the loss itself was finite", []),
        ((), "", []),
    ],
)
def test_whose_loss_was_not_finite(
    project: Path, monkeypatch: pytest.MonkeyPatch, losses: tuple[int, ...], said: str, ranks: list[int]
) -> None:
    monkeypatch.syspath_prepend(project / "src")
    error = importlib.import_module("digits.ddp.errors").NonFinite("9 steps had NaN", losses)
    assert (str(error), error.ranks) == (f"9 steps had NaN{said}", ranks)
