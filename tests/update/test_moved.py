"""Files that have moved, by a release or by the user: what both changed in them comes together, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from cross_section import every
from update_helpers import ROOT, change, commit, git, state

QUESTIONS = """\
_subdirectory: templates/project
package: {type: str, default: p}
source_folder: {type: str, default: src}
launch:
  type: str
  when: false
  default: "{{ 'launch-other' if 'other' in _copier_conf.answers_file | string else 'launch' }}"
_exclude:
  - "{% if launch != 'launch' %}**{% endif %}"
  - "{% if launch != 'launch' %}!/{{ launch }}{% endif %}"
  - "{% if launch != 'launch' %}!/{{ _copier_conf.answers_file }}{% endif %}"
"""
PACKAGE = "{{ source_folder }}/{{ package }}"
SHIM = "import sys\n\nfrom .trace import collectives\n\nsys.modules[__name__] = collectives\n"
MOVES = "- {release: 2.0.0, moves: {ddp/ledger.py: ddp/trace/collectives.py}}\n"
Files = Mapping[str, "str | bytes | None"]


def lines(name: str, number: int = 60, **changed: str) -> str:
    """A file of `number` lines; `l3="x"` says what the third one is."""
    return "".join(
        changed.get(f"l{at}", f"{name}_{at} = {at}  # as the template has it") + "\n" for at in range(number)
    )


FIRST: Files = {
    f"{PACKAGE}/ddp/__init__.py": "",
    f"{PACKAGE}/ddp/ledger.py": lines("ledger"),
    "{{ launch }}/outcome.py": lines("outcome"),
    "README.md": "# About\n",
}
SECOND: Files = {
    f"{PACKAGE}/ddp/ledger.py": SHIM,
    f"{PACKAGE}/ddp/trace/__init__.py": "",
    f"{PACKAGE}/ddp/trace/collectives.py": lines("ledger", l40="ledger_40 = 'fixed'"),
    "{{ launch }}/outcome.py": lines("outcome", l40="outcome_40 = 'fixed'"),
    "templates/moves.yml": MOVES,
}


def release(template: Path, version: str, files: Files) -> None:
    """Make a release of a template in which these files change; None removes one."""
    if not (template / "copier.yml").exists():
        template.mkdir()
        git(template, "init", "--quiet", "--initial-branch=main")
        (template / "copier.yml").write_text(QUESTIONS)
        folder = template / "templates" / "project"
        folder.mkdir(parents=True)
        (folder / "{{ _copier_conf.answers_file }}.jinja").write_text("{{ _copier_answers|to_nice_yaml }}")
    for name, content in files.items():
        path = template / name if name.startswith("templates/") else template / "templates" / "project" / name
        if content is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    commit(template, version)
    git(template, "tag", "--annotate", "--message", version, f"v{version}")


def made(template: Path, project: Path, name: str = "", **answers: str) -> Path:
    """A project of the first release, committed; with `name`, one more answers file in it."""
    command = [sys.executable, "-m", "copier", "copy", "--quiet", "--defaults", "--vcs-ref", "v1.0.0"]
    command += [word for key, value in answers.items() for word in ("--data", f"{key}={value}")]
    command += ["--answers-file", f".copier-answers.{name}.yml"] if name else []
    subprocess.run([*command, str(template), str(project)], check=True, capture_output=True)
    if not name:
        git(project, "init", "--quiet", "--initial-branch=main")
    commit(project, "begin")
    return project


@pytest.fixture
def template(tmp_path: Path) -> Path:
    release(tmp_path / "template", "1.0.0", FIRST)
    return tmp_path / "template"


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Path:
    """A project of the first of two releases; the second one moves ddp/ledger.py, and has fixes."""
    project = made(template, tmp_path / "demo")
    release(template, "2.0.0", SECOND)
    return project


def update(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_scaffold", "update", *options, "--template", str(project.parent / "template")]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "scaffold")}
    return subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, check=False)


def updated(project: Path, *options: str, code: int = 0) -> dict:
    """Update a project and return what `--json` says of it."""
    done = update(project, "--json", *options)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def refused(project: Path, *words: str) -> str:
    """Assert that an update is refused and touches nothing; return its hint."""
    before = state(project)
    done = update(project)
    assert done.returncode == 3, done.stdout + done.stderr
    assert state(project) == before
    *_, error, hint = done.stderr.strip().splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    for word in words:
        assert word in error + hint
    return hint


def left_out(told: dict) -> dict[str, str]:
    return {entry["path"]: entry["why"] for entry in told["left_out"]}


def unmerged(project: Path) -> list[str]:
    return git(project, "diff", "--name-only", "--diff-filter=U", "-z").split("\0")[:-1]


OLD, NEW = "src/p/ddp/ledger.py", "src/p/ddp/trace/collectives.py"


def edit(project: Path, path: str = OLD, at: int = 3, text: str = "mine = True") -> None:
    """Change one line of a file as the template made it, and commit that."""
    name = "outcome" if "outcome" in path else "ledger"
    change(project / path, f"{name}_{at} = {at}  # as the template has it", text)
    commit(project)


# ------------------------------------------------------------------------------------------------ moved by the release


def test_an_edit_goes_along(project):
    edit(project)
    done = update(project, "-y")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\n  {OLD} -> {NEW}\n" in done.stdout
    assert (project / NEW).read_text() == lines("ledger", l3="mine = True", l40="ledger_40 = 'fixed'")
    assert (project / OLD).read_text() == SHIM
    assert unmerged(project) == []


def test_json_says_what_was_carried(project):
    edit(project)
    told = updated(project)
    assert told["carried"] == {OLD: NEW}
    assert told["lost"] == told["left_out"] == told["conflicts"] == []
    assert {"path": NEW, "change": "added"} in told["files"]
    assert {"path": OLD, "change": "changed"} in told["files"]


def test_a_dry_run_shows_the_merged_file(project):
    edit(project)
    before = state(project)
    told = updated(project, "--dry-run")
    assert told["carried"] == {OLD: NEW}
    new_file = told["diff"].split(f"+++ b/{NEW}")[1].split("diff --git")[0]
    assert "+mine = True\n" in new_file
    assert "+ledger_40 = 'fixed'\n" in new_file
    assert state(project) == before


@pytest.mark.parametrize("shim", [True, False])
def test_a_conflict_is_at_the_new_path(template, project, shim):
    if not shim:
        release(template, "2.1.0", {f"{PACKAGE}/ddp/ledger.py": None})
    edit(project, at=40, text="mine = 40")
    told = updated(project, code=2)
    assert told["conflicts"] == [NEW]
    text = (project / NEW).read_text()
    assert "<<<<<<< before updating\nmine = 40\n=======\nledger_40 = 'fixed'\n>>>>>>> after updating\n" in text
    assert unmerged(project) == [NEW]
    assert ((project / OLD).read_text() if (project / OLD).exists() else None) == (SHIM if shim else None)
    git(project, "checkout", "--ours", NEW)
    assert (project / NEW).read_text() == lines("ledger", l40="mine = 40")
    git(project, "checkout", "--theirs", NEW)
    assert (project / NEW).read_text() == lines("ledger", l40="ledger_40 = 'fixed'")
    commit(project)
    assert "nothing to do" in update(project).stdout


def test_a_removed_file_does_not_come_back_elsewhere(project):
    git(project, "rm", "--quiet", OLD)
    commit(project)
    told = updated(project)
    assert not (project / NEW).exists()
    assert not (project / OLD).exists()
    assert left_out(told) == {OLD: f"removed; the release has it as {NEW}"}
    assert told["carried"] == {}


def test_two_releases_behind(template, tmp_path):
    """Moved twice on the way; and where it stood first is another file since, which is moved as well."""
    project = made(template, tmp_path / "demo")
    release(template, "2.0.0", SECOND)
    moves = "- {release: 3.0.0, moves: {ddp/trace/collectives.py: ddp/seen.py, ddp/ledger.py: ddp/old/ledger.py}}\n"
    third: Files = {
        f"{PACKAGE}/ddp/trace/collectives.py": None,
        f"{PACKAGE}/ddp/seen.py": lines("ledger", l40="ledger_40 = 'fixed twice'"),
        f"{PACKAGE}/ddp/ledger.py": None,
        f"{PACKAGE}/ddp/old/ledger.py": SHIM,
        "templates/moves.yml": moves + MOVES,
    }
    release(template, "3.0.0", third)
    edit(project)
    git(project, "branch", "edited")
    assert updated(project)["carried"] == {OLD: "src/p/ddp/seen.py"}
    assert (project / "src/p/ddp/seen.py").read_text() == lines(
        "ledger", l3="mine = True", l40="ledger_40 = 'fixed twice'"
    )
    assert (project / "src/p/ddp/old/ledger.py").read_text() == SHIM
    git(project, "reset", "--quiet", "--hard", "edited")
    assert updated(project, "--to", "2.0.0")["carried"] == {OLD: NEW}  # not further than asked
    commit(project)
    assert updated(project)["carried"] == {NEW: "src/p/ddp/seen.py"}
    assert "mine = True\n" in (project / "src/p/ddp/seen.py").read_text()


def test_edits_in_the_moved_file_and_in_what_stands_there_since(template, project):
    assert update(project, "-y").returncode == 0
    commit(project)
    change(project / OLD, "import sys\n", "import sys  # my shim\n")
    edit(project, NEW)
    third: Files = {
        f"{PACKAGE}/ddp/trace/collectives.py": None,
        f"{PACKAGE}/ddp/seen.py": lines("ledger"),
        f"{PACKAGE}/ddp/ledger.py": SHIM + "# Fixed.\n",
        "templates/moves.yml": MOVES + "- {release: 3.0.0, moves: {ddp/trace/collectives.py: ddp/seen.py}}\n",
    }
    release(template, "3.0.0", third)
    assert updated(project)["carried"] == {NEW: "src/p/ddp/seen.py"}
    assert (project / "src/p/ddp/seen.py").read_text() == lines("ledger", l3="mine = True")
    assert (project / OLD).read_text() == SHIM.replace("import sys\n", "import sys  # my shim\n") + "# Fixed.\n"


def test_an_edit_where_the_old_path_goes_for_good(template, project):
    """In a release that does not move it: it cannot be carried, so the update is refused."""
    assert update(project, "-y").returncode == 0
    change(project / OLD, "import sys\n", "import sys  # my shim\n")
    commit(project)
    release(template, "3.0.0", {f"{PACKAGE}/ddp/ledger.py": None})
    refused(project, f"v3.0.0 no longer has {OLD}, and your edits there would be lost")


def test_two_files_change_places(template, project):
    release(template, "3.0.0", {f"{PACKAGE}/ddp/one.py": lines("one"), f"{PACKAGE}/ddp/two.py": lines("two")})
    assert update(project, "-y").returncode == 0
    for name in ("one", "two"):
        change(project / f"src/p/ddp/{name}.py", f"{name}_3 = 3  # as the template has it", f"my_{name} = True")
    commit(project)
    swapped: Files = {
        f"{PACKAGE}/ddp/one.py": lines("two"),
        f"{PACKAGE}/ddp/two.py": lines("one"),
        "templates/moves.yml": MOVES + "- {release: 4.0.0, moves: {ddp/one.py: ddp/two.py, ddp/two.py: ddp/one.py}}\n",
    }
    release(template, "4.0.0", swapped)
    git(project, "branch", "edited")
    updated(project)
    assert (project / "src/p/ddp/one.py").read_text() == lines("two", l3="my_two = True")
    assert (project / "src/p/ddp/two.py").read_text() == lines("one", l3="my_one = True")
    # One of them removed, the other without an edit: it comes where the removed one was.
    git(project, "reset", "--quiet", "--hard", "edited")
    (project / "src/p/ddp/one.py").write_text(lines("one"))
    git(project, "rm", "--quiet", "src/p/ddp/two.py")
    commit(project)
    updated(project)
    assert not (project / "src/p/ddp/one.py").exists()
    assert (project / "src/p/ddp/two.py").read_text() == lines("one")


@pytest.mark.parametrize("shim", [True, False])
def test_a_template_without_the_list(template, project, shim):
    fork: Files = {"templates/moves.yml": None}
    release(template, "2.1.0", fork if shim else {**fork, f"{PACKAGE}/ddp/ledger.py": None})
    edit(project)
    assert updated(project)["carried"] == {OLD: NEW}
    assert (project / NEW).read_text() == lines("ledger", l3="mine = True", l40="ledger_40 = 'fixed'")
    assert ((project / OLD).read_text() if (project / OLD).exists() else None) == (SHIM if shim else None)


def test_a_list_that_cannot_be_read(template, project):
    for text in ("- release: 2.0.0\n", "moves", "- {release: 2.0.0, moves: {a.py: ../b.py}}", "- {", "- {release: x}"):
        release(template, f"2.1.{len(text)}", {"templates/moves.yml": text})
        refused(project, "the template's templates/moves.yml cannot be used")


def test_names_modes_and_contents_of_all_kinds(template, tmp_path):
    old = {
        "with space.py": lines("ledger"),
        "ünï-côde.py": lines("ledger"),
        "-dash,comma.py": lines("ledger"),
        "run.sh": "#!/bin/sh\n" + lines("ledger"),
        "mode.sh": "#!/bin/sh\n" + lines("mode"),
        "empty.py": "",
        "data.bin": b"\0\1\2" * 50,
        "both.bin": b"\0\3\4" * 50,
        "quote\"'$.py": lines("ledger"),
    }
    release(template, "1.1.0", {f"{PACKAGE}/ddp/{name}": content for name, content in old.items()})
    (template / f"templates/project/{PACKAGE}/ddp/run.sh").chmod(0o755)
    release(template, "1.2.0", {})
    project = made(template, tmp_path / "demo")
    assert update(project, "-y").returncode == 0
    moved = {name: f"new place/{name}" for name in old}
    files: dict[str, str | bytes | None] = {f"{PACKAGE}/ddp/{name}": None for name in old}
    files |= {f"{PACKAGE}/ddp/{moved[name]}": content for name, content in old.items()}
    files[f"{PACKAGE}/ddp/new place/both.bin"] = b"\0release"
    moves = {f"ddp/{name}": f"ddp/{new}" for name, new in moved.items()}
    (template / f"templates/project/{PACKAGE}/ddp/new place").mkdir()
    shutil.copy2(
        template / f"templates/project/{PACKAGE}/ddp/run.sh",
        template / f"templates/project/{PACKAGE}/ddp/new place/run.sh",
    )
    release(template, "2.0.0", {**files, "templates/moves.yml": json.dumps([{"release": "2.0.0", "moves": moves}])})
    folder = project / "src/p/ddp"
    for name, content in old.items():
        if isinstance(content, str) and "ledger_3" in content:
            change(folder / name, "ledger_3 = 3  # as the template has it", "mine = True")
    (folder / "mode.sh").chmod(0o755)
    (folder / "empty.py").write_text("mine = True\n")
    (folder / "data.bin").write_bytes(b"\0mine")
    (folder / "both.bin").write_bytes(b"\0mine, too")
    commit(project)
    told = updated(project, code=2)
    assert told["carried"] == {f"src/p/{one}": f"src/p/{other}" for one, other in moves.items()}
    assert told["conflicts"] == unmerged(project) == ["src/p/ddp/new place/both.bin"]
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["__init__.py", "ledger.py"]
    for name, content in old.items():
        if isinstance(content, str) and "ledger_3" in content:
            expected = content.replace("ledger_3 = 3  # as the template has it", "mine = True")
            assert (folder / "new place" / name).read_text() == expected
    assert (folder / "new place" / "empty.py").read_text() == "mine = True\n"
    assert (folder / "new place" / "data.bin").read_bytes() == b"\0mine"
    assert (folder / "new place" / "both.bin").read_bytes() == b"\0mine, too"
    staged = git(project, "ls-files", "--stage", "--", "src/p/ddp/new place").splitlines()
    assert {line.split("/")[-1] for line in staged if line.startswith("100755")} == {"run.sh", "mode.sh"}
    git(project, "checkout", "--theirs", "src/p/ddp/new place/both.bin")
    assert (folder / "new place" / "both.bin").read_bytes() == b"\0release"


def test_a_file_of_the_users_with_a_name_beyond_ascii(project):
    (project / "données für alle.md").write_text("Mine.\n")
    commit(project)
    edit(project)
    assert updated(project)["carried"] == {OLD: NEW}
    assert (project / "données für alle.md").read_text() == "Mine.\n"


def test_windows_line_endings(project):
    for path in (OLD, "launch/outcome.py", "src/p/ddp/__init__.py"):
        (project / path).write_bytes((project / path).read_bytes().replace(b"\n", b"\r\n"))
    (project / OLD).write_bytes((project / OLD).read_bytes().replace(b"ledger_3 = 3 ", b"mine = 3 "))
    commit(project)
    assert updated(project)["carried"] == {OLD: NEW}
    text = (project / NEW).read_bytes()
    assert b"mine = 3 " in text
    assert b"'fixed'\r\n" in text
    assert text.count(b"\n") == text.count(b"\r\n") == 60
    assert (project / OLD).read_bytes() == SHIM.replace("\n", "\r\n").encode()


def test_windows_line_endings_on_both_sides(template, project):
    """Of the template's own, too: only lines that somebody changed may conflict."""
    windows: Files = {name: SECOND[name] for name in (f"{PACKAGE}/ddp/ledger.py", "templates/moves.yml")}
    fixed = lines("ledger", l40="ledger_40 = 'fixed'").replace("\n", "\r\n")
    release(template, "2.1.0", {**windows, f"{PACKAGE}/ddp/trace/collectives.py": fixed})
    (project / OLD).write_bytes(lines("ledger", l3="mine = 3").replace("\n", "\r\n").encode())
    commit(project)
    assert updated(project)["carried"] == {OLD: NEW}
    assert (project / NEW).read_bytes() == fixed.replace("ledger_3 = 3  # as the template has it", "mine = 3").encode()


