"""How long a function may be. How complex, ruff says (C901 in pyproject.toml)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from cross_section import every

ROOT = Path(__file__).parents[2]
MOST_LINES = 60
# The training loop is read from top to bottom, without looking anything up.
MAY_BE_LONGER = {("train.py", "train")}
FAMILIES = sorted(path.name for path in (ROOT / "templates" / "models").iterdir() if path.name != "common")


def long_functions(files: Iterable[Path]) -> list[str]:
    return [
        f"{file}: {name} has {lines} lines"
        for file in files
        for name, lines in lengths(file.read_text())
        if lines > MOST_LINES and (file.name, name) not in MAY_BE_LONGER
    ]


def lengths(code: str) -> Iterator[tuple[str, int]]:
    """Yield each function with its lines. Parameters (of a command: its options) and docstrings do not count."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, node.body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_functions_of_this_repository() -> None:
    files = [path for folder in ("scaffold", "releases") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50
    assert long_functions([*files, *(ROOT / "docs").glob("*.py"), ROOT / "hatch_build.py"]) == []


@pytest.mark.parametrize("family", every(len(FAMILIES), FAMILIES))
def test_functions_of_a_rendered_project(render: Callable[..., Path], family: str) -> None:
    files = list(render({"model": family}).rglob("*.py"))
    assert len(files) > 50
    assert long_functions(files) == []


def test_a_long_function_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text('def f(\n    a,\n):\n    """Two\n    lines."""\n' + "    a = 1\n" * MOST_LINES)
    assert long_functions([file]) == []
    file.write_text(file.read_text() + "    a = 2\n")
    assert long_functions([file]) == [f"{file}: f has {MOST_LINES + 1} lines"]
