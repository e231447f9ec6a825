"""Where the template comes from: checkout, fork, URL, bundle; and that a new project can be updated at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import refused
from git_helpers import git

from ddp_scaffold import __version__
from ddp_scaffold.template import source

RELEASE = f"v{__version__}"


@pytest.fixture
def fork(template_repo: Path, tmp_path: Path) -> Path:
    """A clone of the template's repository that a test may change."""
    git(tmp_path, "clone", "--quiet", str(template_repo), "fork")
    return tmp_path / "fork"


def source_of(result) -> dict[str, str]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["template"]


def test_override_by_path(cli, fork):
    assert source_of(cli("new", "demo", "--json", "--template", str(fork))) == {"source": str(fork), "commit": RELEASE}


def test_override_by_environment(cli, fork, monkeypatch):
    monkeypatch.setenv("DDP_SCAFFOLD_TEMPLATE", str(fork))
    result = cli("new", "demo", "--json")
    assert source_of(result)["source"] == str(fork)
    assert json.loads(result.stdout)["command"].endswith(f"--template {fork}")


def test_override_by_url_takes_the_newest_release(cli, fork, tmp_path):
    git(fork, "tag", "-a", "-m", "r", "v99.0.0")
    git(fork, "commit", "--quiet", "--allow-empty", "--message", "Next")
    git(fork, "tag", "-a", "-m", "r", "v100.0.0rc1")
    git(fork, "tag", "other")
    git(tmp_path, "clone", "--quiet", "--bare", str(fork), "mirror.git")
    url = f"file://{tmp_path}/mirror.git"
    assert source_of(cli("new", "demo", "--json", "--template", url)) == {"source": url, "commit": "v99.0.0"}


def test_uncommitted_changes_of_a_fork_are_used_and_told(cli, work, fork):
    (fork / "templates" / "project" / "EXTRA.txt").write_text("extra\n")
    result = cli("new", "demo", "-y", "--template", str(fork))
    assert result.exit_code == 0, result.output
    assert "has uncommitted changes; they are used" in result.stderr
    assert (work / "demo" / "EXTRA.txt").is_file()


def test_uncommitted_changes_of_the_own_checkout_are_told(cli, work, fork, monkeypatch):
    monkeypatch.setattr(source, "CHECKOUT", fork)
    (fork / "templates" / "project" / "EXTRA.txt").write_text("extra\n")
    result = cli("new", "demo", "-y")
    assert "has uncommitted changes; they are not used" in result.stderr
    assert not (work / "demo" / "EXTRA.txt").exists()


def test_checkout_without_tags(cli, work, fork, monkeypatch):
    git(fork, "tag", "--delete", RELEASE)
    monkeypatch.setattr(source, "CHECKOUT", fork)
    commit = source_of(cli("new", "demo", "--json"))["commit"]
    assert git(fork, "rev-parse", "HEAD") == f"{commit}\n"  # a short hash could look like a number


def test_bundle(cli, work, template_repo, tmp_path, monkeypatch):
    git(template_repo, "bundle", "create", "--quiet", str(tmp_path / "t.bundle"), "HEAD", "main", RELEASE)
    monkeypatch.setattr(source, "CHECKOUT", tmp_path)
    monkeypatch.setattr(source, "BUNDLE", tmp_path / "t.bundle")
    assert source_of(cli("new", "demo", "--json")) == {"source": source.PUBLIC_URL, "commit": RELEASE}


def test_no_template_at_all(cli, work, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "CHECKOUT", tmp_path)
    monkeypatch.setattr(source, "BUNDLE", tmp_path / "template.bundle")
    refused(cli("new", "demo", "-y"), work, 1, "holds no template", "--template PATH_OR_URL")


def test_repository_without_a_commit(cli, work, tmp_path):
    git(tmp_path, "init", "--quiet", "bare-bones")
    (tmp_path / "bare-bones" / "copier.yml").write_text("")
    refused(cli("new", "demo", "-y", "--template", str(tmp_path / "bare-bones")), work, 1, "has no commit yet")


@pytest.mark.parametrize("wanted", ["nowhere", "https://example.invalid/x", "templates"])
def test_override_that_is_no_template(cli, work, fork, wanted):
    path = str(fork / wanted) if wanted == "templates" else wanted
    refused(cli("new", "demo", "-y", "--template", path), work, 2, f"--template {path}: ")


def test_unreachable_url(cli, work, tmp_path):
    refused(cli("new", "demo", "-y", "--template", f"file://{tmp_path}/absent.git"), work, 1, "git clone failed")


def test_template_that_needs_trust_is_refused(cli, work, fork):
    with (fork / "copier.yml").open("a") as file:
        file.write("\n_tasks: [touch pwned]\n")
    git(fork, "commit", "--quiet", "--all", "--message", "Tasks")
    refused(cli("new", "demo", "-y", "--template", str(fork)), work, 1, "unsafe")


def test_template_with_a_typo_is_two_lines(cli, work, fork):
    (fork / "templates" / "project" / "broken.txt.jinja").write_text("{{ nosuchanswer }}")
    git(fork, "add", "--all")
    git(fork, "commit", "--quiet", "--message", "Typo")
    refused(cli("new", "demo", "-y", "--template", str(fork)), work, 1, "nosuchanswer")


