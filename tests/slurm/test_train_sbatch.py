"""launch/train.sbatch on a real cluster: stops, requeues, preemption, cancellation, and the environment of ranks."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import alive, parent, with_standin

flaky = pytest.mark.flaky(reruns=1, reason="Slurm's own timers of seconds, on a machine that may have other work")
pytestmark = [pytest.mark.slurm, flaky]

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


def test_done(submit: Callable[..., Any], project: Path, launcher: str) -> None:
    hostile = ["a b", "$(touch pwned)", "*", "é'\"", ""]
    job = submit(project, ["--plan", "done", *hostile], LAUNCHER=launcher)
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 0), result.output
    assert [rank["argv"] for rank in job.ready(0)] == [["--plan", "done", *hostile]] * 4
    assert "attempt 0 ended, done: the plan says done; exit code 0" in result.output


def test_a_binding_left_in_the_shell_of_sbatch_is_not_for_the_ranks(
    submit: Callable[..., Any], project: Path, launcher: str
) -> None:
    """nebius/soperator PR #2316: submitted from within an srun, every rank ran on the one core of that."""
    left = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_LIST": "0x1", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}
    job = submit(project, ["--plan", "done"], LAUNCHER=launcher, **left)
    assert job.wait().exit_code == 0
    for rank in job.ready(0):
        assert "0x1" not in rank["env"].get("SLURM_CPU_BIND", "") + rank["env"].get("SLURM_CPU_BIND_LIST", "")


def test_what_the_ranks_find(submit: Callable[..., Any], project: Path, launcher: str) -> None:
    before = time.time()
    job = submit(project, ["--plan", "done"], LAUNCHER=launcher)
    result = job.wait()
    ranks = [rank["env"] for rank in job.ready(0)]
    rank, local_rank = ("SLURM_PROCID", "SLURM_LOCALID") if launcher == "srun" else ("RANK", "LOCAL_RANK")
    assert [env[rank] for env in ranks] == ["0", "1", "2", "3"]
    assert [env[local_rank] for env in ranks] == ["0", "1", "0", "1"]
    assert [env["SLURMD_NODENAME"] for env in ranks] == ["tn1", "tn1", "tn2", "tn2"]
    for env in ranks:
        # srun: of each rank; torchrun: of the node, which its ranks share
        assert env["SLURM_CPUS_PER_TASK"] == ("2" if launcher == "srun" else "4")
        assert env["MASTER_ADDR"] == "tn1"
        assert 10000 <= int(env["MASTER_PORT"]) < 30000
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"  # on the master, too, whose route to itself is lo
        assert env["CUDA_VISIBLE_DEVICES"] == "0,1"  # every rank sees all GPUs of its node: CUDA IPC needs that
        assert env["OMP_NUM_THREADS"] == "2"
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


def test_a_cancelled_job_stays_cancelled(submit: Callable[..., Any], project: Path, launcher: str) -> None:
    job = submit(project, ["--plan", "wait,done"], LAUNCHER=launcher)
    job.ready(0)
    job.cancel()
    result = job.wait()
    assert (result.state, result.restarts) == ("CANCELLED", 0), result.output
    if launcher == "srun":  # stopping torchrun takes longer than Slurm may leave the script
        assert "so no requeue" in result.output
    assert "attempt 0 ended, stopped: signal SIG" in result.output  # the checkpoint was saved all the same


@pytest.mark.parametrize(
    ("plan", "by", "code"),
    [("config", "srun", 78), ("early", "srun", 78), ("fail", "srun", 1), ("config", "torchrun", 78)],
)
def test_failures_are_not_requeued(submit: Callable[..., Any], project: Path, plan: str, by: str, code: int) -> None:
    result = submit(project, ["--plan", plan], LAUNCHER=by).wait()
    assert (result.state, result.exit_code, result.restarts) == ("FAILED", code, 0), result.output


def test_stalls_are_requeued_until_none_is_left(submit: Callable[..., Any], project: Path) -> None:
    result = submit(project, ["--plan", "stall,stall,stall,done"]).wait()
    assert (result.state, result.exit_code, result.restarts) == ("FAILED", 70, 2), result.output
    assert "no restarts left of 2" in result.output


