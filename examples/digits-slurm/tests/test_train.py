"""Whole runs, as a user starts them: train, stop and go on, sample for longer than a collective may take."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CLOCKS, PATIENCE, QUICK, Launch, Result

from digits.config import Settings
from digits.ddp import load_settings


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


# configs/train.yaml may leave them out: every_steps of `eval` or `sample` is 0.
SETTINGS, _ = load_settings(Settings, QUICK, strict_variables=False)
METRICS, PICTURES = SETTINGS.eval.every_steps > 0, SETTINGS.sample.every_steps > 0
GOES_ON = (
    "A job that is stopped and goes on must end where it would have ended, or results depend on the queue.\n"
    "  -> draw random numbers from the default generators, and keep nothing from step to step that is in no state_dict"
)
SHORT = ["--clocks.loader_s", "0.8", "--clocks.stall_s", "0.9", "--clocks.collective_s", "1", "--clocks.guard_s", "4"]
# Enough for the stop, up to 64 steps later, to come before the end; and with all that a checkpoint can hold here.
STEPS = ["--train.steps", "80", "--train.ema", "0.9"]


@pytest.fixture(scope="module")
def whole(launch: Launch) -> Result:
    """An uninterrupted run with two ranks."""
    run = launch(*QUICK, *STEPS, "--log.heartbeat_s", "0.5", run_id="whole")
    assert run.code == 0, run.output
    return run


def test_trains_and_leaves_a_report(whole: Result) -> None:
    assert whole.outcome["outcome"] == "done"
    assert list(losses(whole)) == list(range(5, 81, 5))
    every_line = {"step", "time", *(name for row in whole.metrics if "loss" in row for name in row)}
    found = {name: value for name, value in whole.metrics[-1].items() if name not in every_line}
    assert bool(found) == METRICS, "the last line has what `evaluate` returned"
    drawn = bool(list((whole.run_dir / "samples").glob("step_00000080.*")))
    assert drawn == PICTURES, "`draw` writes a file, or sample.every_steps is 0 (in configs/train.yaml, if that has it)"
    report = (whole.run_dir / "report.md").read_text()
    assert "done" in report
    assert set(found) <= set(re.findall(r"\w+", report))
    assert "timeline" not in report, "a picture is for runs that fail"
    assert not list(whole.run_dir.glob("timeline*"))
    assert "train.steps" in whole.output, "the effective settings are printed"
    assert "(command line)" in whole.output, "and who set each"


def test_every_rank_writes_heartbeats(whole: Result) -> None:
    for rank in (0, 1):
        log = (whole.run_dir / "logs" / f"rank{rank}.log").read_text()
        assert re.search(rf"heartbeat rank={rank} host=\S+ phase=\S+ epoch=\d+ step=\d+", log), log
        state = json.loads((whole.run_dir / "heartbeats" / f"rank{rank}.json").read_text())
        assert state["step"] == 80


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(launch: Launch, whole: Result) -> None:
    # The signal reaches one rank only, in the middle of a step; all ranks must stop at the same one.
    stopped = launch(*QUICK, *STEPS, faults="term@rank=1,step=7,phase=backward", run_id="stopped")
    assert stopped.outcome["outcome"] == "stopped", stopped.output
    assert "SIGTERM on rank 1" in stopped.outcome["reason"]
    assert 7 < stopped.outcome["step"] < 80
    resumed = launch(*QUICK, *STEPS, attempt=1, run_id="stopped")
    assert resumed.code == 0, resumed.output
    assert "resumed from" in resumed.output

    for part in ("objects", "rng"):  # weights and optimiser; the random state of every rank
        assert equal(final_state(whole.run_dir)[part], final_state(resumed.run_dir)[part]), GOES_ON
    assert losses(resumed) == losses(whole), GOES_ON


def test_plain_python_trains_and_goes_on_from_the_last_good_checkpoint(launch: Launch) -> None:
    run = launch(*QUICK, "--checkpoint.every_steps", "10", ranks=0, run_id="plain")
    assert run.code == 0, run.output
    state = run.run_dir / "checkpoints" / "step_00000020" / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1  # one flipped bit
    state.write_bytes(content)
    run = launch(*QUICK, ranks=0, attempt=1, run_id="plain")
    assert run.code == 0, run.output
    assert "skipping broken checkpoint" in run.output
    assert "resumed from" in run.output
    assert "step_00000010" in run.output
    kept = {path.name for path in (run.run_dir / "checkpoints").iterdir()}
    assert kept == {"step_00000010", "step_00000020", "broken-step_00000020"}, "the old good one and the new one"


def losses(run: Result) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in run.metrics if "loss" in row}


def test_rank_0_may_work_for_longer_than_a_collective_may_take(launch: Launch) -> None:
    """A collective has 1 s; rank 0 works ten times as long and says so, and the others go on waiting."""
    run = launch("long_guard", *QUICK, *SHORT, module="matrix.programs")
    assert run.code == 0, run.output
    assert "all 2 ranks went on" in run.output
    assert "waiting for rank 0" in (run.run_dir / "logs" / "rank1.log").read_text()


def test_a_wrong_setting_is_refused_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    limit = PATIENCE * CLOCKS["collective"]
    with pytest.raises(SystemExit, match="78"):
        load_settings(Settings, [*QUICK, "--clocks.stall_s", f"{2 * limit:g}"], strict_variables=False)
    assert f"clocks.stall_s ({2 * limit:g}) must be below clocks.collective_s ({limit:g})" in capfd.readouterr().err
