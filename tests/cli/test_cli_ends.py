"""How a run may end badly: others write to the destination, signals come, the output cannot be printed."""

from __future__ import annotations

import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier

import pytest
from cli_helpers import SCAFFOLD, tree
from cross_section import every
from git_helpers import git

from ddp_scaffold._errors import ScaffoldError
from ddp_scaffold.creating.destination import publishing

DESTINATIONS = ("absent", "missing parents", "empty", "empty repository")


def prepare(work: Path, kind: str) -> Path:
    destination = work / "a" / "b" / "demo" if kind == "missing parents" else work / "demo"
    if kind.startswith("empty"):
        destination.mkdir()
    if kind == "empty repository":
        git(destination, "init", "--quiet")
    return destination


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    project = tmp_path / "staged"
    (project / "src").mkdir(parents=True)
    (project / "src" / "x.py").write_text("staged\n")
    (project / "README.md").write_text("staged\n")
    (project / "zzz").symlink_to("README.md")
    return project


# ------------------------------------------------------------------------------------------ others write there, too
@pytest.mark.slow
@pytest.mark.parametrize("kind", DESTINATIONS)
def test_of_three_processes_one_writes_the_project(work, scaffold_env, kind):
    destination = prepare(work, kind)
    command = [*SCAFFOLD, "new", str(destination), "-y"]
    runs = [
        subprocess.Popen(
            [*command, "--set", f"max_restarts={number}"], env=scaffold_env, stderr=subprocess.PIPE, text=True
        )
        for number in (11, 12, 13)
    ]
    errors = {number: run.communicate()[1] for number, run in zip((11, 12, 13), runs, strict=True)}
    winner = [number for number, run in zip((11, 12, 13), runs, strict=True) if run.returncode == 0]
    assert len(winner) == 1, errors
    assert all("error: " in text and "Traceback" not in text for n, text in errors.items() if n not in winner)
    assert f"max_restarts: {winner[0]}\n" in (destination / ".copier-answers.yml").read_text()
    assert [path.name for path in destination.parent.iterdir()] == ["demo"]
    found = tree(destination)
    if kind != "empty repository":
        assert git(destination, "status", "--porcelain") == ""
        assert sorted(git(destination, "ls-files").splitlines()) == sorted(found)
    again = [*SCAFFOLD, "new", "demo", "-y", "--set", f"max_restarts={winner[0]}"]
    (work / "again").mkdir()
    subprocess.run(again, cwd=work / "again", env=scaffold_env, check=True, stdout=subprocess.DEVNULL)
    assert tree(work / "again" / "demo") == found


@pytest.mark.parametrize("kind", DESTINATIONS)
def test_of_three_at_the_last_moment_one_wins(work, staged, kind):
    destination = prepare(work, kind)
    ready = Barrier(3)

    def publish(number: int) -> str:
        try:
            with publishing(staged, destination) as project:
                (project / "README.md").write_text(f"{number}\n")
                ready.wait(timeout=30)
        except ScaffoldError as error:
            return error.message
        return ""

    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(publish, range(3)))
    assert done.count("") == 1
    assert [message for message in done if message] == [
        f"{destination} cannot be written: others wrote to it meanwhile"
    ] * 2
    winner = f"{done.index('')}\n".encode()
    assert tree(destination) == {"README.md": winner, "src/x.py": b"staged\n", "zzz": winner}
    assert sorted(p.name for p in destination.iterdir() if p.name != ".git") == ["README.md", "src", "zzz"]


@pytest.mark.parametrize("kind", DESTINATIONS)
@pytest.mark.parametrize("name", ["README.md", "src/precious.py", "zzz"])
def test_what_others_write_meanwhile_stays_and_nothing_else(work, staged, kind, name):
    destination = prepare(work, kind)
    theirs = destination / name
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ScaffoldError, match="others wrote to it meanwhile"))
        stack.enter_context(publishing(staged, destination))
        theirs.parent.mkdir(parents=True, exist_ok=True)
        theirs.write_text("theirs\n")
    assert tree(destination) == {name: b"theirs\n"}
    assert {p.name for p in destination.iterdir()} <= {Path(name).parts[0], ".git"}


@pytest.mark.parametrize("kind", DESTINATIONS)
def test_failure_leaves_what_was_there(work, staged, kind):
    destination = prepare(work, kind)
    before = sorted(work.rglob("*"))
    with pytest.raises(ZeroDivisionError), publishing(staged, destination):
        raise ZeroDivisionError
    assert sorted(work.rglob("*")) == before


# ------------------------------------------------------------------------------------------------------------ signals
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", ["clone", "commit"])
def test_signal_leaves_nothing(work, scaffold_env, tmp_path, number, moment):
    """Sent by a git that is told to do something: while copier reads the template, and while the project is made."""
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "git"
    wrapper.write_text(
        f'#!/bin/sh\nfor word in "$@"; do [ "$word" = {moment} ] && kill -{int(number)} $PPID; done\n'
        f'exec {shutil.which("git")} "$@"\n'
    )
    wrapper.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    env = scaffold_env | {"PATH": f"{tmp_path / 'bin'}:{scaffold_env['PATH']}", "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run([*SCAFFOLD, "new", "a/demo", "-y"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted, nothing was left behind\n")
    assert list(work.iterdir()) == []
    assert list((tmp_path / "tmp").iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- output
def shell(command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    line = command.replace("ddp-scaffold", " ".join(SCAFFOLD))
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("option", every(2, ["-y", "--json"]))
def test_full_disk_below_stdout(work, scaffold_env, option):
    done = shell(f"ddp-scaffold new demo {option} > /dev/full", scaffold_env)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "error: stdout cannot be written: No space left on device"
    assert len(done.stderr.splitlines()) == 2
    assert git(work / "demo", "status", "--porcelain") == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "command", every(2, ["presets list", "presets show local", "--help", "--version", "nope --json"])
)
def test_full_disk_below_every_command(work, scaffold_env, command):
    done = shell(f"ddp-scaffold {command} > /dev/full", scaffold_env)
    assert done.returncode in (1, 2)
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]
    assert shell(f"ddp-scaffold {command} 2> /dev/full", scaffold_env).returncode in (0, 2)


@pytest.mark.parametrize("command", every(3, ["new demo -y", "new demo --json", "presets list", "--help"]))
def test_reader_that_leaves_early_is_no_error_to_tell(work, scaffold_env, command):
    done = shell(f"ddp-scaffold {command} | true", scaffold_env)
    assert done.returncode in (0, 1)  # 0: it was faster than `true`
    assert done.stderr == ""
    if "demo" in command:
        assert git(work / "demo", "status", "--porcelain") == ""


def test_closed_streams(work, scaffold_env):
    done = shell("ddp-scaffold new demo -y >&-", scaffold_env)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "error: stdout is closed")
    assert list(work.iterdir()) == []
    assert shell("ddp-scaffold new demo <&- 2>&-", scaffold_env).returncode == 0
    assert shell("ddp-scaffold new demo <&- 2>&-", scaffold_env).returncode == 1


def test_names_that_the_locale_cannot_print(work, scaffold_env):
    done = shell("ddp-scaffold new \u03b1 -y --set project_name=x", scaffold_env | {"PYTHONIOENCODING": "latin-1"})
    assert done.returncode == 0, done.stderr
    assert " files written to \\u03b1. Next:" in done.stdout
