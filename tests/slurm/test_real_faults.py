"""What goes wrong on two nodes, in real training under srun and under torchrun: who is named, and that all of it ends.

The cluster has no cgroups, so no step is killed for its memory: SIGKILL of a rank, which the kernel sends, stands in.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_helpers import (
    STEPS,
    arguments,
    ends,
    everything,
    in_mid_training,
    newest,
    other_end,
    outcome_of,
    ranks_of,
    seconds_to_last_exit,
    slow,
)

flaky = pytest.mark.flaky(reruns=1, reason="Slurm's own timers of seconds, on a machine that may have other work")
pytestmark = [pytest.mark.slurm, flaky, pytest.mark.timeout(300)]

Train = Callable[..., Any]
Timed = Callable[[str, str, float], None]
SILENT_S = 6
OFTEN = ["--checkpoint.every_steps", "5"]


def named(outcome: dict[str, Any]) -> tuple[str, int, str, list[int] | None]:
    """What an attempt has said about its end."""
    return outcome["outcome"], outcome["exit_code"], outcome["kind"], outcome["first_ranks"]


def rows(job: Any) -> int:
    """How many rows of metrics there are; one comes with every ten steps."""
    return len((job.run_dir / "metrics.jsonl").read_text().splitlines())


def test_a_killed_rank_is_named_and_the_run_completed(
    train: Train, uninterrupted: Any, launcher: str, timed: Timed
) -> None:
    job = train(OFTEN, DDP_FAULTS=slow(), LAUNCHER=launcher)
    in_mid_training(job)
    began = time.monotonic()
    os.kill(ranks_of(job.id)[1].pid, signal.SIGKILL)
    timed("SIGKILL of rank 1", launcher, seconds_to_last_exit(job, began))
    outcome = outcome_of(job)
    assert named(outcome) == ("stalled", 70, "rank_killed", [1]), job.output()
    assert "rank 1 (tn2)" in outcome["reason"]
    assert outcome["step"] > 0, outcome
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 1), everything(result)
    assert ends(result.run_dir) == [(0, "stalled", "rank_killed"), (1, "done", "benign")], everything(result)
    assert "requeueing, 1 of 2" in result.output, everything(result)
    assert other_end(result, uninterrupted) == []


@pytest.mark.long  # test_train_sbatch.py has the same with a stand-in for the training
def test_restarts_are_bounded(train: Train) -> None:
    faults = "kill@rank=1,step=8,attempt=0;kill@rank=1,step=12,attempt=1;kill@rank=1,step=16,attempt=2"
    result = train(OFTEN, DDP_FAULTS=faults, MAX_RESTARTS="1", LAUNCHER="torchrun").wait()
    assert (result.state, result.exit_code, result.restarts) == ("FAILED", 70, 1), everything(result)
    assert ends(result.run_dir) == [(0, "stalled", "rank_killed"), (1, "stalled", "rank_killed")], everything(result)
    assert "no restarts left of 1" in result.output, everything(result)


# ------------------------------------------------------------------------------------------------------------- stopping
@pytest.mark.parametrize(
    ("by", "number"), [("srun", signal.SIGTERM), pytest.param("torchrun", signal.SIGUSR2, marks=pytest.mark.long)]
)
def test_a_signal_to_one_rank_twice_is_one_stop(
    train: Train, uninterrupted: Any, by: str, number: signal.Signals, timed: Timed
) -> None:
    job = train(DDP_FAULTS=slow(), LAUNCHER=by)
    in_mid_training(job)
    pid, began = ranks_of(job.id)[1].pid, time.monotonic()
    for _ in range(2):
        os.kill(pid, number)
    timed(f"{number.name} to rank 1, twice", by, seconds_to_last_exit(job, began))
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 1), everything(result)
    assert ends(result.run_dir) == [(0, "stopped", "preempted"), (1, "done", "benign")], everything(result)
    assert f"signal {number.name} on rank 1 (tn2)" in result.output, everything(result)
    assert other_end(result, uninterrupted) == []


@pytest.mark.long
def test_a_stop_file_stops_and_is_the_end(train: Train, timed: Timed) -> None:
    job = train(DDP_FAULTS=slow())
    in_mid_training(job)
    began = time.monotonic()
    (job.run_dir / "stop").touch()
    timed("stop file", "srun", seconds_to_last_exit(job, began))
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("FAILED", 75, 0), everything(result)
    assert ends(result.run_dir) == [(0, "stopped", "benign")], everything(result)
    assert 0 < newest(result.run_dir)["counters"]["step"] < STEPS


def test_the_end_of_the_allocation_by_the_clock_alone(train: Train, uninterrupted: Any) -> None:
    job = train(["--preempt.before_end_s", "560"], options=["--time=10"], DDP_FAULTS=slow(1))
    outcome = outcome_of(job)  # of its ten minutes it may train for 40 s
    assert named(outcome)[:3] == ("stopped", 75, "time_limit"), job.output()
    result = job.wait()
    assert (result.state, result.exit_code) == ("COMPLETED", 0), everything(result)
    assert other_end(result, uninterrupted) == []


@pytest.mark.slow
@pytest.mark.long  # test_train_sbatch.py has the same with a stand-in for the training
def test_the_time_limit_by_the_signal_of_slurm(train: Train, uninterrupted: Any) -> None:
    """Under torchrun; with srun as the launcher it is shown by the stand-in, in test_train_sbatch.py."""
    options = ["--time=2", "--signal=B:USR2@30"]  # 30 to 90 s after the start
    job = train(["--preempt.before_end_s", "0"], options=options, DDP_FAULTS=slow(1), LAUNCHER="torchrun")
    result = job.wait(200)
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 1), everything(result)
    assert "got SIGUSR2: asking the ranks to stop" in result.output, everything(result)
    assert ends(result.run_dir) == [(0, "stopped", "preempted"), (1, "done", "benign")], everything(result)
    assert other_end(result, uninterrupted) == []


def test_a_failed_node_is_replaced(
    train: Train, uninterrupted: Any, launcher: str, slurm: dict[str, str], timed: Timed
) -> None:
    def node(state: str, *more: str) -> int:
        command = ["scontrol", "update", "nodename=tn2", f"state={state}", *more]
        return subprocess.run(command, env=slurm, check=False, timeout=30).returncode

    job = train(OFTEN, DDP_FAULTS=slow(), LAUNCHER=launcher)
    in_mid_training(job)
    job.until(lambda: list((job.run_dir / "checkpoints").glob("step_*")), "a checkpoint")
    began = time.monotonic()
    try:
        assert node("down", "reason=test") == 0
        timed("node failure", launcher, seconds_to_last_exit(job, began))
    finally:
        node("resume")  # refused if the node has come back by itself (ReturnToService=2)
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 1), everything(result)
    assert ends(result.run_dir)[-1] == (1, "done", "benign"), everything(result)
    assert "resumed from" in result.output, everything(result)
    assert other_end(result, uninterrupted) == []


# ---------------------------------------------------------------------------------------------------------- the network
def test_a_short_cut_and_a_slow_network_are_ridden_out(
    train: Train, uninterrupted: Any, launcher: str, link: Callable[..., None]
) -> None:
    job = train(DDP_FAULTS=slow(), LAUNCHER=launcher)
    in_mid_training(job)
    link("cut", "tn2")
    time.sleep(2)  # the fault itself
    link("heal", "tn2")
    before = rows(job)
    job.until(lambda: rows(job) > before, "ten steps more")
    link("slow", "tn2", "200")
    before = rows(job)
    job.until(lambda: rows(job) > before, "ten steps more", 100)
    link("heal", "tn2")
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 0), everything(result)
    assert ends(result.run_dir) == [(0, "done", "benign")], everything(result)
    assert other_end(result, uninterrupted) == []


def test_a_node_cut_off_for_good_is_named_on_both_sides(
    train: Train, launcher: str, link: Callable[..., None], timed: Timed
) -> None:
    job = train(DDP_FAULTS=slow(), LAUNCHER=launcher, MAX_RESTARTS="0")
    in_mid_training(job)
    assert [rank.node for rank in ranks_of(job.id)] == ["tn1", "tn2"]
    began = time.monotonic()
    link("cut", "tn2")
    timed("link of node 2 cut", launcher, seconds_to_last_exit(job, began + SILENT_S))
    outcome = json.loads((job.run_dir / "outcome.json").read_text())
    logs = "".join(file.read_text() for file in sorted(job.run_dir.glob("logs/*.log")))
    assert (outcome["outcome"], outcome["exit_code"], outcome["first_ranks"]) == ("stalled", 70, [1]), logs
    assert "rank 1 (tn2)" in outcome["reason"], logs
    assert outcome["step"] > 0, outcome
    link("heal", "tn2")
    job.cancel()
    job.wait()


@pytest.mark.parametrize("by", ["srun", "torchrun"])
def test_the_host_of_rank_0_dies(allocate: Callable[..., Any], real_project: Path, by: str, timed: Timed) -> None:
    """With its store. Started from outside the nodes, since the batch script is on that host as well."""
    job = allocate(real_project)
    start = 'exec bash launch/task.sh "$@"'
    if by == "torchrun":
        start = f'exec bash launch/node.sh 1 60 "{job.run_dir}" "$@"'
    job.start(start, ["python", "-m", "digits.train", *arguments()], DDP_FAULTS=slow())
    in_mid_training(job)
    first = ranks_of(job.id)[0]
    assert (first.rank, first.node) == (0, "tn1")
    began = time.monotonic()
    for pid in [*reversed(first.launchers), first.pid]:
        os.kill(pid, signal.SIGKILL)
    timed("SIGKILL of everything on node 1", by, seconds_to_last_exit(job, began))
    log = (job.run_dir / "logs" / "rank1.log").read_text()
    outcome = json.loads((job.run_dir / "outcome.json").read_text())
    assert outcome["kind"] in ("store_lost", "rank_killed"), log
    # torchrun serves the store: where that has gone, rank 0 need not have begun it.
    named = [0] if by == "srun" else None
    assert (outcome["outcome"], outcome["exit_code"], outcome["first_ranks"]) == ("stalled", 70, named), log
    assert "tn1" in outcome["reason"], log
    assert outcome["reason"] in log


# ------------------------------------------------------------------------------------------------------------ the start
RENDEZVOUS = {
    # what one of two ranks is started with -> outcome, exit code, kind, and what is said
    "port in use": ("", "config", 78, "port_in_use", "port tn1:{port} is in use already"),
    "wrong MASTER_ADDR": (
        "[ $RANK = 0 ] || MASTER_ADDR=10.78.0.99",
        "stalled",
        70,
        "rendezvous_failed",
        "rank 1 on tn2 cannot reach the store at 10.78.0.99:{port}|ranks [1] did not start within 12 s",
    ),
    "a node never starts": (
        "[ $RANK = 0 ] || exec sleep 100",
        "stalled",
        70,
        "rendezvous_failed",
        "ranks [1] did not start within 12 s (1 of 2 came)",
    ),
    "world size differs": (
        "[ $RANK = 0 ] || WORLD_SIZE=3",
        "config",
        78,
        "launcher_misconfig",
        "rank 1 on tn2 was started for 3 ranks, rank 0 on tn1 for 2",
    ),
    "duplicate rank": ("RANK=0", "config", 78, "launcher_misconfig", "two processes claim rank 0: one on tn"),
}


OF_SLURM = ("port in use", "a node never starts")  # the others are in the matrix, too


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name in OF_SLURM else pytest.mark.long) for name in RENDEZVOUS]
)
def test_a_start_that_cannot_succeed(
    allocate: Callable[..., Any], real_project: Path, listen: Callable[..., None], fault: str, timed: Timed
) -> None:
    change, ending, code, kind, said = RENDEZVOUS[fault]
    job = allocate(real_project)
    port = 10000 + int(job.id) % 20000
    if fault == "port in use":
        listen("tn1", port)
    start = f"export RANK=$SLURM_PROCID WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1; {change}"
    job.start(start + '\nexec bash launch/task.sh python -m digits.train "$@"', arguments(init=12))
    expected = 1 if fault == "a node never starts" else 2
    job.until(lambda: len(ranks_of(job.id)) == expected, "the start of its ranks")
    began = time.monotonic()
    timed(f"{fault} (+ imports)", "by hand", seconds_to_last_exit(job, began))
    outcome = json.loads((job.run_dir / "outcome.json").read_text())
    assert named(outcome)[:3] == (ending, code, kind), job.output()
    for text in said.format(port=port).split("|"):
        assert text in job.output()
