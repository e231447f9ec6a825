"""Rank, world size and master address: read from the launcher's variables, validated, never guessed."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from ..ranks import rank_on

# launcher -> the variables that hold rank, local rank, world size, local world size.
# Slurm: SLURM_STEP_NUM_TASKS exists only inside an srun step. SLURM_NTASKS also exists in the batch script itself,
# where one plain process would take itself for rank 0 of many and wait for ranks that nobody starts.
LAUNCHERS = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "pals": ("PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE", "PMI_LOCAL_SIZE"),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True)
class Place:
    """Where this process stands. `attempt` counts restarts of the job (0 at the first start)."""

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    host: str
    master_addr: str
    master_port: int
    attempt: int
    agent_store: bool  # torchrun's agent already serves the store at master_addr:master_port

    @property
    def who(self) -> str:
        """'rank 3 (n2)', for messages."""
        return rank_on(self.rank, self.host)


def detect(environ: Mapping[str, str] = os.environ) -> Place:
    """Find the launcher and read its variables.

    Raises:
        ConfigError: a variable is missing, is not a number, or contradicts another one.
    """
    present = [name for name, names in LAUNCHERS.items() if names[0] in environ and names[2] in environ]
    whole = [name for name in present if LAUNCHERS[name][1] in environ]  # PALS and MPICH differ in the local rank only
    launcher = next(iter([*whole, *present]), "none")
    if launcher == "none":
        _refuse_half_set(environ)
        return Place("none", 0, 0, 1, 1, socket.gethostname(), "", 0, attempt(environ), False)

    names = LAUNCHERS[launcher]
    rank, world_size = _number(environ, names[0]), _number(environ, names[2])
    local_rank = _number(environ, names[1])
    local_world_size = _local_world_size(environ, names[3], world_size)
    if not 0 <= rank < world_size:
        raise ConfigError(f"{names[0]}={rank} is not below {names[2]}={world_size}", f"start again through {launcher}")
    if not 0 <= local_rank < local_world_size:
        raise ConfigError(
            f"{names[1]}={local_rank} is not below the {local_world_size} tasks of this node ({names[3]})",
            f"start again through {launcher}",
        )
    if world_size > 1 and not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        raise ConfigError(
            f"MASTER_ADDR and MASTER_PORT are not both set, and {world_size} ranks need them to find each other",
            "start through launch/train.sbatch or launch/torchrun.sh, which set both",
        )
    return Place(
        launcher,
        rank,
        local_rank,
        world_size,
        local_world_size,
        host=socket.gethostname(),
        master_addr=environ.get("MASTER_ADDR", ""),
        master_port=_port(environ) if world_size > 1 else 0,
        attempt=attempt(environ),
        # torch/distributed/rendezvous.py reads it as the string "True" (torch 2.13)
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def attempt(environ: Mapping[str, str] = os.environ) -> int:
    """How often this job has been restarted, by the launch script, Slurm or torchrun's agent."""
    by_job = max(_number(environ, name, 0) for name in ("DDP_ATTEMPT", "SLURM_RESTART_COUNT"))
    return by_job + _number(environ, "TORCHELASTIC_RESTART_COUNT", 0)


def has_own_disk(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the run directory is another one on each node: launch/sky.sh fills it, and keeps it in a bucket."""
    return environ.get("LAUNCH_OWN_DISKS") == "1"


def cpus_for_this_process(place: Place) -> int:
    """CPU cores this process may use: its affinity mask, shared by the node's tasks unless the scheduler split it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    per_task = _number(os.environ, "SLURM_CPUS_PER_TASK", 0)
    if place.launcher == "slurm" and per_task:
        return max(1, min(allowed, per_task))
    return max(1, allowed // place.local_world_size)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no whole number", f"unset {name}, or let the launcher set it") from None


def _port(environ: Mapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        remedy = "set it to a free port of rank 0's host, the same on every rank"
        raise ConfigError(f"MASTER_PORT={port} is no port: they go from 1 to 65535", remedy)
    return port


def _local_world_size(environ: Mapping[str, str], name: str, world_size: int) -> int:
    """Slurm writes '2(x3),1' for three nodes with two tasks and one with one; the largest is the safe answer."""
    text = environ.get(name, "")
    counts = [part.split("(")[0] for part in text.split(",") if part]
    try:
        return max(int(count) for count in counts) if counts else world_size
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a task count", f"unset {name}, or let the launcher set it") from None


def _refuse_half_set(environ: Mapping[str, str]) -> None:
    """RANK without WORLD_SIZE, or the reverse, comes from a hand-made launch: every rank would train alone."""
    present = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ]
    if present:
        missing = [name for name in LAUNCHERS["torchrun"] if name not in environ]
        raise ConfigError(
            f"{', '.join(present)} set, but not {', '.join(missing)}: every process would train alone",
            "start through torchrun, or unset them for a run with one process",
        )
    nodes = environ.get("SKYPILOT_NUM_NODES", "")  # SkyPilot runs the same commands on each node, and starts no ranks
    if nodes.isdigit() and int(nodes) > 1 and "SKYPILOT_NODE_RANK" in environ:
        raise ConfigError(
            f"SKYPILOT_NUM_NODES={nodes}, and nothing has started ranks: every node would train alone",
            "start through launch/sky.sh, or unset SKYPILOT_NUM_NODES for a run with one process",
        )
