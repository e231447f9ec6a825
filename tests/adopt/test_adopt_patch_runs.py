"""`adopt.patch` to the end: `git apply`, a stop with 75, the same command that goes on, and a rank that sleeps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import adopt_shapes
import pytest
from git_helpers import git

from ddp_scaffold.adopting.remaining import remaining

pytestmark = pytest.mark.timeout(900)
SETTINGS = {"NPROC": "2", "MAX_RESTARTS": "0", "OMP_NUM_THREADS": "1", "DDP_PREEMPT__POLL_S": "0.05"}
QUICK = {"DDP_CLOCKS__LOADER_S": "4", "DDP_CLOCKS__STALL_S": "5", "DDP_CLOCKS__COLLECTIVE_S": "60"}


def shapes(*at_each_run: str) -> list[Any]:
    """All shapes; those that are not named run with what takes longest, since each starts torchrun three times."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name in at_each_run else pytest.mark.long)
        for name in adopt_shapes.SHAPES
    ]


def launch(directory: Path, run: str, *args: str, code: int = 0, **settings: str) -> str:
    """Run launch/torchrun.sh with two processes and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DDP_", "PYTHONPATH"))}
    environment |= SETTINGS | {"DDP_RUN__ID": run} | settings
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = ["bash", "-c", 'bash launch/torchrun.sh "$@" 2>&1', "launch", *args]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    return done.stdout


def outcome(directory: Path, run: str) -> dict[str, object]:
    return dict(json.loads((directory / f"runs/{run}/outcome.json").read_text()))


def end(text: str) -> str:
    """What the training says of itself at its end: sums of weights, counters, learning rates."""
    found = re.search(r"ended with .*", text)
    assert found, text
    return found[0]


@pytest.fixture
def patched(repository, adopt):
    """`patched("spawn")` is a repository of that shape, adopted and patched."""
    pytest.importorskip("torch")

    def make(shape: str) -> Path:
        directory = repository("lab", adopt_shapes.files(shape))
        assert "adopt.patch changes them" in adopt().stdout
        git(directory, "apply", "adopt.patch")
        [left] = remaining([directory])
        assert [change for change in left.advice.changes if change.must] == [], "nothing that must change is left"
        return directory

    return make


def stops_and_goes_on(directory: Path, *args: str) -> str:
    fault = {"DDP_CHECKPOINT__EVERY_STEPS": "10", "DDP_FAULTS": "term@rank=1,step=10,phase=checkpoint"}
    stopped = launch(directory, "one", *args, code=75, **fault)
    assert "stopped on request: signal SIGTERM on rank 1" in stopped
    assert outcome(directory, "one")["outcome"] == "stopped"
    last = stopped.rstrip().splitlines()[-1]
    assert "DDP_RUN__ID=one" in last
    assert last.endswith(" ".join(["launch/torchrun.sh", *args])), "the last line is the command that goes on"
    went_on = launch(directory, "one", *args)
    assert "resumed from" in went_on
    return end(went_on)


@pytest.mark.slow  # run by make test-update, as all of tests/adopt
def test_a_patched_program_stops_and_goes_on(patched):
    stops_and_goes_on(patched("spawn"), "--epochs", "40")


@pytest.mark.parametrize("shape", shapes("spawn", "while"))
def test_a_stop_changes_nothing_in_any_shape(patched, shape):
    directory = patched(shape)
    ended = stops_and_goes_on(directory, "--epochs", "40")
    assert ended == end(launch(directory, "whole", "--epochs", "40")), "as if it had not been stopped"


@pytest.mark.parametrize("shape", shapes("torchrun", "srun"))
def test_a_sleeping_rank_is_named(patched, shape):
    directory = patched(shape)
    launch(directory, "asleep", "--epochs", "40", code=70, NAP_AT="9", **QUICK)
    found = outcome(directory, "asleep")
    assert (found["kind"], found["first_ranks"]) == ("missing_rank", [1])
    assert "model.py:11" in str(found["reason"])


@pytest.mark.slow  # starts torchrun twice
def test_a_checkpoint_is_written_every_so_many_steps(patched):
    directory = patched("spawn")
    launch(directory, "one", code=1, DDP_CHECKPOINT__EVERY_STEPS="5", DDP_FAULTS="raise@rank=1,step=18,phase=data")
    kept = sorted(path.name for path in (directory / "runs/one/checkpoints").iterdir())
    assert kept == ["step_00000010", "step_00000015"]
    assert "resumed from" in (told := launch(directory, "one", DDP_CHECKPOINT__EVERY_STEPS="5"))
    assert end(told) == "ended with 48"


@pytest.mark.slow  # starts torchrun twice
def test_a_run_that_shall_not_resume_begins_anew(patched):
    directory = patched("pass")
    launch(directory, "one", "--epochs", "2")
    told = launch(directory, "one", "--epochs", "2", DDP_RUN__RESUME="false")
    assert "resumed from" not in told
    shown = [line for line in told.splitlines() if line.startswith("  run.resume ")]
    assert shown == ["  run.resume              False  (DDP_RUN__RESUME)"], "what is read is printed"
    assert not [line for line in told.splitlines() if re.search(r"run\.seed|keep_best|loader\.workers", line)]
