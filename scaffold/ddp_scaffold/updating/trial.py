"""An update on trial: a repository of its own, with the project as its last commit has it, in which copier works.

Nothing of the user's takes part: no hooks, no global ignore list (with one, copier loses edits in files that it
matches: copier-org/copier#2191), no files that are not committed. What comes out is one tree of git, the same that the
project then gets.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._errors import ScaffoldError
from .._git import git
from ..template.source import Template
from . import carry, compare, imports, moves, package
from .recorded import MAIN, Recorded, Refused
from .step import Step, commit, plain_git, take
from .untouched import as_made, update_untouched


@dataclass(frozen=True)
class Outcome:
    """What the trial left in its repository, and what an update of these files cannot bring."""

    repository: Path
    before: str  # commit: the project as it is
    after: str  # commit: as it would be
    changes: dict[str, str]  # path in the project: added, changed, removed or conflict
    unmerged: str  # `git ls-files --unmerged -z` of the conflicts
    lost: list[str]  # what the user changed, and the release no longer has
    moved_to: dict[str, str]  # of these, where the release has it now, if that can be seen
    left_out: dict[str, str]  # what the release changes, and the project has not; with the reason
    carried: dict[str, str]  # where files are now that have moved, with what the user and the release changed in them
    notes: list[str]  # lines of the user's that import what has moved


def run(
    head: Path,
    tree: str,
    template: Template,
    recorded: Sequence[Recorded],
    steps: Sequence[Step],
    scratch: Path,
) -> Outcome:
    """Try the steps, one after another, on `tree` of the repository in `head`.

    Raises Refused if one fails, or if what the release changes would not arrive.
    """
    repository, other = scratch / "project", scratch / "untouched"
    with plain_git():
        before = _check_out(head, tree, repository, other)
        _require_no_link_into_git(repository)
        windows = _to_unix_lines(repository)
        for project in recorded:
            package.record(repository / project.name, project.renamed)
        ours = commit(repository, "ours")
        untouched = as_made(repository, other, recorded, template, scratch)
        made = untouched.commit
        missing = compare.absent(repository, made)
        listed = _listed(template, recorded[0], steps)
        updated = update_untouched(untouched, template, steps) if missing or listed != {} else made
        moved = moves.of_release(repository, made, updated, listed)
        sides = carry.sides(repository, made, ours, updated)
        changed = sorted((moved.keys() | compare.changed(repository, made, updated)).intersection(missing))
        carried = _carried(sides, moved, missing, changed, compare.moves(repository, made, ours) if missing else {})
        unmerged = ""
        for step in steps:
            take(step, repository, template)
            unmerged += git("ls-files", "--unmerged", "-z", cwd=repository)
            _require_no_rejects(repository)
            commit(repository, f"with {step.answers_file}")
        left_out = _leave_removed_folders(repository, made, ours, {moved[path] for path in moved.keys() - {*missing}})
        unmerged = carry.bring(sides, carried, windows, unmerged, scratch)
        _to_windows_lines(repository, [*windows, *(moved[path] for path in windows if path in moved)])
        after = commit(repository, "after")
        places = {each.old: each.place for each in carried if each.mine}
        left_out |= compare.reasons(head, sides.ours, [path for path in changed if path not in places], moved)
        changes = _changes(repository, before, after)
        changes |= {entry.split("\t", 1)[1]: "conflict" for entry in unmerged.split("\0") if entry}
        gone = [path for path, change in changes.items() if change == "removed" and path not in places]
        lost = compare.lost_edits(repository, made, ours, gone)
        now = compare.moves(repository, made, after) if lost else {}
        notes = imports.notes(repository, moved, sides.made, sides.ours, compare.entries(repository, after))
    hints = {path: new for path, new in now.items() if path in lost and changes.get(new) == "added"}
    return Outcome(repository, before, after, changes, unmerged, lost, hints, left_out, places, notes)


def _listed(template: Template, main: Recorded, steps: Iterable[Step]) -> dict[str, str] | None:
    """Return what the template says it has moved; nothing if the project itself stays at its release."""
    ways = [step for step in steps if step.answers_file == MAIN and not step.new]
    return moves.listed(template, main, ways[0].ref) if ways else {}


def _carried(
    sides: carry.Sides,
    moved: Mapping[str, str],
    missing: Iterable[str],
    changed: Iterable[str],
    renames: dict[str, str],
) -> list[carry.Carried]:
    """Return what is to be carried. Raises Refused if the user has moved the plumbing as a whole."""
    compare.require_plumbing(set(sides.made), set(sides.ours), changed, renames)
    return carry.find(sides, moved, missing, renames)


def diff(outcome: Outcome) -> str:
    """Return what changes in the project, as a patch."""
    plain = ("-c", "core.quotePath=false", "diff", "--no-color", "--no-ext-diff")
    return git(*plain, outcome.before, outcome.after, cwd=outcome.repository)


def _changes(repository: Path, before: str, after: str) -> dict[str, str]:
    listed = git("diff", "--no-renames", "--name-status", "-z", before, after, cwd=repository).split("\0")
    words = {"A": "added", "D": "removed"}
    return {path: words.get(letter, "changed") for letter, path in zip(listed[::2], listed[1::2], strict=False)}


def _leave_removed_folders(repository: Path, made: str, ours: str, moved: set[str]) -> dict[str, str]:
    """Take out what is new in folders that the user has removed; return these files, and why.

    Copier leaves out files that were removed, but knows no folders. What has `moved` there is not new.
    """
    changes = _changes(repository, ours, "HEAD")
    added = [path for path, change in changes.items() if change == "added" and path not in moved]
    found = compare.in_removed_folders(repository, made, ours, added)
    for path in found:
        (repository / path).unlink()
    return {path: f"new; {folder}/ was removed" for path, folder in found.items()}


def _check_out(head: Path, tree: str, repository: Path, other: Path) -> str:
    """Make `repository` a work tree of `tree`, which it reads from the objects of `head`; return its commit.

    It can also read what `other`, a new repository, will hold.
    """
    objects = Path(head, git("rev-parse", "--git-path", "objects", cwd=head).strip()).resolve()
    for new in (repository, other):
        git("init", "--quiet", "--initial-branch=main", str(new), cwd=head)
    alternates = f"{objects}\n{other / '.git' / 'objects'}\n"
    (repository / ".git" / "objects" / "info" / "alternates").write_text(alternates, encoding="utf-8")
    # As committed, byte for byte: what attributes would convert is converted when the result is written.
    (repository / ".git" / "info").mkdir(exist_ok=True)
    (repository / ".git" / "info" / "attributes").write_text("* -text -filter -ident -working-tree-encoding\n")
    first = git("commit-tree", tree, "-m", "before", cwd=repository).strip()
    git("reset", "--quiet", "--hard", first, cwd=repository)
    return first


def _require_no_link_into_git(repository: Path) -> None:
    """Raise Refused if a file of the project could be written through a link into git's directory."""
    for entry in git("ls-files", "--stage", "-z", cwd=repository).split("\0")[:-1]:
        facts, path = entry.split("\t", 1)
        target = os.path.realpath(repository / path) if facts.startswith("120000") else ""
        if ".git" in target.lower().split(os.sep):
            raise Refused(f"{path} is a symbolic link into a .git directory", f"git rm {path}, and commit that.")


