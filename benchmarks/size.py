"""Lines of the functions of each ddp module, longest first, next to their limit; exit code 1 beyond it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 60  # without its docstring; files have no limit
SHOWN = 10


def main() -> int:
    """Print one line for each of the longest functions."""
    rows = sorted(
        (
            (length(node), f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
            for path in ROOT.glob("templates/project/*/*/ddp/**/*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
        ),
        reverse=True,
    )
    for lines, name in rows[:SHOWN]:
        print(f"{lines:5d} of {LIMIT}  {name}{'  TOO LONG' if lines > LIMIT else ''}")
    return int(rows[0][0] > LIMIT)


def length(function: ast.FunctionDef) -> int:
    """Lines of `function` without its docstring."""
    first = function.body[0]
    documented = ast.get_docstring(function) is not None
    return (function.end_lineno or 0) - function.lineno + 1 - documented * ((first.end_lineno or 0) - first.lineno + 1)


if __name__ == "__main__":
    sys.exit(main())
