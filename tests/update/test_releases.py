"""The releases themselves: they are complete wherever the repository is, and `make release` refuses a bad one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cross_section import every
from update_helpers import RELEASES, ROOT, change, commit, git, history

from ddp_scaffold import __version__

pytestmark = pytest.mark.timeout(300)  # a release looks at eighteen projects, and imports from nine of them


def listed(repository: Path) -> list[str]:
    command = [sys.executable, "releases/history.py", "list"]
    done = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True)
    return [line.split()[0].removeprefix("v") for line in done.stdout.splitlines()]


def test_the_package_has_the_version_of_the_newest_release():
    assert RELEASES[-1] == __version__
    assert len(RELEASES) >= 3


def test_each_release_says_what_it_brings_and_what_is_to_do():
    text = (ROOT / "CHANGELOG.md").read_text()
    entries = dict(re.findall(r"^## (\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert list(entries) == RELEASES[::-1]
    for version, entry in entries.items():
        assert re.search(r"^By hand: ", entry, re.M), version


def test_the_history_is_that_of_the_tags(tmp_path):
    """Where the checkout has a release's tag, its bundle holds the same template."""
    history.unpack(tmp_path / "history.git")
    tags = set(git(ROOT, "tag").split()) if (ROOT / ".git").exists() else set()
    for version in RELEASES:
        ours = git(tmp_path / "history.git", "ls-tree", f"v{version}")
        if f"v{version}" in tags:
            assert ours == git(ROOT, "ls-tree", f"v{version}", "--", *history.CONTENT)
        assert git(tmp_path / "history.git", "cat-file", "-t", f"v{version}") == "tag\n"  # annotated


