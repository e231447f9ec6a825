"""What a release moves: all of it is listed, and what people import goes on working.

A project of the last release and one of the next are compared, file by file. Whatever of the last one is gone, or only
leads elsewhere now, stands in templates/moves.yml, by which updates bring the user's edits along.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from history import git
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[1] / "scaffold"))
from ddp_scaffold.updating import compare, moves

ALIKE = 90  # per cent, as git counts it: an edit then finds its place
LEADS_ELSEWHERE = "sys.modules[__name__] ="  # a module that is another one
USERS = ("model", "data", "train")  # modules of the user's: old ones must go on working with a new ddp/
NEEDED = ("torch", "numpy", "pydantic_settings")  # to import them; without these, they are only read


@dataclass(frozen=True)
class Pair:
    """A project as the last release makes it, and as the next one does, of the same answers."""

    old: Path
    new: Path

    @cached_property
    def package(self) -> PurePosixPath:
        import yaml

        answers = yaml.safe_load((self.new / ".copier-answers.yml").read_text(encoding="utf-8"))
        return PurePosixPath(answers.get("source_folder", "src"), answers["package"])

    @cached_property
    def old_files(self) -> dict[str, bytes]:
        return _files(self.old)

    @cached_property
    def new_files(self) -> dict[str, bytes]:
        return _files(self.new)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def problems(
    version: str, before: str, listed: str, listed_before: str, removed: Collection[str], pairs: Collection[Pair]
) -> list[str]:
    """Return every reason against the moves of the release `version`, which comes after `before`.

    `listed` is templates/moves.yml, `listed_before` that of the last release; `removed` are the files taken out on
    purpose.
    """
    try:
        entries, past = dict(moves.parse(listed)), dict(moves.parse(listed_before))
    except ValueError as error:
        return [f"templates/moves.yml: {error}"]
    found = [f"templates/moves.yml: what {one} moved must stay" for one in past if entries.get(one) != past[one]]
    others = entries.keys() - past.keys() - {Version(version)}
    found += [f"templates/moves.yml: {one} is not the release that is made" for one in sorted(others)]
    moved = entries.get(Version(version), {}) if Version(version) not in past else {}
    for old in moved:
        if not any(str(pair.package / old) in pair.old_files for pair in pairs):
            found.append(f"templates/moves.yml moves {old}, which is no file of {before}")
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-moves-") as name:
        git("init", "--quiet", name, cwd=Path(name))
        for pair in pairs:
            found += _of_pair(pair, moved, before, removed, Path(name))
    return list(dict.fromkeys(found))


def _of_pair(
    pair: Pair, moved: Mapping[str, str], before: str, removed: Collection[str], repository: Path
) -> Iterator[str]:
    old_files, new_files = pair.old_files, pair.new_files
    full = {str(pair.package / old): str(pair.package / new) for old, new in moved.items()}
    for old, new in full.items():
        if old not in old_files:
            continue
        if new not in new_files:
            yield f"templates/moves.yml moves {old} to {new}, which is no file of a new project"
        elif new in old_files and new not in full:
            yield f"templates/moves.yml moves {old} to {new}, which {before} has already"
        elif (score := similarity(old_files[old], new_files[new], repository)) < ALIKE:
            yield f"{new} is only {score}% alike to {old} of {before}: move it alone, and change it in another release"
        in_its_place = new_files.get(old, b"") if old not in full.values() else b""
        if in_its_place and similarity(old_files[old], in_its_place, repository) >= 50:
            yield f"templates/moves.yml moves {old}, which is still there"
    seen = _seen(pair, repository)
    for path in sorted(old_files.keys() - new_files.keys() - full.keys() - set(removed)):
        where = f"it seems to be {seen[path]}; templates/moves.yml" if path in seen else "templates/moves.yml"
        yield f"{path} of {before} is gone: an edit in it would be lost ({where} or releases/removed.yml)"
    for path in sorted(old_files.keys() & new_files.keys() - full.keys()):
        if path in seen:
            yield f"{path} of {before} is {seen[path]} now, and templates/moves.yml does not say so"
        elif LEADS_ELSEWHERE.encode() in new_files[path] and LEADS_ELSEWHERE.encode() not in old_files[path]:
            yield f"{path} of {before} leads elsewhere now, and templates/moves.yml does not say where"


def similarity(old: bytes, new: bytes, repository: Path) -> int:
    """Return how much of a file is in another one, in per cent, as git counts it for renames."""
    if old == new:
        return 100
    trees = []
    for name, content in (("old", old), ("new", new)):
        command = ["git", "hash-object", "-w", "--stdin"]
        done = subprocess.run(command, cwd=repository, input=content, capture_output=True, check=True)
        trees.append(git("mktree", cwd=repository, text=f"100644 blob {done.stdout.decode().strip()}\t{name}\n"))
    shown = git("diff-tree", "-r", "--find-renames=1%", "--name-status", *trees, cwd=repository)
    return int(shown[1:4]) if shown.startswith("R") else 0


def _seen(pair: Pair, repository: Path) -> dict[str, str]:
    """Return where git finds files of the old project in the new one."""
    trees = []
    for folder in (pair.old, pair.new):
        git("--work-tree", str(folder), "add", "--all", "--force", cwd=repository)
        trees.append(git("write-tree", cwd=repository))
    return compare.moves(repository, *trees)


def import_problems(pairs: Collection[Pair], told: Mapping[str, Collection[str]]) -> list[str]:
    """Return which imports of people's own code would fail with the new `ddp/`.

    That is the last release's model.py, data.py and train.py, and what adopters were told to import (`told`: names by
    module below their package). Where torch is installed they are imported; if not, they are looked up.
    """
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-imports-") as name:
        work = [_to_import(pair, Path(name, str(number)), told) for number, pair in enumerate(pairs)]
        if all(importlib.util.find_spec(module) for module in NEEDED):
            failed = _imported(work, Path(name, "failed"))
        else:
            failed = [why for folder, lines in work for line in lines for why in _looked_up(line, folder)]
    run = [why for pair in pairs for why in _run_problems(pair)]
    return list(dict.fromkeys(run + [f"people's own code would fail: {each}" for each in failed]))


def _to_import(pair: Pair, folder: Path, told: Mapping[str, Collection[str]]) -> tuple[Path, list[str]]:
    """Make a new project in `folder` with the user's modules of the old one; return its root, and what to import."""
    shutil.copytree(pair.new, folder)
    package, lines = pair.package, []
    for module in USERS:
        path = package / f"{module}.py"
        if (pair.old / path).is_file():
            shutil.copy(pair.old / path, folder / path)
            lines.append(f"import {package.name}.{module}")
    if not lines:  # beside code of their own
        for module, names in told.items():
            lines.append(f"import {package.name}.{module}")
            lines += [f"from {package.name}.{module} import {one}" for one in names]
    return folder / package.parent, lines