def test_a_moved_file_keeps_its_line_endings_without_an_edit(project):
    (project / OLD).write_bytes((project / OLD).read_bytes().replace(b"\n", b"\r\n"))
    commit(project)
    assert updated(project)["carried"] == {}
    assert (project / NEW).read_bytes().count(b"\r\n") == 60


def test_a_package_that_was_renamed_by_hand(project):
    git(project, "mv", "src/p", "src/q")
    edit(project, "src/q/ddp/ledger.py")
    told = updated(project)
    assert told["carried"] == {OLD.replace("/p/", "/q/"): NEW.replace("/p/", "/q/")}
    assert "mine = True\n" in (project / "src/q/ddp/trace/collectives.py").read_text()
    assert not (project / "src/p").exists()


def test_an_adopted_project(template, tmp_path):
    project = made(template, tmp_path / "demo", source_folder=".")
    release(template, "2.0.0", SECOND)
    edit(project, "p/ddp/ledger.py")
    (project / "train.py").write_text("import p.ddp.ledger as ledger\n")
    commit(project)
    told = updated(project)
    assert told["carried"] == {"p/ddp/ledger.py": "p/ddp/trace/collectives.py"}
    assert told["notes"] == ["train.py:1 imports p.ddp.ledger, now p.ddp.trace.collectives"]


