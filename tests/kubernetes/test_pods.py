"""Pods as stood in for by standin_cluster.py: what they find, and how exit codes, signals and restarts go together."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import ready, until, with_standin
from pods_cluster import Cluster

pytestmark = [pytest.mark.pods, pytest.mark.timeout(300)]  # each attempt imports torch four times
SMALL = {"nodes": 2, "gpus_per_node": 1, "cpus_per_task": 1, "max_restarts": 2}
ANSWERS = {"preset": "generic-kubernetes", **SMALL, "grace_s": 30}


@pytest.fixture
def project(request: pytest.FixtureRequest, render: Callable[..., Path], tmp_path: Path) -> Path:
    kind = getattr(request, "param", "jobset")
    copy = with_standin(render({**ANSWERS, "kubernetes_kind": kind}), tmp_path / "my project")
    (copy / "launch/settings.py").unlink()  # the stand-in for training has no settings, but a plan
    script = copy / "launch/pod.sh"
    script.write_text(script.read_text().replace('refuse_unknown_settings "$@"\n', ""))
    return copy


@pytest.mark.parametrize("project", ["jobset", "trainjob"], indirect=True)
def test_what_the_ranks_find(cluster: Cluster, project: Path) -> None:
    done = cluster.kube(project, "submit", "--name", "first", "--image", "r.example.org/x:1", "--plan", "done")
    assert done.returncode == 0, done.stdout + done.stderr + cluster.output()
    ranks = [rank["env"] for rank in ready(project / "runs/first", 0, 2)]
    assert [env["RANK"] for env in ranks] == ["0", "1"]
    assert [env["JOB_COMPLETION_INDEX"] for env in ranks] == ["0", "1"]
    for env in ranks:
        assert env["MASTER_ADDR"] == "first-node-0-0.first"
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert env["DDP_RUN__DIR"] == "/runs"
        assert env["DDP_ATTEMPT"] == "0"
        assert env["OMP_NUM_THREADS"] == "1"
        assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "first is done" in done.stderr
    assert "attempt 0 ended, done" in done.stdout


def test_pods_of_another_user_train_and_leave_their_runs_to_its_group(
    cluster: Cluster, render: Callable[..., Path], tmp_path: Path
) -> None:
    """Of a user that the image does not know: without a name, and with a home that is not its own."""
    project = with_standin(render({**ANSWERS, "run_as": "54321:54322"}), tmp_path / "my project")
    (project / "launch/settings.py").unlink()
    script = project / "launch/pod.sh"
    script.write_text(script.read_text().replace('refuse_unknown_settings "$@"\n', ""))
    done = cluster.kube(project, "submit", "--name", "user", "--image", "r.example.org/x:1", "--plan", "done")
    assert done.returncode == 0, done.stdout + done.stderr + cluster.output()
    for env in (rank["env"] for rank in ready(project / "runs/user", 0, 2)):
        assert (env["USER"], env["HOME"]) == ("uid54321", "/tmp")
    written = (project / "runs/user").stat()
    assert (written.st_uid, written.st_gid) == (54321, 54322)
    assert "attempt 0 ended, done" in cluster.output()


def ended(run: str, cluster: Cluster) -> dict[str, Any]:
    """Wait until a run has ended, and return what its JobSet says."""

    def conditions() -> Any:
        status = json.loads((cluster.state / f"jobset-{run}.json").read_text())["status"]
        return status if status.get("conditions") else None

    status: dict[str, Any] = until(conditions, f"the end of {run}", seconds=100)
    return status


def codes(run: str, cluster: Cluster) -> list[int]:
    """The exit codes of the pods of the last attempt."""
    states = [pod["status"]["containerStatuses"][0]["state"] for pod in cluster.pods(run)]
    return [state["terminated"]["exitCode"] for state in states]


def test_an_evicted_pod_ends_the_attempt_and_new_pods_finish(cluster: Cluster, project: Path) -> None:
    cluster.begin(project, "evicted", "--plan", "wait,done")
    ready(project / "runs/evicted", 0, 2)
    cluster.do("evict", cluster.attempt("evicted", 0)[1]["metadata"]["name"])
    log = cluster.kube(project, "log", "evicted")
    assert log.returncode == 0, log.stdout + log.stderr
    assert "got SIGTERM: asking the ranks to stop; SIGKILL comes after 30 s" in cluster.output()
    assert "attempt 0 ended, stopped: signal SIGTERM on rank 1; exit code 75" in cluster.output()
    assert [rank["env"]["DDP_ATTEMPT"] for rank in ready(project / "runs/evicted", 1, 2)] == ["1", "1"]
    assert ended("evicted", cluster)["restarts"] == 1


@pytest.mark.parametrize(
    ("plan", "code", "restarts"), [("config", 78, 0), ("fail", 1, 0), ("stall,stall,stall", 70, 2)]
)
def test_what_is_started_again(cluster: Cluster, project: Path, plan: str, code: int, restarts: int) -> None:
    done = cluster.kube(project, "submit", "--name", "ends", "--image", "r.example.org/x:1", "--plan", plan)
    assert done.returncode == code, done.stdout + done.stderr
    assert ended("ends", cluster).get("restarts", 0) == restarts
    assert set(codes("ends", cluster)) == {code}, cluster.output()
    assert f"ends has ended with {code}" in done.stderr
    assert "the plan says" in done.stderr  # the pods' own last words, from their status


def test_a_killed_rank_is_no_failure_of_the_code(cluster: Cluster, project: Path) -> None:
    # torchrun of its pod ends with 1 at once; the rank of the other pod says much later that it was a stall.
    train = next(project.glob("src/*/train.py"))
    train.write_text(train.read_text().replace("time.sleep(2)  # peers", "time.sleep(10)  # peers"))
    cluster.begin(project, "killed", "--plan", "vanish,done")
    assert ended("killed", cluster)["conditions"][0]["type"] == "Completed", cluster.output()
    assert cluster.output().count("attempt 0 ended, stalled: rank 1 sends no heartbeat any more; exit code 70") == 2


def test_a_lost_node_is_a_restart(cluster: Cluster, project: Path) -> None:
    # The stand-in for training does not see that a peer has gone: here it is SIGKILL that ends it, after 30 s.
    cluster.begin(project, "lost", "--plan", "wait,done")
    ready(project / "runs/lost", 0, 2)
    cluster.do("kill", cluster.attempt("lost", 0)[0]["metadata"]["name"])  # the pod that has the store and the claim
    assert ended("lost", cluster)["conditions"][0]["type"] == "Completed", cluster.output()


def test_a_run_is_stopped_and_goes_on_under_its_name(cluster: Cluster, project: Path) -> None:
    cluster.begin(project, "stopped", "--plan", "wait,done", "--note", "two words")
    ready(project / "runs/stopped", 0, 2)
    done = cluster.kube(project, "stop", "stopped")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempt 0 ended, stopped: signal SIGTERM" in done.stdout
    assert not cluster.pods("stopped")
    said = "[kube] stopped has ended; launch/kube.py resume stopped --image r.example.org/x:1 --plan wait,done "
    assert f"{said}--note 'two words' goes on from its newest checkpoint" in done.stderr  # the JobSet is gone
    words = shlex.split(done.stderr.partition("launch/kube.py ")[2].partition(" goes on")[0])
    again = cluster.kube(project, *words[:4], "--plan", "done", *words[6:])
    assert again.returncode == 0, again.stdout + again.stderr
    printed = cluster.kube(project, "resume", "stopped", "--dry-run")
    assert json.loads(printed.stdout)["items"], printed.stderr
    assert cluster.kube(project, "log", "stopped").returncode == 0, "what is only printed leaves the run as it is"
    assert cluster.kube(project, "submit", "--name", "stopped", "--image", "x", "--plan", "done").returncode == 78


@pytest.mark.parametrize(
    ("what", "says"),
    [("unschedulable", "has no node yet: 0/3 nodes are available: 3 Insufficient"), ("no-image", "ImagePullBackOff")],
)
def test_what_keeps_a_pod_from_starting_is_said(cluster: Cluster, project: Path, what: str, says: str) -> None:
    (cluster.state / what).touch()
    cluster.begin(project, "waits", "--plan", "done")
    until(lambda: cluster.pods("waits"), "a pod")
    command = [sys.executable, project / "launch/kube.py", "log", "waits"]
    with subprocess.Popen(command, env=cluster.for_project(project), stderr=subprocess.PIPE, text=True) as log:
        assert log.stderr is not None
        assert says in log.stderr.readline()
        assert cluster.kube(project, "stop", "waits").returncode == 0
        assert log.wait(30) == 75  # it was deleted
