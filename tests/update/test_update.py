"""What an update does to a project, from one release to the next: nothing is lost, and what conflicts is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cross_section import every
from update_helpers import change, commit, copier, git, make, only_test, state, tree, update

Make = Callable[..., Path]


@pytest.fixture
def project(history_of_two: Path, tmp_path: Path) -> Path:
    """A project of 98.0.0, as it was made."""
    return make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom"})


def guard(project: Path) -> Path:
    return project / "src" / "demo" / "ddp" / "guard.py"


def test_an_untouched_project_becomes_the_new_release(two, history_of_two, project, tmp_path):
    done = update(two, project)
    assert done.returncode == 0, done.stderr
    assert "From v98.0.0 to v98.1.0" in done.stdout
    assert "What 98.1.0 brings." in done.stdout
    assert "What 98.0.0 brings." not in done.stdout
    assert "new_question = nothing" in done.stdout
    staged = git(project, "diff", "--staged", "--no-renames", "--name-status").split()
    changed = dict(zip(staged[1::2], staged[::2], strict=True))
    assert changed["tests/added.py"] == "A"
    assert changed["tests/to_remove.py"] == "D"
    assert changed["src/demo/ddp/guard.py"] == "M"
    assert git(project, "diff", "--name-only") == ""
    fresh = make(history_of_two, "98.1.0", tmp_path / "fresh" / "demo", {"model": "custom"})
    ours, theirs = tree(project), tree(fresh)
    # The user's own: a later release leaves these as they were made.
    assert {path for path in ours if ours[path] != theirs.get(path)} == {"src/demo/model.py"}
    assert ours.keys() == theirs.keys()
    again = update(two, project)
    assert again.returncode == 3  # not committed yet
    commit(project)
    assert "nothing to do" in update(two, project).stdout


def test_plain_copier_does_the_same(two, history_of_two, project, tmp_path):
    other = tmp_path / "other" / "demo"
    other.parent.mkdir()
    git(tmp_path, "clone", "--quiet", str(project), str(other))
    assert update(two, project).returncode == 0
    done = copier("update", "--defaults", "--quiet", other, repository=history_of_two, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tree(project) == tree(other)


@pytest.mark.slow  # `make test-update` runs it
def test_edits_survive(two, project):
    (project / "src/demo/model.py").write_text("# Mine.\n")
    change(project / "configs/train.yaml", "seed: 0", "seed: 7")
    change(project / "src/demo/train.py", "log = ", "MINE = 1\nlog = ")
    with guard(project).open("a") as file:
        file.write("\n# My remark, far from the fix.\n")
    (project / "notes.md").write_text("Mine.\n")
    (project / ".github/workflows/ci.yml").unlink()
    commit(project)
    before = tree(project)
    done = update(two, project)
    assert done.returncode == 0, done.stderr
    after = tree(project)
    for path in ("src/demo/model.py", "configs/train.yaml", "src/demo/train.py", "notes.md"):
        assert after[path] == before[path]
    assert b"# The fix of 98.1.0." in after["src/demo/ddp/guard.py"]
    assert b"# My remark" in after["src/demo/ddp/guard.py"]
    assert ".github/workflows/ci.yml" not in after


@pytest.mark.slow  # `make test-update` runs it
def test_both_sides_changed_the_same_lines(two, project):
    change(project / "README.md", "## Start", "## Mine")
    commit(project)
    trial = update(two, project, "--dry-run")
    assert trial.returncode == 2
    assert "conflict  README.md" in trial.stdout
    assert git(project, "status", "--porcelain") == ""
    done = update(two, project)
    assert done.returncode == 2, done.stderr
    assert "git add README.md" in done.stdout
    text = (project / "README.md").read_text()
    assert "<<<<<<< before updating\n## Mine\n" in text
    assert "## Begin\n>>>>>>> after updating" in text
    assert git(project, "diff", "--name-only", "--diff-filter=U").split() == ["README.md"]
    assert "# The fix of 98.1.0." in guard(project).read_text()
    # Git knows all three versions, so its own tools work.
    git(project, "checkout", "--ours", "README.md")
    assert "## Mine" in (project / "README.md").read_text()
    assert "<<<<" not in (project / "README.md").read_text()
    commit(project)


@pytest.mark.parametrize("name", every(2, ["to_rename.py", "to_remove.py"]))
def test_an_edit_that_would_be_lost_stops_the_update(two, project, name):
    with (project / "tests" / name).open("a") as file:
        file.write("# Mine.\n")
    commit(project)
    before = state(project)
    done = update(two, project)
    assert done.returncode == 3
    assert f"no longer has tests/{name}, and your edits there would be lost" in done.stderr
    way = "git mv tests/to_rename.py tests/renamed.py" if name == "to_rename.py" else "git rm tests/to_remove.py"
    assert way in done.stderr
    assert state(project) == before
    git(project, "rm", "--quiet", f"tests/{name}")
    commit(project)
    assert update(two, project).returncode == 0


def test_the_same_new_file_on_both_sides(two, project):
    (project / "tests" / "added.py").write_text("# Mine.\n")
    commit(project)
    done = update(two, project)
    assert done.returncode == 2
    text = (project / "tests" / "added.py").read_text()
    assert "# Mine." in text
    assert "# A new file." in text


def test_the_same_fix_on_both_sides(two, project):
    change(project / "README.md", "## Start", "## Begin")
    commit(project)
    assert update(two, project).returncode == 0


def test_dry_run_shows_the_diff_and_touches_nothing(two, project):
    before = state(project)
    done = update(two, project, "--dry-run")
    assert done.returncode == 0
    assert "+# The fix of 98.1.0." in done.stdout
    assert state(project) == before


def test_json(two, project):
    change(project / "README.md", "## Start", "## Mine")
    commit(project)
    done = update(two, project, "--json")
    assert done.returncode == 2
    told = json.loads(done.stdout)
    assert (told["from"], told["to"], told["applied"], told["conflicts"]) == ("v98.0.0", "v98.1.0", True, ["README.md"])
    assert {"path": "tests/added.py", "change": "added"} in told["files"]
    assert told["gained"][0]["version"] == "98.1.0"
    refused = update(two, project, "--json")
    assert refused.returncode == 3
    assert json.loads(refused.stdout)["error"]["exit_code"] == 3


def test_a_project_inside_a_larger_repository(two, history_of_two, tmp_path):
    top = tmp_path / "top"
    project = make(history_of_two, "98.0.0", top / "apps" / "demo", {"model": "custom"})
    subprocess.run(["rm", "-rf", project / ".git"], check=True)
    (top / "other.txt").write_text("1\n")
    git(top, "init", "--quiet", "--initial-branch=main")
    commit(top)
    (top / "other.txt").write_text("not committed, and no business of the update\n")
    change(project / "README.md", "## Start", "## Mine")
    git(top, "commit", "--quiet", "-m", "edit", "apps")
    done = update(two, project)
    assert done.returncode == 2, done.stderr
    assert "# The fix of 98.1.0." in guard(project).read_text()
    assert git(top, "diff", "--name-only", "--diff-filter=U").split() == ["apps/demo/README.md"]
    assert "no business" in (top / "other.txt").read_text()


def test_windows_line_endings(two, project):
    """As a checkout on Windows has them, and committed so by an editor that knows no .gitattributes."""
    git(project, "config", "core.autocrlf", "true")
    (project / ".gitattributes").unlink()
    commit(project)
    readme = project / "README.md"
    readme.write_bytes(readme.read_bytes().replace(b"\n", b"\r\n"))
    git(project, "-c", "core.autocrlf=false", "add", "README.md")
    git(project, "-c", "core.autocrlf=false", "commit", "--quiet", "-m", "CRLF")
    git(project, "config", "core.autocrlf", "false")
    git(project, "rm", "--cached", "-r", "--quiet", ".")
    git(project, "reset", "--hard", "--quiet")
    with guard(project).open("ab") as file:
        file.write(b"\n# My remark.\n")
    commit(project)
    done = update(two, project)
    assert done.returncode == 0, done.stdout + done.stderr
    text = readme.read_bytes()
    assert b"## Begin\r\n" in text
    assert text.count(b"\n") == text.count(b"\r\n")
    assert b"# My remark.\n" in guard(project).read_bytes()


def test_a_checkout_with_autocrlf(two, project, tmp_path):
    git(tmp_path, "clone", "--quiet", "--config", "core.autocrlf=true", str(project), "windows")
    other = tmp_path / "windows"
    (other / "README.md").write_bytes((other / "README.md").read_bytes() + b"Mine.\r\n")
    assert b"\r\n" in (other / "README.md").read_bytes()
    commit(other)
    done = update(two, other)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (other / "README.md").read_bytes()
    assert b"## Begin\r\n" in text
    assert b"Mine.\r\n" in text
    assert text.count(b"\n") == text.count(b"\r\n")
    assert git(other, "diff", "--name-only") == ""


def test_a_global_ignore_list_costs_no_edit(two, project, tmp_path):
    """With one that matches a tracked file, copier drops the user's edits in it (copier-org/copier#2191)."""
    ignore = tmp_path / "ignore"
    ignore.write_text("launch/\nguard.py\n")
    configuration = tmp_path / "gitconfig"
    configuration.write_text(f"[user]\nname=t\nemail=t@e\n[core]\nexcludesFile={ignore}\n")
    with guard(project).open("a") as file:
        file.write("\n# My remark.\n")
    commit(project)
    done = update(two, project, GIT_CONFIG_GLOBAL=str(configuration))
    assert done.returncode == 0, done.stderr
    assert "tracked although an ignore list matches" in done.stderr
    assert "# My remark." in guard(project).read_text()
    assert "# The fix of 98.1.0." in guard(project).read_text()


