"""The built package in fresh virtual environments, without a network, on every supported Python at hand."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from git_helpers import git

from ddp_scaffold import __version__

sys.path.insert(0, str(Path(__file__).parents[2] / "releases"))
import history

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TESTS = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path, **changes: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changes
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def interpreter(version: str) -> Path | None:
    """Find a Python: on PATH, or as pyenv keeps them."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode == 0:
        return Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path(os.environ["DDP_SCAFFOLD_REAL_HOME"], ".pyenv"))
    return next(iter(sorted(pyenv.glob(f"versions/{version}.*/bin/python"))), None)


def environment(python: Path | str, directory: Path, *packages: str | Path) -> Path:
    """Make a virtual environment that holds these packages and return its Python."""
    run(python, "-m", "venv", directory, cwd=directory.parent)
    home = os.environ["DDP_SCAFFOLD_REAL_HOME"]  # where pip finds the user's indexes and cache
    pip = {"HOME": home, "XDG_CONFIG_HOME": f"{home}/.config", "XDG_CACHE_HOME": f"{home}/.cache"}
    run(directory / "bin" / "python", "-m", "pip", "install", "--quiet", *packages, cwd=directory.parent, **pip)
    return directory / "bin" / "python"


@pytest.fixture(scope="module")
def wheel(template_repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, which is built from the repository."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, template_repo, cwd=out)
    return next(out.glob("*.whl"))


def test_wheel_works_offline_and_records_the_release(wheel, tmp_path):
    python = environment(sys.executable, tmp_path / "venv", wheel)
    # Git may use nothing but local files, so a fetch from the network would fail.
    run(python.with_name("ddp-scaffold"), "new", "demo", "-y", cwd=tmp_path, GIT_ALLOW_PROTOCOL="file")
    recorded = (tmp_path / "demo" / ".copier-answers.yml").read_text()
    assert "_src_path: https://github.com/ddp-scaffold/ddp-scaffold.git\n" in recorded
    assert f"_commit: v{__version__}\n" in recorded
    assert git(tmp_path / "demo", "status", "--porcelain") == ""
    assert not list((tmp_path / "demo").rglob("*.pyc"))
    assert "generic-slurm" in run(python.with_name("ddp-scaffold"), "presets", "list", cwd=tmp_path)


def test_wheel_built_directly_holds_the_same_bundle(wheel, template_repo, tmp_path):
    """The bundle depends on the commit alone: on no clock, user or machine."""
    identity = {"GIT_AUTHOR_NAME": "Other", "GIT_COMMITTER_EMAIL": "other@example.invalid", "TZ": "Asia/Tokyo"}
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, template_repo]
    run(*build, cwd=tmp_path, **identity)

    def digest(file: Path) -> str:
        shutil.unpack_archive(file, tmp_path / "unpacked", "zip")
        return hashlib.sha256((tmp_path / "unpacked/ddp_scaffold/template.bundle").read_bytes()).hexdigest()

    assert digest(next(tmp_path.glob("*.whl"))) == digest(wheel)


def test_wheel_is_small(wheel):
    assert wheel.stat().st_size < 2_000_000


@pytest.mark.parametrize("release", history.versions()[:-1])
def test_wheel_updates_offline(wheel, tmp_path, release):
    """A project of an older release comes to the newest: another home, and another Python where there is one."""
    python = environment(interpreter("3.12") or sys.executable, tmp_path / "venv", wheel)
    history.unpack(tmp_path / "history.git")
    redirect = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{tmp_path / 'history.git'}.insteadOf"}
    redirect["GIT_CONFIG_VALUE_0"] = "https://github.com/ddp-scaffold/ddp-scaffold.git"
    words = ("copy", "--defaults", "--quiet", "--vcs-ref", f"v{release}", "--data", "project_name=demo")
    project = tmp_path / "demo"
    run(sys.executable, "-m", "copier", *words, redirect["GIT_CONFIG_VALUE_0"], project, cwd=tmp_path, **redirect)
    git(project, "init", "--quiet")
    git(project, "add", "--all")
    (project / "src/demo/model.py").write_text("# Mine.\n")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "-m", "begin")
    shutil.rmtree(tmp_path / "history.git")
    home = tmp_path / "home"
    home.mkdir()
    offline = {"GIT_ALLOW_PROTOCOL": "file", "HOME": str(home), "COPIER_CACHE_DIR": str(home / "cache")}
    run(python.with_name("ddp-scaffold"), "update", project, cwd=home, **offline)
    recorded = (project / ".copier-answers.yml").read_text()
    assert f"_commit: v{__version__}\n" in recorded
    assert "_src_path: https://github.com/ddp-scaffold/ddp-scaffold.git\n" in recorded
    assert (project / "src/demo/model.py").read_text() == "# Mine.\n"


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_supported_pythons(wheel, tmp_path, version):
    """The tests of this directory pass with the installed wheel."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip("these tests run on it already")
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    python = environment(python, tmp_path / "venv", wheel, "pytest", "pytest-timeout", "pexpect")
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider"]
    told = run(
        python, "-m", "pytest", *options, TESTS / "cli", cwd=TESTS.parent, HOME=os.environ["DDP_SCAFFOLD_REAL_HOME"]
    )
    assert " passed" in told
