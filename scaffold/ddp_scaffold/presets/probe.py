"""What this machine tells about its cluster: sinfo, scontrol, kubectl, nvidia-smi, rocm-smi, ip, python3 and module.

What they print is not trusted: only words of known form are taken from it, and the schema checks every value. GPUs and
interfaces of a login node say nothing about compute nodes; they count inside a job, and on a machine without Slurm.
kubectl is asked where there is no other scheduler; if its cluster answers, this machine is none of its nodes.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .. import _output
from .draft import Draft
from .probe_kubernetes import COMMANDS, NODES, probe_kubernetes
from .probe_python import PYTHON, QUIETLY, SOFTWARE, probe_python
from .probe_slurm import probe_slurm

TIMEOUT_S = 10  # for all of them together: they run at the same time
POLL_S = 0.05
MOST = 64_000_000  # bytes of output, those of some thousand nodes; a command that prints more is ended

SLURM = {
    "sinfo": ("sinfo", "-h", "-o", "%P|%G|%c|%m|%D|%l"),
    "scontrol show config": ("scontrol", "show", "config"),
    "scontrol show partition": ("scontrol", "show", "partition", "-o"),
}
GPUS = {"nvidia-smi -L": ("nvidia-smi", "-L"), "rocm-smi --showid": ("rocm-smi", "--showid")}
NETWORK = {"ip link": ("ip", "-o", "link"), "ip addr": ("ip", "-o", "-4", "addr")}
NOT_OF_THE_NETWORK = re.compile(r"lo|docker|virbr|veth|br-|cni|podman|tailscale|tun|wg|ifb|dummy")


def probe_machine(draft: Draft) -> None:
    """Fill a draft with what this machine tells."""
    slurm = any(shutil.which(command[0]) for command in SLURM.values())
    in_job = any(name in os.environ for name in ("SLURM_JOB_ID", "PBS_JOBID"))
    pbs = not slurm and shutil.which("pbsnodes") is not None
    here = "a compute node" if in_job else "the login node" if slurm or pbs else "this machine"
    compute = here != "the login node"
    commands = {**SLURM, **(GPUS if compute else {}), **NETWORK, **PYTHON, **(SOFTWARE if slurm or pbs else {})}
    kubernetes = not (slurm or pbs or in_job) and shutil.which("kubectl") is not None
    said, silent = ask({**commands, **(COMMANDS if kubernetes else {})})
    if NODES in said:
        probe_kubernetes(draft, said)
        for line in silent:
            if line.startswith(NODES.partition(" ")[0]):
                draft.missing(line)
        return
    silent = [line for line in silent if line.startswith(NODES) or not line.startswith("kubectl")]
    if slurm:
        answered = [title for title in SLURM if title in said]
        source = f"{answered[0]} on {here}" if answered else f"Slurm is installed on {here}, and does not answer"
        draft.probed("scheduler", "slurm", source)
        probe_slurm(draft, said, here)
    elif pbs:
        draft.probed("scheduler", "pbs", f"pbsnodes is installed on {here}")
    if compute:
        _gpus(draft, said, here, count=not (slurm or pbs))
    else:
        draft.missing("GPUs and interfaces of compute nodes: this file was not made inside a job, where they show")
    if slurm or pbs:
        _interfaces(draft, said, here, in_job)
    if os.environ.get("SCRATCH"):
        draft.probed("scratch", "$SCRATCH", f"the variable SCRATCH is set on {here}")
    probe_python(draft, said, silent, here, cluster=slurm or pbs)
    for line in silent:
        if line not in QUIETLY:
            draft.missing(line)


def ask(commands: Mapping[str, Sequence[str]]) -> tuple[dict[str, str], list[str]]:
    """Run the commands side by side; return what those printed that ended well, and a line for each other one."""
    said, silent = {}, []
    running: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-probe-") as scratch:
        outputs = {title: Path(scratch, str(number)) for number, title in enumerate(commands)}
        try:
            for title, command in commands.items():
                if shutil.which(command[0]) is None:
                    silent.append(f"{command[0]}: not installed here")
                    continue
                try:
                    running[title] = _start(command, outputs[title])
                except (OSError, subprocess.SubprocessError):
                    silent.append(f"{title}: cannot be run here")
            for title, code in _wait(running).items():
                if code is None:
                    silent.append(f"{title}: no answer within {TIMEOUT_S} s")
                elif code == 0:
                    text = outputs[title].read_text(encoding="utf-8", errors="replace")
                    whole = text[: text.rfind("\n") + 1]  # half a number is a number, too
                    if whole != text:
                        silent.append(f"{title}: what it prints is cut off here")
                    said[title] = whole
                else:
                    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
                    silent.append(f"{title}: failed here ({ended})")
        finally:
            for process in running.values():
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return said, list(dict.fromkeys(silent))


def _wait(running: Mapping[str, subprocess.Popen[bytes]]) -> dict[str, int | None]:
    """Return the exit codes of the commands, None for those that do not end in time. A terminal shows what is asked."""
    deadline = time.monotonic() + TIMEOUT_S
    asked = list(running)
    with _output.status() as show:
        while asked := [title for title in asked if running[title].poll() is None]:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            show(f"Asking {', '.join(asked)} ({left:.0f} s at most)")
            time.sleep(min(POLL_S, left))
    if asked:
        _output.note_on_terminal(f"no answer within {TIMEOUT_S} s: {', '.join(asked)}")
    return {title: process.poll() if title not in asked else None for title, process in running.items()}


def _start(command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, MOST)),
        )


def _gpus(draft: Draft, said: Mapping[str, str], here: str, count: bool) -> None:
    """Take in the GPUs of this machine. Their number counts only where no scheduler can have given a part of them."""
    patterns = {
        "nvidia-smi -L": ("cuda", r"^GPU \d+: ([A-Za-z0-9][A-Za-z0-9 ._+-]{0,79}) \(UUID"),
        "rocm-smi --showid": ("rocm", r"^GPU\[(\d+)\]"),
    }
    for title, (accelerator, pattern) in patterns.items():
        found = re.findall(pattern, said.get(title, ""), re.MULTILINE)
        if accelerator == "rocm":
            found = sorted(set(found))
        if not found:
            continue
        source = f"{title} on {here}"
        draft.probed("accelerator", accelerator, source)
        if accelerator == "cuda" and len(set(found)) == 1:
            draft.probed("gpu", found[0], source)
        if count:
            draft.probed("gpus_per_node", len(found), source)
        return
    for title in GPUS:
        if title in said:
            draft.missing(f"GPUs: {title} shows none on {here}")


def _interfaces(draft: Draft, said: Mapping[str, str], here: str, in_job: bool) -> None:
    """Leave the choice to NCCL, but for Slingshot (hsn*), whose names mean nothing to it. See what there is."""
    up = set(re.findall(r"^\d+: ([A-Za-z0-9_.-]{1,15})[@:][^\n]*[<,]UP[,>]", said.get("ip link", ""), re.MULTILINE))
    found = re.findall(r"^\d+: +([A-Za-z0-9_.-]{1,15})(?:@\S+)? +inet ", said.get("ip addr", ""), re.MULTILINE)
    names = [name for name in dict.fromkeys(found) if not NOT_OF_THE_NETWORK.match(name)]
    names = [name for name in names if name in up or "ip link" not in said][:20]
    if not names:
        return
    seen = f"ip addr on {here} shows {', '.join(names)}"
    if in_job and any(name.startswith("hsn") for name in names):
        draft.probed("nccl_socket_ifname", "hsn", seen)
    else:
        elsewhere = "" if in_job else "; compute nodes may have others"
        draft.probed("nccl_socket_ifname", None, f"{seen}{elsewhere}; left to NCCL, which takes ib* first")
