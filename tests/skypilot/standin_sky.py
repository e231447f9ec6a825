"""A stand-in for what SkyPilot 0.14.1 does with a task on nodes that it has rented: here, processes of this machine.

Like SkyPilot (sky/skylet/log_lib.py, sky/backends/task_codegen.py), it puts `run` into a script that exports the task's
variables and those of the node, and starts that with `bash -i` in ~/sky_workdir, in a session of its own; when a node
fails, the others get SIGTERM, all processes of theirs, and SIGKILL 30 s later; so they do on `cancel`. A preemption is
SIGKILL of all processes, and the disks are gone. A node is a home directory, mounted where all have it, in a mount
namespace; all have this machine's address. The bucket
is a directory that outlives them. What a mounted bucket lacks, and a network, this does not show.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from launch_helpers import environment

MARK = "SKY_STANDIN_NODE"
UNSHARE = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount"]
KILLED = 137  # what SkyPilot notes for nodes that it has ended


def address() -> str:
    """Of this machine, as others would see it; with the loopback, preflight refuses several nodes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def task_of(project: Path) -> dict[str, Any]:
    """The rendered task file."""
    task: dict[str, Any] = yaml.safe_load((project / "launch/train.sky.yaml").read_text())
    return task


@dataclass
class Node:
    """One node of a cluster: a home directory, and the processes that were started in it."""

    home: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self.home.with_suffix(".log").read_text(errors="replace")

    def pids(self) -> list[int]:
        """Of all processes that have the environment of this node's job."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{MARK}={self.mark}".encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class Cluster:
    """The nodes of one attempt of a managed job."""

    nodes: list[Node]

    def codes(self, seconds: float = 240) -> list[int]:
        """Wait for the end, as the job's driver does, and return the exit codes by rank."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            codes = [node.process.poll() for node in self.nodes if node.process]
            if any(codes) or all(code == 0 for code in codes):
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"the job has not ended:\n{self.output()}")
        ended = [code is not None for code in codes]
        self.end([node for node, done in zip(self.nodes, ended, strict=True) if not done])
        return [KILLED if code is None else code for code in codes]

    def end(self, nodes: list[Node] | None = None, grace_s: float = 30) -> None:
        """SIGTERM to every process of these nodes, SIGKILL 30 s later."""
        chosen = self.nodes if nodes is None else nodes
        for node in chosen:
            node.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(node.pids() for node in chosen) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.kill(chosen)

    def kill(self, nodes: list[Node] | None = None) -> None:
        """At once, and all of it."""
        for node in self.nodes if nodes is None else nodes:
            while node.pids():
                node.signal(signal.SIGKILL)
                time.sleep(0.05)
            if node.process:
                node.process.wait()

    def preempt(self) -> None:
        """The nodes are gone, with their disks."""
        self.kill()
        for node in self.nodes:
            shutil.rmtree(node.home)

    def hook(self) -> subprocess.CompletedProcess[str]:
        """What the first node runs before it is given back."""
        (hook,) = task_of(self.nodes[0].home / "sky_workdir")["config"]["hooks"]
        env = {**environment(), "HOME": str(self.nodes[0].home)}
        return subprocess.run(
            ["bash", "-c", hook["run"]], env=env, check=False, capture_output=True, text=True, timeout=hook["timeout"]
        )

    def output(self) -> str:
        return "\n".join(f"--- {node.home.name}\n{node.log}" for node in self.nodes)


@dataclass
class Sky:
    """A client, its cloud, and the bucket."""

    folder: Path
    clusters: list[Cluster] = field(default_factory=list)

    @property
    def bucket(self) -> Path:
        return self.folder / "bucket"

    def start(self, project: Path, task_id: str, gpus: int = 1, **variables: str) -> Cluster:
        """A new cluster for a job, as sky jobs launch makes it at first, and at every recovery."""
        task = task_of(project)
        cluster = Cluster(
            [Node(self.folder / f"cluster{len(self.clusters)}-{rank}") for rank in range(task["num_nodes"])]
        )
        self.clusters.append(cluster)
        self.bucket.mkdir(exist_ok=True)
        of_job = {
            "SKYPILOT_NODE_IPS": "\n".join([address()] * len(cluster.nodes)),
            "SKYPILOT_NUM_NODES": str(len(cluster.nodes)),
            "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
            "SKYPILOT_TASK_ID": task_id,
            **task["envs"],
            "LAUNCH_BUCKET": str(self.bucket),  # where the task's mount is
            **variables,
        }
        for rank, node in enumerate(cluster.nodes):
            shutil.copytree(project, node.home / "sky_workdir", symlinks=True)
            self.run(node, str(task["run"]), {**of_job, "SKYPILOT_NODE_RANK": str(rank)})
        return cluster

    def run(self, node: Node, run: str, variables: Mapping[str, str]) -> None:
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        (node.home / "sky_app.sh").write_text("\n".join(["#!/bin/bash", "cd ~/sky_workdir", *exports, run, ""]))
        same = self.folder / "home"  # the same path on all nodes, and another directory on each
        same.mkdir(exist_ok=True)
        env = {**environment(), "HOME": str(same), MARK: node.mark}
        del env["PREFLIGHT"]
        with open(node.home.with_suffix(".log"), "wb") as log:
            node.process = subprocess.Popen(
                [*UNSHARE, "bash", "-c", 'mount --bind "$1" ~ && exec /bin/bash -i ~/sky_app.sh', "bash", node.home],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
