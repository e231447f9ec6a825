"""What a rank says of itself when it comes to the first meeting, and what rank 0 reads from all of them together.

Interfaces, addresses, GPUs and cores that cannot work are refused here, before a process group is made: there, gloo and
NCCL say it in words of their own, or never. Costs some milliseconds, without a launch script as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..ranks import ranges
from .findings import Finding, merged
from .groups import choose_device
from .launcher import Place
from .network import check_interfaces, gloo_address, interfaces, is_loopback


@dataclass(frozen=True)
class Arrival:
    """One rank: its machine (the same for ranks that reach each other by loopback), gloo's address, GPU and cores."""

    rank: int
    host: str
    machine: str
    gloo: str
    gpu: str
    cores: tuple[int, ...]
    of_cores: int
    bf16: bool = False  # whether the GPU computes in it, other than by emulation
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For the store."""
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> Arrival:
        """What `as_json` made."""
        findings = tuple(Finding(**one) for one in content["findings"])
        return Arrival(**{**content, "cores": tuple(content["cores"]), "findings": findings})


def arrive(place: Place, device: str) -> Arrival:
    """Look at this rank's process and host. `device` is run.device."""
    gpu, found = _gpu(place, device)
    address = ""
    if place.world_size > 1:
        known = interfaces()
        found += check_interfaces(known, several_nodes=False, nccl=bool(gpu))
        address = gloo_address(known)
    bf16 = bool(gpu) and torch.cuda.is_bf16_supported(including_emulation=False)
    return replace(present(place), gloo=address, gpu=gpu, bf16=bf16, findings=tuple(found))


def present(place: Place) -> Arrival:
    """The same without network and GPU."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Arrival(place.rank, place.host, machine(), "", "", tuple(sorted(cores)), os.cpu_count() or 1)


def machine() -> str:
    """The kernel and network namespace of this process: a name may be that of several hosts, or a host have several."""
    found = []
    with suppress(OSError):
        found = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(found)


def judge(arrivals: Sequence[Arrival]) -> list[Finding]:
    """What is wrong with each, and with all of them together; problems first."""
    own = [_of(one.rank, finding) for one in arrivals for finding in one.findings]
    return merged([*own, *_same_gpu(arrivals), *_loopback(arrivals), *crowded(arrivals)])


def precision(arrivals: Sequence[Arrival]) -> str:
    """What all ranks can train in: bf16 where every GPU has it, else fp32."""
    return "bf16" if arrivals and all(one.bf16 for one in arrivals) else "fp32"


def crowded(arrivals: Iterable[Arrival]) -> list[Finding]:
    """Ranks that have to share cores although their host has more of them."""
    together: dict[tuple[str, str], list[Arrival]] = {}
    for one in arrivals:
        together.setdefault((one.host, one.machine), []).append(one)
    found = []
    for (host, _), here in together.items():
        for cores in dict.fromkeys(one.cores for one in here):
            ranks = [one.rank for one in here if set(one.cores) <= set(cores)]
            if len(ranks) <= len(cores) or len(cores) >= here[0].of_cores:
                continue
            share = f"core {cores[0]}" if len(cores) == 1 else f"cores {ranges(cores)}"
            what = f"ranks {ranges(ranks)} on {host} have only {share} of {here[0].of_cores} for all of them"
            remedy = "unset SLURM_CPU_BIND and its like before sbatch or srun, or look at taskset and cgroup limits"
            found.append(Finding(what, remedy, warning=True))
            break
    return found


def _of(rank: int, finding: Finding) -> Finding:
    return Finding(**{**asdict(finding), "ranks": (rank,)})


def _gpu(place: Place, device: str) -> tuple[str, list[Finding]]:
    """Its UUID (of a MIG instance, that of the instance), else its PCI address; empty on the CPU."""
    try:
        chosen = choose_device(place, device)
        if chosen.type == "cpu":
            return "", []
        torch.cuda.set_device(chosen)
        about = torch.cuda.get_device_properties(chosen)
    except ConfigError as error:
        what, remedy = str(error).split("\n  -> ")
        return "", [Finding(what, remedy, blocks=True)]
    except RuntimeError:  # a GPU that is lost: making the process group says more
        return "", []
    bus = [getattr(about, f"pci_{part}_id", "?") for part in ("domain", "bus", "device")]
    return f"{about.name}, {getattr(about, 'uuid', '') or 'PCI ' + ':'.join(map(str, bus))}", []


def _same_gpu(arrivals: Iterable[Arrival]) -> list[Finding]:
    owners: dict[tuple[str, str, str], list[int]] = {}
    for one in arrivals:
        if one.gpu:
            owners.setdefault((one.host, one.machine, one.gpu), []).append(one.rank)
    return [
        Finding(
            f"ranks {ranges(ranks)} on {host} have the same GPU ({gpu}), which NCCL refuses",
            "give each rank a GPU of its own: look at CUDA_VISIBLE_DEVICES, LOCAL_RANK and the GPUs asked for",
            blocks=True,
            kind="device_mapping",
        )
        for (host, _, gpu), ranks in owners.items()
        if len(ranks) > 1
    ]


def _loopback(arrivals: Sequence[Arrival]) -> list[Finding]:
    """Ranks whose gloo listens where only their own host finds it, and ranks elsewhere that must."""
    if len({(one.host, one.machine) for one in arrivals}) == 1 or len({one.machine for one in arrivals} - {""}) == 1:
        return []
    return [
        Finding(
            f"gloo offers the other hosts {one.gloo or 'a loopback address'}, which leads each to itself: it is "
            f"the address of GLOO_SOCKET_IFNAME, or without one what the host name {one.host} resolves to there",
            "set GLOO_SOCKET_IFNAME on that host to its interface towards the others (ip -o address shows them)",
            blocks=True,
            ranks=(one.rank,),
        )
        for one in arrivals
        if not one.gloo or is_loopback(one.gloo)
    ]
