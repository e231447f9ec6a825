"""What sinfo and scontrol print, as fields of a preset."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .draft import Draft

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,79}")
MOST_LIMITS = 100
NO_LIMIT = ("UNLIMITED", "INFINITE", "-1")  # what Slurm takes for no limit at all


@dataclass(frozen=True)
class Group:
    """Equal nodes of one partition."""

    partition: str
    default: bool
    gpus: int
    types: tuple[str, ...]
    cpus: str  # 128, or 64+ where they differ


def probe_slurm(draft: Draft, said: Mapping[str, str], here: str) -> None:
    """Fill a draft with what Slurm tells. `said` holds what each command printed."""
    config = dict(re.findall(r"^(\w+) *= (\S.*?) *$", said.get("scontrol show config", ""), re.MULTILINE))
    cluster = config.get("ClusterName", "")
    if NAME.fullmatch(cluster):
        draft.title = f"The Slurm cluster {cluster}"
        draft.keywords = [cluster] if cluster != draft.name else []
    if "sinfo" in said:
        _nodes(draft, list(groups(said["sinfo"])), f"sinfo on {here}")
    if "scontrol show partition" in said:
        lines = said["scontrol show partition"].splitlines()
        partitions = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines]
        _limits(draft, partitions, config.get("PreemptType", ""), f"scontrol show partition on {here}")
    named = {limit["value"]["name"] for limit in draft.limits}
    if named and draft.value("partition") not in named:
        draft.facts.pop("partition", None)


def groups(text: str) -> Iterator[Group]:
    """Yield the groups of nodes in the output of sinfo; lines of another form are skipped."""
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != 6 or not NAME.fullmatch(cells[0].rstrip("*")):
            continue
        gpus, types = 0, []
        for item in re.sub(r"\([^)]*\)", "", cells[1]).split(","):
            if entry := re.fullmatch(r"gpu(?::([A-Za-z0-9][A-Za-z0-9_.-]{0,79}))?:([0-9]{1,3})", item):
                gpus += int(entry[2])
                types += [entry[1]] if entry[1] else []
        yield Group(cells[0].rstrip("*"), cells[0].endswith("*"), gpus, tuple(types), cells[2])


def _nodes(draft: Draft, groups: list[Group], source: str) -> None:
    """Take in the GPUs and CPUs of the nodes that have GPUs: of the default partition, the only one, or all."""
    if not groups:
        draft.missing(f"gpus_per_node: what {source} prints cannot be read")
        return
    groups = [group for group in groups if group.gpus]
    if not groups:
        draft.missing(f"gpus_per_node: {source} shows no GPUs")
        return
    names = {group.partition for group in groups if group.default} or {group.partition for group in groups}
    if len(names) == 1:
        draft.probed("partition", next(iter(names)), f"{source}: it has GPUs")
    groups = [group for group in groups if group.partition in names]
    where = f" in {next(iter(names))}" if len(names) == 1 else ""
    gpus, types = {group.gpus for group in groups}, {kind for group in groups for kind in group.types}
    cpus = {group.cpus for group in groups}
    if len(gpus) == 1:
        draft.probed("gpus_per_node", gpus.pop(), source)
    else:
        draft.missing(f"gpus_per_node: {source} shows {_listed(map(str, sorted(gpus)))} GPUs a node{where}")
    if len(types) == 1:
        draft.probed("gpu", types.pop(), f"{source}, as Slurm calls it")
    elif types:
        draft.missing(f"gpu: {source} shows {_listed(sorted(types))}{where}; --gpus-per-node=TYPE:N asks for one")
    count = cpus.pop() if len(cpus) == 1 else ""
    if not re.fullmatch("[1-9][0-9]{0,3}", count):
        draft.missing(f"cpus_per_node: {source} shows nodes with different numbers{where}")
        return
    draft.probed("cpus_per_node", int(count), source)
    per_gpu = int(count) // (draft.value("gpus_per_node") or int(count) + 1)
    if per_gpu:
        draft.probed("cpus_per_task", per_gpu, f"{source}: the CPUs of a node divided by its GPUs", "inferred")


def _limits(draft: Draft, partitions: list[dict[str, str]], preemption: str, source: str) -> None:
    """Take in a limit for each partition. By priority, jobs of a partition are pushed out if another one is higher."""
    by_name = {partition.get("PartitionName", ""): partition for partition in partitions}
    partitions = [partition for name, partition in by_name.items() if NAME.fullmatch(name)]
    if not partitions:
        draft.missing(f"limits: what {source} prints cannot be read")
    top = max((_tier(partition) for partition in partitions), default=0)
    for partition in partitions[:MOST_LIMITS]:
        limit: dict[str, Any] = {"name": partition["PartitionName"]}
        least, most = partition.get("MinNodes", ""), partition.get("MaxNodes", "")
        if re.fullmatch("[1-9][0-9]{0,4}", least) and least != "1":
            limit["min_nodes"] = int(least)
        if re.fullmatch("[1-9][0-9]{0,4}", most):
            limit["max_nodes"] = int(most)
        longest = partition.get("MaxTime", "UNLIMITED")
        if most_time := walltime(longest):
            limit["max_walltime"] = most_time
        elif longest.upper() not in NO_LIMIT:
            draft.missing(f"limits: the MaxTime of {limit['name']} in {source} is not a time that can be used")
        by_tier = preemption == "preempt/partition_prio" and _tier(partition) < top
        if by_tier and partition.get("PreemptMode", "OFF") != "OFF":
            limit["preemptible"] = True
        state = partition.get("State", "UP")
        if state in ("DOWN", "DRAIN", "INACTIVE"):
            limit["note"] = f"its state was {state}"
        if "max_nodes" in limit and limit.get("min_nodes", 1) > limit["max_nodes"]:
            draft.missing(f"limits: {source} shows more MinNodes than MaxNodes for {limit['name']}")
            continue
        draft.probed("limits", limit, source)
    if partitions[MOST_LIMITS:]:
        draft.missing(f"limits: {source} shows {len(partitions)} partitions, of which the first {MOST_LIMITS} are here")


def walltime(text: str) -> str | None:
    """Return a time as a preset holds it, or None if it is no time, none at all, or one of 1000 days and more.

    Slurm's forms are M, M:S, H:M:S, D-H, D-H:M and D-H:M:S: https://slurm.schedmd.com/sbatch.html#OPT_time
    """
    if not re.fullmatch(r"[0-9]{1,8}(:[0-9]{1,8}){0,2}|[0-9]{1,8}-[0-9]{1,8}(:[0-9]{1,8}){0,2}", text):
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    total = int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds
    if not 0 < total < 1000 * 86_400:
        return None
    rest = f"{total // 3600 % 24:02}:{total // 60 % 60:02}:{total % 60:02}"
    return f"{total // 86_400}-{rest}" if total >= 86_400 else rest


def _tier(partition: Mapping[str, str]) -> int:
    text = partition.get("PriorityTier", "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def _listed(words: Any) -> str:
    *first, last = list(words)[:8]
    return f"{', '.join(first)} and {last}" if first else last