def test_a_reformatted_file(project):
    """As by a formatter: every line differs from both releases."""
    (project / OLD).write_text((project / OLD).read_text().replace(" = ", "="))
    commit(project)
    told = updated(project, code=2)
    assert told["conflicts"] == [NEW]
    text = (project / NEW).read_text()
    assert "ledger_40=40" in text
    assert "ledger_40 = 'fixed'" in text
    assert (project / OLD).read_text() == SHIM


def test_a_project_with_two_answers_files(template, tmp_path):
    project = made(template, tmp_path / "demo")
    made(template, project, "other")
    release(template, "2.0.0", SECOND)
    edit(project)
    git(project, "mv", "launch-other/outcome.py", "launch-other/mine.py")
    commit(project)
    told = updated(project)
    assert told["carried"] == {OLD: NEW, "launch-other/outcome.py": "launch-other/mine.py"}
    assert "mine = True\n" in (project / NEW).read_text()
    assert "'fixed'" in (project / "launch/outcome.py").read_text()
    assert "'fixed'" in (project / "launch-other/mine.py").read_text()
    assert not (project / "launch-other/outcome.py").exists()


@pytest.mark.parametrize("edited", every(2, [True, False], others=pytest.mark.long))
@pytest.mark.parametrize("what", ["file", "folder", "file in the place of a folder", "link"])
def test_something_of_the_users_stands_at_the_new_path(project, what, edited):
    if edited:
        edit(project)
    path = project / NEW
    blocking = path
    if what == "file in the place of a folder":
        blocking = path.parent
        blocking.write_text("Mine.\n")
    elif what == "folder":
        path.mkdir(parents=True)
        (path / "notes.txt").write_text("Mine.\n")
    elif what == "link":
        path.parent.mkdir()
        path.symlink_to("../../../../README.md")
    else:
        path.parent.mkdir()
        path.write_text("Mine.\n")
    commit(project)
    assert "git mv" in refused(project, f"the release moves {OLD} to {NEW}")
    git(project, "mv", str(blocking), "elsewhere")
    commit(project)
    assert updated(project)["carried"] == ({OLD: NEW} if edited else {})


