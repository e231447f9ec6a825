"""The wizard on a pseudo-terminal, as a person sees and answers it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
import yaml
from cli_helpers import SCAFFOLD, git

DOWN, ENTER, BACKSPACE, CTRL_C = "\x1b[B", "\r", "\x7f", "\x03"
DRAWN = "\x1b[?7h"  # lines wrap again: the prompt is drawn and reads keys
SLURM_ONLY = ["gpus_per_node", "cpus_per_task", "walltime", "partition", "account", "modules"]

Spawn = Callable[..., pexpect.spawn]


@pytest.fixture
def wizard(work: Path, scaffold_env: dict[str, str]) -> Iterator[Spawn]:
    """`wizard("demo", ...)` starts `ddp-scaffold new demo ...` on a terminal of 120 columns."""
    children = []

    def start(*args: str) -> pexpect.spawn:
        environment = scaffold_env | {"PROMPT_TOOLKIT_NO_CPR": "1"}  # this terminal does not tell where its cursor is
        child = pexpect.spawn(
            sys.executable,
            [*SCAFFOLD[1:], "new", *args],
            env=environment,
            dimensions=(50, 120),
            encoding="utf-8",
            timeout=30,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


@pytest.fixture
def ask(template_repo: Path) -> Callable[[pexpect.spawn, str, str], None]:
    """`ask(child, "nodes", keys)` waits for a question and answers it."""
    texts = {
        name: entry["help"]
        for name, entry in yaml.safe_load((template_repo / "copier.yml").read_text()).items()
        if isinstance(entry, dict) and "help" in entry
    }

    def run(child: pexpect.spawn, question: str, keys: str) -> None:
        child.expect_exact(texts[question][:100])
        child.expect_exact(DRAWN)
        child.send(keys)

    return run


def finished(child: pexpect.spawn) -> str:
    """Wait for the end and return what was printed since the last expectation."""
    child.expect(pexpect.EOF)
    child.wait()
    return child.before


def test_full_run_with_arrow_keys(wizard, ask, work):
    child = wizard("demo")
    ask(child, "project_name", ENTER)  # the directory's name stands there already
    ask(child, "package", ENTER)
    ask(child, "preset", DOWN + ENTER)
    ask(child, "model", ENTER)
    ask(child, "tracker", DOWN + DOWN + ENTER)
    ask(child, "nodes", BACKSPACE + "4" + ENTER)
    for question in [*SLURM_ONLY, "max_restarts", "collective_timeout_s"]:
        ask(child, question, ENTER)
    child.expect_exact("What follows from the answers")
    child.expect_exact("16 (4 nodes x 4 GPUs)")
    child.expect_exact("loader 90 s < stall 180 s < collective 300 s < guard 1800 s")
    child.expect_exact("ddp-scaffold new demo -y --preset generic-slurm --set tracker=none --set nodes=4")
    child.expect(r"Write \d+ files to .*demo\? \[Y/n\]")
    assert list(work.iterdir()) == []  # nothing is written before the confirmation
    child.send(ENTER)
    rest = finished(child)
    assert child.exitstatus == 0
    assert "sbatch launch/train.sbatch" in rest
    recorded = yaml.safe_load((work / "demo" / ".copier-answers.yml").read_text())
    assert (recorded["preset"], recorded["tracker"], recorded["nodes"]) == ("generic-slurm", "none", 4)
    assert git(work / "demo", "status", "--porcelain") == ""


def test_wrong_answer_is_asked_again_in_place(wizard, ask, work):
    child = wizard("demo", "--preset", "generic-slurm", "--model", "diffusion", "--dry-run")
    ask(child, "project_name", BACKSPACE * 4 + "class" + ENTER)
    child.expect_exact("is a Python keyword")
    child.send(BACKSPACE * 5 + "fine" + ENTER)
    ask(child, "package", ENTER)
    ask(child, "tracker", ENTER)
    ask(child, "nodes", BACKSPACE + "0" + ENTER)
    child.expect_exact("must be from 1 to 10000")
    child.send(BACKSPACE + "3" + ENTER)
    for question in [*SLURM_ONLY, "max_restarts", "collective_timeout_s"]:
        ask(child, question, ENTER)
    child.expect_exact("12 (3 nodes x 4 GPUs)")
    child.expect_exact("files would be written")
    finished(child)
    assert child.exitstatus == 0
    assert list(work.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--preset", "local"]])
def test_destination_that_is_no_project_name_is_asked_about(wizard, ask, work, options):
    child = wizard("torch", "--dry-run", *options)
    child.expect_exact("note: DEST: the project name 'torch' is a Python keyword, or the name of a module")
    ask(child, "project_name", BACKSPACE * len("torch-project") + "torch" + ENTER)
    child.expect_exact("is a Python keyword, or the name of a module")
    child.send("-project" + ENTER)
    ask(child, "package", CTRL_C)
    interrupted(child, work)


def test_given_answers_are_not_asked(wizard, ask, work):
    given = ["project_name=demo", "package=demo", "tracker=none", "nproc=2", "max_restarts=1"]
    child = wizard("demo", "--preset", "local", "--model", "diffusion", *(word for g in given for word in ("--set", g)))
    ask(child, "collective_timeout_s", ENTER)
    child.expect_exact("[Y/n]")
    child.send("y" + ENTER)
    finished(child)
    assert child.exitstatus == 0
    assert (work / "demo" / ".git").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "collective_timeout_s=1"], "must be from 20 to 7200 seconds"),
        (["--preset", "local", "--set", "nodes=4"], "'nodes' is not asked with preset local"),
    ],
)
def test_wrong_option_is_told_before_the_first_question(wizard, work, options, message):
    child = wizard("demo", *options)
    text = finished(child)
    assert child.exitstatus == 2
    assert message in text
    assert "Name of the project" not in text
    assert list(work.iterdir()) == []


def interrupted(child: pexpect.spawn, work: Path) -> None:
    text = finished(child)
    assert child.exitstatus == 130
    assert text.splitlines()[-1] == "interrupted, nothing was left behind"
    assert "Traceback" not in text
    assert list(work.iterdir()) == []


def test_ctrl_c_at_a_question_leaves_nothing(wizard, ask, work):
    child = wizard("demo")
    ask(child, "project_name", ENTER)
    ask(child, "package", CTRL_C)
    interrupted(child, work)


def test_ctrl_c_at_the_confirmation_leaves_nothing(wizard, work):
    child = wizard_at_confirmation(wizard)
    child.kill(signal.SIGINT)
    interrupted(child, work)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_at_a_question_is_like_ctrl_c(wizard, ask, work, number):
    child = wizard("demo")
    ask(child, "project_name", ENTER)
    child.expect_exact("Name of the Python package")
    child.expect_exact(DRAWN)
    child.kill(number)
    interrupted(child, work)


def test_decline_leaves_nothing(wizard, work):
    child = wizard_at_confirmation(wizard)
    child.send("n" + ENTER)
    text = finished(child)
    assert child.exitstatus == 1
    assert "declined, nothing was written" in text
    assert list(work.iterdir()) == []


def test_end_of_input_leaves_nothing(wizard, ask, work):
    child = wizard("demo")
    ask(child, "project_name", BACKSPACE * 4 + "\x04")
    text = finished(child)
    assert child.exitstatus == 1
    assert "the input ended before the last question" in text
    assert list(work.iterdir()) == []


def wizard_at_confirmation(wizard: Spawn) -> pexpect.spawn:
    """Start a wizard in which every question is answered by options, and wait for the confirmation."""
    given = {"project_name": "demo", "package": "demo", "tracker": "none", "nproc": "2", "max_restarts": "1"}
    given["collective_timeout_s"] = "60"
    pairs = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    child = wizard("demo", "--preset", "local", "--model", "diffusion", *pairs)
    child.expect_exact("[Y/n]")
    return child
