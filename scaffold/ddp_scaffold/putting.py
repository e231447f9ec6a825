"""Bringing the tree of a trial into the user's work tree: all of it or nothing, whoever is killed meanwhile.

One git command checks every path before it writes the first, and it runs in a session of its own, so that a signal
to this command or to its terminal does not reach it. Before it starts, a note in the git directory says what it is
about to do; if even git is killed, the next update finds the note and puts the project back.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ._git import complaint, git, run_git
from .recorded import Refused
from .trial import Outcome

NOTE = "ddp-scaffold-update.json"  # in the git directory
WAIT_S = 15.0  # for a git that still writes

PUT = """
git read-tree -m -u "$1" "$2" && { [ ! -s "$3" ] || git update-index -z --index-info <"$3"; } && rm -f "$4"
"""


def put(project: Path, outcome: Outcome) -> None:
    """Make the work tree and the index of `project` those of the outcome; conflicts are left unmerged, for `git add`.

    Raises Refused, with everything as it was, if the project has changed meanwhile.
    """
    top, prefix = _top(project)
    head = git("rev-parse", "HEAD", cwd=top).strip()
    if git("rev-parse", f"HEAD:{prefix}", cwd=top) != git(
        "rev-parse", f"{outcome.before}^{{tree}}", cwd=outcome.repository
    ):
        raise Refused("the project has a new commit since the update began", "Run it again.")
    added = [path for path, change in outcome.changes.items() if change == "added"]
    for path in added:
        if (project / path).exists() or (project / path).is_symlink():
            raise Refused(
                f"{path} is new in the template, and the project has an ignored file of that name",
                f"Move {path} away, and run it again.",
            )
    _bring_objects(top, outcome)
    tree = _whole_tree(top, prefix, head, git("rev-parse", f"{outcome.after}^{{tree}}", cwd=outcome.repository).strip())
    folder = _git_directory(top)
    note, stages, said = folder / NOTE, outcome.repository.parent / "stages", outcome.repository.parent / "said"
    stages.write_text(_stages(outcome.unmerged, prefix), encoding="utf-8")
    git("update-index", "-q", "--refresh", cwd=top)
    paths = {"head": head, "prefix": prefix, "changed": [p for p in outcome.changes if p not in added], "added": added}
    note.write_text(json.dumps(paths), encoding="utf-8")
    with said.open("wb") as output:
        words = ["sh", "-c", PUT, "sh", head, tree, str(stages), str(note)]
        child = subprocess.Popen(
            words, cwd=top, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    while True:
        try:
            code = child.wait()
            break
        except KeyboardInterrupt:  # it takes no time; half of it would be worse
            continue
    if code:
        if code < 0 or code > 128:  # killed: the lock is its own, and nobody else's
            (folder / "index.lock").unlink(missing_ok=True)
        if dirty(project):
            take_back(project, outcome.changes, head)
        note.unlink(missing_ok=True)
        raise Refused(
            f"git could not write the update: {complaint(said.read_text(errors='replace')) or f'exit code {code}'}",
            "The project is as it was. Correct what git names, and run it again.",
        )


def take_back(project: Path, changes: Iterable[str], head: str) -> None:
    """Make these paths of the project what they are in the commit `head`: those that it lacks go."""
    paths = list(changes)
    listed = git("ls-tree", "-r", "-z", "--name-only", f"{head}:{_top(project)[1]}", cwd=project)
    known = set(listed.split("\0"))
    old = [path for path in paths if path in known]
    new = [path for path in paths if path not in known]
    for path in new:
        with suppress(FileNotFoundError):
            (project / path).unlink()
        for parent in (project / path).parents:
            if parent == project:
                break
            with suppress(OSError):
                parent.rmdir()
    if paths:
        _with_paths(project, ["reset", "--quiet", head], paths)
    if old:
        _with_paths(project, ["checkout", "--quiet", head], old)


def recover(project: Path) -> bool:
    """Put back a project whose update was cut off in the middle; tell whether there was one."""
    note = _git_directory(project) / NOTE
    deadline = time.monotonic() + WAIT_S
    while note.exists() and (_git_directory(project) / "index.lock").exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # the other one still writes
    if not note.exists():
        return False
    cut = json.loads(note.read_text(encoding="utf-8"))
    (_git_directory(project) / "index.lock").unlink(missing_ok=True)
    root = _top(project)[0] / cut["prefix"]
    take_back(root, [*cut["changed"], *cut["added"]], cut["head"])
    note.unlink()
    return True


def _with_paths(project: Path, words: list[str], paths: list[str]) -> None:
    for first in range(0, len(paths), 500):  # a command line has a limit
        git("--literal-pathspecs", *words, "--", *paths[first : first + 500], cwd=project)


def _top(project: Path) -> tuple[Path, str]:
    """Return the root of the work tree, and the project's path in it, with a slash at its end (or empty)."""
    top = git("rev-parse", "--show-toplevel", cwd=project).rstrip("\n")
    return Path(top), git("rev-parse", "--show-prefix", cwd=project).rstrip("\n")


