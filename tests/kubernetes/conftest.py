"""A stand-in for a cluster (standin_cluster.py), and a project on it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_helpers import until
from pods_cluster import STANDIN, Cluster

RUNS = Path("/runs")  # where the manifest mounts the claim: made for the tests, and removed


def is_mount(path: str) -> bool:
    """Also of a folder that is mounted on itself, which os.path.ismount does not see."""
    return not subprocess.run(["mountpoint", "--quiet", path], check=False).returncode


@pytest.fixture(scope="session")
def machine() -> Iterator[None]:
    """Network namespaces, one run of tests at a time; all of it is gone afterwards."""
    missing = [name for name in ("ip", "unshare", "nsenter", "hostname") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root, for network namespaces{', and ' + ', '.join(missing) if missing else ''}")
    if subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip("this system does not allow new namespaces")
    mine, named = not RUNS.exists(), is_mount("/run/netns")
    with open("/tmp/ddp-tests-kubernetes.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if mine:
            RUNS.mkdir()
        try:
            yield
        finally:
            subprocess.run([sys.executable, STANDIN, "down"], env={**os.environ, "K8S_STANDIN": "/"}, check=True)
            if mine:
                RUNS.rmdir()
            if not named and is_mount("/run/netns") and not any(Path("/run/netns").iterdir()):
                subprocess.run(["umount", "/run/netns"], check=True)  # ip netns add has mounted it


@pytest.fixture
def cluster(machine: None, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster without anything on it, whose pods have ended afterwards."""
    made = Cluster(tmp_path)
    yield made
    for file in made.state.glob("jobset-*.json"):
        run = file.stem.removeprefix("jobset-")
        if not json.loads(file.read_text())["status"].get("conditions"):
            (made.state / f"{run}.delete").touch()
            until(lambda file=file: not file.exists(), f"the end of {run}")  # type: ignore[misc]
