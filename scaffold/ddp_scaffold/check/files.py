"""Which files of a repository `check` reads, and their text. It reads them; it never runs, imports or writes them."""

from __future__ import annotations

import ast
import io
import os
import re
import stat
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Literal

from .._errors import ScaffoldError, UsageError
from .._git import run_git

Kind = Literal["python", "notebook", "shell", "env", "yaml", "toml", "json", "markdown", "docker", "other"]

# A longer file was made by a program. Most of a notebook is pictures, which are not code.
MAX_BYTES = {"notebook": 64 << 20}
MAX_BYTES_OTHERWISE = 2 << 20
MAX_BYTES_OF_SETTINGS = 64 << 10  # a longer file of JSON is data

SUFFIXES: dict[str, Kind] = {
    **dict.fromkeys((".py", ".pyw"), "python"),
    ".ipynb": "notebook",
    **dict.fromkeys((".sh", ".bash", ".zsh", ".ksh", ".sbatch", ".slurm", ".pbs", ".qsub", ".lsf", ".job"), "shell"),
    ".env": "env",
    **dict.fromkeys((".yml", ".yaml"), "yaml"),
    ".toml": "toml",
    ".json": "json",
    ".md": "markdown",
}
ENV_NAME = re.compile(r"\.env(?:\..+|rc)?|nccl\.conf|\.nccl\.conf|.+\.env(?:\..+)?")
DOCKER_NAME = re.compile(r"(?:Docker|Container)file(?:\..+)?|.+\.dockerfile", re.IGNORECASE)
SHEBANG: tuple[tuple[re.Pattern[str], Kind], ...] = (
    (re.compile(r"#!.*\bpython[\d.]*\b"), "python"),
    (re.compile(r"#!.*\b(?:ba|z|k|da)?sh\b"), "shell"),
)

# Folders that are nobody's source, and code of others that lies beside one's own.
SKIPPED = {
    *(".git", ".hg", ".svn", "__pycache__", "__pypackages__", "node_modules", "site-packages", ".ipynb_checkpoints"),
    *(".tox", ".nox", ".eggs", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".venv", "venv", "wandb", "mlruns"),
    *("third_party", "thirdparty", "3rdparty", "vendor"),
}
BUILT = {"build", "dist", "_build"}  # where git is, what is built is ignored there, and a tracked `dist` is source


@dataclass(frozen=True)
class SourceFile:
    """A file as it was read.

    `path` is shown to the user: it starts with what the user gave. `inside` is the same file as POSIX text below the
    folder that was given, or below the current folder for a file that was given by name, if it is in there.
    `unread` says why `text` is empty, if the file could not be read.
    """

    path: str
    text: str
    kind: Kind
    inside: str
    unread: str = ""

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of Python, which all rules share. Raises what `ast.parse` raises."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes in code that is not ours to correct
            return ast.parse(self.text)


def collect(paths: Sequence[str | Path]) -> list[SourceFile]:
    """Return the files that `paths` name, in the order of their paths, each once.

    In a folder: those whose kind is known, without `SKIPPED` folders and what git ignores. A file that is given by
    name is there whatever its kind and place. Raises UsageError for a path that does not exist.
    """
    found: dict[str, tuple[str, str, bool]] = {}
    for given in paths:
        path = Path(given)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise UsageError(f"{given} cannot be read: {error.strerror}", "Give a file or a folder.") from error
        if stat.S_ISDIR(mode):
            for inside in _listed(path):
                found.setdefault(os.path.realpath(path / inside), (str(path / inside), inside, False))
        else:
            found[os.path.realpath(path)] = (str(path), _below_here(path), True)
    files = (_read(path, inside, named) for path, inside, named in found.values())
    return sorted((file for file in files if file is not None), key=lambda file: file.path)


def _below_here(path: Path) -> str:
    relative = Path(os.path.relpath(path))
    return path.name if relative.is_absolute() or ".." in relative.parts else relative.as_posix()


