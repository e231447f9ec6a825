"""Two updates of one project at once: the second is refused, and a lock whose holder was killed is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from update_helpers import git, make, state, update

LOCK = Path(".git", "ddp-scaffold-update.lock")


@pytest.fixture
def project(history_of_two: Path, tmp_path: Path) -> Path:
    return make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})


@pytest.fixture
def waiting(two, project, tmp_path):
    """An update that stands still just before it writes, until the file `go` is there."""
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    wrapper = tmp_path / "bin" / "git"
    wrapper.parent.mkdir()
    os.mkfifo(tmp_path / "go")
    os.mkfifo(tmp_path / "there")
    wrapper.write_text(
        f'#!/bin/sh\ncase "$1 $2 $3" in "read-tree -m -u") echo $$ >{tmp_path}/there; cat {tmp_path}/go;; esac\n'
        f'exec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    variables = {**os.environ, "PYTHONPATH": str(two / "scaffold"), "PATH": f"{wrapper.parent}:{os.environ['PATH']}"}
    variables["TMPDIR"] = str(tmp_path)  # one that is killed cleans up nothing
    command = [sys.executable, "-m", "ddp_scaffold", "update"]
    child = subprocess.Popen(command, cwd=project, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    writer = int((tmp_path / "there").read_text())  # waits for it
    group = os.getpgid(writer)  # of its own: it outlives an update that is killed
    assert group not in (os.getpgid(0), os.getpgid(child.pid))
    yield child
    if child.poll() is None:
        child.kill()
    child.communicate()
    with suppress(ProcessLookupError):  # mostly it has ended
        os.killpg(group, signal.SIGKILL)


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_two_updates_at_once(two, project, waiting, tmp_path, options):
    before = state(project)
    done = update(two, project, *options)
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"another update of this project is at work: process {waiting.pid} on " in done.stderr
    assert state(project) == before
    (tmp_path / "go").write_text("")
    output, error = waiting.communicate()
    assert waiting.returncode == 0, error
    assert "All changes are staged." in output.decode()
    assert "# The fix of 98.1.0." in (project / "src/demo/ddp/guard.py").read_text()
    assert not (project / LOCK).exists()


def test_the_git_that_outlives_a_killed_update_has_the_lock(two, project, waiting, tmp_path):
    os.kill(waiting.pid, signal.SIGKILL)
    waiting.wait()
    done = update(two, project)
    assert done.returncode == 3
    assert f"process {waiting.pid} on " in done.stderr
    (tmp_path / "go").write_text("")  # and it ends its work
    deadline = time.monotonic() + 30
    while "# The fix of 98.1.0." not in (project / "src/demo/ddp/guard.py").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_lock_whose_holder_is_gone(two, project):
    (project / LOCK).write_text("process 1 on another-host")
    assert update(two, project).returncode == 0
    assert not (project / LOCK).exists()


def test_a_dry_run_of_a_project_that_cannot_be_written(two, project, tmp_path):
    """As of somebody else: a lock that cannot be taken stops nobody who only looks."""
    lock = project / LOCK
    lock.mkdir()  # root may write everywhere, but not here
    done = update(two, project, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "do not run two updates of this project at once" in done.stderr


def test_work_trees_have_a_lock_each(two, project, waiting, tmp_path):
    git(project, "worktree", "add", "--quiet", str(tmp_path / "other"))
    done = update(two, tmp_path / "other")
    assert done.returncode == 0, done.stderr
    (tmp_path / "go").write_text("")
    waiting.communicate()
    assert waiting.returncode == 0
