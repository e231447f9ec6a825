"""An installation with the two presets that others extend, and no clusters."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddp_scaffold.presets import load


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of presets of such an installation, for the tests to add to."""
    directory = tmp_path / "installed"
    directory.mkdir()
    for name in ("local", "generic-slurm"):
        shutil.copy(load.CHECKOUT / f"{name}.yml", directory)
    monkeypatch.setattr(load, "CHECKOUT", directory)
    return directory
