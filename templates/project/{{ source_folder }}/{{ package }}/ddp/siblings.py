"""The ranks that the same launcher has started on this host: their death is seen at once, whatever the others wait in.

NCCL does not tell a waiting rank that its peer is gone; heartbeats tell it after `clocks.silent_s`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from .board import states
from .setup import Dist

LAUNCHER = os.getppid()
LAUNCHER_ADVICE = "SIGKILL, SIGUSR1 or SIGUSR2 came to torchrun: send signals to the ranks; look for oom-kill in dmesg"


def launcher_gone() -> str:
    """What to say when torchrun's agent, which has started this rank, is there no more; else nothing.

    Only torchrun: a rank started by hand may well outlive its shell.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.getppid() == LAUNCHER:
        return ""
    return f"the launcher (torchrun, process {LAUNCHER}) is gone, and has left its ranks behind"


class Siblings:
    """Knows the processes of this host's other ranks, as soon as they have published a state."""

    def __init__(self, joined: Dist, store: dist.Store) -> None:
        here = joined.place.host
        self._store, self._host, self._pids = store, here, dict[int, int]()
        self._unknown = [rank for rank, host in enumerate(joined.hosts) if host == here and rank != joined.rank]

    def dead(self) -> list[int]:
        """The ranks whose process was there and is no more."""
        if self._unknown:
            for state in states(self._store, self._unknown):
                self._unknown.remove(state["rank"])
                if parent_of(state["pid"]) == os.getppid():
                    self._pids[state["rank"]] = state["pid"]
        return [rank for rank, pid in self._pids.items() if parent_of(pid) is None]

    def kill(self, ranks: Iterable[int]) -> None:
        """End suspended ranks: they would hold up the launcher (torchrun waits 30 s for them)."""
        for state in states(self._store, ranks):
            if state["host"] == self._host and parent_of(state["pid"]) == os.getppid():
                os.kill(state["pid"], signal.SIGKILL)


def parent_of(pid: int) -> int | None:
    """Parent process id, or None without such a process (or without /proc): an id may have a new owner since."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    except (OSError, ValueError):  # too many open files, say: that tells nothing of the process
        return -1
    return None if state in "ZX" else int(parent)
