"""The rooms of ddp/: imports run down the map in its docstring, in no circle; old names lead to the new modules."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
(OLD_NAMES,) = ROOT.glob("templates/project/*/*/ddp{## *")
MOVES = {
    old: new
    for release in yaml.safe_load((ROOT / "templates/moves.yml").read_text())
    for old, new in release["moves"].items()
}
IN_THE_FACE = "the names of __init__, the face, are for a project's own files"


@pytest.fixture(scope="module")
def ddp(render: Callable[..., Path]) -> Path:
    return render({"package": "digits"}) / "src/digits/ddp"


@pytest.fixture(scope="module")
def adopted(render: Callable[..., Path]) -> Path:
    return render({"package": "digits", "code": "existing", "source_folder": "src"}) / "src/digits/ddp"


def rooms_of(ddp: Path) -> dict[str, int]:
    """Room or module at the top -> its line in the map of ddp/__init__.py."""
    docstring = ast.get_docstring(ast.parse((ddp / "__init__.py").read_text())) or ""
    lines = [line for line in docstring.splitlines() if line.startswith("    ")]
    return {name: number for number, line in enumerate(lines) for name in re.split(r"\s{2,}", line.strip())[0].split()}


def modules_of(ddp: Path) -> dict[str, Path]:
    """'guard' or 'watch.verdict' -> its file; a room's own __init__ as 'watch'."""
    paths = {path.relative_to(ddp).with_suffix(""): path for path in ddp.rglob("*.py")}
    return {
        ".".join(name.parts).removesuffix(".__init__"): path
        for name, path in paths.items()
        if path.parent != ddp or path.stem != "__init__"
    }


def imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of ddp/ that one of them imports, wherever in it; '' is the face."""
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - (node.level - 1)]
            assert node.level - 1 <= len(package), f"{name} imports from outside of ddp/"
            base = ".".join([*above, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield inner if inner in modules else base


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The names along one circle, if there is any."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(edges.get(name, ())):
                if found := walk(other, [*path, name]):
                    return found
            done.add(name)
        return []

    return next(filter(None, (walk(name, []) for name in sorted(edges))), [])


def problems(ddp: Path) -> list[str]:
    """What is against the map."""
    lines, modules = rooms_of(ddp), modules_of(ddp)
    exist = {
        name if "." not in name and path.stem != "__init__" else f"{name.partition('.')[0]}/"
        for name, path in modules.items()
    }
    found = [f"{name} is not in the map" for name in sorted(exist - lines.keys())]
    found += [f"{name} of the map does not exist" for name in sorted(lines.keys() - exist - {"variables", "adopted"})]
    edges = {name: set(imports(name, path, modules)) for name, path in modules.items()}
    # A room's __init__ hands out names of the room: it is no module of its own.
    between: dict[str, set[str]] = {}
    for name, others in edges.items():
        here = next((room for room in (f"{name.partition('.')[0]}/", name) if room in lines), "")
        for other in sorted(others):
            there = next((room for room in (f"{other.partition('.')[0]}/", other) if room in lines), "")
            if not other or other not in modules:
                found.append(f"{name} imports from {other or 'the face'}: {IN_THE_FACE}")
            elif here and there and here != there:
                between.setdefault(here, set()).add(there)
                if lines[there] < lines[here]:
                    found.append(f"{name} imports {other}, from above")
    found += [f"a circle of rooms: {' > '.join(names)}" for names in [circle(between)] if names]
    return found + [f"a circle of modules: {' > '.join(names)}" for names in [circle(edges)] if names]


def test_imports_run_down_the_map(ddp: Path, adopted: Path) -> None:
    assert problems(ddp) == []
    assert problems(adopted) == []
    assert (adopted / "variables.py").exists()


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("kinds.py", "from .report import outcome\n", "kinds imports report.outcome, from above"),
        (
            "start/board.py",
            "def f():\n    from ..trace.heartbeat import beat\n",
            "start.board imports trace.heartbeat, from above",
        ),
        (
            "trace/marks.py",
            "from .heartbeat import beat\n",
            "a circle of modules: trace.heartbeat > trace.marks > trace.heartbeat",
        ),
        ("clocks.py", "from .errors import A\nfrom .rng import B\n", ""),
        ("rng.py", "from . import phase\n", f"rng imports from the face: {IN_THE_FACE}"),
        ("guard.py", "from . import start\n", ""),
        ("new.py", "", "new is not in the map"),
        ("room/new.py", "", "room/ is not in the map"),
        ("guard.py", None, "guard of the map does not exist"),
    ],
)
def test_what_is_against_the_map_is_found(ddp: Path, tmp_path: Path, path: str, text: str | None, problem: str) -> None:
    broken = tmp_path / "ddp"
    shutil.copytree(ddp, broken)
    (broken / path).parent.mkdir(exist_ok=True)
    if text is None:
        (broken / path).unlink()
    else:
        with (broken / path).open("a") as file:
            file.write(text)
    assert problem in [*problems(broken), ""]
    assert bool(problem) == bool(problems(broken))


def test_a_circle_of_rooms_is_found(ddp: Path, tmp_path: Path) -> None:
    """Within one line of the map, where no import runs up."""
    broken = tmp_path / "ddp"
    shutil.copytree(ddp, broken)
    (broken / "clocks.py").write_text("from .errors import A\n")
    (broken / "errors.py").write_text("from .clocks import B\n")
    assert problems(broken) == [
        "a circle of rooms: errors > clocks > errors",
        "a circle of modules: errors > clocks > errors",
    ]


def run(source: Path, *code: str) -> str:
    command = [sys.executable, "-W", "error::RuntimeWarning", *code]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_face_has_what_its_table_says_and_loads_it_late(ddp: Path) -> None:
    tree = ast.parse((ddp / "__init__.py").read_text())
    (table,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    named = {(module, name) for module, names in ast.literal_eval(table).items() for name in names.split()}
    typed = [
        (node.module, node.names[0].name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert sorted(typed) == sorted(named)
    assert not {name for _, name in named} & {path.stem for path in ddp.iterdir()}, "a module would hide the name"
    names = ", ".join(name for _, name in named)
    told = run(ddp.parents[1], "-c", f"import sys, digits.ddp; print(len(sys.modules)); from digits.ddp import {names}")
    assert int(told) < 200
    for module in ("start.owner", "start.kinship", "start.launcher", "report.outcome", "report"):
        told = run(ddp.parents[1], "-c", f"import sys, digits.ddp.{module}; print('torch' in sys.modules)")
        assert told == "False\n", module


def test_the_moves_are_those_of_the_files(ddp: Path, adopted: Path) -> None:
    for old, new in MOVES.items():
        for folder in (ddp, adopted):
            assert (folder.parent / new).is_file(), new
            assert not (folder.parent / old).exists(), f"{old} is for updates"
    shims = {f"ddp/{path.name}" for path in OLD_NAMES.iterdir()}
    assert shims == MOVES.keys()
    excluded = yaml.safe_load((ROOT / "templates/questions/moved.yml").read_text())["_exclude"]
    pattern = "{%% if _copier_operation == 'copy' %%}/**/%s{%% endif %%}"
    assert excluded == [pattern % shim for shim in sorted(shims)]


@pytest.fixture(scope="module")
def updated(ddp: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project's root as an update leaves it, with the old names."""
    project = tmp_path_factory.mktemp("updated") / "project"
    shutil.copytree(ddp.parents[2], project)
    shutil.copytree(OLD_NAMES, project / "src/digits/ddp", dirs_exist_ok=True)
    return project