IMPORT = """
import importlib, json, sys
failed = []
for folder, lines in json.load(sys.stdin):
    before = set(sys.modules)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    for line in lines:
        try:
            exec(line, {})
        except BaseException as error:
            failed.append(f"{line}: {type(error).__name__}: {error}")
    del sys.path[0]
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(sys.argv[2]):
            del sys.modules[name]
open(sys.argv[1], "w").write(json.dumps(failed))
"""


def _imported(work: list[tuple[Path, list[str]]], result: Path) -> list[str]:
    command = [sys.executable, "-c", IMPORT, str(result), str(result.parent)]
    text = json.dumps([(str(folder), lines) for folder, lines in work])
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode or not result.is_file():
        return [f"python ended with {done.returncode}: {done.stderr.strip()[-300:]}"]
    failed: list[str] = json.loads(result.read_text())
    return failed


def _looked_up(line: str, folder: Path) -> Iterator[str]:
    """Yield what a line imports, and what the modules behind it do, that is not in the package below `folder`."""
    waiting = [(line, "")]
    done = set()
    while waiting:
        text, package = waiting.pop()
        for module, names in _wanted(ast.parse(text), package):
            path = _path(folder, module)
            if not (folder / module.split(".")[0]).is_dir():
                continue  # not of the package
            if path is None:
                yield f"{line}: there is no module {module}"
                continue
            known = _names(folder, module)
            yield from (
                f"{line}: {module} has no {name}"
                for name in names
                if name not in known and name != "*" and _path(folder, f"{module}.{name}") is None
            )
            if path not in done:
                done.add(path)
                own = module if path.name == "__init__.py" else module.rpartition(".")[0]
                waiting.append((path.read_text(encoding="utf-8"), own))


def _wanted(tree: ast.Module, package: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules that are imported when the module of `package` itself is, and which names of them."""
    for node in _at_import(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])]), [alias.name for alias in node.names]


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _at_import(child)
        yield child


def _names(folder: Path, module: str) -> set[str]:
    """Return the names that a module has; of one that is another, the other's."""
    path = _path(folder, module)
    if path is None:
        return set()
    text = path.read_text(encoding="utf-8")
    tree, found = ast.parse(text), set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in _at_import(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if LEADS_ELSEWHERE in text:
        for other, names in _wanted(tree, package):
            for full in {other, *(f"{other}.{name}" for name in names)} - {module, package}:
                found |= _names(folder, full)
    return found


def _path(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def _run_problems(pair: Pair) -> Iterator[str]:
    """Yield the modules that old launch scripts run by name, as queued jobs will, and that would not run."""
    folder, name = pair.new / pair.package.parent, pair.package.name
    for path, content in sorted(pair.old_files.items()):
        if not path.startswith("launch"):
            continue
        for module in sorted(set(re.findall(rf"\b{name}\.ddp(?:\.\w+)+", content.decode(errors="replace")))):
            old, new = _path(pair.old / pair.package.parent, module), _path(folder, module)
            if old is None:
                continue
            runs = "__main__" in old.read_text(encoding="utf-8")
            if new is None or (runs and "__main__" not in new.read_text(encoding="utf-8")):
                yield f"{path} of the last release runs {module}, which would not run any more"
