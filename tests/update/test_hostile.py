"""Templates that somebody else wrote, and projects that name one: none of them runs code of its author's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cross_section import every
from update_helpers import URL, change, commit, copier, git, make, record, state, update

from ddp_scaffold.template.harmless import NOT_RENDERED

# Two ways in which git comes to run a program.
CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = {mode}\n\tbare = false\n\tfsmonitor = {script}\n{more}"
CONFIG += '[filter "x"]\n\tclean = {script}; cat\n'


@pytest.fixture
def fork(template_repo: Path, tmp_path: Path) -> Path:
    """A template whose own `_exclude` does not leave out what ours does."""
    git(tmp_path, "clone", "--quiet", str(template_repo), "fork")
    for pattern in NOT_RENDERED:
        change(tmp_path / "fork" / "copier.yml", f'  - "{pattern}"\n', "")
    change(tmp_path / "fork" / "templates" / "project" / ".gitattributes.jinja", "\n", "\n*.txt filter=x\n")
    release(tmp_path / "fork", "v98.0.0")
    return tmp_path / "fork"


@pytest.fixture
def project(fork: Path, tmp_path: Path) -> Path:
    """A project of the fork, made while it was harmless."""
    done = new(fork, tmp_path / "demo")
    assert done.returncode == 0, done.stderr
    return tmp_path / "demo"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A program that git runs if a template can make it: it leaves `ran` beside itself."""
    path = tmp_path / "script.sh"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    path.chmod(0o755)
    return path


def new(fork: Path, project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_scaffold", "new", str(project), "-y", "--set", "model=custom"]
    variables = {**os.environ, "PYTHONPATH": str(fork / "scaffold")}
    command += ["--template", str(fork)]
    return subprocess.run(command, env=variables, cwd=project.parent, capture_output=True, text=True, check=False)


def release(fork: Path, version: str = "v99.0.0") -> None:
    git(fork, "add", "--all", "--force")
    git(fork, "commit", "--quiet", "--message", "A release")
    git(fork, "tag", "--annotate", "--message", "Release", version)


def git_directory(folder: Path, config: str, name: str = "{{ '.git' }}") -> None:
    (folder / name / "objects").mkdir(parents=True)
    (folder / name / "refs").mkdir()
    (folder / name / "objects" / "x").touch()
    (folder / name / "refs" / "x").touch()
    (folder / name / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / name / "config").write_text(config)


def at_the_root(folder: Path, script: Path) -> None:
    (folder / "{{ '.git' }}").mkdir()
    (folder / "{{ '.git' }}" / "config").write_text(CONFIG.format(mode="true", script=script, more=""))


def in_capitals(folder: Path, script: Path) -> None:
    (folder / "{{ '.GiT' }}").mkdir()
    (folder / "{{ '.GiT' }}" / "config").write_text(CONFIG.format(mode="true", script=script, more=""))


def deep_inside(folder: Path, script: Path) -> None:
    git_directory(folder / "tests", CONFIG.format(mode="true", script=script, more=""))


def as_a_file(folder: Path, script: Path) -> None:
    (folder / "tests" / "{{ '.git' }}").write_text("gitdir: ../launch\n")


def on_windows(folder: Path, script: Path) -> None:
    git_directory(folder, CONFIG.format(mode="true", script=script, more=""), "{{ 'GIT~1' }}")


def without_its_name(folder: Path, script: Path) -> None:
    """The project's directory itself as a bare repository, which git finds if there is no .git yet."""
    config = CONFIG.format(mode="false", script=script, more="\tworktree = .\n")
    git_directory(folder, config, "{{ 'x' if false }}")
    for entry in (folder / "{{ 'x' if false }}").iterdir():
        entry.rename(folder / entry.name)
    (folder / "{{ 'x' if false }}").rmdir()


HIDDEN = [at_the_root, in_capitals, deep_inside, as_a_file, on_windows, without_its_name]


def of_git(project: Path) -> list[str]:
    """Return what git, on any file system, would take for its own, besides the repository itself."""
    names = (".git", "git~1", "head")
    found = (path.relative_to(project) for path in project.rglob("*"))
    return [str(path) for path in found if path.parts[0] != ".git" and path.name.lower() in names]


@pytest.mark.parametrize("hide", every(3, HIDDEN, others=pytest.mark.long))
def test_git_directories_are_never_rendered(fork, project, script, tmp_path, hide: Callable[[Path, Path], None]):
    hide(fork / "templates" / "project", script)
    (fork / "templates" / "project" / "ADDED.txt").write_text("A new file.\n")
    release(fork)
    for words in (["--dry-run"], ["-y"]):
        done = update(fork, project, "--template", str(fork), *words)
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "ran").exists()
    assert (project / "ADDED.txt").is_file()
    assert not of_git(project)
    done = new(fork, tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "other" / "ADDED.txt").is_file()
    assert not of_git(tmp_path / "other")


def test_a_hostile_release_between_two_harmless_ones(fork, project, script, tmp_path):
    """The old release is rendered by an update as well."""
    at_the_root(fork / "templates" / "project", script)
    (fork / "templates" / "project" / "notes.txt").write_text("A file for the filter.\n")
    release(fork, "v99.0.0")
    record(project, "_commit", "v99.0.0")
    commit(project)
    git(fork, "revert", "--no-edit", "HEAD")
    (fork / "templates" / "project" / "ADDED.txt").write_text("A new file.\n")
    release(fork, "v99.1.0")
    done = update(fork, project, "-y", "--template", str(fork))
    assert done.returncode == 0, done.stderr
    assert (project / "ADDED.txt").is_file()
    assert not (tmp_path / "ran").exists()