def test_an_ignored_file_at_the_new_path(project):
    """It is in no commit, so it would be gone for good."""
    edit(project, at=40)
    (project / NEW).parent.mkdir()
    (project / NEW).write_text("Mine.\n")
    (project / ".gitignore").write_text("collectives.py\n")
    commit(project)
    refused(project, NEW, "Move ")
    assert (project / NEW).read_text() == "Mine.\n"


def test_a_link_in_the_place_of_a_moved_file(template, project):
    (project / OLD).unlink()
    (project / OLD).symlink_to("../../../README.md")
    commit(project)
    told = updated(project)
    assert left_out(told) == {OLD: f"it is a symbolic link; the release has it as {NEW}"}
    assert (project / OLD).readlink() == Path("../../../README.md")
    assert (project / "README.md").read_text() == "# About\n"


@pytest.mark.parametrize("edited", [True, False])
def test_a_moved_file_comes_into_a_folder_that_was_removed(template, tmp_path, edited):
    release(template, "1.1.0", {f"{PACKAGE}/ddp/trace/notes.py": "notes = 1\n"})
    project = made(template, tmp_path / "demo")
    assert update(project, "-y").returncode == 0
    git(project, "add", "--all")
    git(project, "rm", "-r", "--quiet", "--force", "src/p/ddp/trace")
    commit(project)
    if edited:
        edit(project)
    release(template, "2.0.0", SECOND)
    assert updated(project)["carried"] == ({OLD: NEW} if edited else {})
    assert ("mine = True\n" in (project / NEW).read_text()) is edited


