"""What this machine has: GPUs, driver, links, interfaces, shared memory, limits, and what started this shell."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .line import Line

TIMEOUT_S = 10
SHM_LEAST = 1 << 30  # a docker container has 64 MiB; loader workers pass their batches through it
FILES_LEAST = 4096  # each tensor from a loader worker holds a descriptor (sharing strategy file_descriptor)
NOT_OF_THE_NETWORK = re.compile(r"lo|docker|virbr|veth|br-|cni|podman|tailscale|tun|wg|ifb|dummy")
# variable -> what started the process that has it; the first one counts
STARTED_BY = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    "SLURM_STEP_ID": "srun",
    "OMPI_COMM_WORLD_RANK": "mpirun of Open MPI",
    "PMI_RANK": "mpiexec",
    "SLURM_JOB_ID": "a Slurm job, outside of srun",
    "PBS_JOBID": "a PBS job",
    "KUBERNETES_SERVICE_HOST": "a Kubernetes pod",
}


def run(*command: str) -> str:
    """Return what a command prints; empty if there is none, it fails, or it takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def machine(environ: Mapping[str, str] = os.environ) -> list[Line]:
    """Return the lines of the machine. Nothing raises: what is not there is said."""
    return [*_gpus(), *_links(), *_interfaces(environ), *_memory(), *_limits(), _started(environ)]


def driver() -> str:
    """The version of NVIDIA's driver: from the kernel's file, else nvidia-smi; empty without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text("utf-8", "replace")
    except OSError:
        text = ""
    match = re.search(r"Kernel Module(?: for \w+)?\s+(\d+\.\d[\d.]*)", text)
    if match:
        return match.group(1)
    return run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0].strip()


def _gpus() -> list[Line]:
    listed = run("nvidia-smi", "-L")
    names = re.findall(r"^GPU \d+: (.+?) \(UUID", listed, re.MULTILINE)
    source = "nvidia-smi -L"
    if not names:
        names = re.findall(r"Card [Ss]eries:\s*(.+)", run("rocm-smi", "--showproductname"))
        source = "rocm-smi --showproductname"
    if not names:
        return [Line("machine", "GPUs", "none", "nvidia-smi, rocm-smi")]
    kinds = ", ".join(f"{names.count(name)} x {name.strip()}" for name in dict.fromkeys(names))
    mixed = "GPUs of several kinds: the slowest sets the pace of every step." if len(set(names)) > 1 else ""
    lines = [Line("machine", "GPUs", kinds, source, mixed, "warning" if mixed else "ok")]
    if version := driver():
        lines.append(Line("machine", "driver", version, "/proc/driver/nvidia/version"))
    return lines


def _links() -> list[Line]:
    """The links between each pair of GPUs, from the matrix that nvidia-smi prints."""
    pairs: dict[str, int] = {}
    rows = [line.split() for line in run("nvidia-smi", "topo", "-m").splitlines() if line.startswith("GPU")]
    for number, row in enumerate(rows):
        for kind in row[number + 2 : len(rows) + 1]:
            pairs[kind] = pairs.get(kind, 0) + 1
    if not pairs:
        return []
    text = ", ".join(f"{count} pairs by {kind}" for kind, count in sorted(pairs.items()))
    slow = {"SYS", "NODE"} & set(pairs)
    note = "Pairs by SYS or NODE cross the CPU: a smaller job does better on GPUs with closer links." if slow else ""
    lines = [Line("machine", "links", text, "nvidia-smi topo -m", note, "info" if note else "ok")]
    access = [
        line.split()[1:] for line in run("nvidia-smi", "topo", "-p2p", "r").splitlines() if line.startswith("GPU")
    ]
    broken = [cell for row in access for cell in row if cell in ("CNS", "GNS", "TNS", "NS")]
    if access:
        value = f"{len(broken) // 2} pairs without" if broken else "all pairs"
        remark = "NCCL goes through host memory there; see IOMMU and ACS settings." if broken else ""
        level = "warning" if broken else "ok"
        lines.append(Line("machine", "peer access", value, "nvidia-smi topo -p2p r", remark, level))  # type: ignore[arg-type]
    return lines


def _interfaces(environ: Mapping[str, str]) -> list[Line]:
    folder = Path("/sys/class/net")
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return []
    up = []
    for name in names:
        try:
            state = (folder / name / "operstate").read_text().strip()
        except OSError:
            continue
        if state in ("up", "unknown") and not NOT_OF_THE_NETWORK.match(name):
            up.append(name)
    lines = [Line("machine", "interfaces", ", ".join(up) or "none but the loopback", "/sys/class/net")]
    named = environ.get("GLOO_SOCKET_IFNAME", "")
    missing = [name for name in named.split(",") if name and name not in names]
    if missing:
        note = f"gloo finds no {', '.join(missing)} here, and every rank fails at the start."
        lines.append(Line("machine", "gloo's interface", named, "GLOO_SOCKET_IFNAME", note, "warning"))
    adapters = Path("/sys/class/infiniband")
    if adapters.is_dir():
        lines.append(
            Line("machine", "RDMA", ", ".join(sorted(path.name for path in adapters.iterdir())), str(adapters))
        )
    return lines


def _memory() -> list[Line]:
    try:
        size = shutil.disk_usage("/dev/shm")
    except OSError:
        return [Line("machine", "/dev/shm", "not there", note="Loader workers need it.", level="warning")]
    note = ""
    if size.total < SHM_LEAST:
        note = "Loader workers pass batches through it, and NCCL its buffers: raise it (docker run --shm-size=8g)."
    value = f"{size.total / 2**30:.1f} GiB, {size.free / 2**30:.1f} free"
    return [Line("machine", "/dev/shm", value, "statvfs", note, "warning" if note else "ok")]


def _limits() -> list[Line]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    note = ""
    if soft != resource.RLIM_INFINITY and soft < FILES_LEAST:
        note = f"Loader workers run out of it: ulimit -n {hard if hard > 0 else FILES_LEAST}."
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    files = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    return [
        Line("machine", "open files", files, "ulimit -n", note, "warning" if note else "ok"),
        Line("machine", "CPUs", str(cpus), "affinity of this process"),
    ]


def _started(environ: Mapping[str, str]) -> Line:
    for name, what in STARTED_BY.items():
        if environ.get(name):
            return Line("machine", "started by", what, f"{name}={environ[name]}")
    return Line("machine", "started by", "no launcher: a shell", "environment")
