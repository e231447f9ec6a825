"""What people read of the command line fits 78 columns: each question, refusal, summary, error and hint."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pexpect
import pytest
from cli_helpers import SCAFFOLD
from cross_section import every
from test_cli_wizard import BACKSPACE, CTRL_C, DOWN, DRAWN, ENTER, ask, finished, wizard

from ddp_scaffold._errors import WIDTH
from ddp_scaffold._output import _broken
from ddp_scaffold.creating.search_list import Entry, SearchList
from ddp_scaffold.creating.wizard import GENERIC, _without_preset
from ddp_scaffold.template.questions import load_questions

__all__ = ["ask", "wizard"]  # fixtures
MOVES = re.compile(r"[\r\n]+|\x1b\[[0-9;]*[A-HJKf]")  # to another line or column, and what clears one
OTHER = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")
NETWORK = ["NCCL", "gloo", "interface", "internet", "network", "node"]
ROUTES = {
    "laptop": (["--preset", "local"], [*NETWORK, "Slurm", "PBS", "sbatch", "qsub", "artition", "ueue"]),
    "Slurm": (["--preset", "lumi-g"], ["PBS", "qsub", "ueue"]),
    "PBS": (["--preset", "alcf-polaris"], ["Slurm", "sbatch", "srun", "Partition", "QoS"]),
    "workstation": (["--preset", "workstation"], ["Slurm", "PBS", "sbatch", "qsub", "artition", "ueue"]),
    "generic Slurm": (["--preset", "generic-slurm", "--set", "modules=cuda/12.4 nccl/2.30"], ["PBS", "qsub", "ueue"]),
}


def lines(drawn: str) -> list[str]:
    """Return what a terminal was given, as the pieces that stand in one line each."""
    return [text for piece in MOVES.split(drawn) if (text := OTHER.sub("", piece).rstrip())]


def assert_narrow(drawn: str) -> None:
    """A word that is longer, as a path may be, has a line of its own."""
    for line in lines(drawn):
        columns = len(line) + line.count("\N{MICROPHONE}")
        assert columns <= WIDTH or len(line.split()) == 1, f"{columns} columns: {line}"


def answered_by_defaults(child: pexpect.spawn) -> str:
    """Press Enter at every question; return all that was drawn."""
    drawn = ""
    while child.expect([re.escape(DRAWN), pexpect.EOF]) == 0:
        drawn += child.before
        child.send(ENTER)
    child.wait()
    return drawn + child.before


@pytest.mark.parametrize(("options", "foreign"), every(8, ROUTES.values(), ROUTES))
def test_a_route_through_the_wizard(wizard, work, options, foreign):
    drawn = answered_by_defaults(wizard("demo", "--dry-run", *options, columns=200))
    assert "files would be written to demo" in drawn
    assert_narrow(drawn)
    assert [word for word in foreign if word in drawn.partition("files would be written")[0]] == []


@pytest.mark.slow
def test_a_search_that_finds_nothing_leads_on(wizard, ask, work):
    child = wizard("demo", "--dry-run", "--model", "custom", columns=200)
    ask(child, "preset", "\x1b[200~Our Cluster\x1b[201~" + ENTER + DOWN + ENTER)  # pasted; Enter alone takes nothing
    child.expect_exact("generic-slurm: A Slurm cluster")
    ask(child, "project_name", CTRL_C)
    finished(child)


def test_a_search_that_finds_nothing_says_what_to_do():
    entries = [Entry("generic-pbs", "A PBS cluster"), Entry("local", "Here"), Entry("generic-slurm", "A Slurm cluster")]
    listed = SearchList("Where?", "?", entries, "local", (*GENERIC, "own"), _without_preset)
    listed.search("Our Cluster")
    shown = "".join(text for _, text in listed.lines()).splitlines()
    assert "     ddp-scaffold presets init our-cluster" in shown
    assert [line.split()[0] for line in shown[-2:]] == ["generic-slurm", "generic-pbs"]
    assert max(map(len, shown)) <= WIDTH
    assert listed.choose() is None, "Enter alone chooses nothing"
    listed.move(-1)
    assert listed.choose() == "generic-pbs"


@pytest.mark.slow
def test_a_refusal_and_a_question_are_whole_on_a_narrow_terminal(wizard, ask, work):
    child = wizard("demo", "--preset", "generic-slurm", columns=48)
    child.expect_exact("joined by - or _)")  # the end of the question, in its second line
    child.expect_exact(DRAWN)
    child.send(BACKSPACE * 4 + "No" + ENTER)
    child.expect_exact("is not a valid name; use a-z and 0-9")
    child.expect_exact("a letter first, 60 at most")
    child.send(CTRL_C)
    finished(child)


def test_the_confirmation_names_the_place_and_the_job(wizard, work):
    given = ["project_name=demo", "package=demo", "tracker=none", "nodes=2", "gpus_per_node=4", "cpus_per_task=8"]
    given += ["qos=high", "partition=gpu", "walltime=02:00:00", "account=abc", "modules=cuda/12.4", "max_restarts=1"]
    given += ["collective_timeout_s=60", "launcher=srun"]
    pairs = [word for pair in given for word in ("--set", pair)]
    child = wizard("demo", "--preset", "generic-slurm", "--model", "custom", *pairs, columns=200)
    child.expect_exact("Write ")
    drawn = child.before
    for label, value in {"account": "abc", "QoS": "high", "partition": "gpu", "time": "02:00:00"}.items():
        assert any(re.search(rf"{label} +{value}", line) for line in lines(drawn)), label
    child.expect_exact("files to demo? [Y/n]: ")
    child.send("y" + ENTER)
    rest = finished(child)
    assert_narrow(drawn + rest)
    steps = ["cd demo", "module load cuda/12.4", "python3 -m venv .venv", "source .venv/bin/activate"]
    steps += ["python -m pip install -e '.[dev]'", "sbatch launch/train.sbatch"]
    assert [line.strip() for line in lines(rest) if line.strip() in steps] == steps


def test_a_long_error_is_broken_at_its_words_on_a_terminal(scaffold_env, work):
    command = [*SCAFFOLD, "new", "demo", "-y", "--set", f"account={'a; ' * 14}", "--preset", "generic-slurm"]
    child = pexpect.spawn(command[0], command[1:], env=scaffold_env, dimensions=(50, 200), encoding="utf-8", timeout=30)
    said = finished(child)
    assert_narrow(said)
    first, second, third = lines(said)
    assert first.startswith("error: ")
    assert second.startswith("       ")
    assert third.startswith("hint: ")


def test_presets_init_asks_for_the_partition_and_its_longest_time(scaffold_env, work, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("git", "sh"):
        tools.joinpath(name).symlink_to(shutil.which(name))
    environment = scaffold_env | {"PATH": str(tools), "COLUMNS": "200"}
    command = [*SCAFFOLD, "presets", "init", "mine"]
    child = pexpect.spawn(command[0], command[1:], env=environment, dimensions=(50, 200), encoding="utf-8", timeout=30)
    answers = {"Scheduler": "slurm", "Partition for GPU jobs": "gpu", "Longest time of a job in gpu": "two days"}
    answers |= {"write it as 24:00:00": "2-00:00:00", "GPUs on each node": "4"}
    drawn = ""
    for question, answer in answers.items():
        child.expect_exact(question)
        drawn += child.before + question
        child.expect(r": $")
        child.send(answer + ENTER)
    for question in [
        "CPUs for",
        "What starts",
        "How a job",
        "Interface",
        "Must a job",
        "Modules",
        "Internet",
        "Directory",
    ]:
        child.expect_exact(question)
        drawn += child.before + question
        child.send(ENTER)
    assert_narrow(
        re.sub("(?m)^.*[\u2503\u2502].*$", "", drawn + finished(child))
    )  # a table takes the room that there is
    text = (work / "mine.yml").read_text()
    assert "name: gpu\n    max_walltime: 2-00:00:00\n" in text
    assert "partition:\n  value: gpu\n" in text


ERRORS = [
    ["new"],
    ["new", ""],
    ["new", "torch", "-y"],
    ["new", "My Model", "-y"],
    ["new", "full", "-y"],
    ["new", "file", "-y"],
    ["new", "demo", "--wrong"],
    ["new", "demo", "-y", "--preset", "generic-slrum"],
    ["new", "demo", "-y", "--preset", "nowhere"],
    ["new", "demo", "-y", "--preset", "./absent.yml"],
    ["new", "demo", "-y", "--model", "gan"],
    ["new", "demo", "-y", "--answers", "absent.yml"],
    ["new", "demo", "-y", "--template", "./absent"],
    ["new", "demo", "-y", "--into-existing"],
    *(
        ["new", "demo", "-y", "--set", pair]
        for pair in ("nodes=4", "nodse=4", "nope=1", "guard_deadline_s=5", "max_restarts=x", "max_restarts=101")
    ),
    *(["new", "demo", "-y", "--set", pair] for pair in ("tracker=nope", "package=A b", "nproc=0", "x", "_src_path=/")),
    *(
        ["new", "demo", "-y", "--preset", "generic-slurm", "--set", pair]
        for pair in ("nodes=0", "partition=a b", "qos=-", "account=a;b", "modules=-rf", "walltime=soon", "launcher=x")
    ),
    ["update", "nowhere"],
    ["update"],
    ["presets"],
    ["presets", "show", "nowhere"],
    ["presets", "check", "absent.yml"],
    ["presets", "list", "nowhere"],
    ["presets", "init", "Not A Name"],
    ["presets", "init", "local"],
    ["presets", "init", "mine", "--output", "nowhere/mine.yml"],
    ["nope"],
]


@pytest.mark.slow
def test_errors_and_hints_are_short(cli, work):
    Path("full").mkdir()
    Path("full", "a").touch()
    Path("file").touch()
    long = []
    for arguments in ERRORS:
        done = cli(*arguments)
        long += [f"{arguments}: {line}" for line in done.stderr.splitlines() if len(line) > WIDTH]
        if done.stderr:
            said = [line.partition(":")[0] for line in done.stderr.splitlines()]
            assert said in (["error", "hint"], ["note"]), arguments
    assert long == []


def test_help_lists_the_questions(cli, template_repo):
    text = cli("new", "--help").stdout
    questions = load_questions(
        (template_repo / "copier.yml").read_text(), lambda path: (template_repo / path).read_text()
    )
    asked = {name for name, question in questions.items() if not question.computed} - {"code", "preset_file"}
    assert {name for name in asked if not re.search(rf"\b{name}\b", text)} == set()
    assert set(questions["model"].choices) - set(text.split()) == set()


def test_a_long_command_can_be_copied(tmp_path):
    command = f"echo new 'a b' --set walltime=12:00:00 {'--set nodes=4 ' * 8}--set account=abc"
    broken = _broken(command)
    assert len(broken) > 1
    assert max(map(len, broken)) <= WIDTH - 2
    script = tmp_path / "script"
    script.write_text("\n".join(broken))
    assert subprocess.check_output(["sh", script]) == subprocess.check_output(["sh", "-c", command])
    assert _broken(f"{command} && echo") == [f"{command} && echo"]
