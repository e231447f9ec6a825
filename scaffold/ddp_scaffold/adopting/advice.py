"""Which lines of a repository's own training code to change, and the patch that changes them. Runs none of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from .._git import run_git
from ..check.files import SourceFile, decoded
from ..check.findings import Finding
from ..check.python.context import Context, framework_of, wraps_ddp
from ..check.python.effects import FSDP
from ..check.python.module import Call, Module, read
from ..check.python.program import Program
from ..check.run import Selection, check
from . import done, improve, packaging, patch
from .edits import as_patch
from .shape import Shape, read_shape

MAX_BYTES = 1 << 20  # of a file: longer ones are made by programs
# Not the user's training code, whatever is in them.
SKIPPED = {
    *("build", "dist", "docs", "env", "external", "node_modules", "site-packages", "test", "tests", "third_party"),
    *("vendor", "venv", "wandb"),
}
IMPORTED = re.compile(r"^[ \t]*(?:from|import)[ \t]+([\w., \t]+)", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """A line to change: what is wrong there, and what to write instead. Without those that `must`, it does not stop."""

    file: str
    line: int
    text: str
    why: str
    instead: str
    must: bool


@dataclass(frozen=True)
class Advice:
    """All that was found, in the order of work.

    `unknown` has what of the program's shape was not recognised: then there is no patch of its loop. `loop` is empty,
    or says who has the loop, if not this code: a framework, nobody.
    """

    changes: tuple[Change, ...]
    findings: tuple[Finding, ...]
    unread: tuple[str, ...]
    unknown: tuple[str, ...]
    loop: str = ""
    framework: str = ""
    patch: bytes = b""


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


def advise(root: Path, files: Sequence[str], command: str, source_folder: str, package: str) -> Advice:
    """Read `files` and return what to change. `command` is what python runs to train, `package` where ddp/ will be."""
    modules = _modules(root, files, script_of(command, set(files), source_folder))
    unread = tuple(module.file.inside for module in modules if module.problem)
    program = Program(modules)
    program.connect()
    script = script_of(command, set(files), source_folder)
    entry = next((module for module in program.modules if module.file.inside == script), None)
    if entry is None:
        words = f"{script}: {next((m.problem for m in modules if m.file.inside == script), '')}" if script else ""
        loop = f"{words or f'no file of the repository is what python {command} runs'}, so nothing is known of its loop"
        return Advice((), (), unread, (), loop)
    shape = read_shape(program, entry)
    context = Context(program)
    framework = _framework(shape, program)
    if framework:
        return Advice((), (), unread, (), f"{framework} owns the loop of {script}", framework)
    if loop := _nothing(shape, program, script):
        return Advice((), (), unread, (), loop)
    work = patch.plan(shape, package)
    unknown = tuple(f"{module.file.inside}:{line}: {words}" for module, line, words in shape.unknown)
    must = list(done.left(work.places, shape))
    changes = [_change(place, True) for place in must]
    changes += [_change(place, False) for place in improve.improvements(shape, context, package)]
    written = patch.write(work, root) if not unknown and not done.has_session(shape) else b""
    return Advice(tuple(changes), (), unread, unknown, "", "", written)


def _nothing(shape: Shape, program: Program, script: str) -> str:
    """Say it if this program trains nothing. A backward pass elsewhere may be its own, over calls that are not seen."""
    if shape.epochs is not None or any(call.last == "backward" for call in _calls(shape)):
        return ""
    waiting, seen = [shape.entry], {id(shape.entry)}
    while waiting:
        module = waiting.pop()
        line = next((c.node.lineno for f in module.functions for c in f.calls if c.last == "backward"), 0)
        if line:
            shape.unknown[:] = [(module, line, f"how {script} comes to the backward pass here")]
            return ""
        for target in program.imports_of(module):
            if id(target) not in seen:
                seen.add(id(target))
                waiting.append(target)
    if shape.inits:
        return f"{script} makes a process group, and trains nothing: a session would end it as stalled; leave it alone"
    return f"{script} trains nothing, as far as can be seen"


def with_packaging(advice: Advice, root: Path, package: str) -> Advice:
    """Return the advice with what the repository's own packaging needs, so that it installs as it did before."""
    needed = packaging.needed(root, package)
    if needed is None:
        return advice
    text = as_patch({"pyproject.toml": (needed.before, needed.after)})
    change = Change("pyproject.toml", needed.line, "", needed.why, needed.instead, True)
    return replace(advice, changes=(*advice.changes, change), patch=advice.patch + text)


def findings_in(root: Path) -> tuple[Finding, ...]:
    """Return what `check` finds in a repository, with paths below it."""
    checked = check([root], Selection())
    inside = {file.path: file.inside for file in checked.files}
    return tuple(replace(one, file=inside[one.file]) for one in checked.findings)


def _calls(shape: Shape) -> Iterator[Call]:
    for function in shape.reached:
        yield from function.calls


def _framework(shape: Shape, program: Program) -> str:
    """Return what owns the loop, if it is not the code itself."""
    modules = {id(function.module): function.module for function in shape.reached}.values()
    if any(FSDP.fullmatch(call.name) for call in _calls(shape)):
        return "FullyShardedDataParallel"
    plain = any(wraps_ddp(module) for module in program.modules) and shape.inits
    names = [framework_of(module) for module in modules]
    return next((name for name in names if name), "") if not plain else ""


def _change(place: patch.Place, must: bool) -> Change:
    lines = place.module.file.text.split("\n")
    text = " ".join(lines[place.line - 1].split()) if place.line <= len(lines) else ""
    shown = text if len(text) <= 100 else f"{text[:97]}..."
    return Change(place.module.file.inside, place.line, shown, place.why, place.instead, must)


def _modules(root: Path, files: Sequence[str], script: str) -> list[Module]:
    """Read those of `files` that the training script may reach, and those that mention torch."""
    by_name: dict[str, list[str]] = {}
    for path in files:
        parts = PurePosixPath(path).with_suffix("").parts
        for name in {parts[-1], parts[-2] if len(parts) > 1 and parts[-1] == "__init__" else parts[-1]}:
            by_name.setdefault(name, []).append(path)
    texts: dict[str, str] = {}
    for path in files:
        text = _text(root / path)
        if text is not None and (path == script or "torch" in text):
            texts[path] = text
    waiting = [script] if script in texts else []
    seen = set(waiting)
    while waiting:
        for written in IMPORTED.findall(texts[waiting.pop()]):
            for name in re.findall(r"\w+", written):
                for path in by_name.get(name, ()):
                    if path not in seen and (text := texts.get(path) or _text(root / path)) is not None:
                        seen.add(path)
                        texts[path] = text
                        waiting.append(path)
    return [read(SourceFile(str(root / path), text, "python", path)) for path, text in sorted(texts.items())]


def _text(path: Path) -> str | None:
    try:
        if path.is_symlink() or path.stat().st_size > MAX_BYTES:
            return None
        return decoded(path.read_bytes())
    except OSError:
        return None


def script_of(command: str, files: set[str], source_folder: str) -> str:
    """Return the file that `python COMMAND` runs, or an empty text."""
    words = command.split()
    if words[0] != "-m":
        path = os.path.normpath(words[0])
        return path if path in files else ""
    stem = words[1].replace(".", "/")
    tries = [f"{prefix}{stem}{end}" for prefix in ("", f"{source_folder}/") for end in (".py", "/__main__.py")]
    return next((path for path in tries if path in files), "")