def _git_directory(project: Path) -> Path:
    return Path(project, git("rev-parse", "--absolute-git-dir", cwd=project).rstrip("\n"))


def _bring_objects(top: Path, outcome: Outcome) -> None:
    """Copy the objects that only the trial has into the user's repository."""
    listed = git("rev-list", "--objects", outcome.after, f"^{outcome.before}", cwd=outcome.repository)
    names = {line.split(" ", 1)[0] for line in listed.splitlines()}
    names |= {entry.split()[1] for entry in outcome.unmerged.split("\0") if entry}
    packed = subprocess.run(
        ["git", "pack-objects", "--stdout", "-q"],
        cwd=outcome.repository,
        input="".join(f"{name}\n" for name in sorted(names)).encode(),
        capture_output=True,
        check=False,
    )
    done = subprocess.run(
        ["git", "unpack-objects", "-q"], cwd=top, input=packed.stdout, capture_output=True, check=False
    )
    if packed.returncode or done.returncode:
        said = (packed.stderr + done.stderr).decode(errors="replace").strip()
        raise Refused(f"git could not store the update: {said}", "Correct what git names (a full disk?).")


def _whole_tree(top: Path, prefix: str, head: str, project_tree: str) -> str:
    """Return the tree of the whole repository with `project_tree` in the place of the project."""
    if not prefix:
        return project_tree
    index = _git_directory(top) / "ddp-scaffold-index"
    try:
        for words in (
            ["read-tree", head],
            ["rm", "-r", "--cached", "--quiet", "--", prefix],
            ["read-tree", f"--prefix={prefix}", project_tree],
        ):
            _with_index(top, index, *words)
        return _with_index(top, index, "write-tree").strip()
    finally:
        index.unlink(missing_ok=True)


def _with_index(top: Path, index: Path, *words: str) -> str:
    import os

    command = ["git", *words]
    environment = os.environ | {"GIT_INDEX_FILE": str(index)}
    done = subprocess.run(command, cwd=top, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"git {words[0]} failed: {done.stderr.strip()}", "Correct what git names.")
    return done.stdout


def _stages(unmerged: str, prefix: str) -> str:
    """Return what `git update-index -z --index-info` takes to mark the conflicts: stage 0 goes, 1 to 3 come."""
    lines = []
    for entry in unmerged.split("\0")[:-1]:
        facts, path = entry.split("\t", 1)
        empty = f"0 {'0' * len(facts.split()[1])}\t{prefix}{path}"
        lines += [*([] if empty in lines else [empty]), f"{facts}\t{prefix}{path}"]
    return "".join(f"{line}\0" for line in lines)


def dirty(project: Path) -> list[str]:
    """Return the paths of the project that are changed, staged or not known to git."""
    listed = run_git("status", "--porcelain", "-z", "--untracked-files=all", "--", ".", cwd=project).stdout
    return [entry[3:] for entry in listed.split("\0") if len(entry) > 3]
