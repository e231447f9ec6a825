"""InfiniBand, RoCE and EFA adapters as the kernel shows them, and what carried the bytes between two nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..start.findings import Finding
from ..start.network import read, selected

SYS = Path("/sys/class")
DEVICES = Path("/proc/net/dev")  # of this network namespace, which /sys/class/net need not be
COUNTED = 8 << 20  # bytes: less is lost among what else a node sends


@dataclass(frozen=True)
class Adapter:
    """One port of an RDMA device, as in /sys/class/infiniband. `sent` counts bytes, None where nothing counts them."""

    name: str
    port: str
    active: bool
    layer: str  # InfiniBand, or Ethernet for RoCE
    rate: str
    sent: int | None


def adapters(root: Path = SYS) -> list[Adapter]:
    """The ports of all RDMA devices."""
    found = []
    for port in sorted(root.glob("infiniband/*/ports/*")):
        words = read(port / "counters" / "port_xmit_data")  # in units of four bytes
        count = int(words) * 4 if words.isdigit() else None
        octets = read(port / "hw_counters" / "tx_bytes")  # EFA counts here
        count = int(octets) if count is None and octets.isdigit() else count
        active = "ACTIVE" in read(port / "state").split()
        rate = read(port / "rate").split(" (")[0]
        found.append(Adapter(port.parents[1].name, port.name, active, read(port / "link_layer"), rate, count))
    return found


def check_adapters(
    known: list[Adapter], several_nodes: bool, nccl: bool, environ: Mapping[str, str] = os.environ
) -> tuple[str, list[Finding]]:
    """The adapters in words, and a problem if NCCL would want one between nodes and none that it may take is ACTIVE."""
    active = [one for one in known if one.active]
    words = f"{len(active)} ACTIVE of {len(known)}" if known else "-"
    if active:
        words += f", {active[0].layer} {active[0].rate}".rstrip()
    if not known or not nccl or not several_nodes or environ.get("NCCL_IB_DISABLE") == "1":
        return words, []
    setting = environ.get("NCCL_IB_HCA", "")
    usable = [one for one in active if not setting or _takes(setting, one)]
    if usable:
        return words, []
    among = f"that NCCL_IB_HCA={setting} takes" if setting and active else f"of {len(known)}"
    what = f"no InfiniBand or RoCE port {among} is ACTIVE: NCCL fails, or falls back to TCP"
    return words, [Finding(what, "look at ibstat; for TCP on purpose, set NCCL_IB_DISABLE=1")]


def sent_by_interface(table: Path = DEVICES) -> dict[str, int]:
    """Bytes that each interface has sent so far, lo left out."""
    lines = (line.partition(":") for line in read(table).splitlines()[2:])
    return {name.strip(): int(numbers.split()[8]) for name, _, numbers in lines if name.strip() != "lo"}


def _takes(setting: str, adapter: Adapter) -> bool:
    """Whether a value of NCCL_IB_HCA takes an adapter: as NCCL_SOCKET_IFNAME, and a word may end in :port."""
    marks = setting[: len(setting) - len(setting.lstrip("^="))]
    words = [word.split(":") for word in setting[len(marks) :].split(",")]
    fitting = [word[0] for word in words if len(word) == 1 or word[1] == adapter.port]
    return bool(selected(marks + ",".join(fitting), [adapter.name]))


@dataclass(frozen=True)
class Counts:
    """Bytes that this host has sent so far, by adapter and by network interface."""

    adapters: Mapping[str, int]
    interfaces: Mapping[str, int]


def counts(root: Path = SYS, table: Path = DEVICES) -> Counts:
    """As the kernel counts them now."""
    return Counts({one.name: one.sent for one in adapters(root) if one.sent is not None}, sent_by_interface(table))


def carrier(before: Counts, after: Counts, sent: int) -> tuple[str, bool | None]:
    """What carried most of `sent` bytes: 'mlx5_0, mlx5_1', 'eth0 (TCP)' or '?'; and whether that is RDMA, None for '?'.

    Interfaces first: TCP over IPoIB is counted by both, RDMA by the adapter only.
    """
    if sent < COUNTED:
        return "?", None
    pairs: Sequence[tuple[Mapping[str, int], Mapping[str, int], str]]
    pairs = [(before.interfaces, after.interfaces, " (TCP)"), (before.adapters, after.adapters, "")]
    for old, new, kind in pairs:
        grown = {name: count - old[name] for name, count in new.items() if name in old}
        if sum(grown.values()) >= sent / 2:
            return ", ".join(name for name, more in grown.items() if more >= sent / 10) + kind, not kind
    return "?", None
