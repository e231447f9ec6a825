"""What must be right before an update begins. Each refusal is exit 3, says what to do, and touches nothing."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from cross_section import every
from update_helpers import change, commit, git, make, record, state, update


@pytest.fixture
def project(history_of_two: Path, tmp_path: Path) -> Path:
    return make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})


def refused(done, *words: str) -> None:
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 3, done.stdout + done.stderr
    assert lines[-2].startswith("error: ")
    assert lines[-1].startswith("hint: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_no_project(two, tmp_path):
    refused(update(two, tmp_path), "no project of ddp-scaffold")


def test_no_repository(two, project):
    shutil.rmtree(project / ".git")
    refused(update(two, project), "not in a git repository", "git init")


def test_a_repository_of_another_owner(two, project):
    """As in a group's shared directory: git's own words, and its hint, which works."""
    if os.getuid() == 0:
        for path in (project, project / ".git"):
            os.chown(path, 12345, 12345)
        theirs = {}
    else:
        theirs = {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"}
    done = update(two, project, **theirs)
    refused(done, "detected dubious ownership", f"git config --global --add safe.directory {project}")
    assert "git init" not in done.stderr
    assert not (project / "tests" / "added.py").exists()
    if os.getuid() == 0:
        trusted = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": str(project)}
        assert update(two, project, **trusted).returncode == 0


def test_a_repository_that_git_cannot_read(two, project):
    git(project, "config", "core.repositoryFormatVersion", "9")
    refused(update(two, project), "Expected git repo version <= 1, found 9")


def test_gits_words_do_not_depend_on_the_language(two, project, tmp_path):
    """A git that speaks another language unless it is told not to, for here it may have no other one installed."""
    wrapper = tmp_path / "bin" / "git"
    wrapper.parent.mkdir()
    real = shutil.which("git")
    wrapper.write_text(
        '#!/bin/sh\ncase "$LC_ALL $*" in\n'
        '"C "*) ;;\n'
        f'*"rev-parse --show-toplevel") {real} "$@" 2>/dev/null && exit\n'
        f'  echo "fatal: Kein Git-Repository" >&2; exit 128;;\nesac\nexec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    shutil.rmtree(project / ".git")
    german = {"LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de", "PATH": f"{wrapper.parent}:{os.environ['PATH']}"}
    refused(update(two, project, **german), "not in a git repository", "git init")


def test_no_commit(two, project):
    shutil.rmtree(project / ".git")
    git(project, "init", "--quiet")
    refused(update(two, project), "no commit yet")


@pytest.mark.parametrize("kind", ["changed", "staged", "unknown"])
def test_not_committed(two, project, kind):
    path = project / ("new.txt" if kind == "unknown" else "README.md")
    path.write_text("Mine.\n")
    if kind == "staged":
        git(project, "add", "README.md")
    before = state(project)
    refused(update(two, project), path.name, "git stash")
    assert state(project) == before


def test_answers_edited_by_hand(two, project):
    change(project / ".copier-answers.yml", "max_restarts: 3", "max_restarts: 9")
    commit(project)
    before = state(project)
    refused(update(two, project), "edited by hand", "--set max_restarts=9")
    assert state(project) == before
    git(project, "revert", "--no-edit", "HEAD")
    done = update(two, project, "--set", "max_restarts=9")
    assert done.returncode == 0, done.stderr
    assert "MAX_RESTARTS:-9" in (project / "launch" / "torchrun.sh").read_text()


def test_answers_with_windows_line_endings_are_not_edited(two, project):
    answers = project / ".copier-answers.yml"
    git(project, "config", "core.autocrlf", "true")
    answers.write_bytes(answers.read_bytes().replace(b"\n", b"\r\n"))
    git(project, "add", "--renormalize", ".")
    assert update(two, project).returncode == 0


@pytest.mark.parametrize("line", ["_src_path", "_commit"])
def test_answers_without_a_source(two, project, line):
    answers = project / ".copier-answers.yml"
    answers.write_text("".join(one for one in answers.read_text().splitlines(True) if not one.startswith(line)))
    commit(project)
    refused(update(two, project), f"has no {line}")


def test_answers_with_a_tag_of_python(two, project):
    answers = project / ".copier-answers.yml"
    answers.write_text(re.sub(r" Checked by that command: \w+", "", answers.read_text()))
    change(answers, "project_name: demo", "project_name: !!python/name:os.system demo")
    commit(project)
    done = update(two, project)
    refused(done, ".copier-answers.yml:", "python/name:os.system")
    assert "bug" not in done.stderr


def test_answers_that_are_no_yaml(two, project):
    (project / ".copier-answers.yml").write_text("a: [\n")
    commit(project)
    done = update(two, project)
    assert done.returncode in (2, 3)
    assert "Traceback" not in done.stderr


def test_answers_that_are_not_committed(two, project):
    (project / ".gitignore").write_text((project / ".gitignore").read_text() + ".copier-answers.yml\n")
    git(project, "rm", "--quiet", "--cached", ".copier-answers.yml")
    commit(project)
    refused(update(two, project), ".copier-answers.yml is not committed", "git add -f")


def test_a_project_ahead_of_this_installation(two, project):
    record(project, "_commit", "v98.7.0")
    commit(project)
    refused(update(two, project), "the project is at v98.7.0", "pip install --upgrade")


def test_a_project_of_an_unknown_commit(two, project):
    record(project, "_commit", "a" * 40)
    commit(project)
    refused(update(two, project), "none of the releases", "--template")


def test_a_template_that_is_gone(two, project):
    record(project, "_src_path", "/nowhere/at/all")
    commit(project)
    done = update(two, project, "--template", "/nowhere/at/all")
    assert done.returncode in (1, 3)
    assert "/nowhere/at/all" in done.stderr
    assert "Traceback" not in done.stderr


def test_to(two, project):
    refused(update(two, project, "--to", "97.1.1"), "--to 97.1.1: there is no such release", "v98.1.0")
    assert "nothing to do" in update(two, project, "--to", "98.0.0").stdout
    assert update(two, project, "--to", "v98.1.0").returncode == 0
    commit(project)
    refused(update(two, project, "--to", "98.0.0"), "projects are not taken back", "git revert")


@pytest.mark.parametrize(
    ("pair", "words"),
    every(
        3,
        [
            ("model=diffusion", "Make a new project with --model"),
            ("package=other", "the next update records the new name"),
            ("collective_timeout_s=600", "configs/train.yaml"),
            ("tracker=wandb", "log.tracker"),
            ("max_restart=1", "Did you mean max_restarts?"),
            ("max_restarts=-1", "must be from 0 to 100"),
            ("max_restarts=many", "is not a whole number"),
            ("known={}", "follows from other answers"),
            ("account=x; rm -rf ~", ""),
        ],
        others=pytest.mark.long,
    ),
)
def test_answers_that_cannot_be(two, project, pair, words):
    before = state(project)
    refused(update(two, project, "--set", pair), words)
    assert state(project) == before


def test_wrong_options(two, project):
    done = update(two, project, "--nonsense")
    assert done.returncode == 3
    assert "--nonsense" in done.stderr


@pytest.mark.parametrize("content", ["{name: mine}", "{name: mine, extends: local, colour: blue}", "text"])
def test_a_wrong_preset_by_its_content(two, project, content):
    before = state(project)
    done = update(two, project, "--preset", "own", "--set", f"preset_file={content}")
    refused(done, "--set preset_file: ")
    assert "unexpected" not in done.stderr
    assert state(project) == before
