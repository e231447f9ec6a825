"""The stand-in for a cluster (standin_cluster.py), as tests use it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from launch_helpers import environment, until

STANDIN = Path(__file__).with_name("standin_cluster.py")


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
