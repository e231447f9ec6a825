"""Whole runs, as a user starts them: train, stop and go on, sample for longer than a collective may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QUICK, Launch, Result


def final_state(run_dir: Path) -> dict[str, Any]:
    newest = max((run_dir / "checkpoints").glob("step_*"))
    return dict(torch.load(newest / "state.pt", weights_only=True))


def equal(a: Any, b: Any) -> bool:
    """Equal to the bit, through dictionaries, lists and tensors."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("ranks", [0, 3], ids=["plain python", "torchrun, 3 ranks"])
def test_trains_and_leaves_a_report(launch: Launch, ranks: int) -> None:
    run = launch(*QUICK, ranks=ranks)
    assert run.code == 0, run.output
    assert run.outcome["outcome"] == "done"
    assert [row["step"] for row in run.metrics if "loss" in row] == [5, 10, 15, 20]
    assert run.metrics[-1]["val_loss"] > 0
    assert (run.run_dir / "samples" / "step_00000020.png").read_bytes().startswith(b"\x89PNG")
    report = (run.run_dir / "report.md").read_text()
    assert "done" in report
    assert "val_loss" in report
    assert "train.steps" in run.output, "the effective settings are printed"
    assert "(command line)" in run.output, "and who set each"


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(launch: Launch) -> None:
    steps = ["--train.steps", "120"]  # enough for the stop, about a second later, to come before the end
    whole = launch(*QUICK, *steps, run_id="whole")
    assert whole.code == 0, whole.output

    # The signal reaches one rank only, in the middle of a step; all ranks must stop at the same one.
    stopped = launch(*QUICK, *steps, faults="term@rank=1,step=7,phase=backward")
    assert stopped.outcome["outcome"] == "stopped", stopped.output
    assert "SIGTERM on rank 1" in stopped.outcome["reason"]
    assert 7 < stopped.outcome["step"] < 120
    resumed = launch(*QUICK, *steps, attempt=1)
    assert resumed.code == 0, resumed.output
    assert "resumed from" in resumed.output

    for part in ("objects", "rng"):  # weights and optimiser; the random state of every rank
        assert equal(final_state(whole.run_dir)[part], final_state(resumed.run_dir)[part])
    assert losses(resumed) == losses(whole)


def losses(run: Result) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in run.metrics if "loss" in row}


def test_rank_0_may_work_for_longer_than_a_collective_may_take(launch: Launch) -> None:
    """The barrier of the training group has 2 s; rank 0 works 10 s and says so, and the others go on waiting."""
    run = launch(module="guarded_script")
    assert run.code == 0, run.output
    assert "all ranks went on after" in run.output
    assert "waiting for rank 0" in (run.run_dir / "logs" / "rank1.log").read_text()


def test_a_wrong_setting_is_refused_by_name(launch: Launch) -> None:
    run = launch(*QUICK, "--clocks.stall_s", "100", ranks=0)
    assert run.code == 78, run.output
    assert "clocks.stall_s (100) must be below clocks.collective_s (30)" in run.output
    assert "Traceback" not in run.output
