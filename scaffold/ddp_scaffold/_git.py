"""What the commands need of git: that it is there, and the first commit of a new project."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from ._errors import ScaffoldError

MINIMUM = (2, 31)  # GIT_CONFIG_COUNT, by which the template's URL is redirected, is in git since 2.31

# Set inside git hooks, among others; git would work on that repository instead of ours.
LOCAL_VARIABLES = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"),
    *("GIT_NAMESPACE", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_DEFAULT_HASH"),
)
FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, a quota

# What git says where there is no repository, and inside of one that has no work tree.
NO_WORK_TREE = ("not a git repository (or any", "must be run in a work tree")


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment without what would lead git to another repository than that of its directory.

    Git speaks English there: what it says decides what we say.
    """
    kept = {name: value for name, value in os.environ.items() if name not in LOCAL_VARIABLES}
    return kept | {"LC_ALL": "C"} | more


def run_git(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run git in `cwd` and return what came of it, whatever its exit code. Raises ScaffoldError if it cannot run."""
    command = ["git", *args]
    try:
        return subprocess.run(
            command, cwd=cwd, env=clean_environment(), capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise ScaffoldError(
            f"git cannot be run: {error.strerror}", f"See what `git --version` says; it is {shutil.which('git')}."
        ) from error
    except KeyboardInterrupt:
        wait_for_git()
        raise


def git_bytes(*args: str, cwd: Path, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run git on bytes: `data` is its input, and its output is left as it is. Whatever its exit code."""
    command = ["git", *args]
    return subprocess.run(command, cwd=cwd, env=clean_environment(), input=data, capture_output=True, check=False)


def wait_for_git(limit_s: float = 10) -> None:
    """Wait for the git that an interrupt left running, ours or copier's: it would write where we clean up."""
    deadline = time.monotonic() + limit_s
    with suppress(ChildProcessError):  # there is none any more
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)


def git(*args: str, cwd: Path) -> str:
    """Run git in `cwd` and return its output. Raises ScaffoldError with git's own message if it fails."""
    done = run_git(*args, cwd=cwd)
    if done.returncode:
        command = next((arg for arg in args if not arg.startswith("-") and "=" not in arg), "")
        said = complaint(done.stderr) or f"exit code {done.returncode}"
        raise ScaffoldError(
            f"git {command} failed: {said}",
            "Make room, and run it again."
            if says_full(said)
            else "Correct what git names: its configuration, a GIT_ variable, or the template's address.",
        )
    return done.stdout


def complaint(stderr: str) -> str:
    """Return the line of git's stderr that says why it gave up: that of a full disk, or else the fatal one."""
    lines = stderr.strip().splitlines()
    full = next(filter(says_full, lines), None)
    return full or next((line for line in lines if line.startswith("fatal:")), lines[-1] if lines else "")


def says_full(text: str) -> bool:
    """Tell whether a message is about a disk or a quota that is full."""
    return "out of diskspace" in text.lower() or any(os.strerror(number) in text for number in FULL)


def require_git() -> None:
    """Raise ScaffoldError unless a git is installed that is new enough."""
    if shutil.which("git") is None:
        raise ScaffoldError(
            "git is not installed (or not on PATH)",
            "Install git: the project records the template's commit, without which it could never be updated.",
        )
    text = git("--version", cwd=Path("/"))
    found = re.search(r"(\d+)\.(\d+)", text)
    if found is None or (int(found[1]), int(found[2])) < MINIMUM:
        raise ScaffoldError(
            f"git {'.'.join(map(str, MINIMUM))} or newer is needed, found: {text.strip() or 'no version'}",
            "Install a newer git, or load one (on clusters often `module load git`).",
        )
    git("config", "--list", cwd=Path("/"))  # fails for a configuration that git cannot read


def enclosing_work_tree(path: Path) -> Path | None:
    """Return the root of the git work tree that would track files in `path`, or None. `path` need not exist.

    A tree that ignores `path` does not track it, so it does not count. Raises ScaffoldError, in git's own words, if
    there is a repository that git does not read: it has another owner, or is broken.
    """
    parent = next(p for p in (path, *path.parents) if p.is_dir())
    root = run_git("rev-parse", "--show-toplevel", cwd=parent)
    if root.returncode and not any(words in root.stderr for words in NO_WORK_TREE):
        own_hint = re.search(r"git config .*safe\.directory .*", root.stderr)
        hint = f"If you trust its owner: {own_hint[0]}" if own_hint else "Correct what git names."
        raise ScaffoldError(complaint(root.stderr), hint)
    if root.returncode or run_git("check-ignore", "--quiet", f"{path}/", cwd=parent).returncode == 0:
        return None
    return Path(root.stdout.rstrip("\n"))


def first_commit(project: Path, message: str) -> None:
    """Make `project` a git repository whose branch `main` holds everything in it.

    Hooks and signing are the user's, meant for the user's commits: neither takes part here. Files that only the
    user's global ignore list matches are committed too; `copier update` would lose edits in them otherwise.
    """
    git("init", "--quiet", cwd=project)
    git("symbolic-ref", "HEAD", "refs/heads/main", cwd=project)
    identity: list[str] = []
    if any(run_git("var", f"GIT_{role}_IDENT", cwd=project).returncode for role in ("AUTHOR", "COMMITTER")):
        identity = ["-c", "user.name=ddp-scaffold", "-c", "user.email=ddp-scaffold@localhost"]
    git("-c", f"core.excludesFile={os.devnull}", "add", "--all", cwd=project)
    quiet = ["-c", f"core.hooksPath={os.devnull}", "-c", "commit.gpgSign=false", "-c", "maintenance.auto=false"]
    git(*quiet, *identity, "commit", "--quiet", "--no-verify", "--message", message, cwd=project)
