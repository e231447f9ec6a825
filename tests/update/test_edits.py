"""Answers files that somebody edited: noticed, and the hint does the same in a way that reaches the other files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cross_section import every
from update_helpers import change, commit, git, make, record, state, update

ANSWERS = ".copier-answers.yml"


@pytest.fixture
def project(history_of_two: Path, tmp_path: Path) -> Path:
    return make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})


def edit(project: Path, old: str, new: str, name: str = ANSWERS) -> None:
    change(project / name, old, new)
    commit(project)


def refused(repository: Path, project: Path, *words: str) -> str:
    """Assert that an update is refused, in two lines, and that it touches nothing; return the hint."""
    before = state(project)
    done = update(repository, project)
    assert done.returncode == 3, done.stdout + done.stderr
    assert state(project) == before
    *_, error, hint = done.stderr.strip().splitlines()
    assert error.startswith("error: ")
    for word in words:
        assert word in done.stderr
    return hint.removeprefix("hint: ")


def follow(repository: Path, project: Path, hint: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Type what a hint says, letter by letter, but for the remarks in brackets at its end."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin" / "ddp-scaffold").write_text(f'#!/bin/sh\nexec {sys.executable} -m ddp_scaffold "$@"\n')
    (tmp_path / "bin" / "ddp-scaffold").chmod(0o755)
    variables = {**os.environ, "PYTHONPATH": str(repository / "scaffold")}
    variables["PATH"] = f"{tmp_path / 'bin'}:{variables['PATH']}"
    line = re.sub(r"( \([^()]*\))+$", "", hint.replace("; then: ", " && "))
    return subprocess.run(["sh", "-c", line], cwd=project, env=variables, capture_output=True, text=True, check=False)


def test_what_a_hint_says_makes_the_change(two, project, tmp_path):
    edit(project, "max_restarts: 3", "max_restarts: 9")
    hint = refused(two, project, "was edited by hand", "max_restarts", "--set max_restarts=9")
    done = follow(two, project, hint, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "MAX_RESTARTS:-9" in (project / "launch" / "torchrun.sh").read_text()
    assert "_commit: v98.1.0" in (project / ANSWERS).read_text()


def test_of_a_further_cluster(two, project, tmp_path):
    assert update(two, project, "--add", "generic-slurm").returncode == 0
    commit(project)
    edit(project, "nodes: 2", "nodes: 5", ".copier-answers.generic-slurm.yml")
    hint = refused(two, project, "--cluster generic-slurm --set nodes=5")
    done = follow(two, project, hint, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--nodes=5" in (project / "launch-generic-slurm" / "train.sbatch").read_text()


def test_another_preset_with_its_answers(two, project, tmp_path):
    edit(project, "preset: local", "preset: generic-slurm\nnodes: 5")
    done = follow(two, project, refused(two, project), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--nodes=5" in (project / "launch" / "train.sbatch").read_text()


def test_what_is_settled_is_not_proposed(two, project, tmp_path):
    change(project / ANSWERS, "max_restarts: 3", "max_restarts: 9\nno_question: 1")
    edit(project, "package: demo", "package: other")
    hint = refused(two, project, "--set max_restarts=9", "the next update records the new name")
    assert "--set package" not in hint
    assert "no_question=" not in hint
    done = follow(two, project, hint, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (project / "src" / "demo" / "ddp" / "guard.py").is_file()


@pytest.mark.parametrize("line", every(2, ["_commit", "max_restarts"], others=pytest.mark.long))
def test_without_the_check_line(two, project, tmp_path, line):
    values = {"_commit": "v98.1.0", "max_restarts": "9"}
    text = re.sub("(?m)^#.*\n", "", (project / ANSWERS).read_text())
    (project / ANSWERS).write_text(re.sub(rf"(?m)^{line}: .*$", f"{line}: {values[line]}", text))
    commit(project)
    hint = refused(two, project, "edited by hand", line)
    done = follow(two, project, hint, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "# The fix of 98.1.0." in (project / "src" / "demo" / "ddp" / "guard.py").read_text()


def test_a_formatter_changes_no_answer(two, project):
    text = (project / ANSWERS).read_text()
    (project / ANSWERS).write_text("---\n" + re.sub("(?m)^(model|preset): (.*)$", r'\1: "\2"', text))
    commit(project)
    assert update(two, project).returncode == 0


@pytest.mark.parametrize("also", every(2, [True, False], others=pytest.mark.long))
def test_another_commit(two, project, tmp_path, also):
    """The fixes in between would never come."""
    if also:
        (project / "notes.md").write_text("Mine.\n")
    edit(project, "_commit: v98.0.0", "_commit: v98.1.0")
    hint = refused(two, project, "edited by hand", "_commit")
    done = follow(two, project, hint, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "# The fix of 98.1.0." in (project / "src" / "demo" / "ddp" / "guard.py").read_text()


def test_another_source_needs_to_be_named(two, history_of_two, project):
    old = "_src_path: https://github.com/ddp-scaffold/ddp-scaffold.git"
    edit(project, old, "_src_path: https://example.invalid/moved.git")
    hint = refused(two, project, "_src_path")
    assert "--template https://example.invalid/moved.git" in hint
    done = update(two, project, "--template", str(history_of_two))
    assert done.returncode == 0, done.stderr
    assert "_src_path: https://example.invalid/moved.git" in (project / ANSWERS).read_text()
    commit(project)
    record(project, "_src_path", "https://example.invalid/again.git")
    change(project / ANSWERS, "_src_path: https://example.invalid/again.git", old)
    commit(project)
    assert update(two, project).returncode == 0  # back to the public one: that needs nobody's consent


@pytest.fixture
def old_project(history_of_now: Path, tmp_path: Path) -> Path:
    """A project of a release whose check does not cover `_commit`."""
    return make(history_of_now, "0.1.0", tmp_path / "old", {"model": "custom"})


@pytest.mark.long  # test_the_oldest_release goes the same way in one step
def test_a_project_of_an_older_release_is_accepted(now, old_project):
    assert update(now, old_project, "--to", "0.3.0").returncode == 0
    commit(old_project)
    assert update(now, old_project).returncode == 0


def test_another_commit_in_a_project_of_an_older_release(now, old_project, tmp_path):
    edit(old_project, "_commit: v0.1.0", "_commit: v0.3.1")
    hint = refused(now, old_project, "_commit became v0.3.1 without a file of that release")
    done = follow(now, old_project, hint, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "From v0.1.0" in done.stdout


@pytest.mark.long  # the same as of a project of today, and slower
def test_an_edited_answer_in_a_project_of_an_older_release(now, old_project, tmp_path):
    edit(old_project, "max_restarts: 3", "max_restarts: 9")
    hint = refused(now, old_project, "--set max_restarts=9")
    assert follow(now, old_project, hint, tmp_path).returncode == 0


def test_an_edit_that_is_older_than_the_history(two, project):
    change(project / ANSWERS, "max_restarts: 3", "max_restarts: 9")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--amend", "--message", "begin")
    assert "Put it back as the template wrote it" in refused(two, project)


def test_a_recorded_name_that_a_release_no_longer_takes(two, history_of_two, tmp_path):
    """The hint must not propose what is refused as settled."""
    project = make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})
    git(project, "mv", "src/demo", "src/torch")
    record(project, "package", "torch")
    commit(project)
    hint = refused(two, project, "package: ", "name of a module")
    assert "--set package" not in hint
