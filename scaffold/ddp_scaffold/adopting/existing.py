"""`new --into-existing`: what a repository suggests, and how files come into it without touching one that is there."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from .. import _output
from .._errors import ScaffoldError, UsageError, show
from .._git import enclosing_work_tree, run_git
from ..check.findings import Finding
from ..template.given import ANSWERS_FILE, Given
from ..template.questions import Question
from .advice import Advice, Change, advise, findings_in, own_files, with_packaging
from .patch import PATCH
from .sketch import sketch

OPTION = "--into-existing"
MAY_STAY = ".gitattributes"  # of what would be written: the user's serves as well
MANY = 1000  # files that take more than a second or two to read
REQUIREMENTS = "pydantic pydantic-settings PyYAML tqdm"  # of ddp/, beside torch


@dataclass(frozen=True)
class Adoption:
    """What a project beside code that exists has in addition: the fields are those of `new --into-existing --json`."""

    next: list[str]  # commands to type
    kept: list[str]  # paths that stay as they are
    findings: list[Finding]  # of `check`
    changes: list[Change]  # in the order of work
    unknown: list[str]  # what of the program's shape was not recognised
    sketch: list[str]  # lines of a main function
    notes: list[str]
    patch: list[str]  # lines of adopt.patch; empty: none is written
    unfit: str  # why ddp/ is of no use here; empty: it is


def write_patch(staged: Path, advice: Advice) -> list[str]:
    """Write adopt.patch beside what was rendered, if there is one, and return its name in a list."""
    if not advice.patch:
        return []
    (staged / PATCH).write_bytes(advice.patch)
    return [PATCH]


def check_repository(text: str) -> Path:
    """Return the absolute path of a directory that can be adopted. Raises ScaffoldError for any other."""
    try:
        path = Path(text).expanduser().resolve()
        names = {entry.name for entry in path.iterdir()} if text and path.is_dir() else None
    except (OSError, RuntimeError) as error:
        raise ScaffoldError(f"{show(text)} cannot be read: {error}", "Name the repository's directory.") from error
    if names is None:
        raise ScaffoldError(f"{show(text)} is no directory", f"{OPTION} needs a repository; without it, new makes one.")
    if ANSWERS_FILE in names:
        mine = "code: existing" in (path / ANSWERS_FILE).read_text("utf-8", errors="replace")
        raise ScaffoldError(
            f"{show(text)} {'has been adopted already' if mine else 'was made from a template'}: it has {ANSWERS_FILE}",
            "`ddp-scaffold update` brings newer releases." if mine else f"{OPTION} is for code that no template made.",
        )
    if not names - {".git"}:
        raise ScaffoldError(f"{show(text)} is empty", f"Leave {OPTION} out.")
    if enclosing_work_tree(path) is None or ".git" in path.parts:
        raise ScaffoldError(
            f"{show(text)} is in no git work tree that tracks it", "Make it one, and commit what is there: git init."
        )
    if run_git("rev-parse", "--verify", "--quiet", "HEAD", cwd=path).returncode:
        raise ScaffoldError(f"{show(text)} is in a repository without a commit", "Commit what is there first.")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ScaffoldError(f"{show(text)} cannot be written by you", "Adopt a copy that is yours.")
    return path


def whose_code(given: Mapping[str, Given], questions: Mapping[str, Question], into_existing: bool) -> dict[str, Given]:
    """Return `given` with the answer to `code`, which is never asked. Raises UsageError if another one is given."""
    wanted = "existing" if into_existing else "new"
    if "code" not in questions:
        if into_existing:
            raise UsageError(f"{OPTION}: this template cannot do that", "Use one of ddp-scaffold 0.2 or later.")
        return dict(given)
    if "code" in given and given["code"].text != wanted:
        hint = f"Leave {OPTION} out." if into_existing else f"Say {OPTION}, with the repository as DEST."
        raise UsageError(f"{given['code'].where}: code={given['code'].text} is for another kind of project", hint)
    if unasked := [name for name in ("model", "tracker") if into_existing and name in given]:
        raise UsageError(f"{given[unasked[0]].where}: {unasked[0]} is not asked with {OPTION}", "Leave it out.")
    return {"code": Given(wanted, OPTION), **given}


def sort_files(files: Sequence[str], directory: Path, answers: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the files to write, and those that stay as they are. Raises ScaffoldError if others are in the way."""
    source_folder, package = answers["source_folder"], answers["package"]
    hiding = directory / source_folder / f"{package}.py"
    if hiding.exists():
        raise UsageError(
            f"{hiding.relative_to(directory)} would hide the package {package}", "Choose another: --set package=NAME."
        )
    taken = [name for name in files if os.path.lexists(directory / name)]
    for name in files:
        for folder in PurePosixPath(name).parents:
            path = directory / folder
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                taken.append(folder.as_posix())
    blocking = sorted({name for name in taken if name != MAY_STAY})
    if blocking:
        inside = blocking[0].startswith((f"{package}/", f"src/{package}/"))
        more = f" and {len(blocking) - 1} more" if blocking[1:] else ""
        raise ScaffoldError(
            f"{blocking[0]}{more} would have to be written, and exists",
            "Choose another package: --set package=NAME." if inside else "Move it first, for example with git mv.",
        )
    return [name for name in files if name not in taken], [name for name in taken if name == MAY_STAY]


