"""`ddp-scaffold presets init` on a real Slurm: on the host of the scheduler, and in a job on a node."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

SCAFFOLD = Path(__file__).parents[2] / "scaffold"
INIT = [sys.executable, "-m", "ddp_scaffold", "presets", "init", "mine", "-y"]

pytestmark = pytest.mark.slurm


def made(slurm: dict[str, str], directory: Path, *before: str) -> dict[str, Any]:
    environment = slurm | {"PYTHONPATH": str(SCAFFOLD)}
    done = subprocess.run(
        [*before, *INIT], cwd=directory, env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    data: dict[str, Any] = yaml.safe_load((directory / "mine.yml").read_text())
    return data


def test_on_the_host_of_the_scheduler(slurm: dict[str, str], tmp_path: Path) -> None:
    data = made(slurm, tmp_path)
    assert data["title"] == "The Slurm cluster tests"
    known = {name: data[name]["value"] for name in ("scheduler", "partition", "gpus_per_node", "cpus_per_task")}
    assert known == {"scheduler": "slurm", "partition": "main", "gpus_per_node": 2, "cpus_per_task": 2}
    assert [limit["value"] for limit in data["limits"]] == [
        {"name": "main", "max_walltime": "01:00:00", "preemptible": True},
        {"name": "high", "max_walltime": "01:00:00"},
    ]
    assert data["gpus_per_node"]["source"] == "sinfo on the login node"


def test_in_a_job(slurm: dict[str, str], tmp_path: Path) -> None:
    data = made(slurm, tmp_path, "srun", "--nodes=1", "--ntasks=1", "--gpus-per-node=1")
    assert data["gpus_per_node"] == {**data["gpus_per_node"], "value": 2, "source": "sinfo on a compute node"}
    assert "ip addr on a compute node shows eth0" in data["nccl_socket_ifname"]["source"]


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_from_init_to_a_job_that_trains(slurm: dict[str, str], submit: Callable[..., Any], tmp_path: Path) -> None:
    """What a user of a cluster without a preset types, in five minutes: init, check, new, sbatch. No file is edited."""
    pytest.importorskip("torch", reason="trains")
    from training_helpers import arguments, ends

    started = time.monotonic()
    data = made(slurm, tmp_path)
    assert [need["value"]["by"] for need in data["needs"] if need["value"]["what"] == "python"] == ["site"]
    environment = slurm | {"PYTHONPATH": str(SCAFFOLD)}
    for words in (["presets", "check", "mine.yml"], ["new", "digits", "-y", "--preset", "./mine.yml"]):
        command = [sys.executable, "-m", "ddp_scaffold", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "ill needed" not in done.stdout
    assert "sbatch launch/train.sbatch" in done.stdout
    result = submit(tmp_path / "digits", arguments(steps=20), options=["--time=00:05:00"]).wait(250)
    assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
    assert [outcome for _, outcome, _ in ends(next((tmp_path / "digits" / "runs").iterdir()))] == ["done"]
    assert time.monotonic() - started < 300