def test_an_ignored_file_of_the_users_is_not_overwritten(two, project):
    (project / ".gitignore").write_text((project / ".gitignore").read_text() + "added.py\n")
    commit(project)
    (project / "tests" / "added.py").write_text("# Mine, and in no commit.\n")
    done = update(two, project)
    assert done.returncode == 3
    assert "tests/added.py is new in the template, and the project has an ignored file of that name" in done.stderr
    assert (project / "tests" / "added.py").read_text() == "# Mine, and in no commit.\n"
    assert git(project, "status", "--porcelain") == ""


def test_hooks_signing_and_identity_play_no_part(two, project, tmp_path):
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("pre-commit", "prepare-commit-msg", "post-checkout", "commit-msg"):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    configuration = tmp_path / "gitconfig"
    configuration.write_text(f"[core]\nhooksPath={hooks}\n[commit]\ngpgSign=true\n[user]\nuseConfigOnly=true\n")
    done = update(two, project, GIT_CONFIG_GLOBAL=str(configuration))
    assert done.returncode == 0, done.stderr


def test_a_symlink_in_the_place_of_a_file_stays(two, project):
    (project / "shared.md").write_text("Elsewhere.\n")
    (project / "README.md").unlink()
    (project / "README.md").symlink_to("shared.md")
    commit(project)
    done = update(two, project)
    assert done.returncode in (0, 2), done.stderr
    assert (project / "README.md").is_symlink()
    assert (project / "shared.md").read_text() == "Elsewhere.\n"


