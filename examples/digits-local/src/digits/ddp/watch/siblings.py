"""The ranks that the same launcher has started on this host: their death is seen at once, whatever the others wait in.

NCCL does not tell a waiting rank that its peer is gone; heartbeats tell it after `clocks.silent_s`. How a process has
ended only its parent is told, but until the parent has asked, /proc shows it to its owner (proc_pid_stat(5)).
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from ..start.board import states
from ..start.groups import Job
from ..trace.phases import open_of

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

    def __init__(self, job: Job, store: dist.Store) -> None:
        here = job.place.host
        self._store, self._host, self._pids = store, here, dict[int, int]()
        self._unknown = [rank for rank, host in enumerate(job.hosts) if host == here and rank != job.rank]
        self._ended: dict[int, str] = {}  # rank -> "with exit code 0", "by SIGKILL"
        self._gone_at: dict[int, int] = {}  # rank -> when that was seen, in monotonic microseconds
        self._phases: dict[int, int] = {}  # rank -> descriptor of its changes of phase
        self._poll, self._watched = select.poll(), dict[int, int]()  # file descriptor of a process -> rank
        self._wake, self._waker = os.pipe()
        self._poll.register(self._wake, select.POLLIN)

    def dead(self) -> list[int]:
        """The ranks whose process was there and is no more. Asks the store for those that are not known yet."""
        if self._unknown:
            for state in states(self._store, self._unknown):
                self._unknown.remove(state.rank)
                if parent_of(state.pid) == os.getppid():
                    self._pids[state.rank] = state.pid
                    self._watch(state.rank, state.pid)
                    if (descriptor := open_of(state.pid)) is not None:
                        self._phases[state.rank] = descriptor
        return list(self.endings())

    def endings(self) -> dict[int, str]:
        """Those that are known to be gone, and how they ended: "" where nobody has seen it in time."""
        return {rank: self._ended.get(rank, "") for rank, pid in list(self._pids.items()) if parent_of(pid) is None}

    def phases(self) -> dict[int, int]:
        """Rank -> descriptor of its changes of phase, which can be read whatever has become of it."""
        return dict(self._phases)

    def gone_at(self, rank: int) -> int | None:
        """When the end of its process was noticed, in monotonic microseconds; None if it was not."""
        return self._gone_at.get(rank)

    def wait(self, seconds: float) -> None:
        """Sleep until one of them ends, or somebody calls `wake`. Then hurry: the launcher is about to ask as well."""
        for descriptor, _ in self._poll.poll(1000 * seconds):
            rank = self._watched.get(descriptor)
            if rank is None:  # woken
                continue
            self._gone_at[rank] = int(1e6 * time.monotonic())
            if ending := ending_of(self._pids[rank]):
                self._ended[rank] = ending
            self._poll.unregister(descriptor)
            os.close(descriptor)

    def wake(self) -> None:
        """End the `wait` of another thread, and all to come."""
        os.write(self._waker, b"x")

    def _watch(self, rank: int, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, AttributeError):  # Linux before 5.3, or not Linux
            return
        self._watched[descriptor] = rank
        self._poll.register(descriptor, select.POLLIN)

    def kill(self, ranks: Iterable[int]) -> None:
        """End suspended ranks: they would hold up the launcher (torchrun waits 30 s for them)."""
        for state in states(self._store, ranks):
            if state.host == self._host and parent_of(state.pid) == os.getppid():
                os.kill(state.pid, signal.SIGKILL)


def parent_of(pid: int) -> int | None:
    """Parent process id, or None without such a process (or without /proc): an id may have a new owner since."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    except (OSError, ValueError):  # too many open files, say: that tells nothing of the process
        return -1
    return None if state in "ZX" else int(parent)


def ending_of(pid: int) -> str:
    """How a process has ended: "with exit code 0", "by SIGKILL"; "" if its parent has asked already."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return ""
        code = os.waitstatus_to_exitcode(int(fields[49]))
        return f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    except (OSError, ValueError, IndexError):
        return ""
