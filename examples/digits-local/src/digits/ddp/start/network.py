"""What one rank sees of its network without a process group: interfaces, the way to the master, the port."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .findings import Finding
from .launcher import Place

SIOCGIFFLAGS, SIOCGIFADDR = 0x8913, 0x8915  # netdevice(7), Linux
UP_AND_RUNNING = 0x1 | 0x40  # RUNNING: it has a carrier, or its driver does not say
CONNECT_S = 2.0


@dataclass(frozen=True)
class Interface:
    """A network interface. `addresses` is None where the system does not tell (not Linux)."""

    name: str
    up: bool
    addresses: tuple[str, ...] | None


def interfaces() -> dict[str, Interface]:
    """All of this network namespace: asked of the kernel, since /sys may be that of another one."""
    found = {}
    for _, name in socket.if_nameindex():
        flags = _ask(name, SIOCGIFFLAGS)
        state = int.from_bytes(flags[16:18], sys.byteorder) if flags else UP_AND_RUNNING
        found[name] = Interface(name, state & UP_AND_RUNNING == UP_AND_RUNNING, _addresses(name) if flags else None)
    return found


def selected(setting: str, names: Iterable[str]) -> list[str]:
    """Which `names` a value of NCCL_SOCKET_IFNAME takes: prefixes, or after a leading = whole names; ^ turns it."""
    exclude, setting = setting.startswith("^"), setting.removeprefix("^")
    exact, setting = setting.startswith("="), setting.removeprefix("=")
    wanted = [word for word in setting.split(",") if word]
    return [
        name for name in names if any(name == word if exact else name.startswith(word) for word in wanted) != exclude
    ]


def check_interfaces(
    known: Mapping[str, Interface], several_nodes: bool, nccl: bool, environ: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Whether the interfaces that gloo and NCCL are told to take are here, are up and lead to other nodes."""
    found, here = [], ", ".join(known)
    of_gloo = environ.get("GLOO_SOCKET_IFNAME", "")
    for name in filter(None, of_gloo.split(",")):
        if name not in known:
            what = f"GLOO_SOCKET_IFNAME names {name}, which is no interface of this host (it has {here})"
            takes = "gloo takes whole names, separated by commas" + (", and no ^ or = as NCCL does" * (name[0] in "^="))
            found.append(Finding(what, f"{takes}: set it to one of these, or unset it", blocks=True))
        elif wrong := _unusable([known[name]], several_nodes):
            what = f"GLOO_SOCKET_IFNAME={of_gloo}: {wrong}"
            found.append(Finding(what, f"set an interface of this host that is up ({here})", blocks=True))
    setting = environ.get("NCCL_SOCKET_IFNAME", "")
    if nccl and setting:
        taken = [known[name] for name in selected(setting, known)]
        wrong = _unusable(taken, several_nodes) if taken else f"matches no interface of this host (it has {here})"
        if wrong:
            remedy = "correct it: prefixes, or =whole names, or ^excluded ones; or unset it, and NCCL chooses"
            found.append(Finding(f"NCCL_SOCKET_IFNAME={setting}: {wrong}", remedy, blocks=True))
    if several_nodes and not environ.get("GLOO_SOCKET_IFNAME"):
        address = _own_address()
        if not address or is_loopback(address):
            what = f"this host's own name leads to {address or 'no address of it'}, where gloo's peers cannot find it"
            found.append(Finding(what, "set GLOO_SOCKET_IFNAME (launch/task.sh does)", blocks=True))
    return found


def check_master(place: Place, known: Mapping[str, Interface], alone: bool = True) -> tuple[str, list[Finding]]:
    """The local address and interface towards MASTER_ADDR, and what is wrong with address, way or port.

    With `alone` a loopback address is refused on nodes other than rank 0's: several nodes may be one host in a test.
    """
    at = f"MASTER_ADDR={place.master_addr}"
    try:
        family, _, _, _, target = socket.getaddrinfo(place.master_addr, place.master_port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        remedy = "set it to a name or address of rank 0's host that every node can resolve"
        if place.agent_store:
            remedy += "; torchrun takes it from --master-addr, or with c10d from --local-addr or the name of its host"
        return "-", [Finding(f"{at} cannot be resolved: {error}", remedy, alone=True)]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing: the kernel only looks for the way
            probe.connect(target)
            mine = str(probe.getsockname()[0])
    except OSError as error:
        remedy = "set it to an address in a network that every node is in"
        return "-", [Finding(f"there is no route to {at}: {error}", remedy, alone=True)]
    name = next((one.name for one in known.values() if mine in (one.addresses or ())), "")
    found = []
    elsewhere = place.rank >= place.local_world_size  # on rank 0's own host, its name may well be a loopback address
    if alone and elsewhere and is_loopback(mine):
        remedy = "set it to the name of rank 0's host; localhost is another host on every node"
        found.append(Finding(f"{at} is the loopback address of this host", remedy, alone=True))
    if place.rank == 0 and not place.agent_store:
        found += _check_port(place, family, str(target[0]))
    return f"{mine} {name}".rstrip(), found


def _check_port(place: Place, family: int, address: str) -> list[Finding]:
    where = f"{place.master_addr}:{place.master_port}"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store
        try:
            probe.bind(("", place.master_port))  # without listening: no rank can take it for the store
        except OSError as error:
            what = f"port {where} is in use already, or not allowed: {error}"
            return [Finding(what, "choose another MASTER_PORT", alone=True, kind="port_in_use")]
    with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
        probe.bind((address, 0))
        return []
    # Not an address of this host: an address that is translated on the way may still lead here.
    try:
        with socket.create_server(("", place.master_port), family=family):
            socket.create_connection((place.master_addr, place.master_port), CONNECT_S).close()
    except OSError as error:
        what = f"rank 0 is on {place.host}, and MASTER_ADDR={place.master_addr} does not lead there: {error}"
        return [Finding(what, "set MASTER_ADDR to rank 0's host", alone=True)]
    return []


def _unusable(taken: list[Interface], several_nodes: bool) -> str:
    """Why none of them will do; empty if one does."""
    usable = [one for one in taken if one.up and one.addresses != ()]
    names = ", ".join(one.name for one in taken)
    if not usable:
        return f"{names} is down, or has no address"
    return f"{names} leads to no other node" if several_nodes and all(one.name == "lo" for one in usable) else ""


def is_loopback(address: str) -> bool:
    """Whether only processes of the same host find it."""
    return address.startswith("127.") or address == "::1"


def gloo_address(known: Mapping[str, Interface], environ: Mapping[str, str] = os.environ) -> str:
    """Where gloo will tell its peers to find this rank; empty where it takes a loopback address for want of another."""
    if name := environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return next(iter((known[name].addresses or ("?",)) if name in known else ()), "?")
    return _own_address()


def _own_address() -> str:
    """What gloo takes without GLOO_SOCKET_IFNAME: the first address of this host's name that is really here."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    return ""


def _addresses(name: str) -> tuple[str, ...]:
    answer = _ask(name, SIOCGIFADDR)
    found = [socket.inet_ntoa(answer[20:24])] if answer else []
    for line in read(Path("/proc/net/if_inet6")).splitlines():
        number, *_, owner = line.split()
        if owner == name:
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)))
    return tuple(found)


def _ask(name: str, what: int) -> bytes:
    """The kernel's answer about an interface; empty where it has none."""
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl  # not on every system

        return fcntl.ioctl(probe.fileno(), what, struct.pack("256s", name.encode()[:15]))
    return b""


def read(path: Path) -> str:
    """The text of a file of the kernel; empty where there is none."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
