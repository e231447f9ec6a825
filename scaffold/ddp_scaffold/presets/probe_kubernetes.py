"""What kubectl prints of nodes, queues and storage, as fields of a preset.

Objects as in github.com/kubernetes/api core/v1/types.go (Node) and storage/v1/types.go (StorageClass), and in
github.com/kubernetes-sigs/kueue apis/kueue (LocalQueue).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .draft import Draft

LIMIT = "--request-timeout=8s"
COMMANDS = {
    "kubectl get nodes": ("kubectl", "get", "nodes", "--output=json", LIMIT),
    "kubectl get localqueues": (
        *("kubectl", "get", "localqueues.kueue.x-k8s.io", "--all-namespaces"),
        *("--output=json", LIMIT),
    ),
    "kubectl get storageclasses": ("kubectl", "get", "storageclasses", "--output=json", LIMIT),
    "kubectl get crd jobsets": ("kubectl", "get", "crd", "jobsets.jobset.x-k8s.io", "--output=json", LIMIT),
}
NODES = "kubectl get nodes"
GPUS = {"nvidia.com/gpu": "cuda", "amd.com/gpu": "rocm"}
# Labels that say which GPU: NVIDIA/k8s-device-plugin docs/gpu-feature-discovery, ROCm/k8s-device-plugin
# cmd/k8s-node-labeller, GKE's and CoreWeave's own.
PRODUCTS = (
    *("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator"),
    "gpu.nvidia.com/model",
)
RDMA = re.compile(r"rdma|roce|/efa$|hostdev|(^|[/_.-])(ib|hca)([/_.-]|$)")
WHOLE = re.compile(r"[1-9][0-9]{0,2}")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SHOWN = 8


@dataclass(frozen=True)
class Node:
    """A node with GPUs, as far as a preset needs it."""

    resource: str
    gpus: int
    product: str
    cpus: int
    rdma: tuple[tuple[str, str], ...]
    taints: frozenset[str]
    addresses: tuple[str, ...]


def probe_kubernetes(draft: Draft, said: Mapping[str, str]) -> None:
    """Fill a draft with what the cluster tells that kubectl is set to."""
    everything = _items(said.get(NODES, ""))
    nodes = [node for each in everything if (node := _node(each))]
    source = f"{NODES}, where {len(nodes)} of {len(everything)} nodes have GPUs"
    draft.probed("scheduler", "kubernetes", source)
    if nodes:
        _gpus(draft, nodes, source)
        _network(draft, nodes, source)
        common = sorted(frozenset.intersection(*(node.taints for node in nodes)))
        draft.probed("tolerations", common, f"{source}: the taints that all of these have")
    else:
        draft.missing(f"gpus_per_node: {NODES} shows no {' and no '.join(GPUS)}: is the device plugin installed?")
    _queues(draft, said)
    _storage(draft, said)
    if "kubectl get crd jobsets" not in said:
        draft.missing("JobSet: not installed, or it may not be looked at; https://jobset.sigs.k8s.io says how")


def _items(text: str) -> list[dict[str, Any]]:
    """The objects of a list; none where that is no list."""
    try:
        items = json.loads(text)["items"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [each for each in items if isinstance(each, dict)] if isinstance(items, list) else []


def _texts(value: Any) -> dict[str, str]:
    """A mapping of texts, whatever was there."""
    items = value.items() if isinstance(value, dict) else ()
    return {str(key): str(each) for key, each in items}


def _node(item: Mapping[str, Any]) -> Node | None:
    """A node that pods can go to, with whole GPUs."""
    status, spec = item.get("status") or {}, item.get("spec") or {}
    if not isinstance(status, dict) or not isinstance(spec, dict) or spec.get("unschedulable"):
        return None
    has, labels = _texts(status.get("allocatable")), _texts((item.get("metadata") or {}).get("labels"))
    resource = next((name for name in GPUS if WHOLE.fullmatch(has.get(name, ""))), "")
    if not resource:
        return None
    product = next((labels[name] for name in PRODUCTS if labels.get(name)), "")
    rdma = tuple((name, _wanted(amount)) for name, amount in sorted(has.items()) if RDMA.search(name) and amount != "0")
    addresses = [each for each in status.get("addresses") or () if isinstance(each, dict)]
    return Node(
        resource,
        int(has[resource]),
        product,
        _cpus(has.get("cpu", "")),
        rdma,
        frozenset(_taints(spec.get("taints"))),
        tuple(str(each.get("address")) for each in addresses if each.get("type") == "InternalIP"),
    )


def _wanted(amount: str) -> str:
    """What a pod asks for: all of a node's adapters, but one share of an adapter that many may have (1k, 63)."""
    return amount if WHOLE.fullmatch(amount) and int(amount) <= 32 else "1"


