"""The generated project itself, trained on the two-node cluster over gloo: to the end, and through what ends jobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_helpers import until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

STEPS = 120
ANSWERS = {
    "package": "digits",
    "preset": "generic-slurm",
    "nodes": 2,
    "gpus_per_node": 1,
    "cpus_per_task": 1,
    "walltime": "00:10:00",
    "max_restarts": 2,
    "tracker": "none",
}
CPU = "--run.device cpu --log.tracker none --log.every_steps 10".split()
SMALL = f"--train.steps {STEPS} --train.batch_size 16".split()
# Short enough for a test, in the order that is checked, and patient with an importing neighbour on two shared cores.
CLOCKS = (
    "--clocks.init_s 60 --clocks.loader_s 20 --clocks.stall_s 30 --clocks.collective_s 40 --clocks.guard_s 60 "
    "--clocks.silent_s 6 --clocks.beat_s 0.5"
).split()
# The first attempt is slow from step 20 on: whatever comes from outside comes in mid-training, on any machine.
SLOW = ";".join(f"sleep@step={step},seconds=0.3" for step in range(20, STEPS))

Submit = Callable[..., Any]


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render(ANSWERS)


@pytest.fixture
def train(submit: Submit, project: Path) -> Callable[..., Any]:
    """`train(["--section.key", "value"], DDP_FAULTS="...")` submits the real training of two ranks, one a node."""
    return lambda args=(), **env: submit(project, [*CPU, *SMALL, *CLOCKS, *args], **env)


@pytest.fixture(scope="module")
def finished(slurm: dict[str, str], project: Path) -> dict[str, Path]:
    """Run directories that later tests compare with, by name."""
    return {}


def events(run_dir: Path) -> list[dict[str, Any]]:
    """The starts and ends in attempts.jsonl."""
    return [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]


def ends(run_dir: Path) -> list[tuple[int, str, str]]:
    """How each attempt ended: number, outcome, kind."""
    return [(end["attempt"], end["outcome"], end["kind"]) for end in events(run_dir) if end["event"] == "end"]


def last_metric(run_dir: Path, name: str) -> tuple[int, float]:
    """Step and value of the last `name` in metrics.jsonl."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row[name]) for row in rows if name in row][-1]


def newest(run_dir: Path) -> dict[str, Any]:
    """What the newest checkpoint holds."""
    path = max((run_dir / "checkpoints").glob("step_*"))
    return dict(torch.load(path / "state.pt", map_location="cpu", weights_only=True))


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two nested states are not equal, bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [where]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, pair in pairs for found in differences(*pair, f"{where}.{index}")]
    return [] if type(one) is type(other) and one == other else [where]


def in_mid_training(job: Any) -> None:
    """Wait until the job trains, on both nodes: a metric is written once all ranks have made ten steps."""
    metrics = job.run_dir / "metrics.jsonl"
    try:
        until(lambda: metrics.exists() and metrics.stat().st_size, f"metrics of {job.run_dir}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.fields()}\n{job.output()}") from error


def processes_of(job: Any) -> list[str]:
    """The command lines of every process that carries the job's id in its environment."""
    mark, found = f"SLURM_JOB_ID={job.id}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended meanwhile
            continue
    return found


def everything(result: Any) -> str:
    """What a failed assertion prints: the output of all attempts, and the logs of the ranks."""
    files = [result.run_dir / "attempts.jsonl", *sorted(result.run_dir.glob("logs/*.log"))]
    logs = [f"\n--- {file}\n{file.read_text()}" for file in files if file.exists()]
    return f"{result.state}, exit code {result.exit_code}, {result.restarts} restarts\n{result.output}{''.join(logs)}"


def test_trains_to_the_end_over_two_nodes(train: Callable[..., Any], finished: dict[str, Path]) -> None:
    result = train().wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 0), everything(result)
    assert json.loads((result.run_dir / "outcome.json").read_text())["outcome"] == "done", everything(result)
    assert f"2 ranks on tn1, tn2, gloo" in result.output, everything(result)
    report = (result.run_dir / "report.md").read_text()
    assert "✔ done" in report
    assert f"| 0 | tn1 | {STEPS} |" in report
    assert f"| 1 | tn2 | {STEPS} |" in report
    assert (result.run_dir / "samples" / f"step_{STEPS:08d}.png").exists(), everything(result)
    step, loss = last_metric(result.run_dir, "val_loss")
    assert step == STEPS
    assert loss < 0.45, everything(result)  # a constant prediction has 1.0; without the label and the image about 0.6
    finished["uninterrupted"] = result.run_dir


