"""The generated project itself, trained on the two-node cluster over gloo: to the end, and through what ends jobs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_helpers import (
    STEPS,
    arguments,
    ends,
    events,
    everything,
    in_mid_training,
    metric,
    newest,
    other_end,
    processes_of,
    slow,
)

flaky = pytest.mark.flaky(reruns=1, reason="Slurm's own timers of seconds, on a machine that may have other work")
pytestmark = [pytest.mark.slurm, flaky, pytest.mark.timeout(300)]

PREEMPTING = ["--nodes=2", "--gpus-per-node=2", "--wrap=true"]  # takes both nodes, does nothing

Submit = Callable[..., Any]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_trains_to_the_end_over_two_nodes(train: Callable[..., Any], uninterrupted: Any, launcher: str) -> None:
    result = uninterrupted if launcher == "srun" else train(LAUNCHER=launcher, PREFLIGHT="1").wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 0), everything(result)
    assert json.loads((result.run_dir / "outcome.json").read_text())["outcome"] == "done", everything(result)
    report = (result.run_dir / "report.md").read_text()
    assert "✔ done" in report
    assert f"| 0 | tn1 | {STEPS} |" in report
    assert f"| 1 | tn2 | {STEPS} |" in report
    assert (result.run_dir / "samples" / f"step_{STEPS:08d}.png").exists(), everything(result)
    first, last, validated = (metric(result.run_dir, *which) for which in (("loss", 0), ("loss", -1), ("val_loss", -1)))
    assert (first[0], last[0], validated[0]) == (10, STEPS, STEPS)
    assert max(last[1], validated[1]) < first[1], everything(result)
    assert other_end(result, uninterrupted) == []
    assert ("preflight: everything is in order" in result.output) == (launcher == "torchrun"), everything(result)


def test_what_preflight_finds_wrong_ends_the_job_before_training(train: Callable[..., Any], launcher: str) -> None:
    result = train(LAUNCHER=launcher, PREFLIGHT="1", GLOO_SOCKET_IFNAME="none9").wait()
    assert (result.state, result.exit_code, result.restarts) == ("FAILED", 78, 0), everything(result)
    assert "none9" in result.output, everything(result)
    assert not (result.run_dir / "metrics.jsonl").exists(), everything(result)


def test_a_preempted_run_ends_with_the_same_bits(
    train: Callable[..., Any], submit: Submit, real_project: Path, uninterrupted: Any, launcher: str
) -> None:
    job = train(DDP_FAULTS=slow(), LAUNCHER=launcher)
    in_mid_training(job)
    other = submit(real_project, partition="high", options=PREEMPTING, script=())
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 1), everything(result)
    assert other.wait().state == "COMPLETED"
    assert ends(result.run_dir) == [(0, "stopped", "preempted"), (1, "done", "benign")], everything(result)
    stopped = next(event["step"] for event in events(result.run_dir) if event["event"] == "end")
    assert 0 < stopped < STEPS, everything(result)
    assert f"resumed from {result.run_dir}/checkpoints/step_{stopped:08d}" in result.output, everything(result)

    assert other_end(result, uninterrupted) == []


def test_a_cancelled_run_saves_and_stays_cancelled(train: Callable[..., Any], launcher: str) -> None:
    job = train(DDP_FAULTS=slow(), LAUNCHER=launcher)
    in_mid_training(job)
    assert any("digits.train" in command for command in processes_of(job))
    job.cancel()
    result = job.wait()
    assert (result.state, result.restarts) == ("CANCELLED", 0), everything(result)
    job.until(lambda: not processes_of(job), "the end of its processes")
    assert "so no requeue" in job.output(), everything(result)
    assert ends(result.run_dir) == [(0, "stopped", "preempted")], everything(result)
    assert 0 < newest(result.run_dir)["counters"]["step"] < STEPS
    assert job.fields()["JobState"] == "CANCELLED"


def test_a_wrong_configuration_is_not_requeued(train: Callable[..., Any]) -> None:
    result = train(["--clocks.stall_s", "100000"]).wait()
    assert (result.state, result.exit_code, result.restarts) == ("FAILED", 78, 0), everything(result)
    assert "clocks.stall_s (100000) must be below clocks.collective_s (40)" in result.output, everything(result)
    assert ends(result.run_dir) == [(0, "config", "bad_settings")], everything(result)


def test_without_srun_a_process_trains_alone(submit: Submit, real_project: Path) -> None:
    """In a batch script SLURM_PROCID=0 and SLURM_NTASKS=2 are set as well, but nobody has started rank 1."""
    command = " ".join(["python -m digits.train", *arguments(steps=10)])
    show = "echo batch $SLURM_NTASKS ${SLURM_STEP_NUM_TASKS-unset}; srun sh -c 'echo step $SLURM_STEP_NUM_TASKS'"
    job = submit(
        real_project,
        options=["--nodes=2", "--ntasks-per-node=1", f"--wrap={show}; exec {command}"],
        script=(),
        PYTHONPATH=str(real_project / "src"),
        DDP_RUN__ID="alone",
        OMP_NUM_THREADS="1",
    )
    result = job.wait()
    assert (result.state, result.exit_code) == ("COMPLETED", 0), everything(result)
    assert "batch 2 unset" in result.output, everything(result)
    assert result.output.count("step 2\n") == 2, everything(result)
    assert [event.get("world_size") for event in events(real_project / "runs" / "alone")] == [1, None], everything(
        result
    )


WORKERS = ["--loader.workers", "1", "--loader.batch_mb", "1", "--clocks.loader_s", "28"]
SENT = [  # options of scancel; --full reaches the script and srun, too
    pytest.param("--full --signal=USR2"),
    pytest.param("--signal=USR2", marks=pytest.mark.long),
    pytest.param("--full --signal=USR1", marks=pytest.mark.long),
]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("options", SENT)
def test_a_signal_to_every_process_is_a_stop(
    train: Callable[..., Any], slurm: dict[str, str], launcher: str, options: str
) -> None:
    """The fork server of the loader's workers has no handler, and a worker none in its first moments."""
    job = train(WORKERS, PREFLIGHT="0", DDP_FAULTS=slow(), LAUNCHER=launcher)
    in_mid_training(job, 120)  # workers import torch, too
    subprocess.run(["scancel", *options.split(), job.id], env=slurm, check=True, timeout=30)
    result = job.wait(300)
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 1), everything(result)
    assert ends(result.run_dir) == [(0, "stopped", "preempted"), (1, "done", "benign")], everything(result)


@pytest.mark.timeout(500)
def test_a_preempted_run_with_workers_is_requeued(
    train: Callable[..., Any], submit: Submit, real_project: Path, launcher: str
) -> None:
    job = train(WORKERS, PREFLIGHT="0", DDP_FAULTS=slow(), LAUNCHER=launcher)
    in_mid_training(job, 120)  # workers import torch, too
    submit(real_project, partition="high", options=PREEMPTING, script=())
    result = job.wait(300)
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 1), everything(result)
    assert ends(result.run_dir) == [(0, "stopped", "preempted"), (1, "done", "benign")], everything(result)