def _cpus(amount: str) -> int:
    """Whole cores of a quantity: 192, or 191900m."""
    if found := re.fullmatch(r"([0-9]{1,7})(m?)", amount):
        return int(found[1]) // (1000 if found[2] else 1)
    return 0


def _taints(taints: Any) -> Iterator[str]:
    """As kubectl taint writes them. What Kubernetes itself sets when a node is in trouble is not tolerated."""
    for taint in taints if isinstance(taints, list) else ():
        key, value, effect = (str(taint.get(name) or "") for name in ("key", "value", "effect"))
        if key and effect in ("NoSchedule", "NoExecute") and not key.startswith("node.kubernetes.io/"):
            yield f"{key}{'=' + value if value else ''}:{effect}"


def _gpus(draft: Draft, nodes: Sequence[Node], source: str) -> None:
    resources = sorted({node.resource for node in nodes})
    if len(resources) > 1:
        draft.missing(f"gpu_resource: {source} shows {_listed(resources)}; this file is for the first of them")
        nodes = [node for node in nodes if node.resource == resources[0]]
    draft.probed("gpu_resource", resources[0], source)
    draft.probed("accelerator", GPUS[resources[0]], source)
    products = sorted({node.product for node in nodes if node.product})
    if len(products) == 1:
        draft.probed("gpu", products[0], f"{source}: a label")
    elif products:
        draft.missing(f"gpu: {source} shows {_listed(products)}; node_selector chooses one")
    counts = sorted({node.gpus for node in nodes})
    if len(counts) > 1:
        draft.missing(f"gpus_per_node: {source} shows {_listed(map(str, counts))} of them on a node")
        return
    draft.probed("gpus_per_node", counts[0], source)
    cpus = min(node.cpus for node in nodes)
    if per_gpu := cpus * 9 // 10 // counts[0]:
        said = f"{source}: nine tenths of {cpus} allocatable cores, for each GPU; others run on a node as well"
        draft.probed("cpus_per_task", per_gpu, said, "inferred")


def _network(draft: Draft, nodes: Sequence[Node], source: str) -> None:
    """RDMA resources that all these nodes have; and whether they have IPv4."""
    offers = sorted({node.rdma for node in nodes})
    if offers == [()]:
        draft.missing(f"RDMA: {source}, and none of these offers rdma/..., EFA or the like")
    elif len(offers) > 1:
        names = sorted({name for offer in offers for name, _ in offer})
        draft.missing(f"pod_resources: {source} shows {_listed(names)}, not the same on all")
    else:
        draft.probed("pod_resources", dict(offers[0]), f"{source}, allocatable; of shared adapters a pod needs one")
    addresses = [address for node in nodes for address in node.addresses]
    if addresses and all(":" in address for address in addresses):
        draft.missing("IPv4: nodes have none; by IPv6 alone the ranks were tried with gloo, and not with NCCL")


def _queues(draft: Draft, said: Mapping[str, str]) -> None:
    """The local queues of Kueue."""
    title = "kubectl get localqueues"
    found = [each.get("metadata") or {} for each in _items(said.get(title, ""))]
    queues = sorted((str(each.get("namespace")), str(each.get("name"))) for each in found)
    names = {name for _, name in queues if NAME.fullmatch(name)}
    if len(names) == 1:
        where = _listed([space for space, _ in queues if NAME.fullmatch(space)])
        draft.probed("partition", names.pop(), f"{title}: the only name, in namespace {where}")
    elif names:
        listed = _listed(f"{space}/{name}" for space, name in queues if NAME.fullmatch(name) and NAME.fullmatch(space))
        draft.missing(f"partition: {title} shows {listed}; the answer `partition` names one")


def _storage(draft: Draft, said: Mapping[str, str]) -> None:
    """Storage classes: which of them gives ReadWriteMany, an object does not say."""
    title = "kubectl get storageclasses"
    told = []
    for each in _items(said.get(title, "")):
        metadata = each.get("metadata") or {}
        name, provisioner = str(metadata.get("name")), str(each.get("provisioner"))
        default = _texts(metadata.get("annotations")).get("storageclass.kubernetes.io/is-default-class") == "true"
        if re.fullmatch("[a-z0-9]([a-z0-9.-]{0,80}[a-z0-9])?", name) and re.fullmatch(
            "[A-Za-z0-9./-]{1,80}", provisioner
        ):
            told.append(f"{name} ({provisioner}{', the default' if default else ''})")
    if told:
        draft.probed(
            "storage", f"storage classes: {_listed(told)}", f"{title}: of one for runs, ReadWriteMany is needed"
        )


def _listed(words: Any) -> str:
    listed = list(words)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if listed[SHOWN:] else "")
