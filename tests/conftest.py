"""What all tests share: an isolated home, a throw-away git repository of the working tree, and rendering from it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from git_helpers import git

if TYPE_CHECKING:
    from typer.testing import Result

ROOT = Path(__file__).parents[1]
# Copier clones the template for every project, which takes longer the more files there are.
NOT_NEEDED = [f":(exclude){name}" for name in ("tests", "examples", "docs", "benchmarks")]
_isolated = tempfile.TemporaryDirectory(prefix="ddp-scaffold-tests-")


def pytest_configure() -> None:
    """Keep the user's git, copier and editor settings out. Before collection: plumbum copies the environment once."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script: children inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # below nohup: a handler is not inherited, being ignored is
        signal.signal(signal.SIGHUP, lambda *_: None)
    home = Path(_isolated.name)
    (home / ".gitconfig").write_text("[user]\n\tname = Test\n\temail = test@example.invalid\n")
    (home / "copier-settings.yml").write_text("{}\n")
    os.environ.setdefault("DDP_SCAFFOLD_REAL_HOME", os.environ.get("HOME", "/"))  # for tests that run pip
    os.environ |= {
        "OMP_NUM_THREADS": "1",  # threads that wait for each other by spinning slow down the processes beside
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "GIT_CONFIG_GLOBAL": str(home / ".gitconfig"),
        "GIT_CONFIG_NOSYSTEM": "1",
        "COPIER_CACHE_DIR": str(home / "copier-cache"),
        "COPIER_SETTINGS_PATH": str(home / "copier-settings.yml"),
    }
    for name in ("DDP_SCAFFOLD_TEMPLATE", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        os.environ.pop(name, None)


def pytest_unconfigure() -> None:
    _isolated.cleanup()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a second try without its reason: what passes only then has a cause, and mostly it is ours."""
    for mark in item.iter_markers("flaky"):
        assert mark.kwargs.get("reason"), "say why: flaky(reruns=1, reason=...)"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which tests needed a second try; SECOND_TRIES names a file that collects them over several runs."""
    again = [report.nodeid for report in terminalreporter.stats.get("rerun", [])]
    terminalreporter.write_line("\n  ".join([f"second tries: {len(again)}", *again]))
    collected = os.environ.get("SECOND_TRIES")
    if collected and not hasattr(terminalreporter.config, "workerinput"):  # xdist's workers summarise what is theirs
        with open(collected, "a") as file:
            file.writelines(f"{name}\n" for name in again)


@pytest.fixture(scope="session")
def template_repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with one commit, tagged with the version, of what a release needs of the working tree."""
    from ddp_scaffold import __version__

    repo = tmp_path_factory.mktemp("template") / "ddp-scaffold"
    listing = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *NOT_NEEDED)
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():  # listed but deleted files are not part of the working tree
            (repo / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, repo / name)
    git(repo, "init", "--quiet", "--initial-branch=main")
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--message", "The working tree")
    git(repo, "tag", "--annotate", "--message", "Release", f"v{__version__}")
    git(repo, "repack", "-a", "-d", "--quiet")  # one file to clone, and to remove, instead of hundreds
    return repo


@pytest.fixture(scope="session")
def compiled_templates() -> Iterator[None]:
    """Let Jinja compile a template once in a process: hundreds of tests render the same ones, and half of it is that.

    Names of files are not part of what is kept, so a traceback can name an earlier copy of the template.
    """
    from jinja2 import Environment

    compiled: dict[object, Any] = {}
    compile_source = Environment.compile
    settings = ("block_start_string", "variable_start_string", "comment_start_string", "trim_blocks", "lstrip_blocks")
    settings = (*settings, "keep_trailing_newline", "newline_sequence", "autoescape", "undefined", "finalize")

    def compile_once(self: Environment, source: Any, name: Any = None, filename: Any = None, *more: Any) -> Any:
        how = (type(self), *self.extensions, *self.filters, *self.globals, *(getattr(self, each) for each in settings))
        if (key := (how, source, name, more)) not in compiled:
            compiled[key] = compile_source(self, source, name, filename, *more)
        return compiled[key]

    Environment.compile = compile_once  # type: ignore[method-assign]
    yield
    Environment.compile = compile_source  # type: ignore[method-assign]


@pytest.fixture
def cli(template_repo: Path, compiled_templates: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`cli("new", "demo")` runs the command in this process, as if the package stood in `template_repo`."""
    from typer.testing import CliRunner

    from ddp_scaffold.cli import app
    from ddp_scaffold.template import source

    monkeypatch.setattr(source, "CHECKOUT", template_repo)
    return lambda *args: CliRunner().invoke(app, list(args), prog_name="ddp-scaffold")


@pytest.fixture
def scaffold_env(template_repo: Path) -> dict[str, str]:
    """The environment in which `python -m ddp_scaffold` runs from `template_repo`."""
    return {**os.environ, "PYTHONPATH": str(template_repo / "scaffold"), "TERM": "xterm", "COLUMNS": "120"}


@pytest.fixture(scope="session")
def mypy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where mypy keeps what it found in torch, which all rendered projects import."""
    return tmp_path_factory.mktemp("mypy")


@pytest.fixture(scope="session")
def render(
    template_repo: Path, compiled_templates: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`render({"preset": ...}, name="demo")` renders a project with these answers and returns where it is.

    With `unsafe=False`: a template that needed `--trust` would fail here. The same answers are rendered once in a run,
    for all workers of xdist; who asks again is given a copy.
    """
    import copier

    from ddp_scaffold.template.copier_calls import compiled_once, modes_left_to_git

    base = tmp_path_factory.getbasetemp()
    kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "rendered"
    kept.mkdir(exist_ok=True)

    def run(answers: Mapping[str, Any] | None = None, name: str = "demo") -> Path:
        project = tmp_path_factory.mktemp("project") / name
        data = {"project_name": name, **(answers or {})}
        first = kept / hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
        if not first.exists():
            with compiled_once(), modes_left_to_git(project):
                copier.run_copy(
                    str(template_repo), project, data=data, defaults=True, quiet=True, unsafe=False, vcs_ref="HEAD"
                )
            aside = Path(tempfile.mkdtemp(dir=kept))
            shutil.copytree(project, aside, symlinks=True, dirs_exist_ok=True)
            with suppress(OSError):  # another worker was first
                aside.rename(first)
        else:
            shutil.copytree(first, project, symlinks=True)
        return project

    return run
