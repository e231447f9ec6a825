"""What goes wrong in a run must end it on every rank, and the report must name who began it.

These are the quickest of many: `make faults` puts in every fault that is known to happen.
"""

from __future__ import annotations

import pytest
from conftest import QUICK, Launch


@pytest.mark.parametrize(
    ("fault", "kind", "rank", "phase", "code"),
    [
        ("raise@rank=1,step=7,phase=backward", "rank_exception", 1, "backward", 1),
        ("sleep@rank=1,step=7,phase=forward", "missing_rank", 1, "forward", 70),
        ("kill@rank=1,step=7,phase=optim", "rank_killed", 1, None, 70),
    ],
    ids=["exception", "hang", "killed"],
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