def test_peers_of_a_killed_rank_have_the_time_to_say_who_it_was(
    submit: Callable[..., Any], project: Path, launcher: str
) -> None:
    result = submit(project, ["--plan", "vanish"], MAX_RESTARTS="0", LAUNCHER=launcher).wait()
    assert (result.state, result.exit_code) == ("FAILED", 70), result.output
    assert "stalled: rank 1 sends no heartbeat any more" in result.output
    *_, before, line = result.output.rstrip().splitlines()
    assert "to start it again:" in before, "the stand-in has saved nothing"
    assert re.match(r"cd .+ && DDP_RUN__ID=slurm-\d+ .*MAX_RESTARTS=0 ", line), line
    assert re.search(r" sbatch .*train\.sbatch --plan vanish$", line), line


def test_a_signal_to_node_sh_alone_reaches_the_ranks(submit: Callable[..., Any], project: Path) -> None:
    """As with proctrack/cgroup, where Slurm signals only the processes that it has started itself."""
    pytest.importorskip("torch", reason="needs torch, for its torchrun")
    job = submit(project, ["--plan", "wait,done"], LAUNCHER="torchrun")
    node_sh = parent(parent(job.ready(0)[3]["pid"]))
    assert b"launch/node.sh" in Path(f"/proc/{node_sh}/cmdline").read_bytes()
    for _ in range(2):
        os.kill(node_sh, signal.SIGUSR2)
    result = job.wait()
    assert (result.state, result.restarts) == ("COMPLETED", 1), result.output
    assert "stopped: signal SIGTERM on rank" in result.output


def test_ranks_of_a_killed_torchrun_do_not_stay(submit: Callable[..., Any], project: Path) -> None:
    pytest.importorskip("torch", reason="needs torch, for its torchrun")
    job = submit(project, ["--plan", "wait,done"], LAUNCHER="torchrun")
    pids = [rank["pid"] for rank in job.ready(0)]
    os.kill(parent(pids[2]), signal.SIGKILL)
    job.until(lambda: not any(map(alive, pids)), "the end of the ranks")
    result = job.wait()
    assert (result.state, result.restarts) == ("COMPLETED", 1), result.output
    assert "torchrun on tn2 ended and left processes behind" in result.output


def test_a_node_that_does_not_come_is_named(submit: Callable[..., Any], project: Path) -> None:
    pytest.importorskip("torch", reason="needs torch, for its torchrun")
    script = project / "launch/node.sh"
    script.write_text(script.read_text().replace("shift 3\n", "shift 3\n[ $SLURM_NODEID = 0 ] || sleep 120\n"))
    job = submit(project, ["--plan", "done"], LAUNCHER="torchrun", DDP_CLOCKS__INIT_S="3.5", MAX_RESTARTS="0")
    job.until(lambda: "these nodes did not come: tn2" in job.output(), "the name of the node")
    assert "torchrun on tn1 started no rank in 3 s" in job.output()
    job.cancel()  # else srun waits a minute for the sleeping one


def test_a_taken_port_is_passed_over(submit: Callable[..., Any], project: Path, listen: Callable[..., None]) -> None:
    job = submit(project, ["--plan", "done"], options=["--hold"])
    port = 10000 + int(job.id) % 20000
    listen("tn1", port)
    job.release()
    assert job.wait().exit_code == 0
    assert f"port {port} is in use already, trying the next" in job.output()
    assert {rank["env"]["MASTER_PORT"] for rank in job.ready(0)} == {str(port + 1)}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"LAUNCHER": "mpirun"}, "LAUNCHER=mpirun is no launcher of this script"),
        ({"LAUNCHER": "torchrun", "DDP_CLOCKS__INIT_S": "soon"}, "clocks.init_s=soon is not a number from 1"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1 is not a number from 0"),
    ],
)
def test_wrong_variables_are_refused(
    submit: Callable[..., Any], project: Path, variables: dict[str, str], said: str
) -> None:
    result = submit(project, ["--plan", "done"], **variables).wait()
    assert (result.state, result.exit_code, result.restarts) == ("FAILED", 78, 0), result.output
    assert said in result.output


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