def test_an_untouched_project_is_as_plain_copier_makes_it(template, project, tmp_path):
    shutil.copytree(project, tmp_path / "plain")
    assert updated(project)["carried"] == {}
    subprocess.run(
        [sys.executable, "-m", "copier", "update", "--quiet", "--defaults", str(tmp_path / "plain")],
        check=True,
        capture_output=True,
    )
    assert state(project)[2] == state(tmp_path / "plain")[2]


# --------------------------------------------------------------------------------------------------- moved by the user


def move(project: Path, old: str, new: str) -> None:
    (project / new).parent.mkdir(parents=True, exist_ok=True)
    git(project, "mv", old, new)
    commit(project)


def test_a_fix_comes_to_where_the_user_has_the_file(project):
    move(project, "launch/outcome.py", "tools/my outcome.py")
    edit(project, "tools/my outcome.py")
    done = update(project)
    assert done.returncode == 0, done.stderr
    assert "\n  launch/outcome.py -> tools/my outcome.py\n" in done.stdout
    assert "not in your project" not in done.stdout
    text = (project / "tools/my outcome.py").read_text()
    assert text == lines("outcome", l3="mine = True", l40="outcome_40 = 'fixed'")
    assert not (project / "launch/outcome.py").exists()


def test_a_conflict_where_the_user_has_the_file(project):
    move(project, "launch/outcome.py", "tools/outcome.py")
    edit(project, "tools/outcome.py", at=40)
    told = updated(project, code=2)
    assert told["conflicts"] == unmerged(project) == ["tools/outcome.py"]
    assert "mine = True\n=======\noutcome_40 = 'fixed'\n" in (project / "tools/outcome.py").read_text()


