"""What somebody else does to the project while it is updated stays as they left it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from update_helpers import commit, git, make, only_test, state, update


@pytest.fixture
def project(history_of_two: Path, tmp_path: Path) -> Path:
    return make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})


def wrapper(tmp_path: Path, script: str) -> str:
    """A git that does `script` before `read-tree -m -u`; returns the PATH that has it first."""
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / "git"
    file.write_text(f'#!/bin/sh\ncase "$1 $2 $3" in "read-tree -m -u") {script};; esac\nexec {real} "$@"\n')
    file.chmod(0o755)
    return f"{file.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("staged", [False, True])
def test_a_file_saved_while_the_update_runs(two, project, tmp_path, staged):
    add = "; /usr/bin/env -u GIT_DIR $(command -v -p git || echo git) add README.md" if staged else ""
    path = wrapper(tmp_path, f"echo '# precious' >>README.md{add}")
    done = update(two, project, PATH=path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert (project / "README.md").read_text().endswith("# precious\n")
    assert git(project, "status", "--porcelain").split() in (["M", "README.md"], ["MM", "README.md"])


def test_tests_that_fail_put_all_back_in_a_monorepo(two, history_of_two, tmp_path):
    top = tmp_path / "top"
    project = make(history_of_two, "98.0.0", top / "apps" / "demo", {"model": "custom"})
    shutil.rmtree(project / ".git")
    git(top, "init", "--quiet", "--initial-branch=main")
    only_test(project, "def test_it():\n    assert False\n")
    before = state(project)
    done = update(two, project, "--test", VENV=str(Path(sys.executable).parents[1]))
    assert done.returncode == 3, done.stderr
    assert state(project) == before


def test_an_edit_made_while_the_tests_run(two, project):
    only_test(project, "def test_it():\n    open('README.md', 'a').write('# precious')\n    assert False\n")
    done = update(two, project, "--test", VENV=str(Path(sys.executable).parents[1]))
    assert done.returncode == 3
    assert (project / "README.md").read_text().endswith("# precious")
    assert "README.md was changed meanwhile, and stays as it is" in done.stderr


def note_of(project: Path, **fields: object) -> Path:
    head = git(project, "rev-parse", "HEAD").strip()
    note = project / ".git" / "ddp-scaffold-update.json"
    note.write_text(json.dumps({"head": head, "tree": head, "paths": ["README.md"], **fields}))
    return note


def test_a_project_that_has_gone_on_is_not_put_back(two, project):
    note = note_of(project)
    (project / "README.md").write_text("Mine.\n")
    commit(project)
    done = update(two, project, "--dry-run")
    assert done.returncode == 2, done.stderr
    assert (project / "README.md").read_text() == "Mine.\n"
    assert not note.exists()


def test_an_edit_after_an_update_that_was_cut_off(two, project):
    note_of(project)
    (project / "README.md").write_text("Mine, and in no commit.\n")
    done = update(two, project)
    assert done.returncode == 3
    assert "not committed" in done.stderr
    assert (project / "README.md").read_text() == "Mine, and in no commit.\n"


def test_a_dry_run_does_not_put_back(two, project):
    note = note_of(project)
    done = update(two, project, "--dry-run")
    assert done.returncode == 3
    assert "without --dry-run" in done.stderr
    assert note.exists()


def test_a_note_that_is_empty(two, project):
    (project / ".git" / "ddp-scaffold-update.json").write_text("")
    assert update(two, project).returncode == 0


def test_another_git_at_work(two, project):
    (project / ".git" / "index.lock").touch()
    done = update(two, project)
    assert done.returncode == 3
    assert "another git is at work" in done.stderr
    assert (project / ".git" / "index.lock").exists()


def test_a_merge_under_way(two, project):
    (project / ".git" / "MERGE_HEAD").write_text(git(project, "rev-parse", "HEAD"))
    done = update(two, project)
    assert done.returncode == 3
    assert "a merge is under way" in done.stderr


def test_variables_of_git_hooks_are_ignored(two, project, tmp_path):
    variables = {"GIT_INDEX_FILE": str(tmp_path / "index"), "GIT_OBJECT_DIRECTORY": str(tmp_path / "objects")}
    assert update(two, project, **variables).returncode == 0


def test_lines_that_attributes_would_convert_stay_in_files_of_ones_own(two, project):
    for name in ("configs/train.yaml", "Makefile"):
        path = project / name
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    (project / "data.csv").write_bytes(b"a,b\r\n1,2\r\n")
    commit(project)
    with (project / ".gitattributes").open("a") as file:
        file.write("* text=auto\n")
    commit(project)
    done = update(two, project)
    assert done.returncode == 0, done.stdout + done.stderr
    staged = git(project, "diff", "--staged", "--name-only").split()
    assert not {"configs/train.yaml", "data.csv", "Makefile"} & set(staged)


@pytest.mark.parametrize("commit_named", ["HEAD", "main"])
def test_a_commit_that_is_none(two, project, commit_named):
    answers = project / ".copier-answers.yml"
    answers.write_text(answers.read_text().replace("_commit: v98.0.0", f"_commit: {commit_named}"))
    commit(project)
    done = update(two, project)
    assert done.returncode == 3
    assert "no release" in done.stderr
