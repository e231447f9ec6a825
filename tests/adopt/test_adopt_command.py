"""`ddp-scaffold new . --into-existing`: what it writes beside existing code, what it suggests, and what it refuses."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from adopt_repos import FLAT, OWN_TESTS, SRC, make
from cross_section import every

from ddp_scaffold._errors import ScaffoldError
from ddp_scaffold.adopting import existing

OURS = (".copier-answers.yml", ".gitattributes", "adopt.patch")


def tree(directory: Path) -> dict[str, bytes]:
    """Return the content of every file but git's."""
    files = (path for path in directory.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def answers(directory: Path) -> dict[str, object]:
    return dict(yaml.safe_load((directory / ".copier-answers.yml").read_text()))


@pytest.mark.parametrize(
    ("name", "files", "package", "source", "command"),
    [
        ("mnist", FLAT, "mnist", ".", "train.py"),
        ("whatever", SRC, "vision_lab", "src", "-m vision_lab.train"),
        ("2 My Repo", OWN_TESTS, "own", ".", "main.py"),
        ("code", {"README.md": ""}, "code_ddp", ".", "-m code_ddp.train"),
        ("Ünicode-x", {"x.py": "", "src/deep/run.py": ""}, "nicode_x", "src", "-m nicode_x.train"),
        ("mnist", {"mnist.py": ""}, "mnist_ddp", ".", "-m mnist_ddp.train"),
    ],
    ids=["flat", "src", "own-tests", "reserved", "letters", "hidden"],
)
def test_what_a_repository_suggests_is_written_beside_it(repository, adopt, name, files, package, source, command):
    directory = repository(name, files)
    before = tree(directory)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"])
    adopt()
    after = tree(directory)
    assert {path: after[path] for path in before} == before, "no file of the user's is changed"
    folder = f"{package}/ddp/" if source == "." else f"{source}/{package}/ddp/"
    for path in after.keys() - before.keys():
        assert path.startswith((folder, "launch/", "tests/ddp/")) or path in OURS
    assert f"{folder}variables.py" in after
    recorded = answers(directory)
    assert recorded["code"] == "existing"
    assert (recorded["package"], recorded["source_folder"], recorded["command"]) == (package, source, command)
    assert "model" not in recorded
    assert subprocess.check_output(["git", "rev-parse", "HEAD"]) == head, "no commit"
    assert not [path for path in directory.iterdir() if path.name.startswith(".ddp-scaffold")]


def test_json(repository, cli):
    more = {"train.py": FLAT["train.py"], "src/.keep": "", "model.py": "import torch\n"}
    directory = repository("own", OWN_TESTS | more)
    result = cli("new", ".", "--into-existing", "--json", "--preset", "generic-slurm", "--set", "source_folder=.")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert set(told) == {
        *("version", "destination", "answers", "command", "files", "next", "template", "follows"),
        *("kept", "findings", "changes", "unknown", "sketch", "notes", "patch", "unfit"),
    }
    assert told["kept"] == [".gitattributes"]
    assert ".gitattributes" not in told["files"]
    assert told["files"] == sorted(tree(directory).keys() - OWN_TESTS.keys() - more.keys())
    assert all(set(change) == {"file", "line", "text", "why", "instead", "must"} for change in told["changes"])
    assert "broken.py: not read" in told["notes"][0]
    assert told["next"][0] == "echo /runs/ >> .gitignore"
    assert told["next"][1].startswith("git add --force .copier-answers.yml launch own/ddp tests/ddp "), (
        "*.env is ignored"
    )
    assert told["next"][-1] == "sbatch launch/train.sbatch"
    assert told["answers"]["code"] == "existing"
    assert told["follows"]["tracker"] is None
    assert told["sketch"] == [], "what the main function looks like is in the patch"
    assert told["next"][2] == "git apply adopt.patch && rm adopt.patch"
    assert told["patch"][:2] == ["--- a/train.py", "+++ b/train.py"]
    assert {one["rule"] for one in told["findings"]} >= {"DDP553"}
    words = shlex.split(told["command"])
    assert "--into-existing" in words
    assert "code=existing" not in words


def test_the_command_without_questions_gives_the_same(repository, cli, adopt):
    first = repository("mnist", FLAT)
    told = json.loads(adopt("--json", "--dry-run", "--set", "command=train.py --epochs 1").stdout)
    assert tree(first).keys() == FLAT.keys(), "a dry run writes nothing"
    assert cli(*shlex.split(told["command"])[1:]).exit_code == 0
    assert answers(first)["command"] == "train.py --epochs 1"
    assert "run_torchrun train train.py --epochs 1 " in (first / "launch/torchrun.sh").read_text()


def test_text_names_each_line_and_ends_with_what_to_type(repository, adopt):
    repository("mnist", FLAT)
    result = adopt()
    assert "starts     python train.py" in result.stdout
    assert 'train.py:25  dist.init_process_group("gloo")' in result.stdout
    assert "with ddp_session():  # around it" in result.stdout
    assert "What `ddp-scaffold check` finds in it: 2" in result.stdout
    assert result.stdout.splitlines()[-1].strip() == "bash launch/torchrun.sh"
    assert "nothing is committed" in result.stderr
    assert "kept" not in result.stderr


@pytest.mark.parametrize(
    ("files", "args", "code", "words"),
    every(
        3,
        [
            (
                {"mnist/ddp/start/launcher.py": "mine"},
                [],
                1,
                ["mnist/ddp/start/launcher.py would have to be written", "--set package=NAME"],
            ),
            ({"launch/common.sh": "mine"}, [], 1, ["launch/common.sh would have to be written", "git mv"]),
            ({"launch": "a file"}, [], 1, ["launch would have to be written"]),
            ({"tests/ddp/conftest.py": "mine"}, [], 1, ["tests/ddp/conftest.py"]),
            ({".copier-answers.yml": "_src_path: gh:x/y\n"}, [], 1, ["was made from a template"]),
            ({"lab.py": ""}, ["--set", "package=lab"], 2, ["lab.py would hide the package lab"]),
            ({}, ["--set", "command=train.py; rm -rf x"], 2, ["command"]),
            ({}, ["--set", "command=-c import"], 2, ["command"]),
            ({}, ["--set", "command=train.py  --x"], 2, ["command"]),
            ({}, ["--set", "package=a/../b"], 2, ["package"]),
            ({}, ["--set", "source_folder=/tmp"], 2, ["source_folder"]),
            ({}, ["--model", "diffusion"], 2, ["model is not asked with --into-existing"]),
            ({}, ["--set", "code=new"], 2, ["code=new"]),
        ],
        others=pytest.mark.long,
    ),
)
def test_refusals_leave_all_as_it_is(repository, cli, files, args, code, words):
    directory = repository("mnist", FLAT | files)
    before = tree(directory)
    result = cli("new", ".", "--into-existing", "-y", *args)
    assert result.exit_code == code, result.output
    for word in words:
        assert word in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert tree(directory) == before
    assert sorted(path.name for path in directory.iterdir()) == sorted(
        {name.split("/")[0] for name in before} | {".git"}
    )


def test_where_there_is_no_repository(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, word in (("absent", "no directory"), ("empty", "is empty"), ("plain", "no git work tree")):
        if name != "absent":
            (tmp_path / name).mkdir()
        if name == "plain":
            (tmp_path / name / "train.py").write_text("")
        result = cli("new", name, "--into-existing", "-y")
        assert result.exit_code == 1
        assert word in result.stderr
    subprocess.run(["git", "init", "--quiet", "plain"], check=True)
    assert "without a commit" in cli("new", "plain", "--into-existing", "-y").stderr


def test_links_are_not_followed(repository, cli, tmp_path):
    directory = repository("mnist", FLAT)
    (tmp_path / "elsewhere").mkdir()
    (directory / "launch").symlink_to(tmp_path / "elsewhere")
    result = cli("new", ".", "--into-existing", "-y")
    assert result.exit_code == 1
    assert "launch" in result.stderr
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_second_run_and_new_without_the_option_are_refused(repository, cli, adopt):
    repository("mnist", FLAT)
    adopt()
    again = cli("new", ".", "--into-existing", "-y")
    assert again.exit_code == 1
    assert "has been adopted already" in again.stderr
    assert "ddp-scaffold update" in again.stderr
    assert cli("new", ".", "-y").exit_code == 1
    taken = cli("new", "../other", "-y", "--answers", ".copier-answers.yml")
    assert taken.exit_code == 2
    assert "Say --into-existing" in taken.stderr


def test_a_folder_of_a_repository_with_uncommitted_work(repository, adopt, monkeypatch):
    root = repository("mono", {f"lab/{name}": text for name, text in FLAT.items()} | {"other.txt": "x"})
    (root / "other.txt").write_text("changed")
    (root / "lab/train.py").write_text(FLAT["train.py"] + "# changed\n")
    monkeypatch.chdir(root / "lab")
    adopt()
    assert answers(root / "lab")["package"] == "lab"
    assert {path.name for path in root.iterdir()} == {"lab", "other.txt", ".git"}
    assert (root / "lab/train.py").read_text().endswith("# changed\n")


def test_a_project_made_anew_records_whose_code_it_is(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("new", "demo", "-y").exit_code == 0
    assert answers(tmp_path / "demo")["code"] == "new"
    assert "command" not in answers(tmp_path / "demo")


def test_what_fails_half_way_is_taken_back(repository, tmp_path, monkeypatch):
    directory = repository("mnist", FLAT)
    before = tree(directory)
    staged = tmp_path / "staged"
    for name in ("a/b/one", "a/two", "three"):
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_text("ours")
    claim = existing._claim

    def late(copy: Path, target: Path) -> None:
        if target.name == "three":
            target.write_text("theirs")  # others were faster
        claim(copy, target)

    monkeypatch.setattr(existing, "_claim", late)
    with pytest.raises(ScaffoldError, match="three cannot be written"):
        existing.put(staged, directory, ["a/b/one", "a/two", "three"])
    assert tree(directory) == before | {"three": b"theirs"}
    assert not (directory / "a").exists()
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError("no links")))
    monkeypatch.setattr(existing, "_claim", claim)
    existing.put(staged, directory, ["a/b/one"])
    assert (directory / "a/b/one").read_text() == "ours"


@pytest.mark.parametrize("after_s", every(2, [0.3, 1.0, 1.5], others=pytest.mark.long))
def test_interrupted(tmp_path, scaffold_env, after_s):
    directory = make(tmp_path / "mnist", FLAT)
    command = [sys.executable, "-m", "ddp_scaffold", "new", ".", "--into-existing", "-y"]
    with subprocess.Popen(
        command, cwd=directory, env=scaffold_env, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        time.sleep(after_s)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    left = {path.name for path in directory.iterdir()} - {".git"}
    complete = ".copier-answers.yml" in left
    assert complete or left == set(FLAT), "all or nothing"
    assert not any(name.startswith(".ddp-scaffold") for name in left)
