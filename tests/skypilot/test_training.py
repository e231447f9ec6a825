"""Real training below SkyPilot's stand-in: preempted, recovered on new nodes, cancelled, with the losses of one go."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import until
from standin_sky import Sky

pytestmark = [pytest.mark.slow]  # real training, four times two ranks
STEPS = 60
TASK = "sky-managed-2026-11-30-10-15-00-123456_demo_7-0"
ANSWERS = {
    "preset": "sky-aws", "model": "custom", "tracker": "none", "package": "digits", "runs_store": "s3://a-bucket/runs",
    "nodes": 2, "gpus_per_node": 1, "max_restarts": 3, "grace_s": 60,
}  # fmt: skip
# In the order that is checked, short, and patient with a neighbour that imports torch on the same cores.
CLOCKS = {"init": 60, "loader": 20, "stall": 30, "collective": 40, "guard": 60, "silent": 6, "beat": 0.5}


def training(steps: int = STEPS) -> str:
    words = ["--run.device", "cpu", "--train.batch_size", "16", "--log.every_steps", "1", "--train.steps", str(steps)]
    words += ["--checkpoint.every_steps", "10"]
    return " ".join(words + [word for name, value in CLOCKS.items() for word in (f"--clocks.{name}_s", str(value))])


def slow(attempt: int) -> str:
    """Faults that make an attempt take its time, so that what is done to it comes in the middle."""
    return ";".join(f"sleep@step={step},seconds=0.3,attempt={attempt}" for step in range(STEPS))


def losses(run_dir: Path) -> dict[int, float]:
    """Of every step; what an attempt repeats counts as its last."""
    file = run_dir / "metrics.jsonl"
    rows = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def ends(run_dir: Path) -> list[tuple[int, str, str]]:
    events: list[dict[str, Any]] = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    return [(event["attempt"], event["outcome"], event["kind"]) for event in events if event["event"] == "end"]


@pytest.mark.timeout(900)
def test_a_preempted_run_goes_on_elsewhere_with_equal_losses(
    sky: Sky, ports: dict[str, str], render: Callable[..., Path]
) -> None:
    project = render(ANSWERS)
    common = {**ports, "TRAINING": training(), "LAUNCH_SYNC_S": "1"}
    whole = sky.start(project, "sky-whole", PREFLIGHT="1", **common)
    assert whole.codes() == [0, 0], whole.output()
    expected = losses(sky.bucket / "sky-whole")
    assert len(expected) >= STEPS - 1
    assert "preflight: everything is in order" in whole.output()

    kept = sky.bucket / TASK
    first = sky.start(project, TASK, PREFLIGHT="0", DDP_FAULTS=slow(0), **common)
    until(lambda: list(kept.glob("checkpoints/*/manifest.json")), "a checkpoint in the bucket", seconds=240)
    first.preempt()
    second = sky.start(project, TASK, PREFLIGHT="0", DDP_FAULTS=slow(1), **common)
    until(lambda: "resumed from" in second.output(), "the run to go on", seconds=240)
    until(lambda: len(losses(kept)) > 32, "step 32 of attempt 1", seconds=240)
    done = second.hook()  # as sky jobs cancel: a checkpoint before the nodes are given back
    assert done.returncode == 0, done.stdout + done.stderr
    assert second.codes()[0] == 75, second.output()
    second.preempt()
    assert ends(kept) == [(0, "stalled", "rank_killed"), (1, "stopped", "preempted")]  # the first left no word

    third = sky.start(project, TASK, PREFLIGHT="0", **common)
    assert third.codes() == [0, 0], third.output()
    assert ends(kept)[-1][:2] == (2, "done")
    assert losses(kept) == expected
    assert json.loads((kept / "launch.json").read_text())["restarts"] == 1
    logs = sorted(path.name for path in (kept / "logs").iterdir())
    assert logs == ["rank0.log", "rank1.log"]  # of both nodes


@pytest.mark.timeout(600)
def test_an_exception_ends_all_nodes_and_a_lost_node_is_named(
    sky: Sky, ports: dict[str, str], render: Callable[..., Path]
) -> None:
    project = render(ANSWERS)
    common = {**ports, "TRAINING": training(), "LAUNCH_SYNC_S": "1", "PREFLIGHT": "0"}
    failed = sky.start(project, "sky-failed", DDP_FAULTS="raise@step=3,rank=1", **common)
    assert set(failed.codes()) <= {1, 137}, failed.output()  # never 70 or 75: SkyPilot would start it again
    outcome = json.loads((sky.bucket / "sky-failed/outcome.json").read_text())
    assert (outcome["kind"], outcome["first_ranks"]) == ("rank_exception", [1])
    assert (sky.bucket / "sky-failed/logs/rank1.log").exists()

    lost = sky.start(project, "sky-lost", DDP_FAULTS=slow(0), **common)
    first, second = lost.nodes
    until(lambda: len(losses(sky.bucket / "sky-lost")) > 3, "some steps", seconds=240)
    lost.kill([second])
    assert first.process is not None
    assert first.process.wait(timeout=120) == 70, lost.output()
    assert "rank 1" in first.log
    assert json.loads((sky.bucket / "sky-lost/outcome.json").read_text())["first_ranks"] == [1]
