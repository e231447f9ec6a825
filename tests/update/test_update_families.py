"""From every release so far to the working tree, in every family: a year of edits survives, and the project works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cross_section import every
from packaging.version import Version
from update_helpers import NOW, RELEASES, change, commit, copier, git, make, tree, update

FAMILIES = (
    *("classifier", "causal-lm", "masked-lm", "diffusion", "rectified-flow", "adversarial-diffusion", "retrieval"),
    "custom",
)


# What a user trains with is nothing that the project's own tests may depend on.
MINE = {
    "run": {"seed": 7, "resume": False},
    "train": {"precision": "bf16", "accumulate": 4, "learning_rate": 0.002, "warmup_steps": 2000},
    "clocks": {"loader_s": 600, "stall_s": 900, "collective_s": 1200, "guard_s": 7200, "phase_s": {"eval": 1000}},
    "checkpoint": {"every_steps": 1000, "keep": 5},
    "loader": {"workers": 2, "uneven": "drop"},
}


def edit(project: Path) -> dict[str, bytes]:
    """Edit as a user does; return what must be there afterwards."""
    package = project / "src" / "demo"
    model = package / "model.py"
    model.write_text(model.read_text() + "\n\nMINE = 'another model'\n")
    settings = yaml.safe_load((project / "configs" / "train.yaml").read_text())
    mine = {name: (settings.get(name) or {}) | MINE.get(name, {}) for name in settings | MINE}
    (project / "configs" / "train.yaml").write_text(yaml.safe_dump(mine))
    change(package / "train.py", "log = logging.getLogger", "MINE = 'a line'\nlog = logging.getLogger")
    (package / "ddp" / "rng.py").write_text((package / "ddp" / "rng.py").read_text() + "\n# My remark.\n")
    (project / ".github" / "workflows" / "ci.yml").unlink()
    (package / "mine.py").write_text("MINE = 'a module'\n")
    (project / "notes.md").write_text("Mine.\n")
    commit(project)
    kept = ("src/demo/model.py", "configs/train.yaml", "src/demo/mine.py", "notes.md")
    return {path: content for path, content in tree(project).items() if path in kept}


def edits_are_there(project: Path, kept: dict[str, bytes]) -> None:
    after = tree(project)
    assert {path: after[path] for path in kept} == kept
    assert b"MINE = 'a line'\n" in after["src/demo/train.py"]
    assert b"# My remark.\n" in after["src/demo/ddp/rng.py"]
    assert ".github/workflows/ci.yml" not in after
    assert f"_commit: v{NOW}".encode() in after[".copier-answers.yml"]


def updated(now: Path, history: Path, version: str, family: str, project: Path, **answers: str) -> None:
    make(history, version, project, {"model": family, **answers})
    kept = edit(project)
    done = update(now, project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert git(project, "diff", "--name-only", "--diff-filter=U") == ""
    edits_are_there(project, kept)


OF_THE_OLDEST = ("adversarial-diffusion",)  # with a train.py of its own
SHORT = [*((RELEASES[0], family) for family in ("custom", *OF_THE_OLDEST)), (RELEASES[-1], "custom")]
GRID = [
    # From the oldest and the newest release; all others are `long`.
    pytest.param(version, family, marks=[] if (version, family) in SHORT else pytest.mark.long)
    for version in RELEASES
    for family in FAMILIES
]


@pytest.mark.parametrize(("version", "family"), GRID)
def test_edits_survive(now, history_of_now, tmp_path, version, family):
    updated(now, history_of_now, version, family, tmp_path / "demo")
    command = [sys.executable, "-m", "mypy"]
    checked = subprocess.run(command, cwd=tmp_path / "demo", capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


BEFORE = [version for version in RELEASES if Version(version) < Version("0.4.0")]  # which moves what is edited here
EDIT = "# My remark: our launcher sets these.\n"
ADOPTED = {"code": "existing", "command": "train.py"}


def edit_what_moves(history: Path, version: str, project: Path, answers: dict[str, str]) -> None:
    """Edit ddp/env.py and ddp/preflight.py, which 0.4.0 moves: the second into a folder of its own name."""
    make(history, version, project, answers)
    ddp = project / "src" / "demo" / "ddp"
    change(ddp / "env.py", "@dataclass(frozen=True)\nclass Place", EDIT + "@dataclass(frozen=True)\nclass Place")
    change(ddp / "preflight.py", "def main() -> None:\n", EDIT + "def main() -> None:\n")
    commit(project)


EDITED = [
    pytest.param(
        version,
        answers,
        marks=[pytest.mark.long] * (version != BEFORE[-1] or kind == "other"),
        id=f"{version}-{kind}",
    )
    for version in BEFORE
    for kind, answers in {"new": {"model": "custom"}, "other": {"model": "retrieval"}, "adopted": ADOPTED}.items()
    if kind != "adopted" or version != "0.1.0"  # which had no --into-existing
]


@pytest.mark.parametrize(("version", "answers"), EDITED)
def test_an_edit_goes_along_with_a_file_that_moves(now, history_of_now, tmp_path, version, answers):
    project, demo = tmp_path / "demo", tmp_path / "demo" / "src" / "demo"
    edit_what_moves(history_of_now, version, project, answers)
    if version == BEFORE[-1]:  # and the package has another name
        git(project, "mv", "src/demo", "src/mine")
        for path in project.rglob("*.py"):
            path.write_text(path.read_text().replace("demo.", "mine."))
        commit(project)
        demo = project / "src" / "mine"
    done = update(now, project, "--json")
    told = json.loads(done.stdout)
    assert done.returncode in (0, 2), told
    unmerged = git(project, "diff", "--name-only", "--diff-filter=U").split()
    assert done.returncode == (2 if unmerged else 0)
    for old, new in (("env", "start/launcher"), ("preflight", "preflight/__main__")):
        assert told["carried"][f"src/{demo.name}/ddp/{old}.py"] == f"src/{demo.name}/ddp/{new}.py"
        assert EDIT in (demo / "ddp" / f"{new}.py").read_text()
        assert EDIT not in (demo / "ddp" / f"{old}.py").read_text()
    if not unmerged:
        code = f"import {demo.name}.ddp.env as old, {demo.name}.ddp.start.launcher as new; assert old is new"
        subprocess.run([sys.executable, "-c", code], cwd=project / "src", check=True)


@pytest.mark.parametrize("version", every(len(BEFORE), BEFORE[::-1], others=pytest.mark.long))
def test_plain_copier_shows_an_edit_in_a_file_that_moves(history_of_now, tmp_path, version):
    project = tmp_path / "demo"
    edit_what_moves(history_of_now, version, project, {"model": "custom"})
    done = copier("update", "--defaults", "--quiet", project, repository=history_of_now, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for old in ("env", "preflight"):
        text = (project / "src" / "demo" / "ddp" / f"{old}.py").read_text()
        assert "<<<<<<< before updating" in text
        assert EDIT in text


TESTS_OF_THE_EXAMPLE = ("tests/test_model.py", "tests/test_evaluate.py")  # where they stood up to 0.5


@pytest.mark.parametrize("with_copier", every(2, [False, True], ["ddp-scaffold", "copier"], others=pytest.mark.long))
def test_the_tests_of_the_example_are_the_users(now, history_of_now, tmp_path, with_copier):
    """One is edited, one removed: so they stay, and none comes under another name."""
    project = tmp_path / "demo"
    make(history_of_now, "0.5.0", project, {"model": "retrieval"})
    edited, removed = (project / path for path in TESTS_OF_THE_EXAMPLE)
    edited.write_text(edited.read_text() + "\n\ndef test_mine() -> None:\n    pass\n")
    text = edited.read_text()
    git(project, "rm", "--quiet", str(removed))
    commit(project)
    if with_copier:
        done = copier("update", "--defaults", "--quiet", project, repository=history_of_now, cwd=tmp_path)
    else:
        done = update(now, project)
        assert "tests/test_" not in done.stdout.partition("not in your project")[2]
    assert done.returncode == 0, done.stderr
    assert edited.read_text() == text
    assert not removed.exists()
    assert not (project / "tests/example").exists()


@pytest.mark.slow  # `make test-update` runs it
@pytest.mark.timeout(600)  # two updates, and tests of the project
def test_the_oldest_release(now, history_of_now, tmp_path):
    """The same for one, and its quick tests run; plain copier gives the same project."""
    project = tmp_path / "demo"
    make(history_of_now, RELEASES[0], project, {"model": "custom"})
    kept = edit(project)
    other = tmp_path / "other" / "demo"
    other.parent.mkdir()
    git(tmp_path, "clone", "--quiet", str(project), str(other))
    assert update(now, project).returncode == 0
    edits_are_there(project, kept)
    done = copier("update", "--defaults", "--quiet", other, repository=history_of_now, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tree(other) == tree(project)
    run_tests(project, "tests/test_plumbing.py")


@pytest.mark.long  # an untouched project becomes what a new one is, and the tests of that run elsewhere
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.timeout(900)
def test_the_projects_own_tests_pass(now, history_of_now, tmp_path, family):
    updated(now, history_of_now, RELEASES[0], family, tmp_path / "demo")
    run_tests(tmp_path / "demo")


@pytest.mark.parametrize("preset", every(3, ["tacc-vista", "generic-slurm", "generic-pbs"], others=pytest.mark.long))
def test_other_schedulers(now, history_of_now, tmp_path, preset):
    updated(now, history_of_now, RELEASES[0], "custom", tmp_path / "demo", preset=preset)


def run_tests(project: Path, *paths: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