def test_a_file_that_the_release_leaves_alone_is_not_told(template, project):
    release(template, "2.1.0", {"{{ launch }}/outcome.py": lines("outcome")})
    move(project, "launch/outcome.py", "tools/outcome.py")
    told = updated(project)
    assert (told["carried"], told["left_out"]) == ({}, [])


def test_both_moved_it_to_different_places(project):
    move(project, OLD, "src/p/mine/ledger.py")
    edit(project, "src/p/mine/ledger.py")
    told = updated(project)
    assert told["carried"] == {OLD: "src/p/mine/ledger.py"}
    assert (project / "src/p/mine/ledger.py").read_text() == lines(
        "ledger", l3="mine = True", l40="ledger_40 = 'fixed'"
    )
    assert not (project / NEW).exists()
    assert not (project / OLD).exists()
    assert told["left_out"] == []


def test_both_moved_it_to_different_places_and_changed_the_same_lines(project):
    move(project, OLD, "src/p/mine/ledger.py")
    edit(project, "src/p/mine/ledger.py", at=40)
    hint = refused(project, f"you moved {OLD} to src/p/mine/ledger.py, the release moved it to {NEW}")
    command = hint.removeprefix("hint: ").partition(". Then")[0]
    subprocess.run(["sh", "-c", command], cwd=project, check=True)
    commit(project)
    assert updated(project, code=2)["conflicts"] == [NEW]
    assert "mine = True\n=======\nledger_40 = 'fixed'\n" in (project / NEW).read_text()


