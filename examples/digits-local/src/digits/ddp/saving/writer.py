"""The thread that writes a checkpoint beside training: one at a time, on rank 0."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .directory import Note

LOOK_S = 0.1  # between two looks at how far it is


@dataclass
class Write:
    """A checkpoint on its way to the disk, or there."""

    step: int
    began: float = field(default_factory=time.monotonic)
    note: str = ""  # how far it is
    problem: str | None = None  # why it is not there
    error: BaseException | None = None  # nothing that a disk does: a mistake in the code
    told: bool = False  # whether all ranks know of the problem, or soon will
    done: threading.Event = field(default_factory=threading.Event)

    def result(self) -> str | None:
        """Why a write that is done has failed, or None. Raises what was raised, if the disk is not the reason."""
        if self.error is not None:
            raise self.error
        return self.problem


_newest: list[Write] = []  # one at most, until its result has been taken


def begin(step: int, work: Callable[[Note], str | None]) -> None:
    """Start `work`, which returns what went wrong, or None. No other may be in flight: see `wait`."""
    write = Write(step)

    def run() -> None:
        try:
            write.problem = work(lambda note: setattr(write, "note", note))
        except BaseException as error:  # goes on in the main thread
            write.error = error
        write.done.set()

    # A daemon: if the main thread ends by an exception outside a session, a dead file system does not hold it.
    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    _newest[:] = [write]


def wait(note: Note) -> Write | None:
    """Wait for the write in flight, and return it; None if there is none. `note` is called as it moves on."""
    if not _newest:
        return None
    (write,) = _newest
    said = ""
    while not write.done.wait(LOOK_S):
        if write.note != said:
            said = write.note
            note(f"checkpoint of step {write.step}: {said}")
    _newest.clear()
    return write


def in_flight() -> bool:
    """Whether a write has not ended."""
    return bool(_newest) and not _newest[0].done.is_set()


def failure() -> tuple[int, str] | None:
    """Once, when a write has failed: its step, and why. Does not wait.

    Raises what was raised, if the disk is not the reason.
    """
    if not _newest or not _newest[0].done.is_set() or _newest[0].told:
        return None
    (write,) = _newest
    problem = write.result()
    write.told = problem is not None
    return (write.step, problem) if problem else None


def let_finish(longest_s: float) -> None:
    """Before this process ends without further ado: a checkpoint that is nearly there is worth some seconds."""
    if _newest:
        _newest[0].done.wait(longest_s)
