#!/usr/bin/env python3
"""A stand-in for a Kubernetes cluster: what the manifests and launch/kube.py need of one, on a Linux machine, as root.

Not the real thing: no API server, no image, no scheduler. A pod is a process in network, UTS, PID and mount namespaces
of its own, with the command, the environment and the signals that kubelet would give; its image is the project's folder
in K8S_STANDIN_IMAGE. What is kept, from the sources of Kubernetes and JobSet:

- the environment from the manifest, labels by the downward API, index and hostname of an Indexed Job's pod;
- /dev/shm of the size of its emptyDir, the claim's mount path (the folder K8S_STANDIN_RUNS), and names of the headless
  service in /etc/hosts, that of a pod only once it has begun;
- user and group of the container, with no capability of root but one (see `as_user`), and the volume's group;
- SIGTERM to process 1, which gets it only with a handler, and SIGKILL after terminationGracePeriodSeconds;
- the Job: podFailurePolicy by exit code, backoffLimit 0; the other pods get SIGTERM; it has failed when all have ended;
- the JobSet: the first rule of its failurePolicy that matches, else a restart, maxRestarts times, by new pods whose
  label restart-attempt counts (BlockingRecreate); deletion.

Called by the link `kubectl` (create, get, logs, delete), or as `standin_cluster.py evict POD`, `kill POD`. K8S_STANDIN
is the folder of its state, in which `unschedulable`, `no-image` and `shm` (a size) change what comes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from kubelet import expanded

PREFIX = "jobset.sigs.k8s.io"
BRIDGE, NET, SECOND, NET6 = "k8stbr0", "10.79.0", "10.80.0", "fd79"
STATE = Path(os.environ["K8S_STANDIN"])


# --------------------------------------------------------------------------------------------------------- objects


def path_of(kind: str, name: str) -> Path:
    return STATE / f"{kind}-{name}.json"


def load(kind: str, name: str) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path_of(kind, name).read_text())
        return content
    except FileNotFoundError:
        return None


def save(kind: str, thing: dict[str, Any]) -> None:
    path = path_of(kind, thing["metadata"]["name"])
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(thing))
    aside.replace(path)


def pods_of(run: str) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted(STATE.glob("pod-*.json"))]
    return [pod for pod in found if pod["metadata"]["labels"][f"{PREFIX}/jobset-name"] == run]


# ------------------------------------------------------------------------------------------------------------ pods


def network() -> str:
    """What pods have: eth0 with IPv4; `v6`: with IPv6 alone; `two`: beside it net1, in another network."""
    file = STATE / "network"
    return file.read_text() if file.exists() else ""


def namespace(index: int) -> str:
    return f"k8s-pod{network()}{index}"


def address(index: int) -> str:
    return f"{NET6}::{11 + index}" if network() == "v6" else f"{NET}.{11 + index}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def network_up(count: int) -> None:
    if subprocess.run(["ip", "link", "show", BRIDGE], check=False, capture_output=True).returncode:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{NET}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
    for index in range(count):
        name, link = namespace(index), f"vk{network()}-{index}"
        if not Path("/run/netns", name).exists():
            ip("netns", "add", name)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", link, "master", BRIDGE, "up")
            length, *way = ("/64", "nodad") if network() == "v6" else ("/24",)
            ip("-n", name, "addr", "add", f"{address(index)}{length}", "dev", "eth0", *way)
            if network() == "two":
                ip("link", "add", f"{link}b", "type", "veth", "peer", "name", "net1", "netns", name)
                ip("link", "set", f"{link}b", "master", BRIDGE, "up")
                ip("-n", name, "addr", "add", f"{SECOND}.{11 + index}/24", "dev", "net1")
                ip("-n", name, "link", "set", "net1", "up")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")


def network_down() -> None:
    for file in Path("/run/netns").glob("k8s-pod*") if Path("/run/netns").is_dir() else ():
        found = subprocess.run(["ip", "netns", "pids", file.name], check=False, capture_output=True, text=True)
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", file.name)
    subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


# The mounts of a container, then its command as process 1. $1 host name, $2 runs, $3 mount path, $4 hosts, $5 shm.
CONTAINER = """
hostname "$1"; mount --bind "$2" "$3"; mount --bind "$4" /etc/hosts; mount -t tmpfs -o "size=$5" shm /dev/shm
shift 5; exec "$@"
"""


def as_user(spec: dict[str, Any], container: dict[str, Any], variables: dict[str, str]) -> list[str]:
    """The words before a command that make it another user's, as the manifest says; the volume gets its group.

    That user has no name, and / as its home, as in an image that does not know it. One capability stays that a
    container would not have: to read this machine's Python and the project, wherever they lie.
    """
    context = container.get("securityContext", {})
    if "runAsUser" not in context:
        return []
    runs, group = Path(os.environ["K8S_STANDIN_RUNS"]), spec["securityContext"]["fsGroup"]
    os.chown(runs, -1, group)
    runs.chmod(0o2775)
    variables["HOME"] = "/"
    return [
        "setpriv", f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}", f"--groups={group}",
        "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search",
        "--bounding-set=-all,+dac_read_search", "--no-new-privs",
    ]  # fmt: skip


def environment(container: dict[str, Any], labels: dict[str, str], index: int, message: Path) -> dict[str, str]:
    """What kubelet gives a container; the image's own variables are those of the tests."""
    found = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
    for each in container["env"]:
        if "value" in each:
            found[each["name"]] = each["value"]
        else:
            field = each["valueFrom"]["fieldRef"]["fieldPath"]
            found[each["name"]] = labels.get(field.removeprefix("metadata.labels['").removesuffix("']"), "")
    extra = STATE / "environment.json"
    more = json.loads(extra.read_text()) if extra.exists() else {}
    return {**found, **more, "JOB_COMPLETION_INDEX": str(index), "LAUNCH_MESSAGE": str(message)}


