"""launch/sweep.py with the real torchrun: which runs, what is refused, what is left out, a stop, and the table."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_helpers import alive, environment, ready, until, with_standin

pytest.importorskip("torch", reason="needs torch, for its torchrun")


@pytest.fixture(scope="module")
def rendered(render: Callable[..., Path]) -> Path:
    return render({"model": "custom", "max_restarts": 0})


@pytest.fixture
def standin(rendered: Path, tmp_path: Path) -> Path:
    return with_standin(rendered, tmp_path / "my project")


@pytest.fixture(scope="module")
def module(rendered: Path) -> Any:
    """The names of sweep.py, which imports its neighbours."""
    sys.path.insert(0, str(rendered / "launch"))
    try:
        yield runpy.run_path(str(rendered / "launch" / "sweep.py"), run_name="sweep")
    finally:
        sys.path.remove(str(rendered / "launch"))
        for name in ("outcome", "settings"):
            sys.modules.pop(name, None)


def sweep(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(project / "launch" / "sweep.py"), *arguments]
    env = environment(NPROC="1", **variables)
    return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, check=False, timeout=200)


def test_every_run_has_an_id_that_says_what_differs(module: Any) -> None:
    grid = {"train.learning_rate": ["1e-3", "3e-3"], "train.steps": ["9"], "model.width": ["32", "64"]}
    runs = module["named"]("lr", module["combinations"](grid, []))
    assert [run.id for run in runs] == [
        "lr-learning_rate_1e-3-width_32", "lr-learning_rate_1e-3-width_64",
        "lr-learning_rate_3e-3-width_32", "lr-learning_rate_3e-3-width_64",
    ]  # fmt: skip
    assert {run.settings["train.steps"] for run in runs} == {"9"}
    more = module["named"]("lr", module["combinations"]({**grid, "model.width": ["16", "32", "64"]}, []))
    assert {run.id for run in runs} < {run.id for run in more}, "a value more leaves the others their ids"


def test_a_second_value_of_a_setting_trains_nothing_again(rendered: Path, tmp_path: Path) -> None:
    """A run keeps its id when a grid grows by a setting: one that had a single value, or that of the file."""
    project = tmp_path / "project"
    shutil.copytree(rendered, project)
    # In the place of training: every run is done at once.
    script = 'd=runs/$(sed "s/.*--run.id \\([^ ]*\\).*/\\1/" <<<"$*") && mkdir "$d" && cp done.json "$d/outcome.json"\n'
    (project / "launch" / "torchrun.sh").write_text(f"#!/usr/bin/env bash\ncd {project} && {script}")
    (project / "done.json").write_text('{"outcome": "done"}')
    assert sweep(project, "train.learning_rate=1e-3,3e-3", "train.steps=10").returncode == 0
    done = ["sweep-learning_rate_1e-3", "sweep-learning_rate_3e-3"]

    in_file = yaml.safe_load((project / "configs" / "train.yaml").read_text())["train"]["batch_size"]
    more = ["train.steps=10,20", f"train.batch_size={in_file},{2 * in_file}"]
    grown = sweep(project, "train.learning_rate=1e-3,3e-3", *more, "--dry-run")
    runs = [line for line in grown.stdout.splitlines() if not line.startswith(" ")]
    assert len(runs) == 8, grown.stderr
    assert [run for run in runs if ", " in run] == [f"{run}, done" for run in done]

    other = sweep(project, "train.learning_rate=1e-3,3e-3", "train.steps=11")
    assert other.returncode == 78, "the same names, and other settings"
    assert "sweep-learning_rate_1e-3 was started with train.steps=10" in other.stderr


def test_ids_are_known_by_their_settings_where_values_cannot_be_looked_at(standin: Path) -> None:
    assert sweep(standin, "plan=done,fail", "x.y=1").returncode == 1
    grown = sweep(standin, "plan=done,fail", "x.y=1,2", "--dry-run").stdout.splitlines()[::2]
    assert grown == ["sweep-plan_done, done", "sweep-plan_fail, failed", "sweep-plan_done-y_2", "sweep-plan_fail-y_2"]


@pytest.mark.parametrize(
    "every",
    [
        [{"data.path": "/scratch/a b"}, {"data.path": "/scratch/a/b"}],
        [{"data.path": f"{'x' * 200}{n}"} for n in range(3)],
        [{"eval.seed": "1", "run.seed": "2"}, {"eval.seed": "2", "run.seed": "1"}],
        [{"a.b": "1-c_2"}, {"a.b": "1", "a.c": "2"}, {}],
        [{"clocks.phase_s": '{"data": 9}'}, {"clocks.phase_s": '{"data":9}'}, {"clocks.phase_s": "é"}],
    ],
)
def test_ids_are_different_names_of_files(module: Any, every: list[dict[str, str]]) -> None:
    ids = [run.id for run in module["named"]("sweep", every)]
    assert len(set(ids)) == len(every)
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{,79}", each) for each in ids), ids


def test_a_file_is_grid_and_list_and_the_command_line_wins(standin: Path) -> None:
    (standin / "configs" / "width.yaml").write_text(
        "grid:\n  train: {learning_rate: [1e-3, 0.010], steps: 5}\n  data.parts: [[1, 2], [3]]\n"
        "list:\n  - {model.width: 8}\n  - model: {width: 16, deep: true}\n"
    )
    done = sweep(standin, "configs/width.yaml", "train.steps=7", "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * 8
    assert "--train.learning_rate 0.010 --train.steps 7" in lines[-1], "as it is written"
    assert "--data.parts '[\"3\"]'" in lines[-1]
    assert "--model.width 16 --model.deep true" in lines[-1]
    assert lines[0].startswith("width-width_8-learning_rate_1e-3-parts_")
    assert not (standin / "runs").exists()


REFUSED = {
    "a typo": (["train.setps=3,4"], "train.setps is not a setting", "did you mean train.steps?"),
    "no value": (["--train.steps", "3"], "--train.steps has no value", "write train.steps=VALUE"),
    "half a value": (["train.steps=3,"], "train.steps=3,: a value is missing", "write train.steps=VALUE"),
    "nothing": ([], "no settings are given", "for example launch/sweep.py"),
    "no file": (["sweep.yaml"], "sweep.yaml: there is no such file", "give a file"),
    "another file": (["configs/train.yaml"], "configs/train.yaml does not consist of", "--help shows such a file"),
    "an id": (["run.id=a,b"], "run.id cannot be given", "--name says how it begins"),
    "directories": (["run.dir=a,b"], "run.dir cannot be swept", "give it one value"),
    "no name": (["=3"], "=3: the name is missing", "write NAME=VALUE"),
    "one job at a time": (["train.steps=3,4", "--at-once", "1"], "--at-once and --sbatch are", "add --slurm"),
    "no Slurm": (["train.steps=3,4", "--slurm"], "launch/ has no train.sbatch", "leave --slurm out"),
    "no sweep": (["--table", "--name", "x"], "there is no sweep x in runs/sweeps", "start one"),
    "a value": (["train.learning_rate=1e-3,-1"], "sweep-learning_rate_-1: train.learning_rate: Input should", "--help"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_refused_before_anything_starts(rendered: Path, what: str) -> None:
    arguments, problem, remedy = REFUSED[what]
    done = sweep(rendered, *arguments)
    assert done.returncode == 78, done.stdout + done.stderr
    first, second = done.stderr.splitlines()
    assert first.startswith(f"[sweep] error: {problem}")
    assert remedy in second
    assert not (rendered / "runs").exists()


def test_one_that_fails_does_not_stop_the_others_and_what_is_done_is_left_out(standin: Path) -> None:
    done = sweep(standin, "plan=fail,done")
    assert done.returncode == 1, done.stderr
    table = done.stdout.splitlines()
    assert [line.split()[:2] for line in table] == [["plan", "outcome"], ["fail", "failed"], ["done", "done"]]
    first = standin / "runs" / "sweep-plan_done" / "ready-0-0.json"
    assert json.loads(first.read_text())["argv"] == ["--run.id", "sweep-plan_done", "--plan", "done"]
    first.unlink()
    again = sweep(standin, "plan=fail,done,early", "--stop-on-failure")
    assert again.returncode == 1
    assert "1 of 3 runs are done already" in again.stderr
    assert not first.exists(), "it was not started again"
    assert "sweep-plan_early" in again.stdout
    assert not (standin / "runs" / "sweep-plan_early").exists(), "not after a failure"

    other = sweep(standin, "plan=done,early", "x.y=1")  # the same ids, and another run behind them
    assert other.returncode == 78
    assert "sweep-plan_done was started with x.y=(not given)" in other.stderr
    foreign = sweep(standin, "plan=done,early", "--name", "sweep-plan_done", "--dry-run")
    assert foreign.returncode == 0, "another name, other runs"
    shown = json.loads(sweep(standin, "--table", "--json").stdout)
    assert [row["outcome"] for row in shown] == ["failed", "done", "-"]


def test_the_table_says_which_way_is_better_and_when_that_is_a_guess(standin: Path) -> None:
    assert sweep(standin, "plan=done,fail").returncode == 1
    for run, value in (("done", 0.1), ("fail", 0.2)):
        line = {"step": 1, "val_accuracy": value, "seconds": value}
        (standin / "runs" / f"sweep-plan_{run}" / "metrics.jsonl").write_text(json.dumps(line) + "\n")

    def table(*options: str) -> list[str]:
        return sweep(standin, "--table", *options).stdout.splitlines()

    said = table()
    assert "highest val_accuracy" in said[0]
    assert said[2].startswith("*  fail")
    assert len(said) == 3, "evaluate.py says it"
    other = table("--metric", "seconds")[-1]
    assert other == (
        "seconds is taken to be best where it is highest, by its name: HIGHER_IS_BETTER in evaluate.py is about "
        "val_accuracy"
    )
    evaluate = standin / "src" / "demo" / "evaluate.py"
    evaluate.write_text(re.sub(r"^HIGHER_IS_BETTER.*\n", "", evaluate.read_text(), flags=re.MULTILINE))
    assert table()[-1] == (
        "val_accuracy is taken to be best where it is highest, by its name: write HIGHER_IS_BETTER = True, or False, "
        "below METRIC in evaluate.py"
    )
    row = json.loads(sweep(standin, "--table", "--json").stdout)[0]
    assert (row["lower_is_better"], row["lower_is_better_by"]) == (False, "name")


def test_a_run_of_another_hand_is_not_gone_on_with(standin: Path) -> None:
    (standin / "runs" / "sweep-plan_done").mkdir(parents=True)
    done = sweep(standin, "plan=done,fail")
    assert done.returncode == 78
    assert "runs/sweep-plan_done is there, and no run of this sweep" in done.stderr


def test_a_signal_stops_the_run_in_order_and_the_sweep(standin: Path) -> None:
    command = [str(standin / "launch" / "sweep.py"), "plan=wait,done"]
    with (standin / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment(NPROC="1"), stdout=log, stderr=log, text=True, start_new_session=True
        )
        try:
            (rank,) = ready(standin / "runs" / "sweep-plan_wait", 0, 1)
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
            assert process.wait(60) == 75
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    told = (standin / "log").read_text()
    assert told.count("asking the ranks to stop") == 1, told
    assert "got SIGINT: the sweep has stopped; the same command goes on with it" in told
    until(lambda: not alive(rank["pid"]), "the rank is gone")
    assert [line.split()[1] for line in told.splitlines()[-2:]] == ["stopped", "-"]


def test_the_run_of_a_killed_sweep_is_waited_for(standin: Path) -> None:
    """It goes on, since nobody can tell it: the next start must not train beside it on the same GPUs."""
    command = [str(standin / "launch" / "sweep.py"), "plan=fail,wait"]
    env = environment(NPROC="1")
    pids: list[int] = []
    with (standin / "log").open("w") as log:
        first = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            (rank,) = ready(standin / "runs" / "sweep-plan_wait", 0, 1)
            first.kill()
            first.wait()
            assert alive(rank["pid"])
            second = subprocess.Popen(command, env=env, stdout=log, stderr=log, text=True)
            pids.append(second.pid)
            until(lambda: "sweep-plan_wait is still trained by process" in (standin / "log").read_text(), "a word")
            assert (standin / "log").read_text().count("run 1 of 2") == 1, "nothing is started beside it"
            second.send_signal(signal.SIGINT)
            assert second.wait(60) == 75, "which asks that run to stop"
            until(lambda: not alive(rank["pid"]), "the rank is gone")
        finally:
            for pid in filter(alive, [*pids, rank["pid"]]):
                os.kill(pid, signal.SIGTERM)
    assert json.loads((standin / "runs" / "sweep-plan_wait" / "outcome.json").read_text())["outcome"] == "stopped"


@pytest.mark.slow
@pytest.mark.timeout(300)  # three starts of real training
def test_real_runs_go_on_after_a_stop_and_are_compared(rendered: Path, tmp_path: Path) -> None:
    arguments = ["train.learning_rate=1e-3,1e-2", "train.steps=40", "eval.every_steps=10", f"run.dir={tmp_path}"]
    command = [str(rendered / "launch" / "sweep.py"), *arguments, "log.every_steps=1"]
    first = tmp_path / "sweep-learning_rate_1e-3"
    variables = environment(NPROC="2", DDP_FAULTS="slow@rank=0,step=20,seconds=1")
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)
    try:
        until(lambda: (first / "metrics.jsonl").exists(), "it trains")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(90)
    assert json.loads((first / "outcome.json").read_text())["outcome"] == "stopped"
    done = sweep(rendered, *command[1:], "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["outcome"] for row in rows] == ["done", "done"]
    assert [row["steps"] for row in rows] == [40, 40]
    assert rows[0]["metric"] == "val_accuracy"
    assert rows[1]["best"] > rows[0]["best"], "ten times the learning rate learns more in 40 steps"
    shown = sweep(rendered, "--table", f"run.dir={tmp_path}").stdout.splitlines()
    assert shown[2].startswith("*  1e-2")
