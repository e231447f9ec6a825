"""Who may import whom in the command line: one way only, and copier in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "ddp_scaffold"
# From the top: a room may import those below it, and none beside it.
FLOORS = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("creating", "doctor"),
    ("adopting", "updating"),
    ("check", "explain"),
    ("template",),
    ("presets",),
    ("_output", "_git", "_signals"),
    ("_errors",),
    ("__init__",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MAY_IMPORT_COPIER = ("template.",)

Sources = Mapping[str, str]  # of modules, by their names inside of the package


@pytest.fixture(scope="module")
def sources() -> Sources:
    folder = ROOT / "scaffold" / PACKAGE
    files = {path.relative_to(folder).with_suffix(""): path for path in folder.rglob("*.py")}
    return {".".join(name.parts): path.read_text() for name, path in files.items()}


def imported(module: str, code: str) -> Iterator[str]:
    """Yield what a module imports, at its top or in its functions, with full names."""
    package = [PACKAGE, *module.split(".")[:-1]]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            path = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{path}.{name.name}" for name in node.names)


def edges(sources: Sources) -> dict[str, set[str]]:
    """Return the modules of the package that each one imports."""
    found: dict[str, set[str]] = {}
    for module, code in sources.items():
        names = [name.removeprefix(f"{PACKAGE}.") for name in imported(module, code) if name.startswith(PACKAGE)]
        # `from .room import module` names a module; `from .module import name` something in it.
        tries = ((name, name.rpartition(".")[0], "__init__") for name in names)
        found[module] = {next(one for one in names if one in sources) for names in tries}
    return found


def upwards(sources: Sources) -> list[str]:
    """Return the imports that lead to a higher floor, or to another room of the same."""
    found = []
    for module, others in edges(sources).items():
        room = module.partition(".")[0]
        for other in (name.partition(".")[0] for name in sorted(others)):
            if other != room and FLOOR[other] <= FLOOR[room]:
                found.append(f"{module} imports {other}")
    return found


def circle(sources: Sources) -> list[str]:
    """Return the modules of a circle, if there is one."""
    try:
        TopologicalSorter(edges(sources)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def importing_copier(sources: Sources) -> list[str]:
    return [
        module
        for module, code in sources.items()
        if any(name.partition(".")[0] == "copier" for name in imported(module, code))
        and not module.startswith(MAY_IMPORT_COPIER)
    ]


def test_imports_lead_down(sources: Sources) -> None:
    assert upwards(sources) == []


def test_no_circle(sources: Sources) -> None:
    assert circle(sources) == []


def test_only_the_template_room_imports_copier(sources: Sources) -> None:
    assert importing_copier(sources) == []
    assert "copier.errors.CopierError" in imported("template.copier_calls", sources["template.copier_calls"])


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("presets.load", "from ..template import given"),
        ("template.given", "def f():\n    from ..creating.summary import needs"),
        ("adopting.suggest", "from ..updating.lock import only_update"),
        ("_errors", "from . import cli"),
        ("_git", "from ._output import say"),
    ],
)
def test_an_import_upwards_is_seen(sources: Sources, module: str, line: str) -> None:
    broken = {**sources, module: f"{sources[module]}\n{line}\n"}
    assert [found.partition(" ")[0] for found in upwards(broken)] == [module]


def test_a_circle_is_seen(sources: Sources) -> None:
    line = "def f():\n    from .questions import check"
    broken = {**sources, "template.given": f"{sources['template.given']}\n{line}\n"}
    assert {"template.given", "template.questions"} <= set(circle(broken))


def test_copier_elsewhere_is_seen(sources: Sources) -> None:
    broken = {**sources, "creating.create": f"{sources['creating.create']}\ndef f():\n    import copier\n"}
    assert importing_copier(broken) == ["creating.create"]
