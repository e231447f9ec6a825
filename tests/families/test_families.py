"""What can be said of every model family without training it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cross_section import every
from family_runs import FAMILIES, PROMISED

pytest.importorskip("torch")
Family = Callable[..., Path]


def test_every_family_stands_in_the_table_of_the_documentation() -> None:
    assert sorted(PROMISED) == FAMILIES


@pytest.mark.parametrize("model", FAMILIES)
def test_linters_have_nothing_to_say(model: str, family: Family) -> None:
    for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."]):
        tool(family(model), *command)


@pytest.mark.parametrize("model", every(3, FAMILIES))  # `diffusion` is looked at in tests/runtime
def test_the_type_checker_has_nothing_to_say(model: str, family: Family, mypy_cache: Path) -> None:
    tool(family(model), "mypy", "--cache-dir", str(mypy_cache))


def tool(project: Path, *command: str) -> None:
    found = subprocess.run([sys.executable, "-m", *command], cwd=project, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("model", FAMILIES)
def test_files_stay_short(model: str, family: Family) -> None:
    lengths = {
        path.name: len(path.read_text().splitlines()) for path in (family(model) / "src" / "digits").glob("*.py")
    }
    lengths.pop("train.py")  # it is read from top to bottom, and has what it needs for that
    assert max(lengths.values()) <= 200, lengths
