"""launch/sweep.py --slurm on a real cluster: each job of the array stops, is requeued and ends by itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import ready, until, with_standin

flaky = pytest.mark.flaky(reruns=1, reason="Slurm's own timers of seconds, on a machine that may have other work")
pytestmark = [pytest.mark.slurm, flaky]

ANSWERS = {"preset": "generic-slurm", "nodes": 1, "gpus_per_node": 1, "cpus_per_task": 1, "max_restarts": 1}


class Sweep:
    """sweep.py in a project, and Slurm's commands."""

    def __init__(self, project: Path, env: dict[str, str]) -> None:
        self.project, self.env = project, env

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run([str(self.project / "launch" / "sweep.py"), *arguments])

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.project, env=self.env, capture_output=True, text=True, check=False)

    def slurm(self, *command: str) -> str:
        done = self._run(list(command))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self, job: str) -> tuple[str, int]:
        """A job's state, and how often it was requeued."""
        shown = self.slurm("scontrol", "show", "job", "--oneliner", job)
        fields = dict(field.split("=", 1) for field in shown.split() if "=" in field)
        return fields["JobState"], int(fields["Restarts"])

    def row(self, run: str) -> dict[str, Any]:
        rows = json.loads(self("--table", "--json").stdout)
        return next(dict(row) for row in rows if row["run"] == run)


@pytest.fixture
def sweep(slurm: dict[str, str], render: Callable[..., Path], tmp_path: Path) -> Iterator[Sweep]:
    project = with_standin(render(ANSWERS), tmp_path / "my project")
    yield Sweep(project, slurm)
    subprocess.run(["scancel", "--user=root"], env=slurm, check=True)
    until(lambda: not subprocess.check_output(["squeue", "--noheader"], env=slurm), "an empty queue")


def test_jobs_of_an_array_are_stopped_and_requeued_one_by_one(sweep: Sweep) -> None:
    (sweep.project / "two.yaml").write_text('list:\n  - {plan: "wait,done"}\n  - {plan: "wait,done", seed: 1}\n')
    done = sweep("two.yaml", "--name", "sweep", "--slurm", "--at-once", "2", "--sbatch", "--time=5")
    assert done.returncode == 0, done.stderr
    assert "--array=1,2%2 --job-name=sweep" in done.stderr
    one, two = (sweep.project / "runs" / name for name in ("sweep", "sweep-seed_1"))
    (first,), (second,) = ready(one, 0, 1), ready(two, 0, 1)
    assert first["argv"] == ["--run.id", "sweep", "--plan", "wait,done"]
    array = first["env"]["SLURM_ARRAY_JOB_ID"]
    jobs = [f"{array}_1", f"{array}_2"]
    assert array in {rank["env"]["SLURM_JOB_ID"] for rank in (first, second)}, "the id that stands for the array, too"
    assert [sweep.row(run.name)["outcome"] for run in (one, two)] == ["running", "running"]
    assert "nothing to submit" in sweep("two.yaml", "--name", "sweep", "--slurm").stderr

    # The one whose id stands for the whole array: neither the signal nor the requeue may reach the other.
    mine, other = (1, 0) if second["env"]["SLURM_JOB_ID"] == array else (0, 1)
    sweep.slurm("scancel", "--batch", "--signal=USR2", jobs[mine])
    until(lambda: sweep.state(jobs[mine]) == ("COMPLETED", 1), f"{jobs[mine]} has gone on and is done", 100)
    assert sweep.state(jobs[other]) == ("RUNNING", 0)
    assert not ((one, two)[other] / "stop-0").exists()

    sweep.slurm("scancel", jobs[other])
    until(lambda: sweep.state(jobs[other])[0] == "CANCELLED", "the other is cancelled, and not requeued", 60)
    until(lambda: sweep.row((one, two)[other].name)["outcome"] == "stopped", "its checkpoint is saved")
    told = (sweep.project / f"slurm-{array}_{mine + 1}.out").read_text()
    assert told.count("got SIGUSR2: asking the ranks to stop") == 1
    assert "requeueing, 1 of 1" in told

    again = sweep("two.yaml", "--name", "sweep", "--slurm", "--dry-run")
    assert f"--array={other + 1} " in again.stderr, "only what is not done"
