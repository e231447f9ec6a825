"""A rendered project as its owner meets it: clean for linters, typed, small, and its own tests pass."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

Render = Callable[..., Path]


def tool(project: Path, *command: str, timeout: float = 600) -> None:
    """Run a Python tool in the project; fails the test with everything it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DDP_", "PYTEST"))}
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("preset", [pytest.param("local", marks=pytest.mark.slow), "generic-slurm"])
@pytest.mark.parametrize("tracker", ["tensorboard", pytest.param("none", marks=pytest.mark.slow)])
def test_linters_and_the_type_checker_have_nothing_to_say(
    render: Render, preset: str, tracker: str, mypy_cache: Path
) -> None:
    project = render({"preset": preset, "tracker": tracker, "package": "digits"})
    # More than is asked of a user's own files: all rules for all files here, the format, and strict types below.
    tool(project, "ruff", "check", "--no-cache", "--config", "lint.per-file-ignores = {}", ".")
    tool(project, "ruff", "format", "--no-cache", "--check", ".")
    if tracker == "tensorboard":
        tool(project, "mypy", "--cache-dir", str(mypy_cache), "--strict")


OWN = [f"tests/test_{name}.py" for name in ("plumbing", "watching", "loader", "contract")]
OWN += ["tests/example"]
OWN += ["tests/test_picture.py::test_hundreds_of_ranks_are_a_few_rows_and_the_one_to_blame_has_its_own"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tests", [OWN, pytest.param(["-m", ""], marks=pytest.mark.slow)], ids=["quick", "all"])
def test_its_own_tests_pass(render: Render, tests: list[str]) -> None:
    tool(render({"package": "digits"}), "pytest", "-q", *tests)


STOPPED = """
from digits.ddp.agree import Agreement
from digits.ddp.errors import StopRequested
from digits.train import main

poll = Agreement.poll

def stopped(self, step):
    if step == 10:
        raise StopRequested("signal SIGTERM on rank 0")
    poll(self, step)

Agreement.poll = stopped
main()
"""


@pytest.mark.slow
def test_a_stop_right_after_a_checkpoint_does_not_write_it_again(render: Render) -> None:
    """A second one of the same step would push an older one out of `checkpoint.keep`."""
    project = render({"package": "digits", "model": "custom", "tracker": "none"})
    (project / "stopped.py").write_text(STOPPED)
    words = "--run.id stopped --run.device cpu --train.steps 60 --checkpoint.every_steps 10 --sample.every_steps 100"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    command = [sys.executable, "stopped.py", *words.split()]
    environment["PYTHONPATH"] = "src"
    ended = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 75, ended.stderr
    assert [path.name for path in (project / "runs/stopped/checkpoints").iterdir()] == ["step_00000010"]


@pytest.mark.slow
def test_a_start_says_what_changed_since_the_last_one_and_a_batch_that_is_too_large(
    render: Render, tmp_path: Path
) -> None:
    project = render({"package": "digits", "model": "custom", "tracker": "none"})
    same = f"--run.dir {tmp_path} --run.device cpu --log.every_steps 1000 --train.batch_size 400".split()

    def said(ranks: int, *more: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
        environment |= {"PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "digits.train"]
        ended = subprocess.run(
            [*command, "--run.id", "again", *same, *more],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    first = said(1, "--train.steps", "2")
    assert "changed since the last start" not in first
    assert "more than the data set has" not in first
    second = said(2, "--train.steps", "4", "--train.learning_rate", "0.1")
    changed = "train.steps 2 -> 4, train.learning_rate 0.002 -> 0.1, world size 1 -> 2"
    assert f"changed since the last start of this run: {changed}\n" in second
    assert second.count("a batch of 2 x 400 samples is more than the data set has, 455: each step trains") == 1
    third = said(2, "--train.steps", "4", "--train.learning_rate", "0.1")
    assert "changed since the last start" not in third


def test_the_ci_file_is_valid(render: Render) -> None:
    """Structure by the rules of GitHub's workflow syntax that a mistake here would break."""
    workflow = yaml.safe_load((render() / ".github" / "workflows" / "ci.yml").read_text())
    assert set(workflow) == {"name", True, "jobs"}, "YAML reads the key `on` as true"
    for job in workflow["jobs"].values():
        assert {"runs-on", "steps", "timeout-minutes"} <= set(job)
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert commands[-2:] == ["make lint", "make test"]


def test_an_odd_name_reaches_every_file_in_the_right_form(render: Render) -> None:
    project = render({"preset": "generic-slurm"}, name="my-long_name-2")
    assert (project / "src" / "my_long_name_2" / "train.py").exists()
    assert "-m my_long_name_2.train" in (project / "launch" / "train.sbatch").read_text()
    left = [path for path in project.rglob("*") if path.is_file() and ("{{" in str(path) or path.suffix == ".jinja")]
    assert left == []
