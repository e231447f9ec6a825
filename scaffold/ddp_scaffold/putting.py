"""Bringing the tree of a trial into the user's work tree: all of it or nothing, whoever is killed meanwhile.

One git command checks every path before it writes the first, and it runs in a session of its own, so that a signal
to this command or to its terminal does not reach it. Before it starts, a note in the git directory says what it is
about to do; if even git is killed, the next update finds the note and puts the project back.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ._git import clean_environment, complaint, git, run_git
from .recorded import Refused
from .trial import Outcome

NOTE = "ddp-scaffold-update.json"  # in the git directory
WAIT_S = 15.0  # for a git that still writes

PUT = """
git read-tree -m -u "$1" "$2" && { [ ! -s "$3" ] || git update-index -z --index-info <"$3"; } && rm -f "$4"
"""


@dataclass(frozen=True)
class Written:
    """What an update writes: from one commit to one tree, and the paths in the repository that differ."""

    head: str
    tree: str
    paths: list[str]


def put(project: Path, outcome: Outcome) -> Written:
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
    folder = _git_directory(top)
    if (folder / "index.lock").exists():
        raise Refused(
            "another git is at work in this repository", f"Wait for it; if none runs, remove {folder}/index.lock."
        )
    _bring_objects(top, outcome)
    tree = _whole_tree(top, prefix, head, git("rev-parse", f"{outcome.after}^{{tree}}", cwd=outcome.repository).strip())
    note, stages, said = folder / NOTE, outcome.repository.parent / "stages", outcome.repository.parent / "said"
    stages.write_text(_stages(outcome.unmerged, prefix), encoding="utf-8")
    run_git("update-index", "-q", "--refresh", cwd=top)
    written = Written(head, tree, [prefix + path for path in outcome.changes])
    _write_note(note, written)
    with said.open("wb") as output:
        child = subprocess.Popen(
            ["sh", "-c", PUT, "sh", head, tree, str(stages), str(note)],
            cwd=top,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
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
        kept = take_back(top, written)
        note.unlink(missing_ok=True)
        raise Refused(
            f"git could not write the update: {complaint(said.read_text(errors='replace')) or f'exit code {code}'}",
            f"The project is as it was{_but(kept)}. Correct what git names, and run it again.",
        )
    return written


def take_back(top: Path, written: Written) -> list[str]:
    """Undo what the update has written; return the paths left alone since somebody else has changed them.

    A file is put back only if it is what the update writes (or gone, or cut short); one with any other content is the
    work of others, who may have saved it meanwhile.
    """
    run_git("update-index", "-q", "--refresh", cwd=top)
    run_git("read-tree", "-m", "-u", written.tree, written.head, cwd=top)  # all of it, unless files differ from both
    old, new = _blobs(top, written.head), _blobs(top, written.tree)
    hidden = {line[2:] for line in git("ls-files", "-t", "-z", cwd=top).split("\0") if line.startswith("S ")}
    back, kept = [], []
    for path in written.paths:
        now = _blob(top, path)
        if now == old.get(path) or path in hidden:
            back.append(path)
        elif now is None or now == new.get(path) or _is_cut_short(top, path, new.get(path)):
            back.append(path)
            if path not in old:
                _remove(top, path)
            else:
                git("--literal-pathspecs", "checkout", "--quiet", written.head, "--", path, cwd=top)
        else:
            kept.append(path)
    if back:
        _with_paths(top, ["reset", "--quiet", written.head], [path for path in back if path not in hidden])
    return kept


def recover(project: Path, *, only_tell: bool = False) -> bool:
    """Put back a project whose update was cut off in the middle; tell whether there was one.

    If the project has gone on since (another commit), there is nothing to put back. With `only_tell`, raises Refused.
    """
    note = _git_directory(project) / NOTE
    deadline = time.monotonic() + WAIT_S
    while note.exists() and (_git_directory(project) / "index.lock").exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # the other one still writes
    if not note.exists():
        return False
    try:
        written = Written(**json.loads(note.read_text(encoding="utf-8")))
    except (ValueError, TypeError):  # cut off itself: then nothing else was begun
        written = None
    if written is None or git("rev-parse", "HEAD", cwd=project).strip() != written.head:
        note.unlink()
        return False
    if only_tell:
        raise Refused(
            "an earlier update was cut off while it wrote", "Run it without --dry-run: it puts all back first."
        )
    (_git_directory(project) / "index.lock").unlink(missing_ok=True)
    take_back(_top(project)[0], written)
    note.unlink()
    return True


def under_way(project: Path) -> str:
    """Return what somebody has begun and not ended in the repository, or an empty text."""
    names = {"MERGE_HEAD": "a merge", "CHERRY_PICK_HEAD": "a cherry-pick", "REVERT_HEAD": "a revert"}
    names |= {"rebase-merge": "a rebase", "rebase-apply": "a rebase"}
    folder = _git_directory(project)
    return next((what for name, what in names.items() if (folder / name).exists()), "")


def _but(kept: list[str]) -> str:
    return f", but for {', '.join(kept)}, which somebody else has changed" if kept else ""


def _write_note(note: Path, written: Written) -> None:
    aside = note.with_suffix(".new")
    try:
        aside.write_text(json.dumps(asdict(written)), encoding="utf-8")
        os.replace(aside, note)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _blobs(top: Path, tree: str) -> dict[str, str]:
    listed = git("ls-tree", "-r", "-z", "--full-tree", tree, cwd=top).split("\0")[:-1]
    return {path: facts.split()[2] for facts, path in (line.split("\t", 1) for line in listed)}


def _blob(top: Path, path: str) -> str | None:
    """Return the blob that git would make of a file as it is now, or None if it is not there."""
    file = top / path
    if file.is_symlink():
        link = os.readlink(file).encode()
        words = ["git", "hash-object", "--stdin"]
        done = subprocess.run(words, cwd=top, env=clean_environment(), input=link, capture_output=True, check=False)
        return done.stdout.decode().strip()
    return git("hash-object", "--", path, cwd=top).strip() if file.is_file() else None


def _is_cut_short(top: Path, path: str, blob: str | None) -> bool:
    """Tell whether a file is the beginning of what git was writing when it was killed."""
    if blob is None:
        return False
    words = ["git", "cat-file", "--filters", f"--path={path}", blob]
    whole = subprocess.run(words, cwd=top, env=clean_environment(), capture_output=True, check=False).stdout
    return whole.startswith((top / path).read_bytes())


def _remove(top: Path, path: str) -> None:
    (top / path).unlink(missing_ok=True)
    for parent in (top / path).parents:
        if parent == top:
            break
        with suppress(OSError):  # not empty
            parent.rmdir()


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
        env=clean_environment(),
        input="".join(f"{name}\n" for name in sorted(names)).encode(),
        capture_output=True,
        check=False,
    )
    done = subprocess.run(
        ["git", "unpack-objects", "-q"],
        cwd=top,
        env=clean_environment(),
        input=packed.stdout,
        capture_output=True,
        check=False,
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
    command = ["git", *words]
    environment = clean_environment(GIT_INDEX_FILE=str(index))
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
    listed = run_git(
        "--no-optional-locks", "status", "--porcelain", "-z", "--untracked-files=all", "--", ".", cwd=project
    ).stdout
    return [entry[3:] for entry in listed.split("\0") if len(entry) > 3]
