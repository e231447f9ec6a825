"""The fault of each of the five post-mortems, put into the family that was made from it; see docs/post-mortems.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from family_runs import Run, train

pytest.importorskip("torch")
short_clocks = pytest.mark.flaky(reruns=1, reason="clocks of seconds, on a machine that may have other work")
Family = Callable[..., Path]
QUIET = ["--run.device", "cpu", "--log.tracker", "none", "--log.every_steps", "5"]
CLOCKS = [
    *(*QUIET, "--clocks.loader_s", "2", "--clocks.stall_s", "3", "--clocks.collective_s", "4"),
    *("--clocks.silent_s", "3", "--clocks.beat_s", "0.5"),
]


def report(run: Run) -> str:
    return (run.dir / "report.md").read_text()


@pytest.mark.slow
@short_clocks
def test_1_rank_0_draws_for_longer_than_a_collective_may_take(family: Family) -> None:
    arguments = [*CLOCKS, "--train.steps", "12", "--sample.every_steps", "6", "--clocks.guard_s", "60"]
    run = train(family("diffusion"), *arguments, DDP_FAULTS="sleep@rank=0,step=6,phase=guard:sample,seconds=10")
    assert run.code == 0, run.output
    assert run.outcome["outcome"] == "done"
    waiting = (run.dir / "logs" / "rank1.log").read_text()
    assert re.search(r"waiting for rank 0 \(\S+\) in guard:sample for 10 s", waiting), waiting


@short_clocks
def test_1_rank_0_that_hangs_while_it_draws_is_named(family: Family) -> None:
    arguments = [*CLOCKS, "--train.steps", "12", "--sample.every_steps", "6", "--clocks.guard_s", "5"]
    run = train(family("diffusion"), *arguments, DDP_FAULTS="sleep@rank=0,step=6,phase=guard:sample")
    assert run.code == 70, run.output
    assert (run.outcome["kind"], run.outcome["first_ranks"]) == ("rank0_work", [0])
    assert "time.sleep" in run.outcome["stacks"]["0"]


@pytest.mark.slow
def test_2_equal_clocks_are_refused(family: Family) -> None:
    run = train(
        family("adversarial-diffusion"),
        "--run.device",
        "cpu",
        "--clocks.loader_s",
        "600",
        "--clocks.collective_s",
        "600",
    )
    assert run.code == 78, run.output
    assert "clocks.loader_s (600) must be below" in run.output


@pytest.mark.slow
def test_2_an_error_in_one_rank_ends_all_and_too_many_workers_are_not_started(family: Family) -> None:
    arguments = [*QUIET, "--train.steps", "12", "--loader.workers", "64"]  # workers need time to start: no short clocks
    arguments += ["--log.heartbeat_s", "0.5"]
    run = train(family("adversarial-diffusion"), *arguments, DDP_FAULTS="raise@rank=1,step=5,phase=backward")
    assert run.code == 1, run.output
    assert (run.outcome["kind"], run.outcome["first_ranks"], run.outcome["phase"]) == (
        "rank_exception",
        [1],
        "backward",
    )
    assert re.search(r"loader\.workers 64 -> \d+: ", run.output), "the cap is told"
    for rank in (0, 1):
        assert f"heartbeat rank={rank}" in (run.dir / "logs" / f"rank{rank}.log").read_text()


@short_clocks
@pytest.mark.slow
def test_3_uneven_shards_of_features_are_gathered(family: Family) -> None:
    """Three ranks, whose shares of the validation set differ in size: the metrics are those of one process."""
    arguments = [*CLOCKS, "--clocks.guard_s", "60", "--train.steps", "2", "--train.learning_rate", "1e-12"]
    found = []
    for ranks in (1, 3):
        run = train(family("retrieval"), *arguments, ranks=ranks)
        assert run.code == 0, run.output
        found.append({name: value for row in run.metrics for name, value in row.items() if name.startswith("val_")})
    assert found[0] == found[1]


@pytest.mark.slow
@short_clocks
def test_3_a_rank_that_does_not_come_to_the_gather_is_named(family: Family) -> None:
    arguments = [*CLOCKS, "--clocks.guard_s", "60", "--train.steps", "6"]
    run = train(family("retrieval"), *arguments, DDP_FAULTS="sleep@rank=1,step=6,phase=eval")
    assert run.code == 70, run.output
    assert (run.outcome["kind"], run.outcome["first_ranks"], run.outcome["phase"]) == ("missing_rank", [1], "eval")


@short_clocks
@pytest.mark.slow
def test_4_slow_steps_are_told_with_the_phase_that_grew(family: Family) -> None:
    arguments = [*CLOCKS, "--clocks.guard_s", "60", "--train.steps", "40", "--log.heartbeat_s", "0.5"]
    run = train(family("masked-lm"), *arguments, DDP_FAULTS="sleep@rank=1,step=30,phase=forward,seconds=2.5")
    assert run.code == 0, run.output
    slow = r"slow step: step 31 took [\d.]+ s, [\d.]+ s is usual; [\d.]+ s in "
    assert re.search(slow + "forward", (run.dir / "logs" / "rank1.log").read_text()), run.output
    assert re.search(slow + "backward.* waits for other ranks", report(run)), report(run)
    assert re.search(r"straggler: rank 1 \(\S+\) spent [\d.]+ s in forward", report(run)), report(run)
    assert "rehearsal: a step of the largest batch" in run.output, "the first check of all ranks together"


@pytest.mark.slow
@short_clocks
def test_5_a_rank_that_lags_in_logging_is_named_while_training_goes_on(family: Family) -> None:
    arguments = [*CLOCKS, "--clocks.guard_s", "60", "--train.steps", "40", "--log.heartbeat_s", "1"]
    arguments += ["--log.every_steps", "1"]
    run = train(family("rectified-flow"), *arguments, DDP_FAULTS="slow@rank=1,step=1,phase=log,seconds=0.4")
    assert run.code == 0, run.output
    assert re.search(r"straggler: rank 1 \(\S+\) spent [\d.]+ s in log", report(run)), report(run)
    last = [row for row in run.metrics if "grad_norm" in row][-1]
    assert last["grad_norm"] > 0
    assert last["param_norm"] > 0