def test_both_moved_it_to_the_same_place(project):
    move(project, OLD, NEW)
    edit(project, NEW)
    assert updated(project)["carried"] == {OLD: NEW}
    assert (project / NEW).read_text() == lines("ledger", l3="mine = True", l40="ledger_40 = 'fixed'")


def test_both_moved_it_to_the_same_place_and_git_does_not_know_it_again(project):
    move(project, OLD, NEW)
    mine = {f"l{at}": f"rewritten = {at}" for at in range(60) if not 35 < at < 45}
    (project / NEW).write_text(lines("ledger", **mine))
    commit(project)
    assert updated(project)["carried"] == {OLD: NEW}
    assert (project / NEW).read_text() == lines("ledger", l40="ledger_40 = 'fixed'", **mine)


def test_the_release_has_another_file_where_the_user_moved_one(template, project):
    release(template, "2.1.0", {"tools/outcome.py": "# Something else.\n"})
    move(project, "launch/outcome.py", "tools/outcome.py")
    refused(project, "you moved launch/outcome.py to tools/outcome.py, where the release has a file of its own now")
    move(project, "tools/outcome.py", "tools/mine.py")
    assert updated(project)["carried"] == {"launch/outcome.py": "tools/mine.py"}


def test_a_removed_file_is_not_carried_into_one_that_only_looks_alike(template, project):
    """Every empty file is like every other."""
    git(project, "rm", "--quiet", "src/p/ddp/__init__.py")
    (project / "empty.py").touch()
    commit(project)
    release(template, "2.1.0", {f"{PACKAGE}/ddp/__init__.py": "fixed = True\n"})
    told = updated(project)
    assert told["carried"] == {}
    assert left_out(told) == {"src/p/ddp/__init__.py": "removed"}
    assert (project / "empty.py").read_text() == ""


# ------------------------------------------------------------------------------------------------------------- imports


def test_lines_that_import_what_has_moved_are_named(project):
    mine = project / "src" / "p" / "mine.py"
    mine.write_text(
        "import os\n\nfrom .ddp import ledger\nfrom .ddp.ledger import ledger_1\nimport p.ddp.ledger\n"
        "from p.ddp import (\n    other,\n    ledger as mine,\n)\n\n\ndef late():\n    from .ddp import ledger\n"
    )
    (project / "src/p/sub").mkdir()
    (project / "src/p/sub/__init__.py").write_text("from ..ddp import ledger\n")
    (project / "broken.py").write_text("import p.ddp.ledger\n((\n")
    (project / "unlike.py").write_text("import q.ddp.ledger\nfrom .ddp import ledger\n# import p.ddp.ledger\n")
    (project / "src/p/ddp/own.py").write_text("from . import ledger\n")  # of the plumbing, which has its own ways
    commit(project)
    now = "imports p.ddp.ledger, now p.ddp.trace.collectives"
    told = updated(project)
    at = (3, 4, 5, 8, 13)
    assert told["notes"] == [*(f"src/p/mine.py:{line} {now}" for line in at), f"src/p/sub/__init__.py:1 {now}"]


def test_not_more_lines_than_can_be_read(project):
    (project / "mine.py").write_text("import p.ddp.ledger\n" * 25)
    commit(project)
    done = update(project)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("imports p.ddp.ledger, now p.ddp.trace.collectives") == 20
    assert "and 5 more" in done.stderr
