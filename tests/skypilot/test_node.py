"""launch/sky.sh on one node, with the stand-in for training; and how nodes hear of each other."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import environment, until, with_standin
from standin_sky import Cluster, Sky, task_of
from test_bucket import LAUNCH, checkpoint

ANSWERS = {"preset": "sky-aws", "nodes": 1, "gpus_per_node": 1, "max_restarts": 1, "runs_store": "s3://a-bucket"}
NODES = LAUNCH / "{% if known.scheduler == 'skypilot' %}nodes.py{% endif %}"


@pytest.fixture
def project(render: Callable[..., Path], tmp_path: Path) -> Path:
    return with_standin(render(ANSWERS), tmp_path / "demo")


def start(sky: Sky, project: Path, plan: str, **variables: str) -> Cluster:
    """A job whose attempts do what the plan says; the stand-in has no settings that launch/settings.py could know."""
    (project / "launch/settings.py").unlink(missing_ok=True)
    script = project / "launch/sky.sh"
    script.write_text(script.read_text().replace('refuse_unknown_settings "$@"\n', ""))
    given = {"TRAINING": f"--plan {plan}", "DDP_RUN__DIR": str(sky.folder / "home/sky_workdir/runs"), **variables}
    return sky.start(project, "job-1", **given)


def test_stalls_are_restarted_within_bounds(sky: Sky, project: Path) -> None:
    plan = "stall,stall,done"
    codes = []
    for _attempt in range(2):
        cluster = start(sky, project, plan)
        codes += cluster.codes()
        cluster.preempt()  # the nodes of a recovery are new ones
    assert codes == [70, 170], cluster.output()  # SkyPilot recovers after the first, and not after the second
    assert json.loads((sky.bucket / "job-1/launch.json").read_text())["restarts"] == 1
    assert json.loads((sky.bucket / "job-1/outcome.json").read_text())["attempt"] == 1


@pytest.mark.slow  # torchrun, twice
@pytest.mark.parametrize(("plan", "code"), [("fail", 1), ("config", 78)])
def test_what_must_not_be_restarted(sky: Sky, project: Path, plan: str, code: int) -> None:
    cluster = start(sky, project, plan)
    assert cluster.codes() == [code], cluster.output()
    assert "nothing starts it again" in cluster.output()
    assert json.loads((sky.bucket / "job-1/launch.json").read_text())["restarts"] == 0


@pytest.mark.slow  # torchrun
def test_a_cancelled_job_ends_with_its_checkpoint_in_the_bucket(sky: Sky, project: Path) -> None:
    cluster = start(sky, project, "wait")
    (node,) = cluster.nodes
    runs = node.home / "sky_workdir/runs/job-1"
    until(lambda: (runs / "ready-0-0.json").exists(), "the rank")
    checkpoint(runs, 10)
    cluster.end()  # SIGTERM to every process, as sky cancel
    assert node.process is not None
    assert node.process.wait() == 75, cluster.output()
    assert (sky.bucket / "job-1/checkpoints/step_00000010/manifest.json").exists()
    assert "got SIGTERM: asking the ranks to stop" in cluster.output()


def test_the_hook_of_a_node_where_nothing_runs_is_silent(sky: Sky, project: Path) -> None:
    cluster = start(sky, project, "done", SKYPILOT_NODE_IPS="")
    assert cluster.codes() == [78]
    assert "SKYPILOT_NODE_IPS is not set" in cluster.output()
    state = cluster.nodes[0].home / ".ddp-launch"
    state.mkdir()
    (state / "pid").write_text(f"{os.getpid()}\n")  # a number that another process has by now
    done = cluster.hook()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def setup(project: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """What SkyPilot runs on a new node; pip has the settings of this machine."""
    home.mkdir(exist_ok=True)
    variables = {"HOME": str(home), "PIP_CONFIG_FILE": f"{os.environ['DDP_SCAFFOLD_REAL_HOME']}/.config/pip/pip.conf"}
    command = ["bash", "-c", task_of(project)["setup"]]
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"} | variables
    return subprocess.run(command, cwd=project, env=env, check=False, capture_output=True, text=True, timeout=300)


@pytest.mark.slow  # pip, and a package index
def test_setup_makes_an_environment_with_what_is_locked(render: Callable[..., Path], tmp_path: Path) -> None:
    project, home = render(ANSWERS), tmp_path / "home"
    pyproject = project / "pyproject.toml"
    pyproject.write_text(
        re.sub(r"(?m)^dependencies = \[.*?^\]", "dependencies = []", pyproject.read_text(), flags=re.S)
    )
    (project / "launch/requirements.lock").write_text("PyYAML==6.0.2\n")
    for _start in range(2):  # the second one finds it
        done = setup(project, home)
        assert done.returncode == 0, done.stdout + done.stderr
    code = "import yaml, demo; print(yaml.__version__)"
    shown = subprocess.run([home / ".ddp-venv/bin/python", "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout == "6.0.2\n"
    (project / "launch/requirements.lock").write_text("no-such-package-of-ours==1\n")
    failed = setup(project, home)
    assert failed.returncode == 1, failed.stdout + failed.stderr  # SkyPilot calls it FAILED_SETUP


@pytest.mark.parametrize("training", ["--train.setps 5", "--train.batch_size 8\n--train.setps 5\n"])
def test_a_setting_that_does_not_exist_is_refused_at_once(sky: Sky, render: Callable[..., Path], training: str) -> None:
    cluster = sky.start(render(ANSWERS), "job-1", TRAINING=training)
    assert cluster.codes() == [78]
    assert "did you mean --train.steps?" in cluster.output()
    assert not (sky.bucket / "job-1").exists()


# ------------------------------------------------------------------------------------------------------------- nodes.py
def ask(port: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, NODES, "ask", "127.0.0.1", port, *words], stdout=subprocess.PIPE, text=True, env=environment()
    )


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def served(ports: dict[str, str], tmp_path: Path) -> Any:
    """Listens already: another node that asks for the end before that takes the first one to be gone."""
    process = subprocess.Popen([sys.executable, NODES, "serve", ports["LAUNCH_PORT"], tmp_path])
    until(lambda: listens(int(ports["LAUNCH_PORT"])), "the first node to listen")
    yield process
    process.kill()
    process.wait()


def test_nodes_hear_what_the_first_one_says(served: Any, ports: dict[str, str], tmp_path: Path) -> None:
    port = ports["LAUNCH_PORT"]
    waiting = [ask(port, "begin", "60"), ask(port, "end 78", "60")]
    until(lambda: (tmp_path / "codes").exists(), "the code of another node")
    os.kill(served.pid, signal.SIGTERM)  # to all processes of a job: no reason to leave the others alone
    assert (tmp_path / "codes").read_text() == "78\n"
    for word, text in (("begin", "3 step_00000010 29500"), ("end", "75")):
        (tmp_path / "answer").write_text(f"{text}\n")
        (tmp_path / "answer").rename(tmp_path / f"answer-{word}")
    assert [process.communicate(timeout=60)[0] for process in waiting] == ["3 step_00000010 29500\n", "75\n"]
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        connection.sendall(b"../../etc/passwd\n")
        assert connection.recv(100) == b""


def test_a_first_node_that_is_gone_is_not_waited_for(ports: dict[str, str]) -> None:
    assert ask(ports["LAUNCH_PORT"], "end", "600").wait(timeout=60) == 1
    assert ask(ports["LAUNCH_PORT"], "begin", "1").wait(timeout=60) == 1
