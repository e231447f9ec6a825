"""`--preset FILE`: a preset of the user's own, recorded whole in the project, so that updates have it too."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from cli_helpers import refused, tree
from git_helpers import git

from ddp_scaffold import __version__
from ddp_scaffold.template import source


def told(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_preset_file_gives_its_values_and_is_recorded_whole(cli, work, own_preset):
    path = own_preset(gpus_per_node=6, cpus_per_task=7)
    result = told(cli("new", "demo", "--json", "--preset", "./mycluster.yml"))
    assert (result["answers"]["preset"], result["answers"]["gpus_per_node"]) == ("own", 6)
    assert result["follows"]["world_size"] == 12
    recorded = yaml.safe_load((work / "demo" / ".copier-answers.yml").read_text())
    assert recorded["preset"] == "own"
    assert recorded["preset_file"] == yaml.safe_load(path.read_text())
    assert result["answers"]["preset_file"]["verified_on"] == recorded["preset_file"]["verified_on"].isoformat()


@pytest.mark.slow
def test_printed_command_names_the_file(cli, work, own_preset):
    own_preset(gpus_per_node=6)
    command = told(cli("new", "demo", "--json", "--preset", "./mycluster.yml", "--set", "nodes=1"))["command"]
    assert command == "ddp-scaffold new demo -y --preset ./mycluster.yml --set nodes=1"


@pytest.mark.slow
def test_recorded_answers_serve_as_answers_file_without_the_preset_file(cli, work, own_preset):
    path = own_preset(gpus_per_node=6, modules=["cuda/12.4", "gcc"])
    assert cli("new", "demo", "-y", "--preset", str(path)).exit_code == 0
    path.unlink()
    (work / "demo").rename(work / "first")
    command = told(cli("new", "demo", "--json", "--answers", "first/.copier-answers.yml"))["command"]
    first = tree(work / "first")
    assert tree(work / "demo") == first
    (work / "demo").rename(work / "second")
    assert cli(*shlex.split(command)[1:]).exit_code == 0  # that file is not named in it: the preset stands there itself
    assert tree(work / "demo") == first


@pytest.mark.slow
def test_a_named_preset_takes_the_place_of_a_recorded_file(cli, work, own_preset):
    path = own_preset()
    assert cli("new", "demo", "-y", "--preset", str(path)).exit_code == 0
    options = ["--json", "--dry-run", "--answers", "demo/.copier-answers.yml", "--preset", "generic-slurm"]
    result = told(cli("new", "two", *options, "--set", "project_name=two", "--set", "package=two"))
    assert result["answers"]["preset"] == "generic-slurm"
    assert "preset_file" not in result["answers"]


def test_limits_of_a_partition(cli, work, own_preset):
    own_preset()
    options = ["--json", "--dry-run", "--preset", "mycluster.yml", "--set", "partition=debug"]
    result = told(cli("new", "demo", *options))
    assert result["answers"]["walltime"] == "00:30:00"  # by default what the partition allows, and not spelled out
    assert result["command"] == "ddp-scaffold new demo -y --preset mycluster.yml --set partition=debug"
    for pair, message in {
        "nodes=3": "--set partition: 'debug' takes 1 to 2 nodes, not 3 (as of ",
        "walltime=00:31:00": "--set walltime: '00:31:00' is longer than debug allows for 2 nodes, 00:30:00 (as of ",
    }.items():
        assert message in json.loads(cli("new", "demo", *options, "--set", pair).stdout)["error"]["message"]


def test_broken_preset_file_is_refused_with_the_way_to_all_problems(cli, work, own_preset):
    path = own_preset(gpus_per_node="many", colour="blue")
    result = cli("new", "demo", "-y", "--preset", "./mycluster.yml")
    path.unlink()
    refused(result, work, 2, "--preset: mycluster.yml: ", "(and 1 more)", "ddp-scaffold presets check mycluster.yml")


@pytest.mark.parametrize("name", ["absent.yml", "./absent", "sub/"])
def test_absent_preset_file(cli, work, name):
    refused(cli("new", "demo", "-y", "--preset", name), work, 2, "--preset: ", "cannot be read: No such file")


WRONG = {
    "no file": ("preset: own\n", ":1: 'own' names no preset file"),
    "not asked": ("preset: local\npreset_file: {name: x}\n", "'preset_file' is not asked with preset local"),
    "no mapping": ("preset: own\npreset_file: x\n", ":2: 'preset_file' is no preset: it has no name"),
    "no name": ("preset: own\npreset_file: {title: x}\n", ":2: 'preset_file' is no preset: it has no name"),
    "path as name": ("preset: own\npreset_file: {name: ../x}\n", ":2: 'preset_file' is no preset: it has no name"),
    "missing fields": ("preset: own\npreset_file: {name: x}\n", ":2: x.yml: title: is missing (and "),
    "jinja": (
        "preset: own\npreset_file: {name: x, title: '{{ 7 }}', extends: local}\n",
        "holds '{{', which Jinja would evaluate",
    ),
    "tag": ("preset: own\npreset_file: {name: !!python/name:os.system x}\n", "'preset_file' is not YAML: "),
    "recursive": ("preset: own\npreset_file: &a {name: x, title: *a}\n", ":2: "),
    "nested": ("preset: {name: local}\n", ":1: 'preset' must have one plain value"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_wrong_preset_in_an_answers_file(cli, work, tmp_path, text, message):
    file = tmp_path / "answers.yml"
    file.write_text(text)
    refused(cli("new", "demo", "-y", "--answers", str(file)), work, 2, str(file), message)


def test_own_without_a_file(cli, work):
    refused(cli("new", "demo", "-y", "--preset", "own"), work, 2, "--preset: 'own' names no preset file", "--preset ./")


def test_file_and_preset_given_twice(cli, work, own_preset):
    own_preset()
    result = cli("new", "demo", "-y", "--preset", "mycluster.yml", "--set", "preset=local")
    assert result.exit_code == 2
    assert "'preset' is given twice" in result.stderr


@pytest.mark.slow
def test_plain_copier_updates_a_project_with_a_preset_of_its_own(cli, work, own_preset, template_repo, monkeypatch):
    git(work, "clone", "--quiet", str(template_repo), "fork")
    fork = work / "fork"
    monkeypatch.setattr(source, "CHECKOUT", fork)
    path = own_preset(gpus_per_node=6)
    assert cli("new", "demo", "-y", "--preset", str(path)).exit_code == 0
    before = (work / "demo" / ".copier-answers.yml").read_text()
    (fork / "templates" / "project" / "ADDED.txt.jinja").write_text("{{ preset_data.gpus_per_node.value }} GPUs\n")
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
    assert (work / "demo" / "ADDED.txt").read_text() == "6 GPUs\n"
    after = (work / "demo" / ".copier-answers.yml").read_text()
    before = before.replace(f"_commit: v{__version__}\n", "_commit: v99.0.0\n")
    assert re.sub("[0-9a-f]{16}", "", after, count=1) == re.sub("[0-9a-f]{16}", "", before, count=1)


def bomb(expanded: int) -> str:
    """A preset of a kilobyte whose aliases stand for `expanded` times as much; each of its values is right."""
    note = "{value: &v '" + "x " * 250 + "', source: *v, confidence: documented}"
    lines = ["name: mycluster", "title: T", "extends: local", "verified_on: 2026-01-01", "status: documented"]
    return "\n".join([*lines, f"notes: [&n {note}{', *n' * expanded}]", ""])


@pytest.mark.slow
def test_aliases_that_expand_to_much(cli, work, tmp_path):
    """Refused by their size, which is seen before anything is made of them. A few aliases are fine."""
    (tmp_path / "mycluster.yml").write_text(bomb(1000))
    answers = "preset: own\npreset_file:\n" + "".join(f"  {line}\n" for line in bomb(1000).splitlines())
    (tmp_path / "answers.yml").write_text(answers)
    given = ["--preset", str(tmp_path / "mycluster.yml")]
    refused(cli("new", "demo", "-y", *given), work, 2, "aliases expand to more than 128 kB")
    given = ["--answers", str(tmp_path / "answers.yml")]
    refused(cli("new", "demo", "-y", *given), work, 2, "answers.yml:2: ", "aliases expand to more than 256 kB")
    given = ["--set", "preset=own", "--set", f"preset_file={bomb(1000)}"]
    refused(cli("new", "demo", "-y", *given), work, 2, "aliases expand to more than 128 kB")
    assert cli("presets", "check", str(tmp_path / "mycluster.yml")).exit_code == 1
    (tmp_path / "mycluster.yml").write_text(bomb(3))
    assert cli("new", "demo", "-y", "--dry-run", "--preset", str(tmp_path / "mycluster.yml")).exit_code == 0
