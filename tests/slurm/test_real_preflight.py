"""Preflight on the two-node cluster, started by srun as a job would start it: in order, and with a bad link."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

flaky = pytest.mark.flaky(reruns=1, reason="Slurm's own timers of seconds, on a machine that may have other work")
pytestmark = [pytest.mark.slurm, flaky, pytest.mark.timeout(300)]

PREFLIGHT = ["python", "-m", "digits.ddp.preflight", "--run.device", "cpu", "--train.steps", "7"]
PAIR = "rank 0 (tn1) - rank 1 (tn2)"


def start(job: Any, script: str, *arguments: str, **env: str) -> tuple[int, str]:
    """Run preflight as a step of one task a node, and return srun's exit code and all output."""
    job.start(script, [*PREFLIGHT, *arguments], **{"LAUNCH_NODES": "2", **env})
    try:
        code = job.step.wait(timeout=120)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(job.output()) from error
    return code, job.output()


def test_two_nodes_in_order_and_again_on_the_same_port(allocate: Callable[..., Any], real_project: Path) -> None:
    job = allocate(real_project)
    for _ in range(2):  # what follows in the same job uses the same MASTER_PORT
        code, said = start(job, 'bash launch/task.sh "$@"')
        assert code == 0, said
        assert re.search(rf"^both ways +{re.escape(PAIR)} .* eth0 \(TCP\)$", said, re.MULTILINE), said
        assert f"slowest pair of nodes: {PAIR}" in said
        assert re.search(r"^1 +tn2 .* 10\.78\.0\.12 eth0 ", said, re.MULTILINE), "the way to the master"
        assert "clocks: at most" in said
        assert said.splitlines()[-1].startswith("preflight: everything is in order")
        seconds = re.search(r"^preflight took (.*) s$", said, re.MULTILINE)
        assert seconds is not None
        assert float(seconds[1]) < 60, said


def test_a_slow_link_is_named(allocate: Callable[..., Any], real_project: Path, link: Callable[..., None]) -> None:
    job = allocate(real_project)
    link("slow", "tn2", "100")
    code, said = start(job, 'bash launch/task.sh "$@"')
    assert code == 0, said
    assert re.search(rf"^warning: {re.escape(PAIR)}: [1-9]\d\d ms for one number$", said, re.MULTILINE), said


def test_a_node_that_does_not_come_is_named(allocate: Callable[..., Any], real_project: Path) -> None:
    job = allocate(real_project)
    script = '[ "$SLURM_PROCID" = 0 ] || exec sleep 20; exec bash launch/task.sh "$@"'
    code, said = start(job, script, DDP_CLOCKS__PREFLIGHT_S="8")
    assert code == 70, said
    assert "preflight: rank 0 (tn1): ranks [1] did not start within 8 s" in said


def test_an_interface_that_one_node_does_not_have(allocate: Callable[..., Any], real_project: Path) -> None:
    job = allocate(real_project)
    script = '[ "$SLURM_PROCID" = 0 ] || export GLOO_SOCKET_IFNAME=eth7; bash launch/task.sh "$@"'
    code, said = start(job, script)
    assert code == 78, said
    assert "problem: rank 1 (tn2): GLOO_SOCKET_IFNAME names eth7" in said
    assert said.count("problem:") == 1, said


def test_a_directory_that_the_nodes_do_not_share(allocate: Callable[..., Any], real_project: Path) -> None:
    job = allocate(real_project)
    script = 'DDP_RUN__DIR=$DDP_RUN__DIR/$SLURM_PROCID exec bash launch/task.sh "$@"'
    code, said = start(job, script)
    assert code == 78, said
    assert re.search(
        r"^problem: rank 1 \(tn2\): .*/0 is not the directory that rank 0 \(tn1\) sees", said, re.MULTILINE
    )


def test_training_by_itself_refuses_an_address_that_other_hosts_cannot_use(
    allocate: Callable[..., Any], real_project: Path
) -> None:
    """Debian's 127.0.1.1 for the own host name comes to the same."""
    job = allocate(real_project)
    training = ["python", "-m", "digits.train", "--run.device", "cpu", "--train.steps", "7"]
    job.start('[ "$SLURM_PROCID" = 0 ] || export GLOO_SOCKET_IFNAME=lo; exec "$@"', training)
    code, said = job.step.wait(timeout=120), job.output()
    assert code == 78, said
    assert "rank 1 (tn2): gloo offers the other hosts 127.0.0.1" in said