def test_another_home_and_another_path(two, project, tmp_path):
    moved = tmp_path / "some where" / "else"
    moved.parent.mkdir()
    project.rename(moved)
    home = tmp_path / "home"
    home.mkdir()
    done = update(two, tmp_path, str(moved), HOME=str(home), COPIER_CACHE_DIR=str(home / "cache"))
    assert done.returncode == 0, done.stderr
    assert (moved / "tests" / "added.py").exists()
    assert not (home / "cache").exists()  # what is redirected never enters copier's own mirror


def test_no_network_is_used(two, project):
    assert update(two, project, GIT_ALLOW_PROTOCOL="file").returncode == 0


def test_nothing_is_left_behind(two, project, tmp_path):
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    assert update(two, project, TMPDIR=str(scratch)).returncode == 0
    assert list(scratch.iterdir()) == []
    assert not (project / ".git" / "worktrees").exists()
    assert [path for path in (project / ".git").iterdir() if "scaffold" in path.name] == []
    assert git(project, "fsck", "--no-dangling").strip() == ""


@pytest.mark.parametrize("test", ["def test_it():\n    assert True\n", "def test_it():\n    assert False\n"])
def test_the_projects_own_tests_decide(two, project, test):
    only_test(project, test)
    before = state(project)
    done = update(two, project, "--test", VENV=str(Path(sys.executable).parents[1]))
    if "True" in test:
        assert done.returncode == 0, done.stderr
        assert "tests: passed" in done.stdout
        assert "# The fix of 98.1.0." in guard(project).read_text()
    else:
        assert done.returncode == 3
        assert "tests failed after the update" in done.stderr
        assert state(project) == before


