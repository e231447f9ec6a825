"""What goes wrong in a run must end it on every rank; outcome, report and picture must name who began it.

These are the quickest of many: `make faults` puts in every fault that is known to happen.
"""

from __future__ import annotations

import re

import pytest
from conftest import CLOCKS, PATIENCE, QUICK, Launch
from test_picture import marked, texts

from digits.ddp.report import timeline

WAITED = "in (DDP's (all_reduce|broadcast)|all_gather)"  # of gradients; of buffers; a model's own, in its forward


@pytest.mark.parametrize(
    ("fault", "ranks", "ended", "phase", "says"),
    [
        ("raise@rank=1,step=7,phase=backward", 2, ("rank_exception", 1, 1), "backward", ["Rank 1 "]),
        (
            *("sleep@rank=1,step=7,phase=forward", 2, ("missing_rank", 1, 70), "forward"),
            ["Rank 1 was in forward for", f"{PATIENCE * CLOCKS['stall']:g} s stall clock rang", WAITED],
        ),
        ("kill@rank=1,step=5", 3, ("rank_killed", 1, 70), None, ["Rank 1 ", " in forward at ", WAITED]),
        pytest.param(
            *("gil@rank=0,step=5", 2, ("missing_rank", 0, 70), None),
            ["Rank 0 was in forward for", f"{PATIENCE * CLOCKS['silent']:g} s silence clock rang"],
            marks=pytest.mark.slow,
        ),
        (
            *("sleep@rank=0,step=5,phase=guard:sample", 2, ("rank0_work", 0, 70), "guard:sample"),
            ["Rank 0 was in sample for", "waited for it", "guard clock"],
        ),
    ],
    ids=["exception", "hang", "killed", "gil", "rank-0 work"],
)
def test_a_fault_ends_the_run_and_is_named_and_drawn(
    launch: Launch, fault: str, ranks: int, ended: tuple[str, int, int], phase: str | None, says: list[str]
) -> None:
    """Also where that rank could not say itself what it did."""
    kind, culprit, code = ended
    clocks = ["--clocks.collective_s", f"{PATIENCE * 7:g}", "--clocks.guard_s", f"{PATIENCE * 8:g}"]
    run = launch(*QUICK, *clocks, "--sample.every_steps", "5", ranks=ranks, faults=fault)
    assert run.code != 0
    assert (run.outcome["kind"], run.outcome["first_ranks"]) == (kind, [culprit]), run.output
    assert run.outcome["exit_code"] == code
    if phase:
        assert (run.outcome["phase"], run.outcome["step"]) == (phase, int(fault.split("step=")[1].split(",")[0]))
        assert "faults.py" in run.outcome["stacks"][str(culprit)], "the stack shows where"

    report, svg = (run.run_dir / "report.md").read_text(), (run.run_dir / "timeline.svg").read_text()
    said = report.partition("![")[2].partition("]")[0]
    assert f"![{said}](timeline.svg)\n\n{said}." in report
    assert not [part for part in says if not re.search(part, said)], said
    assert texts(svg, "title") == [said]
    assert [label.split(" (")[0] for label in marked(svg)] == [f"▶ rank {culprit}"], run.output
    rows = timeline.load(run.run_dir)
    assert rows is not None
    assert all(row.spans for row in rows.rows), "a rank has left no word of what it did"
    waiting = {row.rank for row in rows.rows if row.last and row.last.waits}
    assert code == 1 or waiting == set(range(ranks)) - {culprit}