def through_a_link(fork: Path) -> str:
    folder = fork / "templates" / "project"
    with (fork / "copier.yml").open("a") as file:
        file.write("\n_preserve_symlinks: true\n")
    (folder / "aaa").symlink_to(".git")
    (folder / "{{ pathjoin('aaa', 'config') }}").write_text("Through the link.\n")
    return "templates/project/aaa"


def by_other_delimiters(fork: Path) -> str:
    change(fork / "copier.yml", "  trim_blocks: true\n", '  trim_blocks: true\n  line_comment_prefix: "."\n')
    return "_envops"


@pytest.mark.parametrize("way", [through_a_link, by_other_delimiters])
def test_ways_around_are_refused(fork, project, tmp_path, way: Callable[[Path], str]):
    named = way(fork)
    release(fork)
    before = state(project)
    for words in (["--dry-run"], ["-y"]):
        done = update(fork, project, "--template", str(fork), *words)
        assert done.returncode == 3, done.stderr
        assert named in done.stderr
    assert state(project) == before
    done = new(fork, tmp_path / "other")
    assert done.returncode == 1
    assert named in done.stderr
    assert not (tmp_path / "other").exists()


def test_a_project_with_a_link_into_its_git_directory(two, history_of_two, tmp_path):
    project = make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})
    git(project, "rm", "--quiet", "-r", "launch")
    (project / "launch").symlink_to(".git/hooks")
    commit(project)
    before = state(project)
    done = update(two, project)
    assert done.returncode == 3, done.stderr
    assert "launch is a symbolic link into a .git directory" in done.stderr
    assert state(project) == before


def test_plain_copier_renders_no_git_directory_of_ours(template_repo, tmp_path):
    """A slip of ours, that is, since `_exclude` is the template's own."""
    git(tmp_path, "clone", "--quiet", str(template_repo), "slip")
    deep_inside(tmp_path / "slip" / "templates" / "project", tmp_path / "script.sh")
    release(tmp_path / "slip")
    words = ["copy", "--defaults", "--data", "project_name=demo", URL, "demo"]
    done = copier(*words, repository=tmp_path / "slip", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo" / "tests" / "conftest.py").is_file()
    assert not (tmp_path / "demo" / "tests" / ".git").exists()


@pytest.mark.parametrize(
    "words", every(2, [[], ["--dry-run"], ["-y"], ["--json"]], ["asked", "dry-run", "yes", "json"], pytest.mark.long)
)
def test_a_source_that_only_the_project_names(fork, project, script, tmp_path, words):
    """Somebody cloned a project. The file that names its template came with it."""
    (fork / "templates" / "project" / "ADDED.txt").write_text("A new file.\n")
    release(fork)
    before = state(project)
    done = update(fork, project, *words)
    assert done.returncode == 3, done.stdout
    assert f"another template than ddp-scaffold's: '{fork}'" in done.stdout + done.stderr
    assert f"--template {fork}" in done.stdout + done.stderr
    assert state(project) == before
    done = update(fork, project, *words, DDP_SCAFFOLD_TEMPLATE=str(fork))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("answer", ["y", "n"])
def test_on_a_terminal_a_person_is_asked_for_the_source(fork, project, answer):
    import pexpect

    (fork / "templates" / "project" / "ADDED.txt").write_text("A new file.\n")
    release(fork)
    variables = {**os.environ, "PYTHONPATH": str(fork / "scaffold"), "TERM": "xterm", "COLUMNS": "300"}
    command = ["-m", "ddp_scaffold", "update"]
    child = pexpect.spawn(sys.executable, command, cwd=str(project), env=variables, encoding="utf-8", timeout=60)
    child.expect("another template than ddp-scaffold's.*Update from it.*y/N")
    child.sendline(answer)
    if answer == "y":
        child.expect("Update .*demo.*Y/n")
        child.sendline("y")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == (0 if answer == "y" else 3)
    assert (project / "ADDED.txt").exists() == (answer == "y")


@pytest.mark.parametrize("source", ["gh:ddp-scaffold/ddp-scaffold", URL.removesuffix(".git"), f"git+{URL}"])
def test_other_spellings_of_the_public_source(two, history_of_two, tmp_path, source):
    project = make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})
    record(project, "_src_path", source)
    commit(project)
    done = update(two, project, https_proxy="http://127.0.0.1:9", COPIER_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert (project / "tests" / "added.py").is_file()


def test_another_template_takes_the_place_of_what_the_project_names(two, history_of_two, tmp_path):
    """Not even a source in copier's own spelling is fetched, if --template says where to take releases from."""
    project = make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})
    record(project, "_src_path", "git+https://example.invalid/evil.git")
    commit(project)
    done = update(two, project, "--template", str(history_of_two))
    assert done.returncode == 0, done.stderr
    assert (project / "tests" / "added.py").is_file()


def test_a_directory_that_git_would_take_for_the_public_url(two, history_of_two, tmp_path):
    project = make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})
    there = project / URL
    there.mkdir(parents=True)
    (there / "HEAD").write_text("ref: refs/heads/main\n")
    commit(project)
    done = update(two, project)
    assert done.returncode in (1, 3), done.stderr
    assert "there is a directory https:/github.com" in done.stderr
