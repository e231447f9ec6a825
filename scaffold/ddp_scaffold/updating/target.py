"""Which release a project is brought to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from .._git import git, run_git
from ..template.own_preset import is_file
from ..template.source import Template
from .changelog import version
from .recorded import Refused


def choose(template: Template, commits: Sequence[str], wanted: str | None) -> str:
    """Return the tag (or commit) to bring a project to whose files record `commits`: `wanted`, else the newest release.

    Raises Refused for one that is older, or unknown here, and if the project is ahead of this installation.
    """
    newest = template.ref
    for commit in commits:
        _require_known(template, commit, newest)
    target = newest if wanted is None else _spelled(template, wanted)
    ahead = [commit for commit in commits if _is_older(target, commit)]
    if ahead and wanted is None and not version(ahead[0]):
        return ahead[0]
    if ahead:
        raise Refused(
            f"the project is at {ahead[0]}, and {target} is older: projects are not taken back",
            "To undo an update, revert its commit: git revert.",
        )
    return target


def name_of_cluster(preset: str) -> str:
    """Return the name of the launch folder for a preset, which may be a file. Raises Refused for an odd one."""
    name = Path(preset).stem if is_file(preset) else preset
    if not re.fullmatch(r"[a-z0-9]+([-_][a-z0-9]+)*", name):
        raise Refused(f"--add {preset}: {name!r} cannot be a folder's name", "Use lower-case letters, digits and -.")
    return name


def _require_known(template: Template, commit: str, newest: str) -> None:
    if run_git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}", cwd=template.repository).returncode == 0:
        return
    theirs, ours = version(commit), version(newest)
    if theirs and ours and theirs > ours:
        raise Refused(
            f"the project is at {commit}, this ddp-scaffold {__version__} knows releases up to {newest}",
            "Update it first: pip install --upgrade ddp-scaffold.",
        )
    raise Refused(
        f"the project was made from {commit}, which is none of the releases that this ddp-scaffold knows",
        "Pass --template URL_OR_PATH of a repository that has it, or run `copier update` with a network.",
    )


def _spelled(template: Template, wanted: str) -> str:
    known = git("tag", "--list", cwd=template.repository).split()
    for tag in (wanted, f"v{wanted}"):
        if tag in known:
            return tag
    if run_git("rev-parse", "--verify", "--quiet", f"{wanted}^{{commit}}", cwd=template.repository).returncode == 0:
        return wanted
    listed = ", ".join(sorted(known, key=lambda tag: (version(tag) is not None, str(version(tag) or tag))))
    raise Refused(f"--to {wanted}: there is no such release", f"There are: {listed or 'none'}.")


def _is_older(target: str, commit: str) -> bool:
    """Tell whether `target` is older than `commit`, which is newer than all releases if it was none."""
    new, old = version(target), version(commit)
    if target == commit or new is None:
        return False
    return old is None or new < old
