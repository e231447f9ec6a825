"""What an update cannot bring is carried to where it belongs, or said; never dropped in silence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from update_helpers import change, commit, copier, git, make, state, tree, update


@pytest.fixture
def project(history_of_two: Path, tmp_path: Path) -> Path:
    return make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})


def rename(project: Path, name: str) -> None:
    """Rename the package as its owner would: the folder, and what names it."""
    git(project, "mv", "src/demo", f"src/{name}")
    for path in tree(project):
        file = project / path
        if file.suffix in (".py", ".toml", ".sh", ".md") or file.name == "Makefile":
            text = file.read_text().replace("src/demo", f"src/{name}")
            text = text.replace("from demo", f"from {name}").replace("import demo", f"import {name}")
            file.write_text(text.replace("demo.", f"{name}."))
    commit(project, "rename")


def left_out(done) -> dict[str, str]:
    return {entry["path"]: entry["why"] for entry in json.loads(done.stdout)["left_out"]}


def test_a_package_renamed_by_hand(two, history_of_two, project, tmp_path):
    rename(project, "mypkg")
    with (project / "src/mypkg/ddp/guard.py").open("a") as file:
        file.write("\n# My remark.\n")
    commit(project)
    done = update(two, project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the package was renamed; recorded from now on: package: mypkg" in done.stderr
    assert "not in your project" not in done.stdout
    assert "# The fix of 98.1.0." in (project / "src/mypkg/ddp/guard.py").read_text()
    assert "# My remark." in (project / "src/mypkg/ddp/guard.py").read_text()
    assert not (project / "src/demo").exists()
    commit(project)
    # What the project now records is true: a project made so is the same, and plain copier has nothing to add.
    answers = {"model": "custom", "package": "mypkg"}
    fresh = make(history_of_two, "98.1.0", tmp_path / "fresh" / "demo", answers)
    ours, theirs = tree(project), tree(fresh)
    assert ours.keys() == theirs.keys()
    assert ours[".copier-answers.yml"] == theirs[".copier-answers.yml"]
    assert "nothing to do" in update(two, project).stdout
    again = copier("update", "--defaults", "--quiet", project, repository=history_of_two, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert git(project, "status", "--porcelain") == ""


def test_a_renamed_package_is_recorded_without_a_new_release(two, history_of_two, tmp_path):
    project = make(history_of_two, "98.1.0", tmp_path / "demo", {"model": "custom"})
    rename(project, "mypkg")
    done = update(two, project)
    assert done.returncode == 0, done.stderr
    assert git(project, "diff", "--staged", "--name-only").split() == [".copier-answers.yml"]
    assert "\npackage: mypkg\n" in (project / ".copier-answers.yml").read_text()


def test_new_files_name_the_renamed_package(now, history_of_now, tmp_path):
    project = make(history_of_now, "0.1.0", tmp_path / "demo", {"model": "custom"})
    rename(project, "mypkg")
    done = update(now, project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (project / "src/demo").exists()
    files = {path: content.decode(errors="replace") for path, content in tree(project).items()}
    assert [path for path, text in files.items() if re.search(r"(from|import) demo|src/demo", text)] == []


def test_all_clusters_take_part_in_a_rename(two, project):
    assert update(two, project, "--to", "98.0.0", "--add", "lumi-g").returncode in (0, 3)
    assert update(two, project, "--add", "lumi-g").returncode == 0
    commit(project)
    rename(project, "mypkg")
    done = update(two, project)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (".copier-answers.yml", ".copier-answers.lumi-g.yml"):
        assert "\npackage: mypkg\n" in (project / name).read_text()
    assert '"""Fixed. ' in (project / "launch-lumi-g/outcome.py").read_text()


def test_the_package_of_an_adopted_project_is_renamed(two, history_of_two, tmp_path):
    answers = {"code": "existing", "package": "theirs", "source_folder": ".", "command": "train.py"}
    project = make(history_of_two, "98.0.0", tmp_path / "demo", answers)
    (project / "src").mkdir()
    git(project, "mv", "theirs", "src/ours")
    commit(project)
    done = update(two, project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# The fix of 98.1.0." in (project / "src/ours/ddp/guard.py").read_text()
    assert not (project / "theirs").exists()
    assert "\npackage: ours\n" in (project / ".copier-answers.yml").read_text()
    assert "\nsource_folder: src\n" in (project / ".copier-answers.yml").read_text()


def test_a_package_under_a_name_that_cannot_be(two, project):
    rename(project, "MyPkg")
    before = state(project)
    done = update(two, project)
    assert done.returncode == 3
    assert "src/MyPkg: 'MyPkg' is not a valid name" in done.stderr
    assert "git mv" in done.stderr
    assert state(project) == before


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("src/demo", "lib/demo", "mkdir -p src && git mv lib/demo src/demo"),
        ("src/demo/ddp", "src/demo/plumbing", "mkdir -p src/demo && git mv src/demo/plumbing src/demo/ddp"),
        ("src/demo/ddp", "src/core/ddp", "mkdir -p src/demo && git mv src/core/ddp src/demo/ddp"),
    ],
)
def test_a_package_where_no_update_finds_it(two, project, old, new, hint):
    """It is refused, and what the hint says works."""
    (project / new).parent.mkdir(exist_ok=True)
    git(project, "mv", old, new)
    commit(project)
    before = state(project)
    done = update(two, project)
    assert done.returncode == 3, done.stdout
    assert "what the release changes there would not arrive" in done.stderr
    assert hint in done.stderr
    assert state(project) == before
    (project / old).parent.mkdir(exist_ok=True)
    git(project, "mv", new, old)
    commit(project)
    assert update(two, project).returncode == 0
    assert "# The fix of 98.1.0." in (project / "src/demo/ddp/guard.py").read_text()


