"""The generated project itself, trained on the two-node cluster over gloo: to the end, and through what ends jobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

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
# In the order that is checked, short, and patient with a neighbour that imports torch on the same two cores.
CLOCKS = {"init": 60, "loader": 20, "stall": 30, "collective": 40, "guard": 60, "silent": 6, "beat": 0.5}
ARGUMENTS = ["--run.device", "cpu", "--train.batch_size", "16", "--log.every_steps", "10"]
ARGUMENTS += [word for name, seconds in CLOCKS.items() for word in (f"--clocks.{name}_s", str(seconds))]
# Each step of the first attempt takes at least 0.2 s: what comes after the first metrics comes in mid-training.
SLOW = ";".join(f"sleep@step={step},seconds=0.2" for step in range(STEPS))
PREEMPTING = ["--nodes=2", "--gpus-per-node=2", "--wrap=true"]  # takes both nodes, does nothing

Submit = Callable[..., Any]


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render(ANSWERS)


@pytest.fixture
def train(submit: Submit, project: Path) -> Callable[..., Any]:
    """`train(["--section.key", "value"], DDP_FAULTS="...")` submits real training: two ranks, one a node."""
    return lambda args=(), steps=STEPS, **env: submit(project, [*ARGUMENTS, "--train.steps", str(steps), *args], **env)


def events(run_dir: Path) -> list[dict[str, Any]]:
    """The starts and ends in attempts.jsonl."""
    return [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]


def ends(run_dir: Path) -> list[tuple[int, str, str]]:
    """How each attempt ended: number, outcome, kind."""
    return [(end["attempt"], end["outcome"], end["kind"]) for end in events(run_dir) if end["event"] == "end"]


def metric(run_dir: Path, name: str, which: int = -1) -> tuple[int, float]:
    """Step and value of one `name` in metrics.jsonl, by default the last."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    step, value = [(row["step"], row[name]) for row in rows if name in row][which]
    return int(step), float(value)


def newest(run_dir: Path) -> dict[str, Any]:
    """What the newest checkpoint holds."""
    path = max((run_dir / "checkpoints").glob("step_*"))
    return dict(torch.load(path / "state.pt", map_location="cpu", weights_only=True))


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two nested states are not equal, bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
        return [] if same_kind and one.numpy().tobytes() == other.numpy().tobytes() else [where]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, pair in pairs for found in differences(*pair, f"{where}.{index}")]
    return [] if type(one) is type(other) and one == other else [where]


def in_mid_training(job: Any) -> None:
    """Wait until the job trains: metrics are written when all ranks have made ten steps."""
    metrics = job.run_dir / "metrics.jsonl"
    job.until(lambda: metrics.exists() and metrics.read_text(), f"{metrics}")


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


def test_trains_to_the_end_over_two_nodes(train: Callable[..., Any]) -> None:
    result = train().wait()
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


def test_a_preempted_run_ends_with_the_same_bits(train: Callable[..., Any], submit: Submit, project: Path) -> None:
    uninterrupted = train().wait()
    assert uninterrupted.state == "COMPLETED", everything(uninterrupted)

    job = train(DDP_FAULTS=SLOW)
    in_mid_training(job)
    other = submit(project, partition="high", options=PREEMPTING, script=())
    result = job.wait()
    assert (result.state, result.exit_code, result.restarts) == ("COMPLETED", 0, 1), everything(result)
    assert other.wait().state == "COMPLETED"
    assert ends(result.run_dir) == [(0, "stopped", "preempted"), (1, "done", "benign")], everything(result)
    stopped = next(event["step"] for event in events(result.run_dir) if event["event"] == "end")
    assert 0 < stopped < STEPS, everything(result)
    assert f"resumed from {result.run_dir}/checkpoints/step_{stopped:08d}" in result.output, everything(result)

    resumed, expected = newest(result.run_dir), newest(uninterrupted.run_dir)
    assert resumed["counters"]["step"] == expected["counters"]["step"] == STEPS
    assert {"model", "optimizer"} <= resumed["objects"].keys()
    assert differences(resumed["objects"], expected["objects"]) == []
    assert differences(resumed["rng"], expected["rng"]) == []
    assert metric(result.run_dir, "val_loss") == metric(uninterrupted.run_dir, "val_loss")


def test_a_killed_rank_is_named_and_the_run_completed(train: Callable[..., Any]) -> None:
    job = train(["--checkpoint.every_steps", "3"], steps=40, DDP_FAULTS="kill@rank=1,step=5,phase=forward")
    file = job.run_dir / "outcome.json"  # the next attempt takes it away, seconds later
    outcome = json.loads(job.until(lambda: file.exists() and file.read_text(), "the outcome of the first attempt"))
    named = [outcome[key] for key in ("attempt", "outcome", "exit_code", "kind", "first_ranks")]
    assert named == [0, "stalled", 70, "rank_killed", [1]], f"{outcome}\n{job.output()}"
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
    job.until(lambda: not processes_of(job), "the end of its processes")
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
    command = " ".join(["python -m digits.train", *ARGUMENTS, "--train.steps 10"])
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
