"""What one rank sees of its machine before it meets the others: GPUs, versions, shared memory, open files, disk."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..clocks import Clocks
from ..errors import ConfigError
from ..loader import LoaderSettings
from ..loading.workers import SHM, room
from ..start.arrival import present
from ..start.findings import Finding
from ..start.groups import Job, choose_device, hidden
from ..start.launcher import Place, cpus_for_this_process
from ..start.network import check_interfaces, check_master, interfaces
from ..start.plugin import check_plugin
from ..start.settings import RunSettings
from .adapters import adapters, check_adapters
from .disk import checkpoint_directory, writable
from .gpu_copies import copies

LITTLE_SHM = 64  # MB: what Docker gives unless told otherwise (docker run --shm-size)
_DRIVERS = ("nvidia[0-9]*", "kfd")  # in /dev, where there are GPUs

Row = dict[str, Any]  # what the table shows of a rank, as JSON


def look(place: Place, run: RunSettings, loader: LoaderSettings) -> tuple[Row, list[Finding]]:
    """One row of the table, and what is wrong. Needs no other rank."""
    several = place.local_world_size < place.world_size
    row, found = _gpus(place, run.device)
    row |= {"cpus": cpus_for_this_process(place), "versions": versions(row["device"])}
    row["arrival"] = present(place).as_json()
    nccl = row["device"] != "CPU"
    for part, findings in (_memory(place, loader), _files(place), writable(checkpoint_directory(run))):
        row |= part
        found += findings
    row["route"], row["ib"] = "-", "-"
    if place.world_size > 1:
        known = interfaces()
        row["route"], wrong = check_master(place, known)
        found += [*wrong, *check_interfaces(known, several, nccl)]
        row["ib"], wrong = check_adapters(adapters(), several, nccl)
        found += [*wrong, *(check_plugin() if nccl else ())]
    if nccl and place.local_rank == 0 and not any(finding.blocks or finding.alone for finding in found):
        row["peers"], wrong = copies(min(place.local_world_size, torch.cuda.device_count()))
        found += wrong
    return row, found


def versions(device: str) -> dict[str, str]:
    """torch, CUDA or HIP, and NCCL or RCCL: the same on all ranks, or nothing can be relied on."""
    toolkit = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or '-'}"
    library = "-" if device == "CPU" else nccl_version()
    return {"torch": torch.__version__, "toolkit": toolkit, "RCCL" if torch.version.hip else "NCCL": library}


def nccl_version() -> str:
    """'2.27.5', of the library that is loaded: torch.cuda.nccl.version() is what torch was compiled with."""
    built, number = "-", ctypes.c_int()
    try:
        built = ".".join(str(part) for part in torch.cuda.nccl.version()[:3])
        # Only what torch has loaded already; where it is linked statically, there is nothing to find.
        name = "librccl.so.1" if torch.version.hip else "libnccl.so.2"
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return built
    return _dotted(number.value)


def _dotted(number: int) -> str:
    """22705 is 2.27.5 and, until 2.8, 2804 is 2.8.4 (nccl.h, NCCL_VERSION)."""
    big, small = (10000, 100) if number >= 10000 else (1000, 100)
    return f"{number // big}.{number % big // small}.{number % small}"


def _gpus(place: Place, wanted: str) -> tuple[Row, list[Finding]]:
    """Chooses and sets the device as training will."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    row: Row = {"rank": place.rank, "host": place.host, "device": "CPU", "gpus": visible, "gpu_id": "", "peers": "-"}
    try:
        device = choose_device(place, wanted)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            properties = torch.cuda.get_device_properties(device)
            row |= {"device": properties.name, "gpu_id": str(getattr(properties, "uuid", ""))}
            torch.ones(1, device=device).item()  # a GPU that is lost or taken fails here
        elif wanted == "auto" and not hidden() and any(any(Path("/dev").glob(name)) for name in _DRIVERS):
            what = "this host has GPUs, and torch sees none: training would run on the CPU"
            remedy = "see torch.cuda.is_available() and the driver, or set run.device"
            if not torch.version.cuda and not torch.version.hip:
                remedy = f"torch {torch.__version__} is built for CPUs only: install another build, or set run.device"
            return row, [Finding(what, remedy, warning=True)]
    except ConfigError as error:
        what, remedy = str(error).split("\n  -> ")
        return row, [Finding(what, remedy, blocks=True)]
    except RuntimeError as error:
        remedy = "look at nvidia-smi or rocm-smi on that host, and at its kernel log (dmesg)"
        return row, [Finding(f"its GPU cannot be used: {str(error).splitlines()[0]}", remedy, blocks=True)]
    return row, []


def _memory(place: Place, loader: LoaderSettings) -> tuple[Row, list[Finding]]:
    """/dev/shm, and as many loader workers as fit."""
    found, usage = [], shutil.disk_usage(SHM) if SHM.is_dir() else None
    limits = room(Job(place, Clocks(), dist.HashStore(), ()), loader.prefetch, loader.batch_mb)
    for limit, why in limits:
        if limit < loader.workers and "CPUs" not in why:  # fewer CPUs are slower, and nothing else
            what = f"{limit} of {loader.workers} loader workers fit: {why}"
            found.append(Finding(what, "do that, or lower loader.workers"))
    if usage and usage.total >> 20 <= LITTLE_SHM and place.local_world_size > 1 and not found:
        what = f"{SHM} has {usage.total >> 20} MB, and NCCL and loader workers share memory through it"
        found.append(Finding(what, "raise it (docker run --shm-size, or --ipc=host)", warning=True))
    workers = f"{min(loader.workers, limits[0][0])} of {loader.workers}"
    return {"workers": workers, "shm_mb": usage.free >> 20 if usage else None}, found


def _files(place: Place) -> tuple[Row, list[Finding]]:
    """Each rank keeps a connection to every other in two gloo groups; rank 0's store has three clients a rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    serves = place.rank == 0 and not place.agent_store
    needed = 100 + (2 + 3 * serves) * place.world_size
    row: Row = {"files": "unlimited" if soft == resource.RLIM_INFINITY else soft}
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return row, []
    what = f"it may open {soft} files, and one of {place.world_size} ranks needs about {needed}"
    may = hard == resource.RLIM_INFINITY or hard >= needed
    how = f"ulimit -n {needed}" + ("" if may else f"; its hard limit of {hard} is the administrator's to raise")
    return row, [Finding(what, how, blocks=True)]
