"""What the rows and links of all ranks say together. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ranks import named, ranges
from ..start.findings import Finding
from .links import Link

CLOCKS_S = 5.0  # ranks stop by their own clocks when an allocation ends, and logs are put side by side by time
SLOWER = 2.0  # times the median of its kind: worth a warning
FAR_MS = 10.0  # for one number between two ranks; within a building it is well below 1 ms

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Slowest:
    """The slowest link of a kind, by throughput, and how many times the median of its kind it takes."""

    link: Link
    ratio: float
    of: int


def differences(rows: Sequence[Row]) -> list[Finding]:
    """Versions and GPUs that must be equal everywhere and are not. Without equal versions no group is made."""
    found = []
    remedy = "let every node use the same environment; look at VENV, modules, containers and LD_LIBRARY_PATH"
    for name in dict.fromkeys(key for row in rows for key in row["versions"]):
        if text := _who_has_what(rows, [str(row["versions"].get(name, "-")) for row in rows]):
            found.append(Finding(f"versions of {name} differ: {text}", remedy, blocks=True))
    if text := _who_has_what(rows, [str(row["device"]) for row in rows]):
        mixed = any(row["device"] == "CPU" for row in rows)  # some would use NCCL, others gloo
        remedy = "find out why some see no GPU, or set run.device" if mixed else "ask for nodes of one kind"
        found.append(Finding(f"devices differ: {text}", remedy, blocks=mixed))
    owners: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row["gpu_id"]:
            owners.setdefault((row["host"], row["gpu_id"]), []).append(row["rank"])
    for (host, _), ranks in owners.items():
        if len(ranks) > 1:
            what = f"ranks {ranges(ranks)} on {host} have the same GPU, which NCCL refuses"
            remedy = "bind one GPU to each task, or let every task see all of them"
            found.append(Finding(what, remedy, blocks=True, kind="device_mapping"))
    return found


def clocks(offsets: Mapping[str, float], reference: str) -> list[Finding]:
    """Hosts whose clocks are too far from that of rank 0's host, `reference`."""
    return [
        Finding(f"the clock of {host} is {abs(by):.1f} s {'ahead of' if by > 0 else 'behind'} {reference}'s", remedy)
        for host, by in offsets.items()
        if abs(by) > CLOCKS_S
        for remedy in ["have it set by NTP (timedatectl, chronyc tracking)"]
    ]


def slowest(links: Sequence[Link]) -> list[Slowest]:
    """Of each kind that has pairs or nodes, the slowest one."""
    found = []
    for kind in ("node", "ranks", "nodes"):
        alike = [link for link in links if link.kind == kind]
        if alike:
            worst = min(alike, key=lambda link: link.gb_s)
            found.append(Slowest(worst, statistics.median(link.gb_s for link in alike) / worst.gb_s, len(alike)))
    return found


def slow(links: Sequence[Link], hosts: Sequence[str]) -> list[Finding]:
    """Warnings: a link much slower than its like, a pair with a long way, and TCP beside InfiniBand."""
    found = []
    for one in slowest(links):
        if one.ratio >= SLOWER:
            what = f"{name(one.link, hosts)} takes {one.ratio:.1f} times as long as the median of {one.of} alike"
            found.append(Finding(what, "look at these machines, cables and ports, or leave the node out", warning=True))
    far = [link for link in links if link.kind in ("ranks", "nodes") and link.latency_ms > FAR_MS]
    if far:
        worst = max(far, key=lambda link: link.latency_ms)
        what = f"{name(worst, hosts)}: {worst.latency_ms:.0f} ms for one number, and {len(far) - 1} other pairs as bad"
        what = what if len(far) > 1 else what.partition(", and")[0]
        found.append(Finding(what, "look at these machines, the route between them and its load", warning=True))
    return found


def tcp_beside_adapters(links: Sequence[Link], rows: Sequence[Row], hosts: Sequence[str]) -> list[Finding]:
    """NCCL that sends through TCP although both hosts have an ACTIVE adapter."""
    has = [row["device"] != "CPU" and not str(row["ib"]).startswith(("-", "0 ")) for row in rows]
    over = [link for link in links if link.rdma is False and all(has[rank] for rank in link.ranks)]
    if not over:
        return []
    what = f"NCCL sends between {name(over[0], hosts)} through {over[0].carrier}, and both have an ACTIVE adapter"
    remedy = "NCCL_DEBUG=INFO says why; see NCCL_IB_HCA, NCCL_IB_DISABLE, and /dev/infiniband in a container"
    return [Finding(what, remedy, warning=True)]


def name(link: Link, hosts: Sequence[str]) -> str:
    """'rank 0 (n1) - rank 8 (n2)' for a pair."""
    if len(link.ranks) == 2 and link.kind in ("ranks", "nodes"):
        return " - ".join(named([rank], hosts) for rank in link.ranks)
    return named(link.ranks, hosts)


def _who_has_what(rows: Sequence[Row], values: Sequence[str]) -> str:
    """'2.7.1 on rank 0 (n1); 2.6.0 on rank 1 (n2)', the rarest first, or nothing where all are equal."""
    hosts = {int(row["rank"]): str(row["host"]) for row in rows}
    owners: dict[str, list[int]] = {}
    for row, value in zip(rows, values, strict=True):
        owners.setdefault(value, []).append(int(row["rank"]))
    if len(owners) == 1:
        return ""
    names = [hosts[rank] for rank in sorted(hosts)]
    rarest_first = sorted(owners.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{value} on {named(ranks, names)}" for value, ranks in rarest_first)