def start(job_set: dict[str, Any], index: int, attempt: int) -> tuple[dict[str, Any], subprocess.Popen[bytes]]:
    """Begin one pod."""
    run = job_set["metadata"]["name"]
    spec = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container = spec["containers"][0]
    host, uid = f"{run}-node-0-{index}", str(uuid.uuid4())
    labels = {
        f"{PREFIX}/jobset-name": run, f"{PREFIX}/jobset-uid": job_set["metadata"]["uid"],
        f"{PREFIX}/restart-attempt": str(attempt),
    }  # fmt: skip
    name = f"{host}-{uid[:5]}"
    message, log = STATE / f"{name}.message", STATE / f"{name}.log"
    message.touch()
    message.chmod(0o666)  # as kubelet's
    hosts = STATE / "hosts"
    with hosts.open("a") as file:  # the record of a pod is there once it has an address
        file.write(f"{address(index)} {host}.{run} {host}\n")
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    shm = next(each["emptyDir"]["sizeLimit"] for each in spec["volumes"] if each["name"] == "shm")
    size = (STATE / "shm").read_text() if (STATE / "shm").exists() else shm.removesuffix("i")
    inside = ["bash", "-ec", CONTAINER, "-", host, os.environ["K8S_STANDIN_RUNS"], mounts["runs"], str(hosts), size]
    variables = environment(container, labels, index, message)
    command = [
        "nsenter", f"--net=/run/netns/{namespace(index)}",
        "unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
        *inside, *as_user(spec, container, variables), *container["command"],
        *(expanded(word, variables) for word in container.get("args", [])),
    ]  # fmt: skip
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=os.environ["K8S_STANDIN_IMAGE"], env=variables,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    pod = {
        "metadata": {"name": name, "uid": uid, "labels": labels, "grace": spec["terminationGracePeriodSeconds"]},
        "status": {"containerStatuses": [{"name": "node", "state": {"running": {}}}]}, "pid": process.pid,
    }  # fmt: skip
    save("pod", pod)
    return pod, process


