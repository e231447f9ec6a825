"""What goes wrong in a run must end it on every rank, and the report must name who began it."""

from __future__ import annotations

import json
import re

import pytest
from conftest import QUICK, Launch


@pytest.mark.parametrize(
    ("fault", "kind", "rank", "phase", "code"),
    [
        ("raise@rank=1,step=7,phase=backward", "rank_exception", 1, "backward", 1),
        ("raise@rank=0,step=20,phase=guard:sample", "rank_exception", 0, "guard:sample", 1),
        ("sleep@rank=1,step=7,phase=forward", "missing_rank", 1, "forward", 70),
        ("kill@rank=1,step=7,phase=optim", "rank_killed", 1, None, 70),
        ("stop@rank=0,step=7,phase=data", "rank_killed", 0, None, 70),
    ],
    ids=["exception", "exception in rank-0 work", "hang", "killed", "suspended"],
)
def test_a_fault_ends_the_run_and_is_named(
    launch: Launch, fault: str, kind: str, rank: int, phase: str | None, code: int
) -> None:
    run = launch(*QUICK, faults=fault)
    assert run.code != 0
    assert (run.outcome["kind"], run.outcome["first_ranks"]) == (kind, [rank]), run.output
    assert run.outcome["exit_code"] == code
    if phase:
        assert (run.outcome["phase"], run.outcome["step"]) == (phase, int(fault.split("step=")[1].split(",")[0]))
        assert "faults.py" in run.outcome["stacks"][str(rank)], "the stack shows where"
    assert f"rank {rank}" in (run.run_dir / "report.md").read_text()


def test_a_broken_checkpoint_is_skipped_and_the_one_before_is_used(launch: Launch) -> None:
    run = launch(*QUICK, "--checkpoint.every_steps", "10")
    assert run.code == 0, run.output
    state = run.run_dir / "checkpoints" / "step_00000020" / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1  # one flipped bit
    state.write_bytes(content)
    run = launch(*QUICK, attempt=1)
    assert run.code == 0, run.output
    assert "skipping broken checkpoint" in run.output
    assert "resumed from" in run.output
    assert "step_00000010" in run.output
    kept = {path.name for path in (run.run_dir / "checkpoints").iterdir()}
    assert kept == {"step_00000010", "step_00000020", "broken-step_00000020"}, "the old good one and the new one"


def test_every_rank_writes_heartbeats(launch: Launch) -> None:
    run = launch(*QUICK, "--log.heartbeat_s", "0.5", "--train.steps", "100")
    assert run.code == 0, run.output
    for rank in (0, 1):
        log = (run.run_dir / "logs" / f"rank{rank}.log").read_text()
        assert re.search(rf"heartbeat rank={rank} host=\S+ phase=\S+ epoch=\d+ step=\d+", log), log
        state = json.loads((run.run_dir / "heartbeats" / f"rank{rank}.json").read_text())
        assert state["step"] == 100
