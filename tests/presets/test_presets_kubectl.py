"""`ddp-scaffold presets init` where kubectl answers: a stand-in on the PATH prints what an API server would.

The objects have the fields of github.com/kubernetes/api core/v1/types.go and storage/v1/types.go, and of
github.com/kubernetes-sigs/kueue apis/kueue/v1beta1/localqueue_types.go; nodes are held against Kubernetes' schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from preset_helpers import Tool, run

H100 = "NVIDIA-H100-80GB-HBM3"
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}

PRESSURE = {"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}


def node(name: str, gpus: int = 8, product: str = H100, *, taints: Any = None, **more: str) -> dict[str, Any]:
    """A node as `kubectl get nodes --output=json` shows it; `more` is allocatable as well, with __ for a slash."""
    resources = {"cpu": "191900m", "memory": "2063582448Ki", "pods": "110", "hugepages-2Mi": "0"}
    resources |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
    resources |= {key.replace("__", "/"): value for key, value in more.items() if "__" in key}
    labels = {"kubernetes.io/hostname": name, **({"nvidia.com/gpu.product": product} if gpus else {})}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": [TAINT] if taints is None and gpus else taints or []},
        "status": {
            "addresses": [{"type": "InternalIP", "address": more.get("address", "10.0.0.7")}],
            "allocatable": resources,
            "capacity": resources,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def queue(namespace: str, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "LocalQueue",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"clusterQueue": "gpus"},
    }


def storage_class(name: str, provisioner: str, default: bool = False) -> dict[str, Any]:
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    metadata = {"name": name, "annotations": annotations}
    return {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": metadata, "provisioner": provisioner}


def items(*objects: dict[str, Any]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [*objects]}, indent=4) + "\n"


def kubectl(tool: Tool, *nodes: dict[str, Any], **answers: str) -> None:
    """The stand-in; what is not given fails, as a resource that the server does not have."""
    given = {f"get {name}": text for name, text in answers.items()}
    tool("kubectl", **{"get nodes": items(*nodes), **given})


def made() -> dict[str, Any]:
    code, text = run("init", "acme", "-y")
    assert code == 0, text
    assert run("check", "acme.yml") == (0, "acme.yml: ok\n")
    data: dict[str, Any] = yaml.safe_load(Path("acme.yml").read_text())
    return data


def values(data: dict[str, Any]) -> dict[str, Any]:
    return {name: fact["value"] for name, fact in data.items() if isinstance(fact, dict)}


INFINIBAND = {"rdma__ib": "8"}


def test_gpus_adapters_queue_and_storage(tool: Tool) -> None:
    kubectl(
        tool,
        node("g1", taints=[TAINT, PRESSURE], **INFINIBAND),
        node("g2", taints=[TAINT, PRESSURE, {"key": "team", "effect": "NoExecute"}], **INFINIBAND),
        node("c1", gpus=0),
        localqueues=items(queue("team-a", "training"), queue("team-b", "training")),
        storageclasses=items(
            storage_class("fast", "csi.example.com", default=True), storage_class("nfs", "nfs.csi.k8s.io")
        ),
        crd='{"kind": "CustomResourceDefinition"}\n',
    )
    data = made()
    assert data["extends"] == "generic-kubernetes"
    assert values(data) == {
        "scheduler": "kubernetes",
        "accelerator": "cuda",
        "gpu": H100,
        "gpus_per_node": 8,
        "cpus_per_task": 21,  # nine tenths of 191 cores, by 8
        "gpu_resource": "nvidia.com/gpu",
        "pod_resources": {"rdma/ib": "8"},
        "tolerations": ["nvidia.com/gpu=present:NoSchedule"],
        "partition": "training",
    }
    assert data["storage"][0]["value"] == "storage classes: fast (csi.example.com, the default), nfs (nfs.csi.k8s.io)"
    assert "2 of 3 nodes have GPUs" in data["gpus_per_node"]["source"]
    assert data["gpus_per_node"]["confidence"] == "probed"
    assert "not_found" not in data


def test_what_differs_is_left_open_and_said(tool: Tool) -> None:
    kubectl(
        tool,
        node("g1", vpc__x="1", **{"vpc.amazonaws.com__efa": "32"}),
        node("g2", gpus=4, product="NVIDIA-A100-SXM4-40GB", taints=[]),
        localqueues=items(queue("team-a", "one"), queue("team-a", "two")),
    )
    data = made()
    assert values(data) == {
        "scheduler": "kubernetes",
        "accelerator": "cuda",
        "gpu_resource": "nvidia.com/gpu",
        "tolerations": [],
    }
    told = "\n".join(data["not_found"])
    assert "NVIDIA-A100-SXM4-40GB, NVIDIA-H100-80GB-HBM3; node_selector chooses one" in told
    assert "shows 4, 8 of them on a node" in told
    assert "shows vpc.amazonaws.com/efa, not the same on all" in told
    assert "team-a/one, team-a/two" in told
    assert "JobSet: not installed" in told
    assert "kubectl get storageclasses: failed here (exit code 1)" in told


def test_amd_and_a_shared_adapter(tool: Tool) -> None:
    amd = node("m1", gpus=0, **{"amd.com__gpu": "8", "rdma__rdma_shared_device_a": "1k", "rdma__hca_shared": "63"})
    amd["metadata"]["labels"]["amd.com/gpu.product-name"] = "AMD_Instinct_MI300X"
    kubectl(tool, amd)
    data = made()
    assert data["extends"] == "generic-kubernetes-amd"
    assert values(data)["pod_resources"] == {"rdma/hca_shared": "1", "rdma/rdma_shared_device_a": "1"}
    assert values(data)["gpu"] == "AMD_Instinct_MI300X"


def test_without_ipv4_it_is_said(tool: Tool) -> None:
    kubectl(tool, node("g1", address="fd00::7"))
    assert any(line.startswith("IPv4: nodes have none") for line in made()["not_found"])


def test_a_cluster_without_gpus(tool: Tool) -> None:
    kubectl(tool, node("c1", gpus=0))
    data = made()
    assert values(data) == {"scheduler": "kubernetes"}
    assert any("is the device plugin installed?" in line for line in data["not_found"])


def test_a_kubectl_that_does_not_answer_is_no_cluster(tool: Tool) -> None:
    tool("kubectl", script="exit 1")
    data = made()
    assert data["extends"] == "local"
    assert data["not_found"].count("kubectl get nodes: failed here (exit code 1)") == 1
    assert not [line for line in data["not_found"] if line.startswith("kubectl get local")]


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        "{}",
        '{"items": 5}',
        '{"items": [5, null, {"status": 7}, {"spec": [], "status": {}}]}',
        items({"metadata": None, "spec": {"taints": 3}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}),
        items(node("g1", product="x\ny: {evil}", taints=[{"key": "a b", "effect": "NoSchedule"}])),
        "[" * 100_000,
    ],
)
def test_nothing_that_it_prints_breaks_the_file(tool: Tool, text: str) -> None:
    text += "\n"
    tool("kubectl", **{"get nodes": text, "get localqueues": text, "get storageclasses": text})
    assert values(made())["scheduler"] == "kubernetes"


def test_the_nodes_are_such_as_an_api_server_shows() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    validate.validate(node("g1", **INFINIBAND), "1.31", strict=True)