def first_process(pid: int) -> int | None:
    """Process 1 of the pod that unshare, in place of nsenter, has begun."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def signal_pod(pod: dict[str, Any], number: int) -> None:
    deadline = time.monotonic() + 5
    while (first := first_process(pod["pid"])) is None and time.monotonic() < deadline:
        if not Path(f"/proc/{pod['pid']}").exists():
            return
        time.sleep(0.02)
    if first is not None:
        os.kill(first, number)


def note_end(pod: dict[str, Any], code: int) -> None:
    message = STATE / f"{pod['metadata']['name']}.message"
    state = {"terminated": {"exitCode": code, "message": message.read_text()}}
    save("pod", {**pod, "status": {"containerStatuses": [{"name": "node", "state": state}]}})


# -------------------------------------------------------------------------------------- the controllers of a JobSet


def run_attempt(job_set: dict[str, Any], attempt: int) -> str:
    """What the Job controller and kubelets do. Returns why the Job has failed; nothing if it is complete."""
    run, template = job_set["metadata"]["name"], job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    (STATE / "hosts").write_text("127.0.0.1 localhost\n")
    count = template["completions"]
    network_up(count)
    pods = [start(job_set, index, attempt) for index in range(count)]
    codes: dict[str, int] = {}
    reason, kill_at, told, killed = "", dict[str, float](), set[str](), set[str]()
    while len(codes) < count:
        deleted = not path_of("jobset", run).exists() or (STATE / f"{run}.delete").exists()
        for pod, process in pods:
            name = pod["metadata"]["name"]
            if name in codes:
                continue
            code = process.poll()
            if code is not None:
                codes[name] = 137 if name in killed else code  # unshare says 1 of a process that SIGKILL has ended
                note_end(pod, codes[name])
                continue
            asked = reason or deleted or (STATE / f"{name}.evict").exists()
            if asked and name not in told:
                told.add(name)
                signal_pod(pod, signal.SIGTERM)
                kill_at[name] = time.monotonic() + pod["metadata"]["grace"]
            if time.monotonic() > kill_at.get(name, float("inf")) or (STATE / f"{name}.kill").exists():
                killed.add(name)
                signal_pod(pod, signal.SIGKILL)
        failed = [code for code in codes.values() if code]
        if failed and not reason:
            final = {code for rule in template["podFailurePolicy"]["rules"] for code in rule["onExitCodes"]["values"]}
            reason = "PodFailurePolicy" if final.intersection(failed) else "BackoffLimitExceeded"
        time.sleep(0.05)
    return reason


def control(run: str) -> None:
    """What the JobSet controller does."""
    job_set = load("jobset", run)
    assert job_set is not None
    policy = job_set["spec"]["failurePolicy"]
    if (STATE / "unschedulable").exists() or (STATE / "no-image").exists():
        return pretend_waiting(job_set)
    for attempt in range(policy["maxRestarts"] + 1):
        reason = run_attempt(job_set, attempt)
        if (STATE / f"{run}.delete").exists():
            break
        if not reason:
            finish(job_set, "Completed", "AllJobsCompleted", "jobset completed successfully")
            return None
        rules = [rule for rule in policy["rules"] if reason in rule["onJobFailureReasons"]]
        if rules and rules[0]["action"] == "FailJobSet":
            finish(job_set, "Failed", "FailJobSetFailurePolicyAction", f"the Job has failed: {reason}")
            return None
        if attempt == policy["maxRestarts"]:
            finish(job_set, "Failed", "ReachedMaxRestarts", "jobset failed due to reaching max number of restarts")
            return None
        job_set["status"] = {"restarts": attempt + 1}
        save("jobset", job_set)
        for pod in pods_of(run):
            path_of("pod", pod["metadata"]["name"]).unlink()
    remove(run)
    return None


def pretend_waiting(job_set: dict[str, Any]) -> None:
    """Pods that never begin, as the scheduler or kubelet has them."""
    run = job_set["metadata"]["name"]
    status: dict[str, Any] = {"containerStatuses": []}
    if (STATE / "unschedulable").exists():
        text = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        status["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text},
        ]
    else:
        waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
        status["containerStatuses"] = [{"name": "node", "state": {"waiting": waiting}}]
    labels = {f"{PREFIX}/jobset-name": run}
    save("pod", {"metadata": {"name": f"{run}-node-0-0-abcde", "uid": "u", "labels": labels}, "status": status})
    while not (STATE / f"{run}.delete").exists():
        time.sleep(0.05)
    remove(run)


def finish(job_set: dict[str, Any], kind: str, reason: str, message: str) -> None:
    status = {"type": kind, "status": "True", "reason": reason, "message": message}
    save("jobset", {**job_set, "status": {**job_set["status"], "conditions": [status]}})


def remove(run: str) -> None:
    for pod in pods_of(run):
        path_of("pod", pod["metadata"]["name"]).unlink()
    for kind in ("jobset", "trainjob", "trainingruntime"):
        path_of(kind, run).unlink(missing_ok=True)
    (STATE / f"{run}.delete").unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------- kubectl


def create() -> int:
    for thing in json.load(sys.stdin)["items"]:
        kind, run = thing["kind"].lower(), thing["metadata"]["name"]
        save(kind, {**thing, "status": {}})
        if kind == "trainingruntime":
            continue
        if kind == "trainjob":  # as Kubeflow Trainer makes it, from the runtime
            runtime = load("trainingruntime", thing["spec"]["runtimeRef"]["name"])
            assert runtime is not None
            spec = runtime["spec"]["template"]["spec"]
        else:
            spec = thing["spec"]
        metadata = {**thing["metadata"], "uid": str(uuid.uuid4())}
        save("jobset", {"kind": "JobSet", "metadata": metadata, "spec": spec, "status": {}})
        nowhere = subprocess.DEVNULL
        with (STATE / "controller.log").open("ab") as output:
            subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "control", run],
                start_new_session=True, stdin=nowhere, stdout=output, stderr=output,
            )  # fmt: skip
        print(f"{kind}/{run} created")
    return 0


def get(words: list[str]) -> int:
    if words[0] == "pods":
        run = next(word for word in words if word.startswith("--selector")).rpartition("=")[2]
        print(json.dumps({"items": pods_of(run)}))
        return 0
    found = load(words[0], words[1])
    if found is None:
        print(f'Error from server (NotFound): {words[0]} "{words[1]}" not found', file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


def logs(words: list[str]) -> int:
    name = next(word for word in words if word.startswith(tuple("abcdefghijklmnopqrstuvwxyz")))
    log, prefix = STATE / f"{name}.log", f"[pod/{name}/node] " if "--prefix" in words else ""
    position = 0
    while True:
        pod = load("pod", name)
        ended = pod is None or "terminated" in pod["status"]["containerStatuses"][0]["state"]
        text = log.read_bytes()[position:]
        position += len(text)
        for line in text.decode(errors="replace").splitlines(keepends=True):
            sys.stdout.write(prefix + line)
        sys.stdout.flush()
        if ended or "--follow" not in words:
            return 0
        time.sleep(0.05)


def delete(words: list[str]) -> int:
    kind, run = words[0], words[1]
    owner = kind == "trainjob" or (kind == "jobset" and load("trainjob", run) is None)
    job_set = load("jobset", run)
    if owner and job_set is not None:
        if job_set["status"].get("conditions"):
            remove(run)
        else:
            (STATE / f"{run}.delete").touch()
    return 0


def main(name: str, words: list[str]) -> int:
    if name == "kubectl":
        words = words[2:] if words[0] == "--namespace" else words
        rest = words[1:]
        calls = {"create": create, "get": lambda: get(rest), "logs": lambda: logs(rest), "delete": lambda: delete(rest)}
        return calls[words[0]]()
    if words[0] == "control":
        control(words[1])
    elif words[0] == "down":
        network_down()
    else:
        (STATE / f"{words[1]}.{words[0]}").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name, sys.argv[1:]))
