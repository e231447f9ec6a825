"""`now`: the releases so far and the working tree as the next one; `two`: a release with one more after it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from update_helpers import NOW, change, commit, git

# The cross-section for `make test`; the others are for `make test-update` and `make test-all`.
QUICK = {
    "test_an_untouched_project",
    "test_copier_has_what_this_needs",
    "test_edits_survive",
    "test_both_sides_changed_the_same_lines",
    "test_an_edit_goes_along",
    "test_a_conflict_is_at_the_new_path[True]",
    "test_a_fix_comes_to_where_the_user_has_the_file",
    "test_a_move_that_is_listed",
    "test_a_moved_file_that_was_changed_much",
    "test_not_committed[changed]",
    "test_the_package_has_the_version_of_the_newest_release",
    "test_each_release_says_what_it_brings_and_what_is_to_do",
    "test_the_history_is_that_of_the_tags",
    "test_twice_the_same_bytes",
    "test_the_releases_survive[shallow]",
    "test_the_oldest_release",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.name not in QUICK:
            item.add_marker(pytest.mark.slow)


def release(repository: Path, version: str) -> None:
    """Add a release of what the checkout holds, with its bundle."""
    text = (repository / "CHANGELOG.md").read_text()
    text = text.replace("## Unreleased\n", "", 1)
    head, mark, rest = text.partition("\n## ")
    entry = f"\n## {version} (2099-01-01)\n\n- What {version} brings.\n\nBy hand: nothing.\n"
    (repository / "CHANGELOG.md").write_text(head + entry + mark + rest)
    git(repository, "add", "--all")
    code = f"import history, pathlib; history.add(pathlib.Path({str(repository)!r}), {version!r}, '2099-01-01')"
    subprocess.run([sys.executable, "-c", code], cwd=repository / "releases", check=True)
    commit(repository, f"Release {version}")


@pytest.fixture(scope="session")
def now(template_repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with all releases, and the working tree as the newest. It has no tags: nothing may need them."""
    repository = tmp_path_factory.mktemp("now") / "ddp-scaffold"
    shutil.copytree(template_repo, repository)
    git(repository, "tag", "--delete", *git(repository, "tag").split())
    release(repository, NOW)
    return repository


@pytest.fixture(scope="session")
def two(template_repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with releases 98.0.0 (the working tree) and 98.1.0, which changes what the tests name."""
    repository = tmp_path_factory.mktemp("two") / "ddp-scaffold"
    shutil.copytree(template_repo, repository)
    git(repository, "tag", "--delete", *git(repository, "tag").split())
    project = repository / "templates" / "project"
    (project / "tests" / "to_rename.py").write_text("# A file that will get another name.\n")
    (project / "tests" / "to_remove.py").write_text("# A file that will go.\n")
    release(repository, "98.0.0")
    (project / "tests" / "to_rename.py").rename(project / "tests" / "renamed.py")
    (project / "tests" / "to_remove.py").unlink()
    (project / "tests" / "added.py").write_text("# A new file.\n")
    (ddp,) = project.glob("*/*/ddp")
    change(ddp / "guard.py", '"""', '# The fix of 98.1.0.\n"""')
    change(ddp / "__init__.py", '"""', '"""Fixed. ')
    (launch,) = project.glob("*launch*")
    change(launch / "outcome.py", '"""', '"""Fixed. ')
    change(project / "README.md.jinja", "## Start", "## Begin")
    change(repository / "templates" / "models" / "custom" / "model.py", '"""', '"""Fixed. ')
    change(repository / "templates" / "models" / "custom" / "evaluate.py", '"""', '"""Fixed. ')
    with (repository / "copier.yml").open("a") as questions:
        questions.write('\nnew_question: {type: str, help: "What is new?", default: "nothing"}\n')
    release(repository, "98.1.0")
    return repository


@pytest.fixture(scope="session")
def history_of_two(two: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The releases of `two` as the public repository would have them: tags on commits."""
    return _unpacked(two, tmp_path_factory.mktemp("history") / "history.git")


@pytest.fixture(scope="session")
def history_of_now(now: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The releases of `now` as the public repository would have them."""
    return _unpacked(now, tmp_path_factory.mktemp("history") / "history.git")


def _unpacked(repository: Path, bare: Path) -> Path:
    code = f"import history, pathlib; history.unpack(pathlib.Path({str(bare)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=repository / "releases", check=True)
    return bare
