"""Projects of past releases, edited as people do, and the command that updates them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "releases"))
import history  # noqa: E402 (a module of this repository, not of the package)

URL = "https://github.com/ddp-scaffold/ddp-scaffold.git"
NOW = "99.0.0"  # the working tree, as the next release
RELEASES = history.versions()


def git(directory: Path, *args: str) -> str:
    """Run git in `directory` and return its output."""
    return subprocess.run(["git", *args], cwd=directory, check=True, capture_output=True, text=True).stdout


def commit(directory: Path, message: str = "edit") -> None:
    """Commit everything."""
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "--message", message)


def redirected(repository: Path, cache: Path) -> dict[str, str]:
    """The environment in which copier finds the public URL in `repository`."""
    return {
        **os.environ,
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": URL,
        "COPIER_CACHE_DIR": str(cache),
    }


def copier(*args: str | Path, repository: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run plain copier, without --trust, as somebody would who has not installed ddp-scaffold."""
    command = [sys.executable, "-m", "copier", *map(str, args)]
    environment = redirected(repository, cwd / ".copier-cache")
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    shutil.rmtree(cwd / ".copier-cache", ignore_errors=True)
    return done


_made: dict[str, Path] = {}  # copier takes seconds: each kind of project is made once, and copied


def make(repository: Path, version: str, project: Path, answers: Mapping[str, Any] | None = None) -> Path:
    """Make a project as the release `version` did, and commit it."""
    key = f"{repository} {version} {project.name} {answers}"
    if key not in _made:
        _made[key] = _make(repository, version, repository.parent / f"made-{len(_made)}" / project.name, answers)
    shutil.copytree(_made[key], project, symlinks=True)
    git(project, "status")  # refreshes the index: the copies have other times
    return project


def _make(repository: Path, version: str, project: Path, answers: Mapping[str, Any] | None) -> Path:
    data = {"project_name": project.name, **(answers or {})}
    words = [word for name, value in data.items() for word in ("--data", f"{name}={value}")]
    project.parent.mkdir(parents=True, exist_ok=True)
    done = copier(
        *("copy", "--quiet", "--defaults", "--vcs-ref", f"v{version}"), *words, URL, project,
        repository=repository, cwd=project.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    git(project, "init", "--quiet", "--initial-branch=main")
    commit(project, "begin")
    return project


def update(repository: Path, project: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `ddp-scaffold update` of the checkout `repository` in the project."""
    command = [sys.executable, "-m", "ddp_scaffold", "update", *args]
    variables = {**os.environ, "PYTHONPATH": str(repository / "scaffold"), **environment}
    return subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, check=False)


def record(project: Path, key: str, value: str, name: str = ".copier-answers.yml") -> None:
    """Change a line of the answers file, and its check with it, as copier itself would have written it."""
    path = project / name
    text = re.sub(rf"(?m)^{key}: .*$", f"{key}: {value}", path.read_text())
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    check = hashlib.sha256(body.encode()).hexdigest()[:16]
    path.write_text(re.sub("(?<=Checked by that command: )[0-9a-f]{16}", check, text))


def only_test(project: Path, code: str) -> None:
    """Replace the project's tests by one of a few milliseconds."""
    shutil.rmtree(project / "tests")
    (project / "tests").mkdir()
    (project / "tests" / "test_mine.py").write_text(code)
    commit(project)


def tree(project: Path) -> dict[str, bytes]:
    """Return the content of every file but git's and what Python leaves."""
    files = (path for path in project.rglob("*") if path.is_file() or path.is_symlink())
    skipped = (".git", "__pycache__", ".pytest_cache", "runs")
    found = (path for path in files if not set(path.relative_to(project).parts) & set(skipped))
    return {str(path.relative_to(project)): _content(path) for path in found}


def _content(path: Path) -> bytes:
    return os.readlink(path).encode() if path.is_symlink() else path.read_bytes()


def state(project: Path) -> tuple[str, str, dict[str, bytes]]:
    """Everything that an update that is refused must leave as it was."""
    return git(project, "rev-parse", "HEAD"), git(project, "status", "--porcelain=v2"), tree(project)


def change(path: Path, old: str, new: str) -> None:
    """Replace the first `old` in a file. Fails if it is not there."""
    text = path.read_text()
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new, 1))