def test_a_preempted_run_ends_with_the_same_bits(
    train: Callable[..., Any], submit: Submit, project: Path, finished: dict[str, Path]
) -> None:
    job = train(DDP_FAULTS=SLOW)
    in_mid_training(job)
    other = submit(project, partition="high", options=["--nodes=2", "--gpus-per-node=2", "--wrap=true"], script=())
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 1), everything(result)
    assert other.wait().state == "COMPLETED"
    assert ends(result.run_dir) == [(0, "stopped", "preempted"), (1, "done", "benign")], everything(result)
    stopped = next(event["step"] for event in events(result.run_dir) if event["event"] == "end")
    assert 0 < stopped < STEPS, everything(result)
    assert f"resumed from {result.run_dir}/checkpoints/step_{stopped:08d}" in result.output, everything(result)

    reference = finished.get("uninterrupted") or train().wait().run_dir  # on its own when this test runs alone
    resumed, uninterrupted = newest(result.run_dir), newest(reference)
    assert resumed["counters"]["step"] == uninterrupted["counters"]["step"] == STEPS
    assert differences(resumed["objects"], uninterrupted["objects"]) == []
    assert differences(resumed["rng"], uninterrupted["rng"]) == []
    assert last_metric(result.run_dir, "val_loss") == last_metric(reference, "val_loss")


def test_a_killed_rank_is_named_and_the_run_completed(train: Callable[..., Any]) -> None:
    job = train(["--checkpoint.every_steps", "3"], DDP_FAULTS="kill@rank=1,step=5,phase=forward")
    file = job.run_dir / "outcome.json"
    try:  # it stays until the next attempt begins, seconds later
        outcome = json.loads(until(lambda: file.exists() and file.read_text(), "outcome.json of the first attempt"))
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.fields()}\n{job.output()}") from error
    named = {key: outcome[key] for key in ("attempt", "outcome", "exit_code", "kind", "first_ranks")}
    assert named == {
        "attempt": 0, "outcome": "stalled", "exit_code": 70, "kind": "rank_killed", "first_ranks": [1],
    }, job.output()  # fmt: skip
    assert "rank 1 (tn2)" in outcome["reason"]
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 1), everything(result)
    assert ends(result.run_dir) == [(0, "stalled", "rank_killed"), (1, "done", "benign")], everything(result)
    assert f"resumed from {result.run_dir}/checkpoints/step_00000003" in result.output, everything(result)
    assert "requeueing, 1 of 2" in result.output, everything(result)


def test_a_cancelled_run_saves_and_stays_cancelled(train: Callable[..., Any]) -> None:
    job = train(DDP_FAULTS=SLOW)
    in_mid_training(job)
    assert any("digits.train" in command for command in processes_of(job))
    job.cancel()
    result = job.wait()
    assert (result.state, result.restarts) == ("CANCELLED", 0), everything(result)
    until(lambda: not processes_of(job), f"the end of all processes of job {job.id}")
    assert "so no requeue" in job.output(), everything(result)
    assert ends(result.run_dir) == [(0, "stopped", "preempted")], everything(result)
    assert 0 < newest(result.run_dir)["counters"]["step"] < STEPS
    assert job.fields()["JobState"] == "CANCELLED"


def test_a_wrong_configuration_is_not_requeued(train: Callable[..., Any]) -> None:
    result = train(["--clocks.stall_s", "100000"]).wait()
    assert (result.state, result.exit_code, result.restarts) == ("FAILED", 78, 0), everything(result)
    assert "clocks.stall_s (100000) must be below clocks.collective_s (40)" in result.output, everything(result)
    assert ends(result.run_dir) == [(0, "config", "launcher_misconfig")], everything(result)


def test_without_srun_a_process_trains_alone(submit: Submit, project: Path) -> None:
    """In a batch script SLURM_PROCID=0 and SLURM_NTASKS=2 are set as well, but nobody has started rank 1."""
    command = " ".join(["python -m digits.train", *CPU, *CLOCKS, "--train.steps 10 --sample.ddim_steps 1"])
    show = "echo batch $SLURM_NTASKS ${SLURM_STEP_NUM_TASKS-unset}; srun sh -c 'echo step $SLURM_STEP_NUM_TASKS'"
    job = submit(
        project,
        options=["--nodes=2", "--ntasks-per-node=1", f"--wrap={show}; exec {command}"],
        script=(),
        PYTHONPATH=str(project / "src"),
        DDP_RUN__ID="alone",
        OMP_NUM_THREADS="1",
    )
    result = job.wait()
    assert (result.state, result.exit_code) == ("COMPLETED", 0), everything(result)
    assert "batch 2 unset" in result.output, everything(result)
    assert result.output.count("step 2\n") == 2, everything(result)
    assert [event.get("world_size") for event in events(project / "runs" / "alone")] == [1, None], everything(result)
