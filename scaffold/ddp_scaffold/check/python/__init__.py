"""The rules for Python files and notebooks."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath

from .. import rules
from ..files import SourceFile
from ..findings import Finding
from . import (
    buffers,
    costs,
    devices,
    everywhere,
    hang,
    leaving,
    loadable,
    loading,
    measures,
    orders,
    ports,
    prepares,
    rank_zero,
    reads,
    rendezvous,
    results,
    resumes,
    samplers,
    saves,
    seeds,
    shares,
    stops,
    unsaved,
    waiting,
    wrapped,
    writes,
)
from .context import Context, Found
from .module import Module, read
from .parts import concerns, parts_of
from .program import Program

TEMPLATE = re.compile(r"^\s*\{[%#]-?\s", re.MULTILINE)  # of Jinja: not Python before it is rendered
ROOMS = (
    hang,
    shares,
    leaving,
    loadable,
    loading,
    waiting,
    stops,
    rank_zero,
    results,
    resumes,
    samplers,
    orders,
    measures,
    rendezvous,
    seeds,
    devices,
    ports,
    prepares,
    saves,
    unsaved,
    reads,
    costs,
    buffers,
    everywhere,
    wrapped,
    writes,
)
ANYWHERE = tuple(rule for room in ROOMS for rule in room.RULES)
RULES = (*ANYWHERE, *(rule for room in ROOMS for rule in room.OF_RANKS))


def findings(files: Sequence[SourceFile], texts: Sequence[str] | None = None) -> Iterator[Finding]:
    """Yield what is wrong in those of `files` that are Python or notebooks, which are read together as one program.

    Tests are read, since they show who calls what, but nothing is said about them: they have faults on purpose.
    `texts` are those of all files, where `files` are a part of them.
    """
    python = [file for file in files if is_python(file)]
    with without_collection():
        wanted = {id(file) for part in parts_of(python) if concerns(part) for file in part}
        modules = [read(file, outline=id(file) not in wanted) for file in python]
        program = Program([module for module in modules if id(module.file) in wanted])
        program.connect()
        context = Context(program, texts if texts is not None else [file.text for file in python])
        found = {_placed(one) for one in _found(context)} | {_placed(one) for one in _unread(modules)}
    yield from sorted(found)


def is_python(file: SourceFile) -> bool:
    """Tell whether a file is read by these rules."""
    return file.kind in ("python", "notebook")


@contextmanager
def without_collection() -> Iterator[None]:
    """Leave the garbage collector out: trees of many files have millions of nodes, and none of them goes away."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _found(context: Context) -> Iterator[Found]:
    for module in context.program.modules:
        if is_test(module):
            continue
        rules_here = RULES if id(module) in context.distributed else ANYWHERE
        for function in module.functions:
            for rule in rules_here:
                try:
                    yield from rule(context, function)
                except RecursionError:  # an expression that is nested as deeply as programs write them
                    continue


def is_test(module: Module) -> bool:
    """Tell whether a file is a test, by its name or its folder."""
    *folders, name = PurePosixPath(module.file.inside).parts
    return name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py" or "tests" in folders


def _unread(modules: Sequence[Module]) -> Iterator[Found]:
    for module in modules:
        if module.problem and not is_test(module) and not TEMPLATE.search(module.file.text):
            message = f"this file was not checked: {module.problem}"
            fix = "correct it, or leave it out of what is checked"
            yield Found("DDP601", module, _Line(module.problem_line), message, fix)


class _Line:
    """The place of what has no syntax tree."""

    def __init__(self, lineno: int) -> None:
        self.lineno, self.col_offset = lineno, 0


def _placed(found: Found) -> Finding:
    severity = rules.SEVERITIES[int(found.rule[3]) - 1]  # of the hundreds, also where a rule is one of scripts
    cell, line = found.module.position(getattr(found.node, "lineno", 1))
    column = getattr(found.node, "col_offset", 0) + 1
    path, docs = found.module.file.path, rules.page_of(found.rule)
    return Finding(path, line, column, found.rule, severity, found.message, found.fix, docs, cell)
