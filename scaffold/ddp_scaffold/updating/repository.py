"""The user's repository: where it is, and in what state."""

from __future__ import annotations

from pathlib import Path

from .._git import git, run_git


def top_of(project: Path) -> tuple[Path, str]:
    """Return the root of the work tree, and the project's path in it, with a slash at its end (or empty)."""
    top = git("rev-parse", "--show-toplevel", cwd=project).rstrip("\n")
    return Path(top), git("rev-parse", "--show-prefix", cwd=project).rstrip("\n")


def git_directory(project: Path) -> Path:
    return Path(project, git("rev-parse", "--absolute-git-dir", cwd=project).rstrip("\n"))


def under_way(project: Path) -> str:
    """Return what somebody has begun and not ended in the repository, or an empty text."""
    names = {"MERGE_HEAD": "a merge", "CHERRY_PICK_HEAD": "a cherry-pick", "REVERT_HEAD": "a revert"}
    names |= {"rebase-merge": "a rebase", "rebase-apply": "a rebase"}
    folder = git_directory(project)
    return next((what for name, what in names.items() if (folder / name).exists()), "")


def dirty(project: Path) -> list[str]:
    """Return the paths of the project that are changed, staged or not known to git."""
    listed = run_git(
        "--no-optional-locks", "status", "--porcelain", "-z", "--untracked-files=all", "--", ".", cwd=project
    ).stdout
    return [entry[3:] for entry in listed.split("\0") if len(entry) > 3]


def with_conflicts(project: Path) -> list[str]:
    """Return the committed files in which copier's marks of a conflict stand: both, each as a line of its own."""
    both = ("--all-match", "-e", "^<<<<<<< before updating\r?$", "-e", "^>>>>>>> after updating\r?$")
    found = run_git("grep", "--cached", "-I", "-l", "-z", "-E", *both, "--", ".", cwd=project).stdout
    return found.split("\0")[:-1]


def tree_of(project: Path) -> str:
    """Return the tree of the project in the last commit of its repository."""
    prefix = git("rev-parse", "--show-prefix", cwd=project).strip()
    return git("rev-parse", f"HEAD:{prefix}", cwd=project).strip()
