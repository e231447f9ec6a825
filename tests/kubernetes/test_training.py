"""Real training in pods that standin_cluster.py stands in for: drained, lost and done, with the losses of one go.

As a user that is not root and that the image does not know, which takes nothing away from the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import until
from pods_cluster import Cluster

pytestmark = [pytest.mark.pods, pytest.mark.slow]  # real training, four times two ranks
STEPS = 60
ANSWERS = {
    "preset": "generic-kubernetes", "model": "custom", "tracker": "none", "package": "digits",
    "nodes": 2, "gpus_per_node": 1, "cpus_per_task": 1, "max_restarts": 3, "grace_s": 60, "run_as": "54321:54322",
}  # fmt: skip
# In the order that is checked, short, and patient with a neighbour that imports torch on the same cores.
CLOCKS = {"init": 60, "loader": 20, "stall": 30, "collective": 40, "guard": 60, "silent": 6, "beat": 0.5}


def arguments() -> list[str]:
    words = ["--run.device", "cpu", "--train.batch_size", "16", "--log.every_steps", "1", "--train.steps", str(STEPS)]
    words += ["--checkpoint.every_steps", "10"]
    return words + [word for name, value in CLOCKS.items() for word in (f"--clocks.{name}_s", str(value))]


def slow(attempt: int) -> str:
    """Faults that make an attempt take its time, so that what is done to its pods comes in the middle."""
    return ";".join(f"sleep@step={step},seconds=0.3,attempt={attempt}" for step in range(STEPS))


def losses(run_dir: Path) -> dict[int, float]:
    """Of every step; what an attempt repeats counts as its last."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def events(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "attempts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def reached(run_dir: Path, attempt: int, step: int) -> Callable[[], bool]:
    """Whether an attempt trains, and has come to a step."""

    def look() -> bool:
        begun = any(event["event"] == "start" and event["attempt"] == attempt for event in events(run_dir))
        return begun and (run_dir / "metrics.jsonl").exists() and max(losses(run_dir), default=0) >= step

    return look


@pytest.mark.timeout(900)
def test_a_run_is_drained_and_loses_a_node_and_ends_as_in_one_go(cluster: Cluster, render: Callable[..., Path]) -> None:
    project = render(ANSWERS)
    done = cluster.kube(project, "submit", "--name", "whole", "--image", "x:1", *arguments())
    assert done.returncode == 0, done.stdout + done.stderr
    whole = losses(project / "runs/whole")
    assert len(whole) >= STEPS - 1

    run_dir = project / "runs/broken"
    cluster.pods_have(PREFLIGHT="1", DDP_FAULTS=slow(0))
    cluster.begin(project, "broken", *arguments())
    until(reached(run_dir, 0, 12), "step 12 of attempt 0", seconds=240)
    cluster.pods_have(PREFLIGHT="0", DDP_FAULTS=slow(1))
    cluster.do("evict", cluster.attempt("broken", 0)[1]["metadata"]["name"])
    until(reached(run_dir, 1, 32), "step 32 of attempt 1", seconds=240)
    cluster.do("kill", cluster.attempt("broken", 1)[0]["metadata"]["name"])  # the store, and rank 0
    log = cluster.kube(project, "log", "broken")
    assert log.returncode == 0, cluster.output()
    ends = [(event["attempt"], event["outcome"], event["kind"]) for event in events(run_dir) if event["event"] == "end"]
    assert ends[0] == (0, "stopped", "preempted")
    assert ends[-1][:2] == (2, "done")
    assert "signal SIGTERM (60 s before SIGKILL) on rank 1 (broken-node-0-1)" in cluster.output()
    assert "preflight: everything is in order" in cluster.output()
    assert losses(run_dir) == whole


def test_a_small_dev_shm_is_found_before_training(cluster: Cluster, render: Callable[..., Path]) -> None:
    project = render(ANSWERS)
    cluster.pods_have(PREFLIGHT="1")
    (cluster.state / "shm").write_text("64M")  # what a pod has without the manifest's emptyDir
    words = ["--name", "small", "--image", "x:1", *arguments(), "--loader.workers", "2", "--loader.batch_mb", "64"]
    done = cluster.kube(project, "submit", *words)
    assert done.returncode == 78, done.stdout + done.stderr
    assert "of 2 loader workers fit" in done.stdout
    assert not (project / "runs/small/metrics.jsonl").exists()
