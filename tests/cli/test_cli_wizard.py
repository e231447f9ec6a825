"""The wizard on a pseudo-terminal, as a person sees and answers it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pexpect
import pytest
import yaml
from cli_helpers import SCAFFOLD
from cross_section import every
from git_helpers import git

from ddp_scaffold._signals import _Ending
from ddp_scaffold.creating.search_list import Entry, matching
from ddp_scaffold.template.questions import load_questions

UP, DOWN, ENTER, BACKSPACE, CTRL_C = "\x1b[A", "\x1b[B", "\r", "\x7f", "\x03"
DRAWN = "\x1b[?7h"  # lines wrap again: the prompt is drawn and reads keys
SLURM_ONLY = ["gpus_per_node", "cpus_per_task", "qos", "partition", "walltime", "account", "modules"]

Spawn = Callable[..., pexpect.spawn]


@pytest.fixture
def wizard(work: Path, scaffold_env: dict[str, str]) -> Iterator[Spawn]:
    """`wizard("demo", ...)` starts `ddp-scaffold new demo ...` on a terminal of 120 columns, or `columns`."""
    children = []

    def start(*args: str, columns: int = 120, program: Sequence[str] = SCAFFOLD) -> pexpect.spawn:
        environment = scaffold_env | {"COLUMNS": str(columns)}
        environment["PROMPT_TOOLKIT_NO_CPR"] = "1"  # this terminal does not tell where its cursor is
        child = pexpect.spawn(
            program[0],
            [*program[1:], "new", *args],
            env=environment,
            dimensions=(50, columns),
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
    questions = load_questions(
        (template_repo / "copier.yml").read_text(), lambda path: (template_repo / path).read_text()
    )
    texts = {name: question.help for name, question in questions.items() if question.help}
    texts["partition"] = "Partition (empty"  # a template: with PBS it is a queue

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
    ask(child, "preset", "generic-slurm" + ENTER)
    child.expect_exact("generic-slurm: A Slurm cluster")
    child.expect_exact("slurm: srun starts one task a GPU")
    child.expect(r"documented, verified \d{4}-\d\d-\d\d, ")
    child.expect_exact("launcher=srun (--set changes them)")
    ask(child, "project_name", ENTER)  # the directory's name stands there already
    ask(child, "package", ENTER)
    ask(child, "model", ENTER)
    ask(child, "tracker", DOWN + DOWN + ENTER)
    ask(child, "nodes", BACKSPACE + "4" + ENTER)
    for question in [*SLURM_ONLY, "max_restarts", "collective_timeout_s"]:
        ask(child, question, ENTER)
    child.expect_exact("What follows from the answers")
    child.expect_exact("16 (4 nodes x 4 GPUs)")
    child.expect_exact("loader 90 s < stall 180 s < collective 300 s < guard 1800 s")
    child.expect_exact("ddp-scaffold new demo -y --preset generic-slurm --set tracker=none \\\r\n      --set nodes=4")
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


@pytest.mark.parametrize("options", every(2, [[], ["--preset", "local"]]))
def test_destination_that_is_no_project_name_is_asked_about(wizard, ask, work, options):
    child = wizard("torch", "--dry-run", *options)
    child.expect_exact("note: DEST: project name 'torch' is a Python keyword or the name of a module")
    if not options:
        ask(child, "preset", ENTER)
    ask(child, "project_name", BACKSPACE * len("torch-project") + "torch" + ENTER)
    child.expect_exact("is a Python keyword or the name of a module")
    child.send("-project" + ENTER)
    ask(child, "package", CTRL_C)
    interrupted(child, work)


@pytest.mark.slow
def test_list_of_places_is_searched_by_name_and_title(wizard, ask, work):
    child = wizard("demo", "--dry-run")
    ask(child, "preset", "slurm CLUS")  # of the title, in any case
    child.expect_exact("slurm CLUS")
    child.send(ENTER)
    child.expect_exact("generic-slurm: A Slurm cluster")
    ask(child, "project_name", CTRL_C)
    interrupted(child, work)


@pytest.mark.parametrize(
    ("typed", "name"),
    every(
        4,
        [
            ("berkeley", "nersc-perlmutter"),  # a site
            ("mi250 LUMI", "lumi-g"),  # a GPU type and a name
            ("H200 cloud google", "gcp-a3-ultra"),  # the words in any order
            ("Amazon hyper", "aws-hyperpod"),  # a company
        ],
    ),
)
def test_list_of_places_is_searched_by_keywords(wizard, ask, work, typed, name):
    child = wizard("demo", "--dry-run", columns=80)
    ask(child, "preset", typed)
    child.expect_exact(typed)
    child.expect_exact(name)  # the only one that is still listed
    child.send(ENTER)
    child.expect_exact(f"{name}: ")
    child.expect_exact("Name of the project")
    child.expect_exact(DRAWN)
    child.send(CTRL_C)
    interrupted(child, work)


@pytest.mark.slow
def test_nothing_is_chosen_where_nothing_matches(wizard, ask, work):
    child = wizard("demo", "--dry-run")
    ask(child, "preset", "nowhere")
    child.expect_exact("nothing matches")
    child.send(ENTER + ENTER)  # an arrow would mark what is always offered
    child.send(BACKSPACE * len("nowhere") + "mila")
    child.expect_exact("Mila cluster")
    child.send(ENTER)
    child.expect_exact("mila: Mila cluster")
    ask(child, "project_name", CTRL_C)
    interrupted(child, work)


@pytest.mark.slow
def test_search_takes_a_name_before_what_only_holds_it():
    entries = [Entry("one", "This machine's two GPUs"), Entry("two-b", "B", ["two"]), Entry("two", "Two", ["Site, B"])]
    found = {typed: [entry.name for entry, _ in matching(entries, typed)] for typed in ("two", "TWO b", "site two", "")}
    assert found == {
        "two": ["two", "one", "two-b"],
        "TWO b": ["two-b", "two"],
        "site two": ["two"],
        "": ["one", "two-b", "two"],
    }
    assert matching(entries, "site") == [(entries[2], ["Site, B"])]  # the list shows why


def test_no_title_of_the_list_is_cut_off_on_a_narrow_terminal(wizard, ask, work):
    child = wizard("demo", columns=80)
    ask(child, "preset", "crusoe")
    child.expect_exact("200)")  # the end of the longest title
    child.send(CTRL_C)
    interrupted(child, work)


@pytest.mark.slow
def test_end_of_input_at_the_list_of_places_leaves_nothing(wizard, ask, work):
    child = wizard("demo")
    ask(child, "preset", "\x04")
    text = finished(child)
    assert child.exitstatus == 1
    assert "the input ended before the last question" in text
    assert list(work.iterdir()) == []


@pytest.mark.slow
def test_own_preset_file_is_asked_for_and_decides(wizard, ask, work, own_preset):
    own_preset(gpus_per_node=6, cpus_per_task=7, days=500)
    child = wizard("demo", "--model", "diffusion", "--set", "tracker=none", "--dry-run")
    ask(child, "preset", UP + ENTER)  # the last one
    child.expect_exact("Which preset file?")
    child.expect_exact(DRAWN)
    child.send("absent.yml" + ENTER)
    child.expect_exact("absent.yml: cannot be read: No such file")
    child.send(BACKSPACE * len("absent.yml") + "./mycluster.yml" + ENTER)
    child.expect_exact("mycluster: My cluster")
    for line in ("6 GPUs a node, 7 CPUs a GPU: A100 40 GB", "NCCL hsn", "none on compute nodes"):
        child.expect_exact(line)
    child.expect_exact("debug: 1 to 2 nodes, 00:30:00")
    child.expect(r"community, verified \d{4}-\d\d-\d\d, 16 months ago")
    child.expect_exact("WARNING")
    child.expect_exact("verified more than a year ago")
    child.expect_exact("launcher=srun, gpus_per_node=6, cpus_per_task=7")
    for question in ["project_name", "package", "nodes", "qos", "partition", "walltime", "account", "modules"]:
        ask(child, question, ENTER)
    for question in ["max_restarts", "collective_timeout_s"]:
        ask(child, question, ENTER)
    child.expect_exact("12 (2 nodes x 6 GPUs)")
    child.expect_exact("ddp-scaffold new demo -y --preset ./mycluster.yml --set tracker=none")
    text = finished(child)
    assert child.exitstatus == 0
    assert "files would be written" in text


@pytest.mark.slow
def test_limits_are_told_at_the_question_that_they_are_about(wizard, ask, work, own_preset):
    own_preset(gpus_per_node=4, cpus_per_task=8)
    child = wizard("demo", "--preset", "mycluster.yml", "--model", "diffusion", "--set", "tracker=none", "--dry-run")
    for question in ["project_name", "package"]:
        ask(child, question, ENTER)
    ask(child, "nodes", BACKSPACE + "3" + ENTER)
    ask(child, "qos", ENTER)
    ask(child, "partition", "debug" + ENTER)
    child.expect(r"takes 1 to 2 nodes, not 3 \(as of ")
    child.send(BACKSPACE * len("debug") + ENTER)
    ask(child, "walltime", CTRL_C)
    interrupted(child, work, "mycluster.yml")


@pytest.mark.slow
def test_given_answers_win_over_what_the_preset_decides(wizard, ask, work, own_preset):
    own_preset(gpus_per_node=6, cpus_per_task=7)
    child = wizard("demo", "--preset", "mycluster.yml", "--set", "gpus_per_node=3", "--set", "launcher=torchrun")
    child.expect_exact("cpus_per_task=7 (--set changes them)")
    assert "gpus_per_node=" not in child.before
    ask(child, "project_name", CTRL_C)
    interrupted(child, work, "mycluster.yml")


@pytest.mark.slow
def test_answer_that_the_chosen_place_does_not_ask_is_told_at_once(wizard, ask, work):
    child = wizard("demo", "--set", "nproc=2")
    ask(child, "preset", "generic-slurm" + ENTER)
    text = finished(child)
    assert child.exitstatus == 2
    assert "--set nproc: 'nproc' is not asked with preset generic-slurm" in text
    assert "Name of the project" not in text
    assert list(work.iterdir()) == []


@pytest.mark.slow
def test_end_of_input_at_the_path_of_a_preset_leaves_nothing(wizard, ask, work):
    child = wizard("demo")
    ask(child, "preset", UP + ENTER)
    child.expect_exact("Which preset file?")
    child.expect_exact(DRAWN)
    child.send("\x04")
    text = finished(child)
    assert child.exitstatus == 1
    assert "the input ended before the last question" in text
    assert list(work.iterdir()) == []


@pytest.mark.slow
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


def interrupted(child: pexpect.spawn, work: Path, *before: str) -> None:
    text = finished(child)
    assert child.exitstatus == 130
    assert text.splitlines()[-1] == "interrupted, nothing was left behind"
    assert "Traceback" not in text
    assert [entry.name for entry in work.iterdir()] == list(before)


def test_a_signal_where_exceptions_are_swallowed_waits() -> None:
    ending = _Ending()

    class Dying:
        def __del__(self) -> None:
            ending.go_on(signal.SIGHUP, sys._getframe())

    dying = Dying()
    del dying
    names = {"__name__": "_weakrefset", "ending": ending, "sys": sys}
    exec("def _remove():\n    ending.go_on(1, sys._getframe())\n_remove()", names)
    assert not ending.raised
    with pytest.raises(KeyboardInterrupt):
        ending.go_on(signal.SIGHUP, sys._getframe())


def test_ctrl_c_at_a_question_leaves_nothing(wizard, ask, work):
    child = wizard("demo", "--preset", "local")
    ask(child, "project_name", ENTER)
    ask(child, "package", CTRL_C)
    interrupted(child, work)


@pytest.mark.slow
def test_ctrl_c_at_the_list_of_places_leaves_nothing(wizard, ask, work):
    child = wizard("demo")
    ask(child, "preset", CTRL_C)
    interrupted(child, work)


@pytest.mark.slow
def test_ctrl_c_at_the_confirmation_leaves_nothing(wizard, work):
    child = wizard_at_confirmation(wizard)
    child.kill(signal.SIGINT)
    interrupted(child, work)


@pytest.mark.parametrize(("number", "later"), every(2, [(signal.SIGTERM, True), (signal.SIGHUP, False)]))
def test_signal_at_a_question_is_like_ctrl_c(wizard, ask, work, number, later):
    child = wizard("demo")
    child.expect_exact("Where will it train?")
    child.expect_exact(DRAWN)
    if later:
        child.send(ENTER)
        ask(child, "project_name", ENTER)
        child.expect_exact("Name of the Python package")
        child.expect_exact(DRAWN)
    child.kill(number)
    interrupted(child, work)


@pytest.mark.parametrize("moment", every(3, ["1", "4", "end"]))
def test_signal_at_any_moment_of_a_question_is_like_ctrl_c(wizard, ask, work, moment):
    program = [sys.executable, str(Path(__file__).with_name("signal_at.py")), moment]
    child = wizard("demo", "--preset", "local", program=program)
    ask(child, "project_name", ENTER)
    if moment == "end":
        ask(child, "package", ENTER)
    interrupted(child, work)


@pytest.mark.slow
def test_decline_leaves_nothing(wizard, work):
    child = wizard_at_confirmation(wizard)
    child.send("n" + ENTER)
    text = finished(child)
    assert child.exitstatus == 1
    assert "declined, nothing was written" in text
    assert list(work.iterdir()) == []


@pytest.mark.slow
def test_end_of_input_leaves_nothing(wizard, ask, work):
    child = wizard("demo", "--preset", "local")
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
