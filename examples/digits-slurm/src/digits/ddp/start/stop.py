"""Reasons to stop: a signal, the end of the allocation, a stop file. Nothing is done here: handlers only set a flag."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType

from pydantic import BaseModel, Field

from ..errors import ConfigError, KindName

log = logging.getLogger("ddp")

# SIGTERM: preemption, scancel, torchrun passing a signal on. SIGUSR1/2: Slurm's --signal before the time limit.
# SIGINT, SIGHUP: Ctrl-C, and a terminal that is closed.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


# How a reason begins -> the kind of the outcome. After a stop file nothing is started again: a person wants the end.
KINDS: dict[str, KindName] = {"signal": "preempted", "end of the allocation": "time_limit", "stop file": "benign"}


class PreemptSettings(BaseModel, extra="forbid"):
    """When to stop early so that the checkpoint is written before the scheduler kills the job."""

    before_end_s: float = Field(120, ge=0, description="stop this long before the allocation ends (DDP_WALLTIME_END)")
    poll_s: float = Field(1.0, gt=0, description="ranks agree on stopping this often; a stop takes up to twice that")


class StopFlags:
    """Collects reasons to stop for this rank. What all ranks do about it is decided in `agree`.

    A second SIGINT (Ctrl-C twice) ends the process at once, unless it comes within a second: torchrun passes on what a
    terminal or Slurm has already sent to all. Any other repeated signal changes nothing.

    Raises:
        ConfigError: DDP_WALLTIME_END is not a time.
    """

    def __init__(self, settings: PreemptSettings) -> None:
        self.stop_file: Path | None = None
        self._signal: str | None = None
        self._interrupted = float("inf")  # when the first SIGINT came
        self._next_look = 0.0
        self._reason: str | None = None
        end = os.environ.get("DDP_WALLTIME_END", "")
        if end and not end.isdigit():
            raise ConfigError(f"DDP_WALLTIME_END={end!r} is not in unix seconds", "unset it, or use `date +%s`")
        grace = os.environ.get("LAUNCH_GRACE_S", "")  # of pods, from their manifest
        self._grace = f" ({grace} s before SIGKILL)" if grace.isdigit() else ""
        self._stop_at = float(end) - settings.before_end_s if end else float("inf")

    def install(self) -> None:
        """Set the handlers. Call it in the main thread, before anything slow. Below nohup, SIGHUP stays ignored."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if now > self._interrupted + 1:
                signal.default_int_handler(number, None)
            self._interrupted = min(now, self._interrupted)
        self._signal = signal.Signals(number).name

    def reason(self) -> str | None:
        """Why this rank should stop, or None. Looks at the file system at most once a second."""
        if self._reason is None and self._signal is not None:
            written = _in_stop_file(self.stop_file) if self.stop_file else ""
            self._reason = written if written.startswith("signal ") else f"signal {self._signal}{self._grace}"
        now = time.monotonic()
        if self._reason is None and now >= self._next_look:
            self._next_look = now + 1
            if time.time() >= self._stop_at:
                self._reason = "end of the allocation"
            elif self.stop_file and self.stop_file.exists():
                self._reason = _in_stop_file(self.stop_file)
        return self._reason


@contextmanager
def shielded() -> Iterator[None]:
    """Processes that are started inside inherit blocked stop signals, and so outlive one that is sent to the whole job.

    Slurm without cgroups, PBS, systemd and `kill -- -PGID` signal every process: also a fork server, which has no
    handler of its own, and a worker that has not come to set one. This rank itself misses nothing: a blocked signal
    goes to another thread, or is delivered at the end of the block.
    """
    with _blocked():
        resource_tracker.ensure_running()  # else started below by the first queue or semaphore, and see the next line
    with _blocked():  # again: until Python 3.13 the tracker's start ends with SIGINT and SIGTERM let through
        yield


@contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """In a process that was started in `shielded`: ignore stop signals, which are the training process's business."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _in_stop_file(path: Path) -> str:
    """A launch script writes the signal that it got into the file, if it sends none (below mpiexec), or another one."""
    with suppress(OSError):
        first, *_ = path.read_text(errors="replace").splitlines() or [""]
        if re.fullmatch(r"signal [A-Z0-9]+ .{1,200}", first):
            return first
    return f"stop file {path}"


def kind_of_stop(reason: str) -> KindName:
    """The kind of outcome that a reason to stop leads to."""
    return next(kind for beginning, kind in KINDS.items() if reason.startswith(beginning))