def test_environment_of_the_user_is_appended_to(cli, work, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "user.name")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "Someone")
    before = dict(os.environ)
    assert cli("new", "demo", "-y").exit_code == 0
    assert dict(os.environ) == before
    assert git(work / "demo", "log", "--format=%an") == "Someone\n"


def test_longer_redirect_of_ours_wins_over_the_users(cli, work, monkeypatch, tmp_path):
    (tmp_path / "gitconfig").write_text('[url "ssh://git@github.com/"]\n\tinsteadOf = https://github.com/\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    assert cli("new", "demo", "-y").exit_code == 0


def redirect_to(mirror: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "gitconfig").write_text(f'[url "{mirror}"]\n\tinsteadOf = {source.PUBLIC_URL}\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))


def test_a_mirror_in_the_place_of_the_public_url(cli, work, fork, tmp_path, monkeypatch):
    """What plain copier needs without a network. The project records the public URL, as ever."""
    git(fork, "tag", "-a", "-m", "r", "v99.0.0")
    git(tmp_path, "clone", "--quiet", "--bare", str(fork), "mirror.git")
    redirect_to(tmp_path / "mirror.git", tmp_path, monkeypatch)
    result = cli("new", "demo", "--json")
    assert source_of(result) == {"source": source.PUBLIC_URL, "commit": "v99.0.0"}
    assert f"releases are taken from {tmp_path}/mirror.git" in result.stderr


def test_a_mirror_that_is_not_there_is_named(cli, work, monkeypatch, tmp_path):
    redirect_to(Path("/mirror.git"), tmp_path, monkeypatch)
    refused(cli("new", "demo", "-y"), work, 1, f"replaces {source.PUBLIC_URL} by /mirror.git", "remove that insteadOf")


@pytest.mark.parametrize("text", ["a: [", "- a", ""])
def test_template_whose_questions_cannot_be_read(cli, work, fork, text):
    (fork / "copier.yml").write_text(text)
    refused(cli("new", "demo", "-y", "--template", str(fork)), work, 1, "the template's copier.yml")


def test_choices_and_defaults_in_other_files_of_a_fork(cli, work, fork):
    """They are read from the fork, at once: a wrong choice is told before copier runs, a default is not spelled out."""
    copier, choices = fork / "copier.yml", fork / "templates" / "questions" / "trackers.yml"
    choices.write_text('"Nowhere": none\n"A file": tensorboard\n"Mine": minerva\n')
    (fork / "templates" / "questions" / "restarts.jinja").write_text("{% if preset %}\n5\n{%- endif %}\n")
    text = copier.read_text()
    assert "choices: [tensorboard, wandb, none]" in text
    text = text.replace(
        "choices: [tensorboard, wandb, none]", "choices: \"{% include 'templates/questions/trackers.yml' %}\""
    )
    copier.write_text(text)
    clocks = fork / "templates" / "questions" / "clocks.yml"
    restarts = "\"{% include 'templates/questions/restarts.jinja' %}\""
    assert "default: 3\n" in clocks.read_text()
    clocks.write_text(clocks.read_text().replace("default: 3\n", f"default: {restarts}\n"))
    git(fork, "add", "--all")
    git(fork, "commit", "--quiet", "--message", "Mine")
    options = ["--json", "--template", str(fork)]
    told = json.loads(cli("new", "demo", "--dry-run", "--set", "tracker=none", *options).stdout)
    assert told["answers"]["max_restarts"] == 5
    assert told["command"] == f"ddp-scaffold new demo -y --set tracker=none --template {fork}"
    wrong = json.loads(cli("new", "demo", "--set", "tracker=minerv", *options).stdout)["error"]
    assert wrong["message"] == "--set tracker: 'minerv' is none of none, tensorboard, minerva"
    assert wrong["hint"] == "Did you mean minerva?"


@pytest.mark.parametrize(
    "made_from",  # `make test-update` runs all three
    [pytest.param(one, marks=pytest.mark.slow) for one in ("release", "commit after it", "commit without tags")],
)
def test_plain_copier_updates_a_new_project_at_once(cli, work, fork, monkeypatch, made_from):
    """Also one that was made from a checkout without releases, or past the last one, as developers do."""
    monkeypatch.setattr(source, "CHECKOUT", fork)
    if made_from == "commit without tags":
        git(fork, "tag", "--delete", RELEASE)
    if made_from == "commit after it":
        git(fork, "commit", "--quiet", "--allow-empty", "--message", "Unreleased")
    assert cli("new", "demo", "-y").exit_code == 0
    (fork / "templates" / "project" / "ADDED.txt").write_text("from the next release\n")
    git(fork, "add", "--all")
    git(fork, "commit", "--quiet", "--message", "Next")
    git(fork, "tag", "-a", "-m", "r", "v99.0.0")
    redirect = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{fork}.insteadOf",
        "GIT_CONFIG_VALUE_0": source.PUBLIC_URL,
        "COPIER_CACHE_DIR": str(work / "cache"),
    }
    update = [sys.executable, "-m", "copier", "update", "--defaults", "--skip-answered"]
    done = subprocess.run(
        update, cwd=work / "demo", env=os.environ | redirect, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (work / "demo" / "ADDED.txt").is_file()
    assert "_commit: v99.0.0\n" in (work / "demo" / ".copier-answers.yml").read_text()
