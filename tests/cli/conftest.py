"""The command line in this process (`cli`), and the environment for one of its own (`scaffold_env`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory. What a refused run leaves behind would be seen in it."""
    directory = tmp_path / "work"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def cli(template_repo: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`cli("new", "demo")` runs the command as if the package stood in `template_repo`."""
    from ddp_scaffold import template
    from ddp_scaffold.cli import app

    monkeypatch.setattr(template, "CHECKOUT", template_repo)
    return lambda *args: CliRunner().invoke(app, list(args), prog_name="ddp-scaffold")


@pytest.fixture
def scaffold_env(template_repo: Path) -> dict[str, str]:
    """The environment in which `cli_helpers.SCAFFOLD` runs from `template_repo`."""
    return {**os.environ, "PYTHONPATH": str(template_repo / "scaffold"), "TERM": "xterm", "COLUMNS": "120"}