def test_an_old_name_is_the_new_module(updated: Path) -> None:
    rooms = {f"ddp/{path.name}.py" for path in (updated / "src/digits/ddp").iterdir() if path.is_dir()}
    pairs = {old: new for old, new in MOVES.items() if old not in rooms}
    dotted = [tuple(f"digits.{name.removesuffix('.py').replace('/', '.')}" for name in pair) for pair in pairs.items()]
    code = (
        f"from importlib import import_module as load\nfor old, new in {dotted}: assert load(old) is load(new), old\n"
    )
    code += "from digits.ddp import heartbeat, env, ledger\nfrom digits.ddp.trace import heartbeat as moved\n"
    code += "assert heartbeat is moved and env.Place and ledger.keep_ledger\n"
    code += "from digits.ddp.report import note_slow, write\nfrom digits.ddp.same import Difference, digest\n"
    code += "from digits.ddp.preflight import PreflightSettings, main, ours\n"
    run(updated / "src", "-c", code)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["preflight", "--help"], "--clocks.preflight_s"),
        (["report"], ""),
        (["owner", "held", "1"], "."),
        (["start.owner", "taken", "1"], "."),
    ],
)
def test_commands_have_the_names_that_queued_jobs_know(updated: Path, words: list[str], said: str) -> None:
    assert said in run(updated / "src", "-m", f"digits.ddp.{words[0]}", *words[1:])


@pytest.mark.slow
def test_old_names_have_types(updated: Path, mypy_cache: Path) -> None:
    """For the project's mypy: model.py of an older release and the user's own files import by them."""
    mine = updated / "src/digits/mine.py"
    mine.write_text(
        "from .ddp.env import Place\nfrom .ddp.heartbeat import phase\nfrom .ddp.preflight import PreflightSettings\n\n"
        'reveal_type((Place, phase("x"), PreflightSettings().run.dir))\n'
    )
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(mypy_cache)]
    result = subprocess.run(command, cwd=updated, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert "Any" not in result.stdout
    mine.unlink()
    for words in (["check", "."], ["format", "--check", "."]):
        subprocess.run([sys.executable, "-m", "ruff", *words], cwd=updated, check=True)
