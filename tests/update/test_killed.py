"""An update that is interrupted at any moment leaves the project as it was, or complete."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from update_helpers import commit, git, make, state, tree, update

MOMENTS = 12


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_killed_at_random_moments(two, history_of_two, tmp_path, number):
    project = make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})
    with (project / "src/demo/ddp/guard.py").open("a") as file:
        file.write("\n# Mine.\n")
    commit(project)
    before = state(project)
    began = time.monotonic()
    assert update(two, project).returncode == 0
    takes = time.monotonic() - began
    complete = tree(project)
    git(project, "reset", "--quiet", "--hard")
    assert state(project) == before
    seen = set()
    chance = random.Random(int(number))
    # Half of them where it writes: in the last part of the run.
    moments = [chance.uniform(0.0, takes) for _ in range(MOMENTS // 2)]
    moments += [chance.uniform(0.75 * takes, 1.1 * takes) for _ in range(MOMENTS - len(moments))]
    for moment in moments:
        variables = {**os.environ, "PYTHONPATH": str(two / "scaffold")}
        command = [sys.executable, "-m", "ddp_scaffold", "update"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        child = subprocess.Popen(command, cwd=project, env=variables, start_new_session=True, **quiet)
        try:
            child.wait(moment)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, number)
            child.wait()
        settled(project)
        if state(project) == before:
            seen.add("before")
        else:
            assert tree(project) == complete, f"half an update, {moment:.2f} s of {takes:.2f}"
            seen.add("complete")
            git(project, "reset", "--quiet", "--hard")
        assert git(project, "fsck", "--no-dangling").strip() == ""
        assert not (project / ".git" / "index.lock").exists()
    assert "before" in seen
    assert update(two, project).returncode == 0


def settled(project: Path) -> None:
    """Wait until the git that writes the update, in a session of its own, is done."""
    deadline = time.monotonic() + 10
    while (project / ".git" / "ddp-scaffold-update.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_git_is_killed_in_the_middle(two, history_of_two, tmp_path, monkeypatch):
    """What only a power failure does: files half written, a lock, and the note. The next update puts all back."""
    project = make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})
    before = state(project)
    fake = tmp_path / "bin"
    fake.mkdir()
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    # read-tree writes two files, takes the lock, and is gone.
    (fake / "git").write_text(
        f'#!/bin/sh\nif [ "$1 $3" = "read-tree -u" ] && [ ! -e {fake}/done ]; then touch {fake}/done\n'
        f"git show HEAD:README.md | head -c 100 >README.md; printf '# A new' >tests/added.py\n"
        f'touch .git/index.lock; kill -9 $PPID; exit 1; fi\nexec {real} "$@"\n'
    )
    (fake / "git").chmod(0o755)
    cut = update(two, project, PATH=f"{fake}:{os.environ['PATH']}")
    assert cut.returncode == 3, cut.stdout + cut.stderr
    (project / ".git" / "index.lock").unlink(missing_ok=True)
    assert state(project) == before
    done = update(two, project)
    assert done.returncode == 0, done.stderr


def test_a_note_of_an_update_that_was_cut_off(two, history_of_two, tmp_path):
    import json

    project = make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})
    head = git(project, "rev-parse", "HEAD").strip()
    (project / "README.md").write_text("half\n")
    (project / "tests" / "added.py").write_text("new\n")
    tree = subprocess.run("git add -A && git write-tree", shell=True, cwd=project, capture_output=True, text=True)
    git(project, "reset", "--quiet")
    note = {"head": head, "tree": tree.stdout.strip(), "paths": ["README.md", "tests/added.py"]}
    (project / ".git" / "ddp-scaffold-update.json").write_text(json.dumps(note))
    done = update(two, project)
    assert done.returncode == 0, done.stderr
    assert "an earlier update was cut off" in done.stderr
    assert "half" not in (project / "README.md").read_text()
