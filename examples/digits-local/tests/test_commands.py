"""What a run has learned: `python -m digits.evaluate`, `.sample`, and which checkpoint is the best.

What an evaluate.py or sample.py of your own does without is skipped: the lines at their ends, METRIC, HIGHER_IS_BETTER.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import QUICK, Launch, Result
from turns import job_of

from digits import evaluate, sample
from digits.config import Settings
from digits.ddp import ConfigError, Job, checkpoint, load_settings
from digits.ddp.best import best_of
from digits.ddp.saving.chosen import read_chosen

METRIC, HIGHER_IS_BETTER = (getattr(evaluate, name, None) for name in ("METRIC", "HIGHER_IS_BETTER"))
SETTINGS, _ = load_settings(Settings, QUICK, strict_variables=False)
MAIN = 'if __name__ == "__main__":'
evaluates = pytest.mark.skipif(MAIN not in inspect.getsource(evaluate), reason="evaluate.py is no command")
samples = pytest.mark.skipif(
    MAIN not in inspect.getsource(sample) or not SETTINGS.sample.every_steps,
    reason="sample.py is no command, or sample.every_steps is 0: no pictures are drawn",
)
rated = pytest.mark.skipif(HIGHER_IS_BETTER is None or METRIC is None, reason="evaluate.py names no metric to watch")
EVERY = [f"--{section}.every_steps" for section in ("eval", "sample", "checkpoint")]


@pytest.fixture(scope="module")
def trained(launch: Launch) -> Result:
    """A run of two ranks that has evaluated, drawn and saved at steps 10 and 20."""
    steps = [word for option in EVERY for word in (option, "10")]
    best = str(HIGHER_IS_BETTER is not None and METRIC is not None).lower()
    run = launch(*QUICK, *steps, "--checkpoint.keep_best", best, "--checkpoint.keep", "9")
    assert run.code == 0, run.output
    return run


def files_of(run: Result) -> dict[str, bytes]:
    """All that the run has written."""
    return {str(path.relative_to(run.run_dir)): path.read_bytes() for path in run.run_dir.rglob("*") if path.is_file()}


@evaluates
@pytest.mark.parametrize(("ranks", "step"), [(0, 10), (2, 20)])
def test_evaluate_finds_what_training_has_logged(launch: Launch, trained: Result, ranks: int, step: int) -> None:
    before = files_of(trained)
    which = (trained.run_dir.name, "--checkpoint", str(step))
    asked = launch(*which, module="digits.evaluate", ranks=ranks, run_id="x")
    assert asked.code == 0, asked.output
    (logged,) = [row for row in trained.metrics if row["step"] == step and "loss" not in row]
    found = json.loads((trained.run_dir / f"evaluation-step_{step:08d}.json").read_text())
    for name, value in found["metrics"].items():
        assert value == pytest.approx(logged[name], rel=1e-4), asked.output
        assert f"  {name}" in asked.output
    assert found["world_size"] == max(1, ranks)
    after = files_of(trained)
    assert {name: after.get(name) for name in before} == before, "it has changed nothing of the run"


@samples
def test_sample_draws_what_training_has_drawn(launch: Launch, trained: Result) -> None:
    asked = launch(str(trained.run_dir), "--checkpoint", "10", module="digits.sample", ranks=0, run_id="x")
    assert asked.code == 0, asked.output
    for drawn in (trained.run_dir / "samples").glob("step_00000010*"):
        assert (trained.run_dir / f"sample-{drawn.name}").read_bytes() == drawn.read_bytes()
        assert f"sample-{drawn.name}" in asked.output


@evaluates
def test_what_is_not_there_is_said_in_two_lines(launch: Launch, trained: Result) -> None:
    asked = launch(trained.run_dir.name, "--checkpoint", "15", module="digits.evaluate", ranks=0, run_id="x")
    assert asked.code == 78
    problem, remedy = asked.output.splitlines()
    assert problem.endswith("has no checkpoint of step 15")
    assert remedy == "  -> there are steps 10, 20"
    with pytest.raises(ConfigError, match="none of best, last or a step"):
        read_chosen(trained.run_dir, "newest", print)
    with pytest.raises(ConfigError, match="has no complete checkpoint"):
        read_chosen(trained.run_dir / "logs", "last", print)


@rated
def test_training_keeps_the_best_by_the_metric_of_evaluate(trained: Result) -> None:
    values = {row["step"]: row[METRIC] for row in trained.metrics if METRIC in row}
    wanted = (max if HIGHER_IS_BETTER else min)(sorted(values), key=lambda step: values[step])
    assert read_chosen(trained.run_dir, "best", print)[1]["counters"]["step"] == wanted


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A process group of one rank, in which no best checkpoint is kept when the test has ended."""
    monkeypatch.setattr(checkpoint, "_watched", [])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield replace(job_of(0, 1), control=dist.group.WORLD)
    dist.destroy_process_group()


def save_best(job: Job, run_dir: Path, values: dict[int, float], higher: bool) -> tuple[list[int], list[int]]:
    """As a start does: save a step that is the best, and step 9. Returns steps that were, and those on the disk."""
    layer, best_steps = torch.nn.Linear(2, 2), list[int]()
    checkpoint.keep_best(SimpleNamespace(METRIC="found", HIGHER_IS_BETTER=higher))
    for step, value in values.items():
        torch.nn.init.constant_(layer.weight, step)
        checkpoint.rate(job, run_dir, step, {"found": value})
        best_steps += [step] if checkpoint.is_best(step) else []
        if checkpoint.is_best(step) or step == 9:
            checkpoint.save(job, run_dir, {"step": step}, {"layer": layer}, keep=1)
            assert not checkpoint.is_best(step), "saved once"
    assert checkpoint.finish(job)
    return best_steps, [int(path.name.removeprefix("step_")) for path in sorted((run_dir / "checkpoints").iterdir())]


@pytest.mark.parametrize("higher", [True, False])
def test_the_best_one_stays_through_worse_ones_nan_and_a_resume(job: Job, tmp_path: Path, higher: bool) -> None:
    sign = 1 if higher else -1
    first: dict[int, float] = {1: 0.5 * sign, 2: 0.7 * sign, 3: math.nan, 4: 0.6 * sign, 5: math.inf * sign}
    assert save_best(job, tmp_path, first, higher) == ([1, 2], [2])
    assert save_best(job, tmp_path, {8: 0.6 * sign, 9: 0.7 * sign}, higher) == ([], [2, 9]), "known after a resume"
    _, best = read_chosen(tmp_path, "best", print)
    assert best["counters"]["step"] == 2
    assert (best["objects"]["layer"]["weight"] == 2).all(), "the weights that were evaluated"
    assert save_best(job, tmp_path, {11: 0.8 * sign}, higher) == ([11], [11])


def test_a_direction_is_not_guessed() -> None:
    with pytest.raises(ConfigError, match="HIGHER_IS_BETTER"):
        checkpoint.keep_best(SimpleNamespace(METRIC="val_loss"))


def test_of_another_metric_the_best_is_found_anew(job: Job, tmp_path: Path) -> None:
    save_best(job, tmp_path, {1: 0.9}, True)
    checkpoint.keep_best(SimpleNamespace(METRIC="other", HIGHER_IS_BETTER=True))
    checkpoint.rate(job, tmp_path, 2, {"other": 0.1})
    assert checkpoint.is_best(2)
    checkpoint.rate(job, tmp_path, 3, {})
    assert not checkpoint.is_best(3), "evaluate() has not returned it"
    assert best_of([]) is None
