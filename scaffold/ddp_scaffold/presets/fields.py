"""The fields of a preset as people read them: in groups, with values as short texts. The same for shell and pages."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .schema import (
    Account,
    Container,
    EnvLine,
    Fact,
    Hang,
    Limit,
    Need,
    Preemption,
    Preset,
    Script,
    Sidecar,
    UserEnvironment,
)

# Every field but those that stand above the groups.
GROUPS = {
    "what a job needs, and who provides it": ("needs",),
    "hardware": ("accelerator", "gpu", "gpus_per_node", "cpus_per_node", "cpus_per_task"),
    "asking for GPUs": (
        *("scheduler", "launcher", "account", "partition", "qos", "gpu_request", "chunk", "gpu_type", "gpu_order"),
        *("sees", "cpu_masks", "directives", "launch_flags", "forbidden_flags"),
    ),
    "pods": (
        *("gpu_resource", "pod_resources", "pod_annotations", "node_selector", "tolerations"),
        *("capabilities", "host_paths", "sidecar"),
    ),
    "what SkyPilot rents": (
        *("sky_infra", "sky_accelerator", "sky_spot", "sky_multi_node", "sky_network_tier", "sky_store"),
    ),
    "network": ("master_addr", "master_suffix", "nccl_socket_ifname", "gloo_socket_ifname", "internet"),
    "environment": ("env_scripts", "env"),
    "software": ("modules", "module_paths", "commands", "library_paths", "container", "uenv", "torch_index"),
    "storage": ("scratch", "node_local", "storage"),
    "limits": ("limits",),
    "stops": ("requeue", "preemption", "stop_signal_lead_s"),
    "known hangs": ("hangs", "recovery"),
    "notes": ("notes",),
    "not found": ("not_found",),
}
TITLE = ("name", "title", "extends", "keywords", "verified_on", "status")
LEFT_OPEN = "-"  # a value that is null
BY = {
    "module": "a module",
    "container": "the container",
    "uenv": "the uenv",
    "pip": "pip, in .venv",
    "site": "the site",
    "user": "you",
}


@dataclass(frozen=True)
class Table:
    """One group of a preset."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(preset: Preset, origins: Mapping[str, str]) -> list[Table]:
    """Return the groups that hold anything. `origins` names the preset that each taken-over field comes from."""
    found = []
    for title, names in GROUPS.items():
        rows = [row for name in names for row in _rows(preset, name, origins)]
        if not rows:
            continue
        header: tuple[str, ...] = ("field", "value", "confidence", "source")
        if title == "limits":
            header = ("limit", "of", "nodes", "longest", "preemptible", "note", "confidence", "source")
        elif title == "what a job needs, and who provides it":
            header = ("need", "from", "which", "where nothing else has it", "confidence", "source")
        elif title == "notes":
            header, rows = ("note", *header[2:]), [row[1:] for row in rows]
        elif title == "not found":
            header = ("looked for in vain",)
        found.append(Table(title, header, rows))
    return found


def text(value: Any) -> str:
    """Return the value of a fact in a few words."""
    if value is None:
        return LEFT_OPEN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {each}" for key, each in value.items()) or "none"
    if isinstance(value, Account):
        parts = [
            "required" if value.required else "not required",
            f"looks like {value.pattern}" if value.pattern else "",
            f"for example {value.example}" if value.example else "",
        ]
    elif isinstance(value, Container):
        parts = [
            f"srun {' '.join(value.srun_flags)}" if value.srun_flags else "",
            f"{' '.join(value.command)} python ..." if value.command else "",
            f"image: {value.image}" if value.image else "",
            "" if value.modules is None else f"modules there: {text(value.modules)}",
            f"variables are passed as {value.variables} needs it" if value.variables else "",
            f"library paths inside: {text(value.library_paths)}" if value.library_paths else "",
            f"packages: {value.packages}" if value.packages else "",
        ]
    elif isinstance(value, Preemption):
        parts = [
            f"{value.grace_s} s from the signal to the end" if value.grace_s is not None else "",
            "" if value.requeued is None else "requeued" if value.requeued else "not requeued",
            value.note or "",
        ]
    elif isinstance(value, UserEnvironment):
        parts = [value.image, f"view {value.view}"]
    elif isinstance(value, Sidecar):
        parts = [f"{value.name}: {value.image}", " ".join(value.command), f"capabilities: {text(value.capabilities)}"]
    elif isinstance(value, Script):
        parts = [value.path, f"on {nodes(value.min_nodes, None)} nodes" if value.min_nodes > 1 else ""]
    else:
        return str(value)
    return "; ".join(part for part in parts if part)


