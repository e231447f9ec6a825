"""What an update makes of an untouched project is put together from one rendering; copier's update makes the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

import pytest
from update_helpers import RELEASES, URL, commit, copier, git, history

from ddp_scaffold.template import copier_calls
from ddp_scaffold.template.source import open_template
from ddp_scaffold.updating import untouched
from ddp_scaffold.updating.answers import answers_for_update
from ddp_scaffold.updating.recorded import read
from ddp_scaffold.updating.step import Step, plain_git

QUESTIONS = """\
_subdirectory: project
package: {type: str, default: p}
launch:
  type: str
  when: false
  default: "{{ 'launch-other' if 'other' in _copier_conf.answers_file | string else 'launch' }}"
_skip_if_exists: ["/kept*.py"]
_exclude:
  - "{% if _copier_operation == 'update' %}/src/*/model.py{% endif %}"
  - "{% if _copier_operation == 'update' %}/configs{% endif %}"
  - "{% if launch != 'launch' %}**{% endif %}"
  - "{% if launch != 'launch' %}!/{{ launch }}{% endif %}"
  - "{% if launch != 'launch' %}!/{{ _copier_conf.answers_file }}{% endif %}"
"""
MINE = "{% if _copier_operation == 'update' %}/configs{% endif %}"
Files = Mapping[str, "str | None"]
FIRST: Files = {
    "copier.yml": QUESTIONS,
    "project/{{ _copier_conf.answers_file }}.jinja": "{{ _copier_answers|to_nice_yaml }}",
    "project/src/{{ package }}/model.py": "first = True\n",
    "project/src/{{ package }}/ddp/old.py": "ddp = 1\n",
    "project/src/{{ package }}/ddp/fixed.py.jinja": "package = '{{ package }}'\n",
    "project/{{ launch }}/train.sh": "#!/bin/sh\n",
    "project/{{ launch }}/gone/stop.sh": "#!/bin/sh\n",
    "project/configs/train.yaml": "steps: 1\n",
    "project/configs/gone.yaml": "steps: 1\n",
    "project/kept.py": "kept = 1\n",
    "project/kept_and_gone.py": "kept = 1\n",
    "project/.gitattributes": "*.sh text eol=lf\n",
}
SECOND: Files = {
    "project/src/{{ package }}/model.py": "second = True\n",
    "project/src/{{ package }}/ddp/old.py": None,
    "project/src/{{ package }}/ddp/trace/new.py": "ddp = 1\n",
    "project/src/{{ package }}/ddp/fixed.py.jinja": "package = '{{ package }}'  # fixed\n",
    "project/{{ launch }}/train.sh": "#!/bin/sh\nset -e\r\n",
    "project/{{ launch }}/gone/stop.sh": None,
    "project/configs/train.yaml": "steps: 2\n",
    "project/configs/gone.yaml": None,
    "project/kept.py": "kept = 2\n",
    "project/kept_new.py": "kept = 2\n",
    "project/kept_and_gone.py": None,
}


def release(template: Path, version: str, files: Files) -> None:
    """Make a release of a template in which these files change; None removes one."""
    if not template.exists():
        template.mkdir()
        git(template, "init", "--quiet", "--initial-branch=main")
    for name, content in files.items():
        path = template / name
        if content is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())
        path.chmod(0o755 if "set -e" in content else 0o644)
    commit(template, version)
    git(template, "tag", "--annotate", "--message", version, f"v{version}")


def made(template: Path, project: Path, *answers_files: str) -> Path:
    """A project of the first release, of which these answers files are recorded."""
    for name in answers_files or (".copier-answers.yml",):
        command = [sys.executable, "-m", "copier", "copy", "--quiet", "--defaults", "--vcs-ref", "v1.0.0"]
        subprocess.run([*command, "--answers-file", name, str(template), str(project)], check=True)
    return project


def both(template: Path, project: Path, scratch: Path, only: str = "") -> tuple[str, str, list[str]]:
    """Take an untouched project to the newest release; return two trees and the answers files that copier updated.

    The first tree is what is put together where that is possible, the second one what copier's update makes.
    """
    clusters, trees, taken = read(project), [], []
    with open_template(str(template), clusters[0].source) as source, plain_git(), pytest.MonkeyPatch.context() as patch:
        take = untouched.take
        patch.setattr(untouched, "take", lambda step, *rest: (taken.append(step.answers_file), take(step, *rest)))
        steps = []
        for each in clusters:
            rendered, _ = answers_for_update(each, {}, source, scratch)
            if only in each.name:
                steps.append(Step(each.name, rendered.answers, source.ref, rendered=rendered.update))
        repository, copy = scratch / "untouched", scratch / "copy"
        git(scratch, "init", "--quiet", str(repository))
        before = untouched.as_made(project, repository, clusters, source, scratch)
        shutil.copytree(repository, copy)
        git(copy, "status")  # refreshes the index: the copies have other times
        by_copier = [replace(step, rendered=None) for step in steps]
        for made, ways in ((before, steps), (replace(before, repository=copy), by_copier)):
            after = untouched.update_untouched(made, source, ways)
            trees.append(git(made.repository, "rev-parse", f"{after}^{{tree}}"))
    assert trees[1] != git(copy, "rev-parse", f"{before.commit}^{{tree}}")
    return trees[0], trees[1], taken[: -len(steps)]


def test_an_untouched_project(tmp_path):
    release(tmp_path / "template", "1.0.0", FIRST)
    project = made(tmp_path / "template", tmp_path / "demo")
    release(tmp_path / "template", "2.0.0", SECOND)
    together, by_copier, taken = both(tmp_path / "template", project, tmp_path)
    assert together == by_copier
    assert taken == []


@pytest.mark.parametrize("only", ["", "other", "answers.yml"])
def test_clusters(tmp_path, only):
    """With a step for both, or for one: the files of the other are nobody's to remove."""
    release(tmp_path / "template", "1.0.0", FIRST)
    project = made(tmp_path / "template", tmp_path / "demo", ".copier-answers.yml", ".copier-answers.other.yml")
    release(tmp_path / "template", "2.0.0", SECOND)
    together, by_copier, taken = both(tmp_path / "template", project, tmp_path, only)
    assert together == by_copier
    assert taken == []


