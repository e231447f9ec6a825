"""launch/train.sbatch on a real cluster: stops, requeues, preemption, cancellation, and the environment of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import with_standin

pytestmark = pytest.mark.slurm

ANSWERS = {
    "preset": "generic-slurm",
    "nodes": 2,
    "gpus_per_node": 2,
    "cpus_per_task": 2,
    "walltime": "00:10:00",
    "max_restarts": 2,
}


@pytest.fixture(scope="module")
def rendered(render: Callable[..., Path]) -> Path:
    return render(ANSWERS)


@pytest.fixture
def project(rendered: Path, tmp_path: Path) -> Path:
    return with_standin(rendered, tmp_path / "my project")


def test_done(submit: Callable[..., Any], project: Path) -> None:
    hostile = ["a b", "$(touch pwned)", "*", "é'\"", ""]
    job = submit(project, ["--plan", "done", *hostile])
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 0), result.output
    assert [rank["argv"] for rank in job.ready(0)] == [["--plan", "done", *hostile]] * 4
    assert "attempt 0 ended, done: the plan says done; exit code 0" in result.output


def test_what_the_ranks_find(submit: Callable[..., Any], project: Path) -> None:
    before = time.time()
    job = submit(project, ["--plan", "done"])
    result = job.wait()
    ranks = [rank["env"] for rank in job.ready(0)]
    assert [env["SLURM_PROCID"] for env in ranks] == ["0", "1", "2", "3"]
    assert [env["SLURM_LOCALID"] for env in ranks] == ["0", "1", "0", "1"]
    for env in ranks:
        assert env["MASTER_ADDR"] == "tn1"
        assert 10000 <= int(env["MASTER_PORT"]) < 30000
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"  # on the master, too, whose route to itself is lo
        assert env["CUDA_VISIBLE_DEVICES"] == "0,1"  # every rank sees all GPUs of its node: CUDA IPC needs that
        assert env["SLURM_CPUS_PER_TASK"] == env["OMP_NUM_THREADS"] == "2"
        assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
        assert 0 < float(env["DDP_WALLTIME_END"]) - before < 11 * 60
        assert "NCCL_SOCKET_IFNAME" not in env
    assert result.exit_code == 0


def test_time_limit_stops_requeues_and_finishes(submit: Callable[..., Any], project: Path) -> None:
    job = submit(project, ["--plan", "wait,done"], options=["--time=1", "--signal=B:USR2@55"])
    result = job.wait()
    assert (result.state, result.restarts) == ("COMPLETED", 1), result.output
    assert "got SIGUSR2: asking the ranks to stop" in result.output
    assert "stopped: signal SIGUSR2 on rank" in result.output
    assert "requeueing, 1 of 2" in result.output
    assert [rank["env"]["DDP_ATTEMPT"] for rank in job.ready(1)] == ["1"] * 4


def test_preemption_stops_requeues_and_finishes(submit: Callable[..., Any], project: Path) -> None:
    job = submit(project, ["--plan", "wait,done"])
    job.ready(0)
    other = submit(project, partition="high", options=["--nodes=2", "--gpus-per-node=2", "--wrap=true"], script=())
    result = job.wait()
    assert (result.state, result.restarts) == ("COMPLETED", 1), result.output
    assert "stopped: signal SIGTERM on rank" in result.output
    assert other.wait().state == "COMPLETED"


def test_a_cancelled_job_stays_cancelled(submit: Callable[..., Any], project: Path) -> None:
    job = submit(project, ["--plan", "wait,done"])
    job.ready(0)
    job.cancel()
    result = job.wait()
    assert (result.state, result.restarts) == ("CANCELLED", 0), result.output
    assert "so no requeue" in result.output
    assert "attempt 0 ended, stopped: signal SIG" in result.output  # the checkpoint was saved all the same


@pytest.mark.parametrize(("plan", "code"), [("config", 78), ("early", 78), ("fail", 1)])
def test_failures_are_not_requeued(submit: Callable[..., Any], project: Path, plan: str, code: int) -> None:
    result = submit(project, ["--plan", plan]).wait()
    assert (result.state, result.exit_code, result.restarts) == ("FAILED", code, 0), result.output


def test_stalls_are_requeued_until_none_is_left(submit: Callable[..., Any], project: Path) -> None:
    result = submit(project, ["--plan", "stall,stall,stall,done"]).wait()
    assert (result.state, result.exit_code, result.restarts) == ("FAILED", 70, 2), result.output
    assert "no restarts left of 2" in result.output


def test_peers_of_a_killed_rank_have_the_time_to_say_who_it_was(submit: Callable[..., Any], project: Path) -> None:
    result = submit(project, ["--plan", "vanish"], MAX_RESTARTS="0").wait()
    assert (result.state, result.exit_code) == ("FAILED", 70), result.output
    assert "stalled: rank 1 sends no heartbeat any more" in result.output


def test_submitted_from_elsewhere(submit: Callable[..., Any], project: Path, tmp_path: Path) -> None:
    job = submit(tmp_path, script=[str(project / "launch/train.sbatch")])
    result = job.wait()
    assert (result.state, result.exit_code) == ("FAILED", 78), result.output
    assert f"{tmp_path} is not the project's directory" in result.output


def test_modules_are_loaded(submit: Callable[..., Any], render: Callable[..., Path], tmp_path: Path) -> None:
    project = with_standin(render({**ANSWERS, "modules": "gcc/13.2 cuda/12.4"}), tmp_path / "project")
    loads = {"BASH_FUNC_module%%": '() { echo "module called with $*"; }'}
    result = submit(project, ["--plan", "done"], **loads).wait()
    assert result.exit_code == 0, result.output
    assert "module called with load gcc/13.2 cuda/12.4" in result.output
    fails = {"BASH_FUNC_module%%": "() { false; }"}
    result = submit(project, ["--plan", "done"], **fails).wait()
    assert result.exit_code == 78, result.output
    assert "module load failed" in result.output
