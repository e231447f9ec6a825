"""Which lines of a repository's own training code to change once ddp/ is beside it. Reads the code, runs none of it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .._git import run_git
from . import habits, rank0, rules
from .code import Module, parse

MAX_BYTES = 1 << 20  # of a file: longer ones are made by programs
# Not the user's training code, whatever is in them.
SKIPPED = {
    *("build", "dist", "docs", "env", "external", "node_modules", "site-packages", "test", "tests", "third_party"),
    *("vendor", "venv", "wandb"),
}
# These hold for every file; the others for code that the training command reaches.
EVERYWHERE = (rules.groups, rules.error_paths)
IN_TRAINING = (
    *(habits.options, habits.norms, habits.signals),
    *(rank0.long_work, rank0.lonely_collectives),
)


@dataclass(frozen=True)
class Change:
    """A line to change: what is wrong there, and what to write instead."""

    file: str
    line: int
    text: str
    why: str
    instead: str


@dataclass(frozen=True)
class Advice:
    """All that was found: the lines, the files that could not be read, the framework that trains here, if any."""

    changes: list[Change]
    unread: list[str]
    framework: str = ""


def own_files(root: Path, ours: Iterable[str] = ()) -> list[str]:
    """Return the repository's Python files, as git knows them, without tests, vendored code and the folders `ours`."""
    listed = run_git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py", cwd=root).stdout
    prefixes = tuple(f"{folder}/" for folder in ours)
    return sorted(path for path in set(listed.split("\0")) if path and _is_own(path) and not path.startswith(prefixes))


def _is_own(path: str) -> bool:
    *folders, name = PurePosixPath(path).parts
    if any(folder in SKIPPED or folder.startswith(".") for folder in folders) or name.startswith("."):
        return False
    return name not in ("conftest.py", "setup.py") and not name.startswith("test_") and not name.endswith("_test.py")


def advise(root: Path, files: Iterable[str], command: str, source_folder: str) -> Advice:
    """Read `files` and return what to change. `command` is what python runs to train."""
    names = set(files)
    read: dict[str, Module | None] = {}

    def module(path: str) -> Module | None:
        if path not in read:
            content = _content(root / path)
            read[path] = None if content is None else parse(path, content)
        return read[path]

    reached = set(_reached(script_of(command, names, source_folder), names, source_folder, module))
    found, unread = {}, []
    for path in sorted(names):
        content = _content(root / path) or b""
        if path in reached or b"torch" in content or b"NCCL_" in content:
            parsed = module(path)
            if parsed is not None:
                found[path] = parsed
            else:
                unread.append(path)
    if not reached:  # the training script was not found
        reached = {path for path, parsed in found.items() if parsed.knows_ranks}
    knows_ranks = any(parsed.knows_ranks for parsed in found.values())
    framework = next((found[path].framework for path in sorted(reached & set(found)) if found[path].framework), "")
    sites: dict[str, list[tuple[Module, ast.Call]]] = defaultdict(list)
    for parsed in found.values():
        for call, name in parsed.calls:
            sites[name.rpartition(".")[2]].append((parsed, call))

    read_by_user = {name for parsed in found.values() for name in habits.variables_read(parsed)}
    changes: set[Change] = set()
    for path, parsed in found.items():
        findings = [*habits.variables(parsed, read_by_user)]
        for rule in EVERYWHERE:
            findings += rule(parsed)
        if knows_ranks and path in reached and not framework:
            for rule in IN_TRAINING:
                findings += rule(parsed)
            findings += rules.loaders(parsed, "set_epoch" in sites)
            findings += rank0.saves_everywhere(parsed, sites)
        changes |= set(_changes(parsed, findings))
    return Advice(sorted(changes, key=lambda c: (c.file, c.line, c.why)), unread, framework)


def _content(path: Path) -> bytes | None:
    try:
        if path.is_symlink() or path.stat().st_size > MAX_BYTES:
            return None
        return path.read_bytes()
    except OSError:
        return None


def _changes(module: Module, findings: Iterable[rules.Finding]) -> Iterator[Change]:
    for node, why, instead in findings:
        line: int = node.lineno  # type: ignore[attr-defined]  # statements and expressions have one
        yield Change(module.path, line, module.text(line), why, instead)


def script_of(command: str, files: set[str], source_folder: str) -> str:
    """Return the file that `python COMMAND` runs, or an empty text."""
    words = command.split()
    if words[0] != "-m":
        path = PurePosixPath(words[0]).as_posix()
        return path if path in files else ""
    stem = words[1].replace(".", "/")
    tries = [f"{prefix}{stem}{end}" for prefix in ("", f"{source_folder}/") for end in (".py", "/__main__.py")]
    return next((path for path in tries if path in files), "")


def _reached(script: str, files: set[str], source_folder: str, module: Callable[[str], Module | None]) -> Iterator[str]:
    """Yield the script and the files that it imports, and those that they import."""
    waiting, seen = [script] if script else [], {script}
    folders = {".", source_folder, PurePosixPath(script).parent.as_posix()}
    prefixes = {"" if folder == "." else f"{folder}/" for folder in folders}
    while waiting:
        path = waiting.pop()
        yield path
        parsed = module(path)
        for name in _imported(parsed, path) if parsed else ():
            for prefix in prefixes:
                for end in (".py", "/__init__.py"):
                    candidate = f"{prefix}{name}{end}"
                    if candidate in files and candidate not in seen:
                        seen.add(candidate)
                        waiting.append(candidate)


def _imported(module: Module, path: str) -> Iterator[str]:
    """Yield what a file may import, as paths without an end: `a/b` for `from a import b`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.replace(".", "/") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").replace(".", "/")
            if node.level:
                folder = PurePosixPath(path)
                for _ in range(node.level):
                    folder = folder.parent
                base = (folder / base).as_posix().removeprefix("./")
            yield base
            yield from (f"{base}/{alias.name}".removeprefix("./").lstrip("/") for alias in node.names)