def test_twice_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        history.join(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("how", ["without tags", "shallow", "archive"])
def test_the_releases_survive(template_repo, tmp_path, how):
    copy = tmp_path / "copy"
    if how == "archive":
        copy.mkdir()
        packed = subprocess.run(["git", "archive", "HEAD"], cwd=template_repo, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", copy], input=packed, check=True)
    else:
        depth = ["--depth", "1"] if how == "shallow" else []
        git(tmp_path, "clone", "--quiet", "--no-tags", *depth, f"file://{template_repo}", str(copy))
    assert listed(copy) == RELEASES
    history_there = [sys.executable, "releases/history.py", "join", str(tmp_path / "all.bundle")]
    subprocess.run(history_there, cwd=copy, check=True)
    git(tmp_path, "clone", "--quiet", "--bare", "all.bundle", "all.git")
    assert git(tmp_path / "all.git", "tag").split() == sorted(f"v{version}" for version in RELEASES)


@pytest.fixture
def checkout(template_repo: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "checkout"
    shutil.copytree(template_repo, copy)
    git(copy, "tag", "--delete", *git(copy, "tag").split())
    text = (copy / "CHANGELOG.md").read_text()
    if "## Unreleased\n" in text:
        change(copy / "CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\nBy hand: nothing.\n")
    else:
        change(copy / "CHANGELOG.md", "\n## ", "\n## Unreleased\n\nBy hand: nothing.\n\n## ")
    moves = copy / "templates" / "moves.yml"
    known = "|".join(map(re.escape, RELEASES))  # what waits for the next release is for the one that is made here
    moves.write_text(re.sub(rf"(?m)^- release: (?!(?:{known})$).+$", "- release: 97.0.0", moves.read_text()))
    removed = copy / "releases" / "removed.yml"
    removed.write_text(re.sub(rf"(?m)^(?!(?:{known}):)\d.+:$", "97.0.0:", removed.read_text()))
    commit(copy)
    return copy


def release(checkout: Path, version: str = "97.0.0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "releases/release.py", version]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


def test_a_release(checkout, tmp_path):
    done = release(checkout)
    assert done.returncode == 0, done.stderr
    assert listed(checkout)[-1] == "97.0.0"
    assert git(checkout, "status", "--porcelain") == ""
    assert git(checkout, "cat-file", "-t", "v97.0.0") == "tag\n"
    assert "## 97.0.0 (" in (checkout / "CHANGELOG.md").read_text()
    assert '__version__ = "97.0.0"' in (checkout / "scaffold/ddp_scaffold/__init__.py").read_text()
    again = release(checkout)
    assert again.returncode == 1
    assert "not newer than 97.0.0" in again.stderr
    assert "no entry below '## Unreleased'" in again.stderr


@pytest.mark.parametrize(
    ("fault", "said"),
    every(
        3,
        [
            ("dirty", "the tree is not clean"),
            ("changelog", "lacks its line 'By hand: ...'"),
            ("moving tag", "the tag v1 reads as a version"),
            ("file", "launch/torchrun.sh of"),
            ("move", "ddp/start/clocks.py; templates/moves.yml"),
            ("moved", "ddp/start/launcher.py"),
            ("question", "the question max_restarts of"),
            ("choice", "tracker=wandb of"),
            ("tasks", "every update would need --trust"),
            ("ignore", "hides template files from git"),
        ],
        others=pytest.mark.long,
    ),
)
def test_a_release_that_would_hurt_is_refused(checkout, fault, said):
    project = checkout / "templates" / "project"
    if fault == "dirty":
        (checkout / "README.md").write_text("changed\n")
    elif fault == "changelog":
        text = (checkout / "CHANGELOG.md").read_text()
        (checkout / "CHANGELOG.md").write_text(text.replace("By hand: ", "Nothing to do: "))
    elif fault == "moving tag":
        git(checkout, "tag", "v1")
    elif fault == "file":
        next(project.glob("*launch*/torchrun.sh.jinja")).unlink()
    elif fault == "move":
        (ddp,) = project.glob("*/*/ddp")
        (ddp / "clocks.py").rename(ddp / "start" / "clocks.py")
    elif fault == "moved":  # to a file that is not there
        next(project.glob("*/*/ddp/start/launcher.py")).unlink()
    elif fault == "question":
        questions = checkout / "templates" / "questions" / "clocks.yml"
        questions.write_text(questions.read_text().replace("max_restarts", "restarts"))
    elif fault == "choice":
        change(checkout / "copier.yml", "[tensorboard, wandb, none]", "[tensorboard, none]")
    elif fault == "tasks":
        change(checkout / "copier.yml", "_envops:", "_tasks: [echo]\n_envops:")
    elif fault == "ignore":
        (project / ".gitignore").write_text("\n")
    if fault not in ("dirty", "moving tag"):
        git(checkout, "add", "--all", "--force")
        git(checkout, "commit", "--quiet", "-m", "fault")
    before = git(checkout, "rev-parse", "HEAD"), git(checkout, "tag")
    done = release(checkout)
    assert done.returncode == 1, done.stdout
    assert said in done.stderr
    assert (git(checkout, "rev-parse", "HEAD"), git(checkout, "tag")) == before
    assert not (checkout / "releases" / "v97.0.0.bundle").exists()


@pytest.mark.parametrize("version", every(3, ["", "1", "v1.2.3", "1.2", "1.2.3rc1", "01.2.3"], others=pytest.mark.long))
def test_versions_that_are_none(checkout, version):
    assert release(checkout, version).returncode == 2


@pytest.mark.parametrize("fault", every(2, ["hook", "signature"], others=pytest.mark.long))
def test_a_release_that_fails_leaves_nothing(checkout, fault):
    if fault == "hook":
        hook = checkout / ".git" / "hooks" / "pre-commit"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
    else:
        git(checkout, "config", "tag.gpgSign", "true")
        git(checkout, "config", "gpg.program", "/bin/false")
    before = git(checkout, "rev-parse", "HEAD"), git(checkout, "tag")
    done = release(checkout)
    assert done.returncode == 1
    assert "failed, and taken back: " in done.stderr
    assert "Traceback" not in done.stderr
    assert (git(checkout, "rev-parse", "HEAD"), git(checkout, "tag")) == before
    assert git(checkout, "status", "--porcelain") == ""


@pytest.fixture
def with_make(checkout: Path, tmp_path: Path) -> Path:
    """A checkout whose check, which takes minutes, only says that it runs."""
    with (checkout / "Makefile").open("a") as file:
        file.write(f"\nsay:\n\techo checked >>{tmp_path}/checked\n")
    commit(checkout)
    return checkout


def make_release(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["make", "release", "CHECK=say", *words]
    return subprocess.run(
        command, cwd=checkout, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    every(
        3,
        [
            ("syntax", "usage: make release VERSION=x.y.z"),
            ("none", "usage: make release VERSION=x.y.z"),
            ("old", "is not newer than"),
            ("tag", "there is a tag v97.0.0 already"),
            ("changelog", "no entry below '## Unreleased'"),
            ("dirty", "the tree is not clean"),
        ],
        others=pytest.mark.long,
    ),
)
def test_what_is_seen_at_once_is_refused_before_the_tests_run(with_make, tmp_path, fault, said):
    version = {"syntax": "1.x", "old": RELEASES[0], "none": ""}.get(fault, "97.0.0")
    if fault == "tag":
        git(with_make, "tag", "v97.0.0")
    elif fault == "changelog":
        text = (with_make / "CHANGELOG.md").read_text()
        (with_make / "CHANGELOG.md").write_text(re.sub(r"## Unreleased\n.*?(?=\n## )", "", text, flags=re.S))
        commit(with_make)
    elif fault == "dirty":
        (with_make / "README.md").write_text("changed\n")
    done = make_release(with_make, *([f"VERSION={version}"] if version else []))
    assert done.returncode != 0
    assert said in done.stderr
    assert not (tmp_path / "checked").exists()


def test_make_release_needs_no_environment_of_its_own(with_make, tmp_path):
    done = make_release(with_make, "VERSION=97.0.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "checked").exists()
    assert not (with_make / ".venv").exists()
    assert listed(with_make)[-1] == "97.0.0"


@pytest.mark.parametrize("number", every(2, [signal.SIGINT, signal.SIGTERM], others=pytest.mark.long))
@pytest.mark.parametrize("moment", every(3, ["commit", "add", "tag"], others=pytest.mark.long))
def test_a_release_that_is_interrupted_leaves_nothing(checkout, tmp_path, moment, number):
    """The signal comes with the git command that writes."""
    real = shutil.which("git")
    wrapper = tmp_path / "bin" / "git"
    wrapper.parent.mkdir()
    kill = f"kill -{int(number)} $PPID;" if moment != "tag" else f"[ $2 != -a ] || kill -{int(number)} $PPID;"
    wrapper.write_text(f'#!/bin/sh\ncase "$1" in {moment}) {kill} esac\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    before = git(checkout, "rev-parse", "HEAD"), git(checkout, "tag")
    command = [sys.executable, "releases/release.py", "97.0.0"]
    variables = {**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stdout + done.stderr
    assert "interrupted, and taken back" in done.stderr
    assert (git(checkout, "rev-parse", "HEAD"), git(checkout, "tag")) == before
    assert git(checkout, "status", "--porcelain") == ""
    assert not (checkout / "releases" / "v97.0.0.bundle").exists()
