"""`ddp-scaffold new` without questions: what it writes, prints and refuses."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from cli_helpers import SCAFFOLD, refused, tree
from git_helpers import git

VENV = ["python3 -m venv .venv", "source .venv/bin/activate", "python -m pip install -e '.[dev]'"]
SLURM = ["--preset", "generic-slurm", "--set", "nodes=3", "--set", "gpus_per_node=2", "--set", "walltime=1-12:00:00"]


def test_writes_a_committed_project_and_says_what_to_do_next(cli, work):
    result = cli("new", "demo")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "loader 90 s < stall 180 s < collective 300 s < guard 1800 s" in result.stdout
    steps = ["cd demo", *VENV, "bash launch/torchrun.sh"]
    assert [line.strip() for line in result.stdout.splitlines() if line.strip() in steps] == steps
    assert "torch" in result.stdout
    assert git(work / "demo", "status", "--porcelain") == ""
    assert git(work / "demo", "log", "--format=%D %an") == "HEAD -> main Test\n"


def test_records_the_public_url_and_the_release(cli, work):
    from ddp_scaffold import __version__

    cli("new", "demo", "-y")
    recorded = (work / "demo" / ".copier-answers.yml").read_text()
    assert "_src_path: https://github.com/ddp-scaffold/ddp-scaffold.git\n" in recorded
    assert f"_commit: v{__version__}\n" in recorded


@pytest.mark.slow
def test_pipe_gets_plain_text(cli, work):
    text = cli("new", "demo", "-y").stdout
    assert text.isascii()
    assert "\x1b" not in text


def test_json_schema(cli, work):
    result = cli("new", "demo", "--json", *SLURM)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert list(told) == ["version", "destination", "answers", "command", "files", "next", "template", "follows"]
    assert told["version"] == 1
    assert told["destination"] == str((work / "demo").resolve())
    assert told["answers"]["nodes"] == 3
    assert "nproc" not in told["answers"]
    assert "preset_data" not in told["answers"]
    assert told["files"] == sorted(tree(work / "demo"))
    assert told["next"] == ["cd demo", *VENV, "sbatch launch/train.sbatch"]
    assert set(told["template"]) == {"source", "commit"}
    assert told["follows"] == {
        "package": "demo",
        "tracker": "tensorboard",
        "world_size": 6,
        "max_restarts": 3,
        "clocks_s": {"loader": 90, "stall": 180, "collective": 300, "guard": 1800},
        "scripts": [name for name in told["files"] if name.endswith((".sh", ".sbatch"))],
        "place": told["follows"]["place"],
        "needs": told["follows"]["needs"],
        "hangs": [],
    }
    assert [need.partition(":")[0] for need in told["follows"]["needs"]] == ["python"]  # which of the site is not known
    assert told["follows"]["place"]["name"] == "generic-slurm"
    assert "launch/train.sbatch" in told["follows"]["scripts"]


def test_what_a_job_will_lack_and_how_old_the_facts_are_is_told(cli, work):
    result = cli("new", "demo", "-y", "--dry-run", "--preset", "cineca-leonardo")
    assert re.search(r"still needed +an account \(--set account=", result.stdout)
    assert re.search(r"verified 2025-\d\d-\d\d; MORE THAN A YEAR AGO", result.stdout)
    given = cli("new", "demo", "--json", "--dry-run", "--preset", "alcf-polaris", "--set", "account=mine")
    told = json.loads(given.stdout)
    assert told["follows"]["needs"] == ["a queue (--set partition=..., or qsub -q NAME for each job)"]
    assert told["next"][-1] == "qsub launch/train.pbs"
    large = cli("new", "demo", "--json", "--dry-run", "--preset", "tacc-vista", "--set", "nodes=65")
    assert "a partition: gh does not take 65 nodes" in json.loads(large.stdout)["follows"]["needs"]


@pytest.mark.slow
def test_clocks_keep_their_order_at_both_ends(cli, work):
    for seconds in (20, 7200):
        told = json.loads(cli("new", "demo", "--json", "--dry-run", "--set", f"collective_timeout_s={seconds}").stdout)
        clocks = list(told["follows"]["clocks_s"].values())
        assert clocks == sorted(set(clocks))


def test_json_error(cli, work):
    result = cli("new", "demo", "--json", "--set", "nodse=2")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert set(error) == {"message", "hint", "exit_code"}
    assert error["exit_code"] == 2
    assert "nodse" in error["message"]
    assert result.stderr == ""


@pytest.mark.parametrize("extra", [pytest.param([], marks=pytest.mark.slow), ["--json"]])
def test_dry_run_writes_nothing_and_lists_the_files(cli, work, extra):
    result = cli("new", "demo", "-y", "--dry-run", *extra)
    assert result.exit_code == 0, result.output
    assert list(work.iterdir()) == []
    cli("new", "demo", "-y")
    listed = json.loads(result.stdout)["files"] if extra else result.stdout.split("would be written")[1].split()
    assert set(tree(work / "demo")) <= set(listed)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(SLURM, marks=pytest.mark.slow),
        pytest.param(["--set", "package=other", "--set", "tracker=none", "--set", "nproc=2"], marks=pytest.mark.slow),
        ["--preset", "generic-slurm", "--set", "modules=cuda/12.4 gcc/13", "--set", "account=me@site"],
    ],
)
def test_printed_command_gives_the_identical_project(cli, work, options):
    told = json.loads(cli("new", "demo", "--json", *options).stdout)
    first = tree(work / "demo")
    (work / "demo").rename(work / "first")
    words = shlex.split(told["command"])
    assert words[:3] == ["ddp-scaffold", "new", "demo"]
    assert cli(*words[1:]).exit_code == 0
    assert tree(work / "demo") == first


@pytest.mark.slow
def test_printed_command_holds_only_what_differs(cli, work):
    def command(*options: str) -> str:
        return json.loads(cli("new", "demo", "--json", "--dry-run", *options).stdout)["command"]

    assert command() == "ddp-scaffold new demo -y"
    assert command("--preset", "local", "--set", "package=demo", "--set", "max_restarts=3") == command()
    assert command("--set", "max_restarts=4") == "ddp-scaffold new demo -y --set max_restarts=4"
    told = command("--preset", "generic-slurm", "--set", "modules=cuda/12 gcc")
    assert told == "ddp-scaffold new demo -y --preset generic-slurm --set 'modules=cuda/12 gcc'"


@pytest.mark.slow
def test_copier_settings_of_the_user_are_spelled_out(cli, work):
    """Others do not have them: without this, the printed command would give them another project."""
    settings = Path(os.environ["COPIER_SETTINGS_PATH"])
    settings.write_text("defaults:\n  max_restarts: 9\n")
    try:
        told = json.loads(cli("new", "demo", "--json", "--dry-run").stdout)
    finally:
        settings.write_text("{}\n")
    assert told["answers"]["max_restarts"] == 9
    assert told["command"].endswith("--set max_restarts=9")


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "defaults: 2024-13-45\n", "\0", "a: " + "[" * 5000])
def test_broken_copier_settings_of_the_user(cli, work, monkeypatch, tmp_path, text):
    (tmp_path / "settings.yml").write_text(text)
    monkeypatch.setenv("COPIER_SETTINGS_PATH", str(tmp_path / "settings.yml"))
    refused(cli("new", "demo", "-y"), work, 1, "copier's settings cannot be read", "COPIER_SETTINGS_PATH")


# ------------------------------------------------------------------------------------------------- destinations
def test_current_directory(cli, work, monkeypatch):
    (work / "demo").mkdir()
    monkeypatch.chdir(work / "demo")
    assert cli("new", ".", "-y").exit_code == 0
    assert git(work / "demo", "log", "--format=%D") == "HEAD -> main\n"


@pytest.mark.slow
def test_missing_parents_are_made(cli, work):
    assert cli("new", "a/b/demo", "-y").exit_code == 0
    assert (work / "a/b/demo/.copier-answers.yml").is_file()


def test_non_empty_destination(cli, work, tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "precious").write_text("kept")
    refused(cli("new", str(tmp_path / "demo"), "-y"), work, 1, "is not empty: it holds 'precious'")
    assert tree(tmp_path / "demo") == {"precious": b"kept"}


def test_destination_is_a_file(cli, work, tmp_path):
    (tmp_path / "demo").write_text("kept")
    refused(cli("new", str(tmp_path / "demo"), "-y"), work, 1, "exists and is not a directory")
    refused(cli("new", str(tmp_path / "demo" / "sub"), "-y"), work, 1)
    assert (tmp_path / "demo").read_text() == "kept"


@pytest.mark.slow
def test_link_to_a_directory_gives_its_own_name(cli, work, tmp_path):
    (tmp_path / "Real Place").mkdir()
    (work / "demo").symlink_to(tmp_path / "Real Place")
    assert cli("new", "demo", "-y").exit_code == 0
    assert (work / "demo").is_symlink()
    assert (tmp_path / "Real Place" / "src" / "demo").is_dir()


@pytest.mark.parametrize("below", ["", "/a/b"])
def test_dangling_link(cli, work, tmp_path, below):
    (tmp_path / "demo").symlink_to(tmp_path / "absent")
    refused(cli("new", f"{tmp_path}/demo{below}", "-y"), work, 1, "is a link that leads nowhere")
    assert not (tmp_path / "absent").exists()


def test_inside_a_git_directory(cli, work, tmp_path):
    git(tmp_path, "init", "--quiet")
    refused(cli("new", str(tmp_path / ".git" / "demo"), "-y"), work, 1, "is inside a .git directory")


def test_link_to_itself(cli, work, tmp_path):
    (tmp_path / "demo").symlink_to(tmp_path / "demo")
    refused(cli("new", str(tmp_path / "demo"), "-y"), work, 1, "another destination")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_parent_that_cannot_be_written(cli, work, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    refused(cli("new", str(tmp_path / "closed" / "demo"), "-y"), work, 1, "cannot be written by you")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, in which even root cannot write")
def test_write_failure_leaves_nothing(cli, work):
    result = cli("new", "/proc/demo", "-y")
    assert result.exit_code == 1
    assert "error: /proc/demo cannot be written" in result.stderr
    assert not Path("/proc/demo").exists()


# ----------------------------------------------------------------------------------------------------------- git
def test_missing_git(cli, work, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(cli("new", "demo", "-y"), work, 1, "git is not installed", "Install git")


def test_git_that_cannot_run(cli, work, monkeypatch, tmp_path):
    (tmp_path / "git").write_bytes(b"\0")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(cli("new", "demo", "-y"), work, 1, "git cannot be run: Exec format error", str(tmp_path / "git"))


def test_git_configuration_that_git_cannot_read(cli, work, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        configure(patch, tmp_path, "[broken")
        refused(cli("new", "demo", "-y"), work, 1, "failed: fatal: bad config line")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "abc")
    refused(cli("new", "demo", "-y"), work, 1, "failed: fatal: unable to parse command-line config")


def test_old_git(cli, work, monkeypatch, tmp_path):
    old = tmp_path / "bin" / "git"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho git version 2.18.4\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:{os.environ['PATH']}")
    refused(cli("new", "demo", "-y"), work, 1, "git 2.31 or newer is needed, found: git version 2.18.4")


def configure(monkeypatch: pytest.MonkeyPatch, directory: Path, text: str) -> None:
    (directory / "gitconfig").write_text(text)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(directory / "gitconfig"))


@pytest.mark.slow
def test_commits_without_an_identity(cli, work, monkeypatch, tmp_path):
    configure(monkeypatch, tmp_path, "[user]\n\tuseConfigOnly = true\n")
    assert cli("new", "demo", "-y").exit_code == 0
    assert git(work / "demo", "log", "--format=%an") == "ddp-scaffold\n"


def test_hooks_signing_and_ignore_lists_of_the_user_take_no_part(cli, work, monkeypatch, tmp_path):
    hook = tmp_path / "hooks" / "prepare-commit-msg"
    hook.parent.mkdir()
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    (tmp_path / "ignore").write_text("*.sh\n*.yml\n")
    configure(
        monkeypatch,
        tmp_path,
        f"[user]\n\tname = T\n\temail = t@example.invalid\n[commit]\n\tgpgSign = true\n[gpg]\n\tprogram = /bin/false\n"
        f"[core]\n\thooksPath = {hook.parent}\n\texcludesFile = {tmp_path / 'ignore'}\n",
    )
    assert cli("new", "demo", "-y").exit_code == 0
    assert {".copier-answers.yml", "launch/torchrun.sh"} <= set(git(work / "demo", "ls-files").splitlines())


def test_failing_commit_leaves_nothing(cli, work, monkeypatch):
    monkeypatch.setenv("GIT_AUTHOR_DATE", "no date")
    result = cli("new", "a/demo", "-y")
    assert result.exit_code == 1
    assert "error: git commit failed" in result.stderr
    assert list(work.iterdir()) == []


@pytest.mark.slow
def test_failing_commit_empties_a_directory_that_was_there(cli, work, monkeypatch):
    (work / "demo").mkdir()
    monkeypatch.setenv("GIT_AUTHOR_DATE", "no date")
    assert cli("new", "demo", "-y").exit_code == 1
    assert list((work / "demo").iterdir()) == []


def test_inside_a_work_tree_nothing_is_committed(cli, work):
    git(work, "init", "--quiet")
    result = cli("new", "demo", "-y")
    assert result.exit_code == 0, result.output
    assert "note: this directory is a git work tree" in result.stderr
    assert not (work / "demo" / ".git").exists()


@pytest.mark.slow
def test_in_a_cloned_empty_repository_nothing_is_committed(cli, work):
    (work / "demo").mkdir()
    git(work / "demo", "init", "--quiet")
    result = cli("new", "demo", "-y")
    assert result.exit_code == 0, result.output
    assert "is a git work tree" in result.stderr
    assert (work / "demo" / ".copier-answers.yml").is_file()


@pytest.mark.slow
def test_a_directory_that_the_outer_work_tree_ignores_gets_its_own_repository(cli, work):
    git(work, "init", "--quiet")
    (work / ".gitignore").write_text("/demo/\n")
    assert cli("new", "demo", "-y").exit_code == 0
    assert git(work / "demo", "log", "--format=%D") == "HEAD -> main\n"


@pytest.mark.slow
def test_from_inside_a_git_hook(cli, work, monkeypatch, tmp_path):
    """Git exports GIT_DIR to hooks; work on that repository would be the wrong one."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "elsewhere" / "index"))
    assert cli("new", "demo", "-y").exit_code == 0
    monkeypatch.undo()
    assert git(work / "demo", "log", "--format=%D") == "HEAD -> main\n"


def test_without_a_terminal_it_never_waits(work, scaffold_env):
    done = subprocess.run(
        [*SCAFFOLD, "new", "demo"],
        env=scaffold_env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (work / "demo" / ".git").is_dir()
