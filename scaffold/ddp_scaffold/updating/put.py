"""Bringing the tree of a trial into the user's work tree: all of it or nothing, whoever is killed meanwhile.

One git command checks every path before it writes the first, and it runs in a session of its own, so that a signal
to this command or to its terminal does not reach it. Before it starts, a note in the git directory says what it is
about to do; if even git is killed, the next update finds the note and puts the project back.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NoReturn

from .._errors import ScaffoldError
from .._git import clean_environment, complaint, git, git_bytes, run_git, says_full
from .recorded import Refused
from .repository import git_directory, top_of, tree_of
from .space import shortage
from .trial import Outcome
from .undo import NOTE, Written, take_back, write_note

PUT = """
git read-tree -m -u "$1" "$2" && { [ ! -s "$3" ] || git update-index -z --index-info <"$3"; } && rm -f "$4"
"""


def put(project: Path, outcome: Outcome, lock: int | None) -> Written:
    """Make the work tree and the index of `project` those of the outcome; conflicts are left unmerged, for `git add`.

    The git that writes holds the lock, too: it goes on if this process is killed.
    Raises Refused, with everything as it was, if the project has changed meanwhile.
    """
    top, prefix = top_of(project)
    head = git("rev-parse", "HEAD", cwd=top).strip()
    folder = git_directory(top)
    _require_as_it_was(project, folder, outcome)
    if short := shortage(folder, outcome):
        raise Refused(short, "Nothing was changed. Make room, and run it again.")
    _bring_objects(top, outcome)
    tree = _whole_tree(top, prefix, head, git("rev-parse", f"{outcome.after}^{{tree}}", cwd=outcome.repository).strip())
    note, stages, said = folder / NOTE, outcome.repository.parent / "stages", outcome.repository.parent / "said"
    stages.write_text(_stages(outcome.unmerged, prefix), encoding="utf-8")
    run_git("update-index", "-q", "--refresh", cwd=top)
    written = Written(head, tree, [prefix + path for path in outcome.changes])
    write_note(note, written)
    with said.open("wb") as output:
        child = subprocess.Popen(
            ["sh", "-c", PUT, "sh", head, tree, str(stages), str(note)],
            cwd=top,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
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
        why = complaint(said.read_text(errors="replace")) or f"exit code {code}"
        if not says_full(why):  # of a file that it cannot write, git does not say why
            short = shortage(folder, outcome)
            why += f" ({short})" if short else ""
        _give_up(top, written, note, why)
    return written


def _require_as_it_was(project: Path, folder: Path, outcome: Outcome) -> None:
    """Raise Refused if others have changed the project, or its git directory `folder`, since the trial began."""
    if tree_of(project) != git("rev-parse", f"{outcome.before}^{{tree}}", cwd=outcome.repository).strip():
        raise Refused("the project has a new commit since the update began", "Run it again.")
    words = ("diff", "--no-renames", "--diff-filter=A", "--name-only", "-z", outcome.before, outcome.after)
    for path in git(*words, cwd=outcome.repository).split("\0")[:-1]:
        if (project / path).exists() or (project / path).is_symlink():
            raise Refused(
                f"{path} is new in the template, and the project has an ignored file of that name",
                f"Move {path} away, and run it again.",
            )
    if (folder / "index.lock").exists():
        raise Refused(
            "another git is at work in this repository", f"Wait for it; if none runs, remove {folder}/index.lock."
        )


def _give_up(top: Path, written: Written, note: Path, said: str) -> NoReturn:
    """Take the update back, as far as that can be done now, and raise Refused."""
    try:
        kept = take_back(top, written)
    except (ScaffoldError, OSError) as error:
        why = error.message if isinstance(error, ScaffoldError) else str(error)
        raise Refused(
            f"git could not write the update: {said}; nor could what it wrote be taken back: {why}",
            f"{'Make room' if says_full(said + why) else 'Correct that'}, then run the update again: it first puts the"
            " project back as it was.",
        ) from error
    note.unlink(missing_ok=True)
    raise Refused(
        f"git could not write the update: {said}",
        f"The project is as it was{_but(kept)}. {'Make room' if says_full(said) else 'Correct what git names'},"
        " and run it again.",
    )


def _but(kept: list[str]) -> str:
    return f", but for {', '.join(kept)}, which somebody else has changed" if kept else ""


def _bring_objects(top: Path, outcome: Outcome) -> None:
    """Copy the objects that only the trial has into the user's repository."""
    listed = git("rev-list", "--objects", outcome.after, f"^{outcome.before}", cwd=outcome.repository)
    names = {line.split(" ", 1)[0] for line in listed.splitlines()}
    names |= {entry.split()[1] for entry in outcome.unmerged.split("\0") if entry}
    wanted = "".join(f"{name}\n" for name in sorted(names)).encode()
    packed = git_bytes("pack-objects", "--stdout", "-q", cwd=outcome.repository, data=wanted)
    done = git_bytes("unpack-objects", "-q", cwd=top, data=packed.stdout)
    if packed.returncode or done.returncode:
        said = complaint((packed.stderr + done.stderr).decode(errors="replace"))
        raise Refused(f"git could not store the update: {said}", "Nothing was changed. Correct what git names.")


def _whole_tree(top: Path, prefix: str, head: str, project_tree: str) -> str:
    """Return the tree of the whole repository with `project_tree` in the place of the project."""
    if not prefix:
        return project_tree
    index = git_directory(top) / "ddp-scaffold-index"
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