def _require_no_rejects(repository: Path) -> None:
    """Copier should leave no .rej file with inline conflicts; one that it leaves all the same holds a lost edit."""
    rejected = git("ls-files", "--others", "-z", "--", "*.rej", cwd=repository).split("\0")[:-1]
    if rejected:
        raise Refused(
            f"copier could not merge {rejected[0].removesuffix('.rej')} and would leave the edit in {rejected[0]}",
            "Nothing was changed; this is a bug, please report it with both versions of that file.",
        )


def _to_unix_lines(repository: Path) -> list[str]:
    """Give committed files with Windows line endings the template's, for git compares lines; return their paths."""
    found = []
    for entry in git("ls-files", "--eol", "-z", cwd=repository).split("\0")[:-1]:
        facts, path = entry.split("\t", 1)
        file = repository / path
        if facts.startswith("i/crlf") and file.is_file() and not file.is_symlink():
            file.write_bytes(file.read_bytes().replace(b"\r\n", b"\n"))
            found.append(path)
    if found:
        commit(repository, "Unix line endings")
    return found


def _to_windows_lines(repository: Path, paths: Iterable[str]) -> None:
    for path in paths:
        file = repository / path
        if file.is_file() and not file.is_symlink():
            file.write_bytes(file.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))


def require_commit(project: Path) -> str:
    """Return the commit that the project is at. Raises ScaffoldError if there is none."""
    try:
        return git("rev-parse", "--verify", "HEAD", cwd=project).strip()
    except ScaffoldError as error:
        raise Refused(f"{project} has no commit yet", "Commit the project first: git add -A && git commit.") from error