def test_answers_files_that_make_the_same_files(tmp_path):
    questions = QUESTIONS.partition('  - "{% if launch')[0]
    release(tmp_path / "template", "1.0.0", {**FIRST, "copier.yml": questions})
    project = made(tmp_path / "template", tmp_path / "demo", ".copier-answers.yml", ".copier-answers.other.yml")
    release(tmp_path / "template", "2.0.0", SECOND)
    together, by_copier, taken = both(tmp_path / "template", project, tmp_path)
    assert together == by_copier
    assert taken == [".copier-answers.other.yml"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # What an ignore list matches is not in copier's copies. (Without the suffix, the template would be without it.)
        ({"project/.gitignore.jinja": "fixed.py\n"}, {"project/.gitignore.jinja": None}),
        ({}, {"copier.yml": QUESTIONS.replace(MINE, "")}),  # the user's once, now the release's again
        ({"project/tags/one.py": "one = 1\n"}, {"project/tags/one.py": None}),  # a name that filecmp passes over
    ],
    ids=["ignored", "brought again", "not compared"],
)
def test_where_an_update_is_more_than_a_rendering(tmp_path, first, second):
    release(tmp_path / "template", "1.0.0", {**FIRST, **first})
    project = made(tmp_path / "template", tmp_path / "demo")
    release(tmp_path / "template", "2.0.0", {**SECOND, **second})
    together, by_copier, taken = both(tmp_path / "template", project, tmp_path)
    assert together == by_copier
    assert taken == [".copier-answers.yml"]


def test_files_that_only_updates_bring(tmp_path):
    """Copier takes those of the old release for removed by the user, and brings those that are new."""
    questions = {"copier.yml": QUESTIONS.replace(MINE, MINE.replace("update", "copy"))}
    release(tmp_path / "template", "1.0.0", {**FIRST, **questions})
    project = made(tmp_path / "template", tmp_path / "demo")
    release(tmp_path / "template", "2.0.0", {**SECOND, "project/configs/new.yaml": "new: true\n"})
    together, by_copier, taken = both(tmp_path / "template", project, tmp_path)
    assert together == by_copier
    assert taken == []
    assert git(tmp_path / "copy", "ls-files", "configs").split() == ["configs/new.yaml"]


def test_what_belongs_to_the_user_from_the_new_release_on(tmp_path):
    release(tmp_path / "template", "1.0.0", {**FIRST, "copier.yml": QUESTIONS.replace(MINE, "")})
    project = made(tmp_path / "template", tmp_path / "demo")
    release(tmp_path / "template", "2.0.0", {**SECOND, "copier.yml": QUESTIONS})
    together, by_copier, taken = both(tmp_path / "template", project, tmp_path)
    assert together == by_copier
    assert taken == []


def test_with_a_copier_that_cannot_render_for_an_update(tmp_path, monkeypatch):
    def gone():
        raise copier_calls.CopierRefused("cannot import name '_operation'")

    release(tmp_path / "template", "1.0.0", FIRST)
    project = made(tmp_path / "template", tmp_path / "demo")
    release(tmp_path / "template", "2.0.0", SECOND)
    monkeypatch.setattr(copier_calls, "_for_update", gone)
    together, by_copier, taken = both(tmp_path / "template", project, tmp_path)
    assert together == by_copier
    assert taken == [".copier-answers.yml"]


def test_copier_has_what_this_needs():
    """Where this fails, updates are right, and take a third longer: see `copier_calls._for_update`."""
    from copier import _main

    assert isinstance(getattr(_main, "_operation", None), ContextVar)


def test_the_first_release_and_the_newest(tmp_path):
    """Of this template nothing is left to copier: an update would take a third longer."""
    repository = tmp_path / "history.git"
    history.unpack(repository)
    project = tmp_path / "demo"
    words = ("copy", "--quiet", "--defaults", "--vcs-ref", f"v{RELEASES[0]}", "--data", "project_name=demo")
    assert copier(*words, URL, project, repository=repository, cwd=tmp_path).returncode == 0
    together, by_copier, taken = both(repository, project, tmp_path)
    assert together == by_copier
    assert taken == []
