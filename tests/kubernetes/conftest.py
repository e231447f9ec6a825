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
from typing import Any

import pytest
from launch_helpers import environment, until

STANDIN = Path(__file__).with_name("standin_cluster.py")
RUNS = Path("/runs")  # where the manifest mounts the claim: made for the tests, and removed


class Cluster:
    """The stand-in, whose state is in one folder."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "cluster"
        programs = folder / "bin"
        for each in (self.state, programs):
            each.mkdir()
        (programs / "kubectl").symlink_to(STANDIN)
        self.environment = environment(K8S_STANDIN=str(self.state))
        del self.environment["PREFLIGHT"]  # pods have no such variable of this shell
        self.environment["PATH"] = f"{programs}:{self.environment['PATH']}"
        self.pods_have(PREFLIGHT="0")

    def pods_have(self, **variables: str) -> None:
        """Variables of all containers, as an edited manifest would give them."""
        (self.state / "environment.json").write_text(json.dumps(variables))

    def for_project(self, project: Path) -> dict[str, str]:
        runs = project / "runs"
        runs.mkdir(exist_ok=True)
        return {**self.environment, "K8S_STANDIN_IMAGE": str(project), "K8S_STANDIN_RUNS": str(runs)}

    def kube(self, project: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """launch/kube.py, to its end."""
        command = [sys.executable, project / "launch/kube.py", *words]
        env = self.for_project(project)
        return subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=300)

    def begin(self, project: Path, run: str, *arguments: str) -> None:
        done = self.kube(project, "submit", "--name", run, "--image", "r.example.org/x:1", "--detach", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr

    def do(self, what: str, pod: str) -> None:
        subprocess.run([sys.executable, STANDIN, what, pod], env=self.environment, check=True)

    def pods(self, run: str) -> list[dict[str, Any]]:
        found = [json.loads(file.read_text()) for file in sorted(self.state.glob(f"pod-{run}-*.json"))]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def attempt(self, run: str, number: int) -> list[dict[str, Any]]:
        """Wait until the pods of an attempt run."""

        def those() -> list[dict[str, Any]]:
            label = "jobset.sigs.k8s.io/restart-attempt"
            return [pod for pod in self.pods(run) if pod["metadata"]["labels"][label] == str(number)]

        until(lambda: len(those()) == 2, f"pods of attempt {number}")
        return those()

    def output(self) -> str:
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted(self.state.glob("*.log")))


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
