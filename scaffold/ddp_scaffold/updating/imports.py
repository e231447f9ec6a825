"""The lines of a user's own code that import a module under the name that it had before it moved."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from .compare import Entry

SHOWN = 20


def notes(
    repository: Path,
    moved: Mapping[str, str],
    made: Mapping[str, Entry],
    ours: Mapping[str, Entry],
    after: Mapping[str, Entry],
) -> list[str]:
    """Return a remark for each such line of the work tree, which holds `after`; not more than can be read."""
    names = {_module(old): _module(new) for old, new in moved.items() if old.endswith(".py") and new.endswith(".py")}
    plumbing = {f"{PurePosixPath(*parts[: parts.index('ddp') + 1])}/" for parts in _parts(moved) if "ddp" in parts}
    found = []
    for path in sorted(after) if names else []:
        theirs = path in ours and (after[path] == ours[path] or ours[path] != made.get(path))
        if not path.endswith(".py") or not theirs or path.startswith(tuple(plumbing)) or after[path].is_link:
            continue
        for line, name in _imported((repository / path).read_bytes(), path):
            if name in names:
                found.append(f"{path}:{line} imports {name}, now {names[name]}")
    found = list(dict.fromkeys(found))
    return found[:SHOWN] + ([f"and {len(found) - SHOWN} more"] if found[SHOWN:] else [])


def _parts(paths: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    return (PurePosixPath(path).parts for path in paths)


def _module(path: str) -> str:
    """Return the name under which a file is imported: `src/` holds packages, and is none."""
    parts = PurePosixPath(path).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(text: bytes, path: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of everything that a file imports; nothing of one that is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in somebody's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = _module(str(PurePosixPath(path).with_name("__init__.py"))).split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((alias.lineno, f"{module}.{alias.name}") for alias in node.names)
