"""An empty directory to work in, and a preset file there."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory. What a refused run leaves behind would be seen in it."""
    directory = tmp_path / "work"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def cli(work: Path, cli: Callable[..., Result]) -> Callable[..., Result]:
    """That of all tests, in the empty directory `work`."""
    return cli


@pytest.fixture
def own_preset(work: Path) -> Callable[..., Path]:
    """`own_preset(gpus_per_node=6, days=500)` writes ./mycluster.yml, verified that long ago, and returns its path."""

    def write(*, days: int = 10, **values: Any) -> Path:
        def fact(value: Any) -> dict[str, Any]:
            return {"value": value, "source": "a test", "confidence": "seen"}

        preset = {
            "name": "mycluster",
            "title": "My cluster",
            "extends": "generic-slurm",
            "verified_on": date.today() - timedelta(days=days),
            "status": "community",
            "limits": [fact({"name": "debug", "max_nodes": 2, "max_walltime": "00:30:00"})],
        }
        known = {"gpu": "A100 40 GB", "nccl_socket_ifname": "hsn", "internet": "none", **values}
        path = work / "mycluster.yml"
        path.write_text(yaml.safe_dump(preset | {name: fact(value) for name, value in known.items()}, sort_keys=False))
        return path

    return write