def put(staged: Path, directory: Path, files: Sequence[str]) -> None:
    """Bring `files` from `staged` into `directory`, all or none. Nothing that others write meanwhile is replaced."""
    inodes: dict[Path, int] = {}
    folders: list[Path] = []
    try:
        with tempfile.TemporaryDirectory(prefix=".ddp-scaffold-", dir=directory) as own:
            for number, name in enumerate(sorted(files, key=lambda name: name == ANSWERS_FILE)):  # that one last
                target, copy = directory / name, Path(own, str(number))
                shutil.copy2(staged / name, copy)
                for folder in reversed([parent for parent in target.parents if not parent.exists()]):
                    folders.append(folder)
                    folder.mkdir()
                inodes[target] = copy.stat().st_ino
                _claim(copy, target)
    except BaseException as error:
        for target, inode in inodes.items():
            with suppress(OSError):
                if target.lstat().st_ino == inode:
                    target.unlink()
        for folder in reversed(folders):
            with suppress(OSError):  # not empty: others use it
                folder.rmdir()
        if isinstance(error, OSError):
            raise ScaffoldError(
                f"{error.filename2 or error.filename} cannot be written: {error.strerror}",
                "Nothing was left behind; correct that, and run it again.",
            ) from error
        raise


def _claim(copy: Path, target: Path) -> None:
    """Give the file its name, which fails if there is one of that name."""
    try:
        os.link(copy, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        target.touch(exist_ok=False)
        os.replace(copy, target)


def look(directory: Path, answers: Mapping[str, Any], files: Sequence[str]) -> Advice:
    """Read the code that exists. It takes seconds for thousands of files, so that is said."""
    package, command, source = answers["package"], answers["command"], answers["source_folder"]
    own = own_files(directory, ours=[_top(name) for name in files])
    if len(own) > MANY:
        _output.note(f"reading {len(own)} files")
    advice = with_packaging(advise(directory, own, command, source, package), directory, package)
    return replace(advice, findings=findings_in(directory))


def describe(
    dest: str,
    directory: Path,
    kept: Sequence[str],
    answers: Mapping[str, Any],
    files: Sequence[str],
    start: str,
    advice: Advice,
) -> Adoption:
    """Return what the user has to do about code that exists. `start` is the command that starts a training."""
    notes = [f"{', '.join(advice.unread)}: not read, this Python cannot parse it"] if advice.unread else []
    if advice.loop:
        what = "ddp/ is for loops in plain PyTorch" if advice.framework else "another: --set command=..."
        notes.append(f"{advice.loop}; {what}")
    return Adoption(
        next=_next_steps(dest, directory, files, start, bool(advice.patch)),
        kept=list(kept),
        findings=list(advice.findings),
        changes=list(advice.changes),
        unknown=list(advice.unknown),
        sketch=sketch(answers["package"]) if advice.unknown or advice.loop else [],
        notes=notes,
        patch=advice.patch.decode("utf-8", errors="replace").splitlines(),
        unfit=advice.loop if advice.framework else "",
    )


def refuse_unfit(adoption: Adoption) -> None:
    """Raise ScaffoldError where ddp/ would be of no use: whoever asks for it all the same is asked on a terminal."""
    if adoption.unfit:
        raise ScaffoldError(
            f"{adoption.unfit}, and ddp/ is for loops in plain PyTorch: nothing was written",
            "`ddp-scaffold check` reads such code as well. Run it on a terminal without -y to add ddp/ all the same.",
        )


def _next_steps(dest: str, directory: Path, files: Sequence[str], start: str, patched: bool) -> list[str]:
    """Return the commands to type. The user's .gitignore may match what an update needs in a commit."""
    runs_ignored = run_git("check-ignore", "--quiet", "--", "runs/x", cwd=directory).returncode == 0
    files = [name for name in files if name != PATCH]
    ignored = run_git("check-ignore", "--no-index", "--", *files, cwd=directory).returncode == 0
    added = shlex.join(sorted({_top(name) for name in files}))
    steps = [] if directory == Path.cwd() else [f"cd {shlex.quote(dest)}"]
    steps += [] if runs_ignored else ["echo /runs/ >> .gitignore"]
    steps += [f"git add {'--force ' if ignored else ''}{added} && git commit -m 'Adopt ddp-scaffold'"]
    steps += [f"git apply {PATCH} && rm {PATCH}"] if patched else []
    return [*steps, f"python -m pip install {REQUIREMENTS}", "python -m pytest tests/ddp", start]


def _top(name: str) -> str:
    """Return what to name for git: the folder that is all ours, or the file."""
    before, inside, _ = name.partition("/ddp/")
    return f"{before}/ddp" if inside else "launch" if name.startswith("launch/") else name