@pytest.mark.parametrize("left", every(2, ["nothing", "an empty folder"], others=pytest.mark.long))
def test_a_project_without_tests(two, project, left):
    git(project, "rm", "-r", "--quiet", "tests")
    if left == "an empty folder":
        (project / "tests").mkdir()
        (project / "tests" / "conftest.py").write_text("")
    commit(project)
    environment = {"VENV": str(Path(sys.executable).parents[1])}
    shown = update(two, project, "--test", "--json", **environment)
    assert shown.returncode == 0, shown.stdout
    assert json.loads(shown.stdout)["test"] == "skipped"
    git(project, "reset", "--quiet", "--hard")
    done = update(two, project, "--test", **environment)
    assert done.returncode == 0, done.stderr
    assert "\n\nThe project's tests: skipped, there are none.\n" in done.stdout
    assert "\\n" not in done.stdout
    assert "# The fix of 98.1.0." in guard(project).read_text()


@pytest.mark.parametrize("answer", ["n", "y", "\x03"])
def test_on_a_terminal_it_asks_after_the_report(two, project, answer):
    import pexpect

    before = state(project)
    variables = {**os.environ, "PYTHONPATH": str(two / "scaffold"), "TERM": "xterm", "COLUMNS": "100"}
    command = ["-m", "ddp_scaffold", "update"]
    child = pexpect.spawn(sys.executable, command, cwd=str(project), env=variables, encoding="utf-8", timeout=60)
    child.expect("What 98.1.0 brings")
    child.expect("Update .*demo.*Y/n")
    child.send(answer if answer == "\x03" else f"{answer}\n")
    child.expect(pexpect.EOF)
    child.close()
    if answer == "y":
        assert child.exitstatus == 0
        assert "# The fix of 98.1.0." in guard(project).read_text()
    else:
        assert child.exitstatus == (3 if answer == "n" else 130)
        assert state(project) == before


def test_a_recopy_leaves_what_is_the_users(history_of_two, project, tmp_path):
    """`copier recopy` brings the template's text back everywhere else: `git diff` shows it."""
    mine = ["src/demo/model.py", "src/demo/data.py", "configs/train.yaml"]
    for path in [*mine, "README.md"]:
        (project / path).write_text("# Mine.\n")
    commit(project)
    words = ["recopy", "--overwrite", "--defaults", "--quiet", "--vcs-ref", "v98.0.0", project]
    done = copier(*words, repository=history_of_two, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert git(project, "diff", "--name-only").split() == ["README.md"]
    (project / "src/demo/model.py").unlink()
    assert copier(*words, repository=history_of_two, cwd=tmp_path).returncode == 0
    assert "class" in (project / "src/demo/model.py").read_text()  # one that is gone comes back


def test_a_mirror_in_the_place_of_the_public_url(two, history_of_two, project, tmp_path):
    """The same configuration of git that plain copier needs without a network; releases come from there."""
    config = tmp_path / "gitconfig"
    config.write_text(f'[url "{history_of_two}"]\n\tinsteadOf = https://github.com/ddp-scaffold/ddp-scaffold.git\n')
    done = update(two, project, GIT_CONFIG_GLOBAL=str(config))
    assert done.returncode == 0, done.stderr
    assert f"releases are taken from {history_of_two}" in done.stderr
    assert "# The fix of 98.1.0." in guard(project).read_text()
    assert (
        "_src_path: https://github.com/ddp-scaffold/ddp-scaffold.git" in (project / ".copier-answers.yml").read_text()
    )
