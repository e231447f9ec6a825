"""A stand-in for SkyPilot (standin_sky.py), and ports of its own."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from standin_sky import UNSHARE, Sky


@pytest.fixture
def sky(tmp_path: Path) -> Iterator[Sky]:
    """Nothing of it runs afterwards."""
    if subprocess.run([*UNSHARE, "true"], check=False).returncode:
        pytest.skip("this system does not allow new mount namespaces")
    made = Sky(tmp_path)
    yield made
    for cluster in made.clusters:
        cluster.kill()


@pytest.fixture
def ports() -> dict[str, str]:
    """Free ones: nodes have a network of their own, processes of this machine have not."""
    found = []
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("", 0))
            found.append(str(each.getsockname()[1]))
    return {"LAUNCH_PORT": found[0], "MASTER_PORT": found[1]}
