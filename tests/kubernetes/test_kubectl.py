"""launch/kube.py with a kubectl that fails, prints what is no object, hangs, or comes back: a script on the PATH."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import environment, until

ANSWERS = {"preset": "generic-kubernetes"}
CONTAINER = {"name": "node", "image": "r.example.org/x:1", "args": ["--run.dir", "$$(NNODES) b"]}
POD_SPEC = {"template": {"spec": {"containers": [CONTAINER]}}}
SPEC = {"replicatedJobs": [{"template": {"spec": POD_SPEC}}]}
RUNNING: dict[str, Any] = {"kind": "JobSet", "metadata": {"name": "x"}, "spec": SPEC}
ENDED = {**RUNNING, "status": {"conditions": [{"type": "Completed", "status": "True"}]}}
POD: dict[str, Any] = {
    "metadata": {"name": "x-node-0-1-abcde", "uid": "u1"},
    "spec": {"nodeName": "n7"},
    "status": {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]},
}
BEGINNING = """#!/bin/bash
here=$(dirname "$0")
echo "$*" >>"$here/calls"
case "$*" in
"""


@dataclass(frozen=True)
class Kube:
    """launch/kube.py of a project, and its kubectl."""

    script: Path
    folder: Path

    def answers(self, cases: str) -> None:
        """The cases of a bash `case` over the words of kubectl; the rest ends with 0 and says nothing."""
        (self.folder / "kubectl").write_text(f"{BEGINNING}{cases}\nesac\n")
        (self.folder / "kubectl").chmod(0o755)

    def has(self, **objects: Any) -> None:
        for name, value in objects.items():
            (self.folder / name).write_text(json.dumps(value))

    def command(self, *words: str) -> tuple[list[str | Path], dict[str, str]]:
        env = environment()
        return [sys.executable, self.script, *words], {**env, "PATH": f"{self.folder}:{env['PATH']}"}

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        command, env = self.command(*words)
        return subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=60)

    def calls(self) -> str:
        file = self.folder / "calls"
        return file.read_text() if file.exists() else ""


@pytest.fixture
def kube(render: Callable[..., Path], tmp_path: Path) -> Kube:
    script = render(ANSWERS) / "launch/kube.py"
    text = re.sub(r"(?m)^KUBECTL_S = .*", "KUBECTL_S = 1.0", script.read_text())
    script.write_text(re.sub(r"(?m)^POLL_S = .*", "POLL_S = 0.1", text))
    (tmp_path / "bin").mkdir()
    return Kube(script, tmp_path / "bin")


@pytest.mark.parametrize(
    ("cases", "says", "remedy"),
    [
        ("*) echo \"server doesn't have a resource type\" >&2; exit 1 ;;", "a resource type", "install JobSet"),
        ('*) printf \'E1130 16:00:26.6 1 x] "no"\\nrefused\\n\' >&2; exit 1 ;;', "with 1: refused", "cluster-info"),
        ("*) echo 'Error from server (Forbidden): no' >&2; exit 1 ;;", "(Forbidden)", "kubectl auth can-i"),
        ("*) echo '<html>502' ;;", "printed no JobSet, but '<html>502'", "kubectl version"),
        ("*) echo null ;;", "has printed no JobSet, but 'null'", "kubectl version"),
        ('*) echo \'{"kind": "Status"}\' ;;', "has printed no JobSet", "kubectl version"),
        ("*) ;;", "has printed no JobSet, but ''", "kubectl version"),
        ("*) exec sleep 60 ;;", "kubectl get has not ended for 1 s", "a login"),
    ],
)  # fmt: skip
def test_what_kubectl_fails_with_is_said_with_what_to_do(kube: Kube, cases: str, says: str, remedy: str) -> None:
    kube.answers(cases)
    for words in (("log", "x"), ("stop", "x"), ("resume", "x"), ("submit", "--name", "x", "--image", "x:1")):
        done = kube(*words)
        assert done.returncode == 78, done.stderr
        wrong, do = done.stderr.splitlines()  # one line each, and no traceback
        assert says in wrong
        assert remedy in do


def test_a_kubectl_that_is_no_program(kube: Kube) -> None:
    kube.answers("")
    (kube.folder / "kubectl").write_bytes(b"\0")
    done = kube("log", "x")
    assert (done.returncode, len(done.stderr.splitlines())) == (78, 2), done.stderr


@pytest.mark.parametrize("name", ["a,b=c", "x y", "", "X", "$(touch pwned)", "jobset/x", "n" * 47])
def test_a_name_that_no_run_has_reaches_no_cluster(kube: Kube, name: str) -> None:
    kube.answers("*) echo '{}' ;;")
    for command in ("log", "stop", "resume"):
        done = kube(command, name)
        assert (done.returncode, len(done.stderr.splitlines())) == (78, 2), done.stderr
        assert "is no name of a run" in done.stderr
    assert kube.calls() == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--train.setps", "5"], "did you mean --train.steps?"),
        (["--image", "registry.example.com/x:1"], "only an example"),
        (["--image", "x y"], "is no image"),
    ],
)
def test_what_cannot_be_resumed_is_not_deleted(kube: Kube, words: list[str], says: str) -> None:
    kube.has(ended=ENDED, pods={"items": []})
    kube.answers('*"get jobset"*) cat "$here/ended" ;;\n*"get pods"*) cat "$here/pods" ;;')
    done = kube("resume", "x", *words)
    assert done.returncode == 78, done.stderr
    assert says in done.stderr
    assert "delete" not in kube.calls()


def test_a_run_resumes_with_the_arguments_that_it_had(kube: Kube) -> None:
    kube.has(ended=ENDED, pods={"items": []})
    kube.answers(
        '*"get jobset"*) if grep -q delete "$here/calls"; then echo NotFound >&2; exit 1; fi; cat "$here/ended" ;;\n'
        '*"get pods"*) cat "$here/pods" ;;\n*create*) cat >"$here/new" ;;'
    )
    done = kube("resume", "x", "--detach")
    assert done.returncode == 0, done.stderr
    (job_set,) = json.loads((kube.folder / "new").read_text())["items"]
    made = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert (made["image"], made["args"]) == (CONTAINER["image"], CONTAINER["args"])
    assert "launch/kube.py resume x --image r.example.org/x:1 --run.dir '$(NNODES) b' goes on" in done.stderr
    assert kube.calls().index("delete jobset x") < kube.calls().index("create")


def test_a_cluster_that_does_not_answer_for_a_while_has_not_ended_the_run(kube: Kube) -> None:
    kube.has(running=RUNNING, ended=ENDED, pods={"items": []})
    kube.answers(
        '*"get jobset"*) case $(grep -c "get jobset" "$here/calls") in 1) cat "$here/running" ;;'
        ' 2 | 3) echo "connection refused" >&2; exit 1 ;; *) cat "$here/ended" ;; esac ;;\n'
        '*"get pods"*) cat "$here/pods" ;;'
    )
    done = kube("log", "x")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("connection refused; the run goes on, and this asks again") == 1
    assert "x is done" in done.stderr


def test_a_log_that_breaks_off_goes_on(kube: Kube) -> None:
    kube.has(running=RUNNING, ended=ENDED, pods={"items": [POD]})
    kube.answers(
        '*"get jobset"*) if [ -e "$here/second" ]; then cat "$here/ended"; else cat "$here/running"; fi ;;\n'
        '*"get pods"*) cat "$here/pods" ;;\n'
        '*logs*--since=*s*) echo the rest; touch "$here/second" ;;\n*logs*) echo begin ;;'
    )
    done = kube("log", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("begin\nthe rest\n")


def test_a_pod_whose_node_does_not_answer_is_named(kube: Kube) -> None:
    lost = {**POD, "metadata": {**POD["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    gone = {**lost, "status": {"phase": "Failed"}, "metadata": {**lost["metadata"], "name": "x-node-0-0-abcde"}}
    kube.has(ended=ENDED, pods={"items": [lost, gone]})
    kube.answers('*"get jobset"*) cat "$here/ended" ;;\n*"get pods"*) cat "$here/pods" ;;')
    done = kube("log", "x")
    said = "x-node-0-1-abcde does not end, and new pods wait for that: once its node is off, kubectl delete node n7"
    assert said in done.stderr
    assert "x-node-0-0-abcde does not" not in done.stderr


def test_what_keeps_a_container_from_being_made_is_told(kube: Kube) -> None:
    waiting = {"containerStatuses": [{"name": "node", "state": {"waiting": {"reason": "ContainerCreating"}}}]}
    moments = ("2999-01-01T00:00:00Z", "2026-01-01T00:00:00Z")
    pods = [{**POD, "status": {**waiting, "startTime": moment}} for moment in moments]
    events = {"kind": "List", "items": [{"message": "older"}, {"message": "Multi-Attach error for volume"}]}
    kube.has(ended=ENDED, pods={"items": pods}, events=events)
    kube.answers(
        '*"get jobset"*) cat "$here/ended" ;;\n*"get pods"*) cat "$here/pods" ;;\n*"get events"*) cat "$here/events" ;;'
    )
    done = kube("log", "x")
    assert "x-node-0-1-abcde has no container yet: Multi-Attach error for volume" in done.stderr
    assert kube.calls().count("get events") == 1


def test_an_interrupted_stop_is_not_told_as_a_run_that_goes_on(kube: Kube) -> None:
    kube.has(running=RUNNING, pods={"items": []})
    kube.answers(
        '*"get jobset"*) cat "$here/running" ;;\n*"get pods"*) cat "$here/pods" ;;\n*delete*) exec sleep 30 ;;'
    )
    kube.script.write_text(kube.script.read_text().replace("KUBECTL_S = 1.0", "KUBECTL_S = 60.0"))
    command, env = kube.command("stop", "x")
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True) as stop:
        until(lambda: "delete" in kube.calls(), "kubectl delete")
        stop.send_signal(signal.SIGINT)
        _, said = stop.communicate(timeout=30)
    assert stop.returncode == 130
    assert "interrupted; kubectl get jobsets,pods shows" in said
    assert "goes on" not in said
