"""What `make release` says to moves: small projects of the last release and the next, as they would be rendered."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from update_helpers import ROOT

sys.path.insert(0, str(ROOT / "releases"))
import moved

SHIM = "import sys\n\nfrom .trace import collectives\n\nsys.modules[__name__] = collectives\n"
LEDGER = "".join(f"line_{at} = {at}\n" for at in range(100))
ENTRY = "- {release: 2.0.0, moves: {ddp/ledger.py: ddp/trace/collectives.py}}\n"
OLD = {
    "ddp/__init__.py": "",
    "ddp/ledger.py": LEDGER,
    "model.py": "from .ddp.ledger import line_3\n",
    "train.py": "def main():\n    from .ddp import ledger\n",
}
NEW = {
    "ddp/__init__.py": "",
    "ddp/ledger.py": SHIM,
    "ddp/trace/__init__.py": "",
    "ddp/trace/collectives.py": LEDGER.replace("line_7 =", "line_seven ="),
    "model.py": "from .ddp.trace.collectives import line_3\n",
    "train.py": OLD["train.py"],
}


def project(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name if name.startswith(("launch", "tests")) else folder / "src" / "demo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / ".copier-answers.yml").write_text("package: demo\n")
    return folder


def pair(tmp_path: Path, old: Mapping[str, str], new: Mapping[str, str]) -> moved.Pair:
    return moved.Pair(project(tmp_path / "old", old), project(tmp_path / "new", new))


def problems(tmp_path: Path, *, listed: str = ENTRY, before: str = "[]", removed: Iterable[str] = (), **changes) -> str:
    """The reasons against a release; `old` and `new` change files of the two projects, and None removes one."""
    versions = []
    for files, change in ((OLD, changes.get("old", {})), (NEW, changes.get("new", {}))):
        versions.append({name: text for name, text in {**files, **change}.items() if text is not None})
    return "\n".join(moved.problems("2.0.0", "1.0.0", listed, before, set(removed), [pair(tmp_path, *versions)]))


def test_a_move_that_is_listed(tmp_path):
    assert problems(tmp_path) == ""


def test_without_a_module_at_the_old_path(tmp_path):
    assert problems(tmp_path, new={"ddp/ledger.py": None}) == ""


@pytest.mark.parametrize("shim", [SHIM, None])
def test_a_move_that_is_not_listed(tmp_path, shim):
    said = problems(tmp_path, listed="[]", new={"ddp/ledger.py": shim})
    assert "src/demo/ddp/ledger.py of 1.0.0" in said
    assert "src/demo/ddp/trace/collectives.py" in said
    assert "templates/moves.yml" in said


def test_a_small_module_that_leads_elsewhere(tmp_path):
    """Too small for git to see that it was rewritten."""
    said = problems(tmp_path, old={"ddp/few.py": "few = 1\n"}, new={"ddp/few.py": SHIM})
    assert said == "src/demo/ddp/few.py of 1.0.0 leads elsewhere now, and templates/moves.yml does not say where"


def test_a_moved_file_that_was_changed_much(tmp_path):
    changed = LEDGER.replace("line_1", "another_1")
    said = problems(tmp_path, new={"ddp/trace/collectives.py": changed})
    assert "% alike to src/demo/ddp/ledger.py of 1.0.0" in said


def test_a_file_that_is_gone(tmp_path):
    gone = {"old": {"launch/old.sh": "echo\n"}}
    assert "launch/old.sh of 1.0.0 is gone" in problems(tmp_path / "a", **gone)
    assert problems(tmp_path / "b", removed=["launch/old.sh"], **gone) == ""


def test_no_pattern_waves_files_through(tmp_path):
    gone = {"old": {"ddp/one.py": "one = 1\n"}}
    assert "ddp/one.py of 1.0.0 is gone" in problems(tmp_path / "a", removed=["src/demo/ddp/*", "**"], **gone)
    said = problems(tmp_path / "b", listed="- {release: 2.0.0, moves: {ddp/*: ddp/trace/*}}", **gone)
    assert "ddp/one.py of 1.0.0 is gone" in said
    assert "moves ddp/*, which is no file of 1.0.0" in said


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("ddp/no.py: ddp/trace/no.py", "moves ddp/no.py, which is no file of 1.0.0"),
        ("ddp/ledger.py: ddp/no.py", "ddp/no.py, which is no file of a new project"),
        ("ddp/ledger.py: ddp/__init__.py", "which 1.0.0 has already"),
        ("ddp/ledger.py: ../no.py", "paths are below the package"),
        ("train.py: ddp/trace/collectives.py", "moves src/demo/train.py, which is still there"),
    ],
)
def test_a_list_that_is_wrong(tmp_path, listed, said):
    assert said in problems(tmp_path, listed=f"- {{release: 2.0.0, moves: {{{listed}}}}}")


def test_entries_of_other_releases(tmp_path):
    past = "- {release: 1.0.0, moves: {ddp/a.py: ddp/b.py}}\n"
    other, later = ENTRY + past.replace("/b", "/c"), ENTRY + past.replace("1.0", "3.0")
    assert "what 1.0.0 moved must stay" in problems(tmp_path / "a", before=past)
    assert "what 1.0.0 moved must stay" in problems(tmp_path / "b", before=past, listed=other)
    assert problems(tmp_path / "c", before=past, listed=ENTRY + past) == ""
    assert "3.0.0 is not the release that is made" in problems(tmp_path / "d", listed=later)


@pytest.fixture(params=["imported", "looked up"])
def how(request, monkeypatch) -> str:
    """With what the projects import, which these small ones do not, and without."""
    monkeypatch.setattr(moved, "NEEDED", () if request.param == "imported" else ("no_such_module",))
    return request.param


def import_problems(tmp_path: Path, told: Mapping[str, list[str]] | None = None, **new: str | None) -> str:
    files = {name: text for name, text in {**NEW, **new}.items() if text is not None}
    return "\n".join(moved.import_problems([pair(tmp_path, OLD, files)], told or {}))


def test_old_code_works_with_the_new_modules(tmp_path, how):
    assert import_problems(tmp_path) == ""


@pytest.mark.parametrize(
    ("ledger", "said"),
    [(None, "ddp.ledger"), ("line_4 = 4\n", "line_3"), (SHIM.replace(".trace", ".no"), "demo.ddp.no")],
)
def test_old_code_that_would_fail(tmp_path, how, ledger, said):
    """model.py of the last release imports `line_3` of it."""
    found = import_problems(tmp_path, **{"ddp/ledger.py": ledger})
    assert "people's own code would fail: import demo.model: " in found
    assert said in found


def test_what_adopters_were_told_to_import(tmp_path, how, monkeypatch):
    for name in ("model.py", "train.py"):
        monkeypatch.delitem(OLD, name)
    assert import_problems(tmp_path / "a", {"ddp": ["ledger"], "ddp.ledger": ["line_3"]}) == ""
    found = import_problems(tmp_path / "b", {"ddp.ledger": ["line_7"], "ddp.no": []})
    assert "from demo.ddp.ledger import line_7: " in found
    assert "import demo.ddp.no: " in found


def test_modules_that_queued_jobs_run(tmp_path):
    main = '\nif __name__ == "__main__":\n    print(1)\n'
    old = {**OLD, "ddp/ledger.py": LEDGER + main, "launch/train.sbatch": "python -m demo.ddp.ledger --all\n"}
    said = "\n".join(moved.import_problems([pair(tmp_path / "a", old, NEW)], {}))
    assert "launch/train.sbatch of the last release runs demo.ddp.ledger, which would not run any more" in said
    new = {**NEW, "ddp/ledger.py": SHIM + main}
    assert moved.import_problems([pair(tmp_path / "b", old, new)], {}) == []


def test_the_list_of_what_adopters_were_told_is_complete():
    """What the sketch of --into-existing imports now is kept as well."""
    import ast

    import yaml

    from ddp_scaffold.adopting.sketch import SKETCH

    told = yaml.safe_load((ROOT / "releases" / "imports.yml").read_text())
    for node in ast.parse(SKETCH.partition("\n\n")[0]).body:
        assert isinstance(node, ast.ImportFrom)
        assert {alias.name for alias in node.names} <= set(told[node.module.removeprefix("PACKAGE.")])