def test_what_the_release_changes_and_the_project_has_not(two, project):
    git(project, "rm", "--quiet", "src/demo/evaluate.py")
    git(project, "mv", "launch/outcome.py", "launch/result.py")
    git(project, "rm", "--quiet", "--cached", "src/demo/ddp/guard.py")
    (project / ".gitignore").write_text((project / ".gitignore").read_text() + "guard.py\n")
    (project / "notes.md").write_text("Elsewhere.\n")
    (project / "README.md").unlink()
    (project / "README.md").symlink_to("notes.md")
    (project / "tests/test_loader.py").unlink()  # the release does not change it
    commit(project)
    shown = update(two, project, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "Changed by the release, but not in your project:\n" in shown.stdout
    assert "  src/demo/evaluate.py (removed)\n" in shown.stdout
    done = update(two, project, "--json")
    assert done.returncode == 0, done.stderr
    assert left_out(done) == {
        "README.md": "it is a symbolic link",
        "src/demo/ddp/guard.py": "it is in no commit",
        "src/demo/evaluate.py": "removed",
    }
    assert json.loads(done.stdout)["carried"] == {"launch/outcome.py": "launch/result.py"}
    assert '"""Fixed. ' in (project / "launch/result.py").read_text()
    assert (project / "notes.md").read_text() == "Elsewhere.\n"


def test_nothing_new_in_a_folder_that_was_removed(two, project):
    git(project, "rm", "-r", "--quiet", "tests")
    commit(project)
    done = update(two, project, "--json")
    assert done.returncode == 0, done.stderr
    assert not (project / "tests").exists()
    assert left_out(done) == {f"tests/{name}.py": "new; tests/ was removed" for name in ("added", "renamed")}


def test_files_that_are_the_users_are_not_left_out(two, project):
    """model.py differs between the two releases; its owner has removed it, as the documentation says one may."""
    git(project, "rm", "--quiet", "src/demo/model.py", "configs/train.yaml")
    commit(project)
    done = update(two, project, "--json")
    assert done.returncode == 0, done.stderr
    assert left_out(done) == {}


def test_a_folder_that_leads_out_of_the_project(two, project, tmp_path):
    git(project, "mv", "launch", "elsewhere")
    (project / "elsewhere").rename(tmp_path / "elsewhere")
    (project / "launch").symlink_to(tmp_path / "elsewhere")
    commit(project)
    before = tree(tmp_path / "elsewhere")
    done = update(two, project)
    assert done.returncode == 3
    assert "launch is a symbolic link that leads out of the project, or nowhere" in done.stderr
    assert "is forbidden" not in done.stderr
    assert tree(tmp_path / "elsewhere") == before


def test_a_folder_that_leads_elsewhere_in_the_project(two, project):
    git(project, "mv", "launch", "ops")
    (project / "launch").symlink_to("ops")
    commit(project)
    done = update(two, project, "--json")
    assert done.returncode == 0, done.stderr
    assert left_out(done) == {}
    assert '"""Fixed. ' in (project / "ops/outcome.py").read_text()


def test_all_edits_that_would_be_lost_are_named(two, project):
    for name in ("to_rename.py", "to_remove.py"):
        with (project / "tests" / name).open("a") as file:
            file.write("# Mine.\n")
    commit(project)
    done = update(two, project, "--json")
    assert done.returncode == 3
    told = json.loads(done.stdout)
    assert told["lost"] == ["tests/to_remove.py", "tests/to_rename.py"]
    assert told["moved_to"] == {"tests/to_rename.py": "tests/renamed.py"}
    assert "tests/to_remove.py, tests/to_rename.py" in told["error"]["message"]
    assert "git mv tests/to_rename.py tests/renamed.py; git rm tests/to_remove.py" in told["error"]["hint"]
    # The hint works: no edit is gone, it comes as a conflict.
    git(project, "mv", "tests/to_rename.py", "tests/renamed.py")
    git(project, "rm", "--quiet", "tests/to_remove.py")
    commit(project)
    done = update(two, project)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Both sides changed the same lines of one file." in done.stdout
    assert "# Mine." in (project / "tests/renamed.py").read_text()


def test_conflicts_that_were_committed_unsolved(two, project):
    change(project / "README.md", "## Start", "## Mine")
    commit(project)
    assert update(two, project).returncode == 2
    commit(project, "with all its marks")
    done = update(two, project)
    assert done.returncode == 3
    assert "README.md: committed with the marks of a conflict of an earlier update" in done.stderr


def test_questions_that_no_longer_can_be_answered_otherwise(now, history_of_now, tmp_path):
    project = make(history_of_now, "0.1.0", tmp_path / "demo", {"model": "custom"})
    done = update(now, project, "--dry-run")
    assert "New questions, answered by their defaults:\n  code = new\n" in done.stdout
    assert "--set changes them" not in done.stdout