def _listed(folder: Path) -> Iterator[str]:
    """Yield the files in `folder` as POSIX text below it: as git knows them where it can tell, else all."""
    tracked = _known_to_git(folder)
    if tracked is None:
        yield from _walked(folder)
        return
    for inside in tracked:
        parts = PurePosixPath(inside).parts
        if any(part in SKIPPED for part in parts[:-1]):
            continue
        if inside.endswith("/"):  # a repository inside of this one, which git does not enter
            yield from (f"{inside}{below}" for below in _listed(folder / inside))
        elif _is_regular(folder / inside):
            yield inside


def _known_to_git(folder: Path) -> list[str] | None:
    """Return what git does not ignore in `folder`, or None if it cannot tell or ignores all of it."""
    if not any((parent / ".git").exists() for parent in (folder.resolve(), *folder.resolve().parents)):
        return None
    try:
        listed = run_git("ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=folder)
        ignored = run_git("check-ignore", "--quiet", ".", cwd=folder)
    except ScaffoldError:
        return None
    if listed.returncode or ignored.returncode == 0:
        return None
    return sorted(set(filter(None, listed.stdout.split("\0"))))


def _walked(folder: Path) -> Iterator[str]:
    """Yield the files below `folder`. Links to folders are not followed, so a loop of them does no harm."""
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        builds = {"pyproject.toml", "setup.py", "CMakeLists.txt"} & set(names)
        below = here.relative_to(folder).as_posix()
        prefix = "" if below == "." else f"{below}/"
        keep = []
        for name in sorted(folders):
            if name in SKIPPED or (builds and name in BUILT) or (here / name / "pyvenv.cfg").exists():
                continue
            if (here / name / ".git").exists():
                yield from (f"{prefix}{name}/{inside}" for inside in _listed(here / name))
            else:
                keep.append(name)
        folders[:] = keep
        yield from (f"{prefix}{name}" for name in sorted(names) if _is_regular(here / name))


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def kind_of(name: str, first_line: str = "") -> Kind:
    """Return what a file is, by its name, or by its first line where the name says nothing."""
    by_suffix = SUFFIXES.get(PurePosixPath(name).suffix.lower())
    if by_suffix is not None:
        return by_suffix
    if ENV_NAME.fullmatch(name):
        return "env"
    if DOCKER_NAME.fullmatch(name):
        return "docker"
    return next((kind for pattern, kind in SHEBANG if pattern.match(first_line)), "other")


def _read(path: str, inside: str, named: bool) -> SourceFile | None:
    """Read a file; None for one that was found in a folder and is of no kind that `check` reads."""
    name = PurePosixPath(inside).name
    kind = kind_of(name)
    if kind == "other" and "." in name and not named:
        return None
    try:
        with open(path, "rb") as stream:
            if kind == "other":
                kind = kind_of(name, stream.readline(200).decode("latin-1"))
                stream.seek(0)
            if kind == "other" and not named:
                return None
            hidden = any(part.startswith(".") for part in PurePosixPath(inside).parts)  # settings of an editor
            if kind == "json" and (hidden or os.fstat(stream.fileno()).st_size > MAX_BYTES_OF_SETTINGS):
                return None
            limit = MAX_BYTES.get(kind, MAX_BYTES_OTHERWISE)
            content = stream.read(limit + 1)
    except OSError as error:
        return SourceFile(path, "", kind, inside, error.strerror or "it cannot be read")
    if len(content) > limit:
        return SourceFile(path, "", kind, inside, f"it has more than {limit >> 20} MiB")
    return SourceFile(path, decoded(content), kind, inside)


def decoded(content: bytes) -> str:
    """Return a file's text, in the encoding that it names or begins with, else UTF-8, else Latin-1. Lines end in LF."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = content.decode("utf-16", errors="replace")
    else:
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
        except (SyntaxError, LookupError, UnicodeDecodeError):
            text = content.decode("latin-1")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