def nodes(least: int | None, most: int | None) -> str:
    """Return a range of node counts in words, or nothing if it has no ends."""
    least = least or 1
    if most is None:
        return f"{least} or more" if least > 1 else ""
    return str(most) if least == most else f"{least} to {most}"


def env_line(line: EnvLine) -> tuple[str, str]:
    """Return a line of an env file, and what reads it, when it counts and why."""
    counts = nodes(line.min_nodes, line.max_nodes)
    ends = (f"from {line.min_plugin}" if line.min_plugin else "", f"to {line.max_plugin}" if line.max_plugin else "")
    versions = " ".join(filter(None, ends))
    parts = [
        f"read by {line.read_by}{f' since {line.since}' if line.since else ''}",
        f"on {counts} node{'' if counts == '1' else 's'}" if counts else "",
        f"in partition {line.partition}" if line.partition else "",
        f"with {line.gpu}" if line.gpu else "",
        f"with aws-ofi-nccl {versions}" if versions else "",
    ]
    instead = f"; instead {line.instead}" if line.instead else ""
    return f"{line.name}={line.value}", f"{', '.join(part for part in parts if part)}: {line.why}{instead}"


def gpus(preset: Preset) -> str:
    """Return what a node has, in one cell: 4x A100 40 GB."""
    count = preset.gpus_per_node.value
    kind = preset.gpu.value if preset.gpu else ""
    return " ".join(part for part in (f"{count}x" if count and kind else str(count or ""), kind) if part) or LEFT_OPEN


def _rows(preset: Preset, name: str, origins: Mapping[str, str]) -> list[tuple[str, ...]]:
    value = getattr(preset, name)
    if value is None or value == []:
        return []
    if name == "not_found":
        return [(line,) for line in value]
    items = value if isinstance(value, list) else [value]
    return [(*_cells(name, item), *_known(item, preset.verified_on, origins.get(name))) for item in items]


def _cells(name: str, item: Any) -> tuple[str, ...]:
    if isinstance(item, EnvLine):
        variable, why = env_line(item)
        return (variable, why if name == "env" else f"off, for a hang; {why}")
    value = item.value
    if isinstance(value, Need):
        return (value.what, BY[value.by], value.name or "", value.add or "")
    if isinstance(item, Hang):
        return (name, f"open{_where(item)}: {value}" if item.open else value)
    if isinstance(value, Limit):
        longest, preemptible = value.max_walltime or "", "yes" if value.preemptible else ""
        hardware = f"{value.gpus_per_node} GPUs a node" if value.gpus_per_node else ""
        note = "; ".join(filter(None, ("" if value.chains else "no restarts by themselves", hardware, value.note)))
        return (value.name, value.by, nodes(value.min_nodes, value.max_nodes), longest, preemptible, note)
    return (name, text(value))


def _where(hang: Hang) -> str:
    """Return when a hang is met."""
    parts = [
        f"from {hang.min_ranks} ranks" if hang.min_ranks else "",
        f"from {hang.min_nodes} nodes" if hang.min_nodes else "",
        "" if hang.container is None else "in a container" if hang.container else "without a container",
    ]
    words = ", ".join(filter(None, parts))
    return f", {words}" if words else ""


def _known(item: Fact[Any] | EnvLine, verified_on: datetime.date, origin: str | None) -> tuple[str, str]:
    """Return how a value is known, with its own day if that differs, and the source, with the preset it stands in."""
    day = f", {item.verified_on}" if item.verified_on not in (None, verified_on) else ""
    return f"{item.confidence}{day}", f"{item.source} (taken from {origin})" if origin else item.source
