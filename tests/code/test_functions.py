"""How long a function may be, and how complex, which ruff counts (C901): here by pyproject.toml, in projects below."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from cross_section import every

ROOT = Path(__file__).parents[2]
MOST_LINES = 60
MOST_COMPLEX = 15
FAMILIES = sorted(path.name for path in (ROOT / "templates" / "models").iterdir() if path.name != "common")


def long_functions(files: Iterable[Path]) -> list[str]:
    return [
        f"{file}: {name} has {lines} lines"
        for file in files
        for name, lines in lengths(file.read_text())
        if lines > MOST_LINES
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
    project = render({"model": family})
    files = list(project.rglob("*.py"))
    assert len(files) > 50
    assert long_functions(files) == []
    limit = ("--select", "C901", "--config", f"lint.mccabe.max-complexity={MOST_COMPLEX}")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", *limit, str(project)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_long_function_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text('def f(\n    a,\n):\n    """Two\n    lines."""\n' + "    a = 1\n" * MOST_LINES)
    assert long_functions([file]) == []
    file.write_text(file.read_text() + "    a = 2\n")
    assert long_functions([file]) == [f"{file}: f has {MOST_LINES + 1} lines"]
