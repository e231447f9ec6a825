"""What the tests of presets share, apart from fixtures."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from ddp_scaffold.cli import app

Tool = Callable[..., None]  # the fixture `tool`


def run(*args: str) -> tuple[int, str]:
    """Run `ddp-scaffold presets ...` and return the exit code and what it printed."""
    result = CliRunner().invoke(app, ["presets", *args])
    return result.exit_code, result.output


def fact(value: Any, **more: Any) -> dict[str, Any]:
    """Return a value as presets hold it."""
    return {"value": value, "source": "a page", "confidence": "documented", **more}


def preset(directory: Path, name: str, **values: Any) -> Path:
    """Write a preset that extends generic-slurm, and return its file. None leaves a field out."""
    data = {
        "name": name,
        "title": f"The cluster {name}",
        "extends": "generic-slurm",
        "verified_on": datetime.date.today(),
        "status": "documented",
        **values,
    }
    path = directory / f"{name}.yml"
    path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}, sort_keys=False))
    return path
