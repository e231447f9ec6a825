"""The last changes of phase of this rank, for the picture of a failure. They outlive the process while a sibling lives.

They stand in a memory file without a name (memfd_create(2), Linux), which the other ranks of the host open through
/proc once they know this process. So they can be read when it is killed, suspended, or holds the GIL in C code; nothing
is written to a file system while training goes on, and nothing is left behind. Without memory files they are kept in
plain memory, and lost with the process.

Times are `time.monotonic_ns()`: it does not jump, and is one clock for all processes of a host.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from contextlib import suppress
from pathlib import Path

KEPT = 4096  # changes: hundreds of steps
NAMES, NAME = 64, 48  # phases that can be told apart, and bytes of a name
LABEL = "ddp-phases"
HEAD = struct.Struct("=8sq")  # what this is, and how many changes there were
ENTRY = struct.Struct("=qq")  # when; finished steps, and in the last byte the number of the name
MAGIC, WORD = b"phases 1", 8
ENTRIES = HEAD.size + NAMES * NAME  # where they begin
SIZE, FIRST = ENTRIES + KEPT * ENTRY.size, ENTRIES // WORD

Change = tuple[int, str, int]  # when, in monotonic nanoseconds; phase; finished steps


class Phases:
    """A ring of `KEPT` changes. One thread at a time may `add`."""

    def __init__(self) -> None:
        self.heard: dict[int, int] = {}  # number of a message that all ranks hear at once -> when this one did
        self._buffer: mmap.mmap | None = None
        self._words: memoryview | None = None  # of `_buffer`, numbers of 8 bytes: the fastest way to write there
        self._names: dict[str, int] = {}
        self._count = 0

    def begin(self) -> None:
        """Keep changes from now on."""
        if self._buffer is not None:
            return
        buffer = _memory()
        HEAD.pack_into(buffer, 0, MAGIC, 0)
        self._buffer, self._words = buffer, memoryview(buffer).cast("q")
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)  # a loader worker is no rank

    def _forget(self) -> None:
        self._buffer = self._words = None

    def add(self, name: str, step: int) -> None:
        """This rank comes to the phase `name` now. It stands in the way of a step, so it must be quick."""
        words = self._words
        if words is None:
            return
        number = self._names.get(name)
        if number is None:
            number = self._number(name)
        place = FIRST + self._count % KEPT * 2
        words[place] = time.monotonic_ns()
        words[place + 1] = (int(step) & 0xFFFFFFFF) << 8 | number
        self._count += 1  # last, so that a change that a kill has cut short does not count
        words[1] = self._count

    def _number(self, name: str) -> int:
        """The names that come first get a place; should there be no end of them, the rest share the last one."""
        number = min(len(self._names), NAMES - 1)
        text = name.encode()[: NAME - 1] if len(self._names) < NAMES - 1 else b"others"
        assert self._buffer is not None
        self._buffer[HEAD.size + number * NAME : HEAD.size + (number + 1) * NAME] = text.ljust(NAME, b"\0")
        self._names[name] = number
        return number

    def hear(self, number: int) -> None:
        """The message `number` has just come: see `report.timeline`, which sets the clocks of all hosts by it."""
        self.heard[number] = time.monotonic_ns()
        while len(self.heard) > 8:
            self.heard.pop(next(iter(self.heard)))

    def changes(self) -> list[Change]:
        """What is kept, oldest first."""
        return read(bytes(self._buffer)) if self._buffer is not None else []


phases = Phases()


def _memory() -> mmap.mmap:
    with suppress(OSError, AttributeError):  # not Linux, no more open files, no memory
        file = os.memfd_create(LABEL)
        try:
            os.posix_fallocate(file, 0, SIZE)  # now: a page that cannot be had later is a SIGBUS
            return mmap.mmap(file, SIZE)  # duplicates the descriptor, and so keeps the file
        finally:
            os.close(file)
    return mmap.mmap(-1, SIZE)


def open_of(pid: int) -> int | None:
    """A descriptor of the changes of another process of this user and host, or None if it has none."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if os.readlink(link).startswith(f"/memfd:{LABEL}"):
                    return os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    return None


def read_from(descriptor: int) -> list[Change]:
    """What `open_of` has opened. Raises ValueError or OSError."""
    return read(os.pread(descriptor, SIZE, 0))


def read(memory: bytes) -> list[Change]:
    """The changes in `memory`, oldest first, also while they are written to.

    Raises:
        ValueError: this is no such memory, or not all of it.
    """
    if len(memory) != SIZE or not memory.startswith(MAGIC):
        raise ValueError(f"no changes of phase: {len(memory)} bytes that begin with {memory[:8]!r}")
    count = HEAD.unpack_from(memory)[1]
    names = [memory[at : at + NAME].rstrip(b"\0").decode(errors="replace") for at in range(HEAD.size, ENTRIES, NAME)]
    found: list[Change] = []
    for number in range(max(0, count - KEPT), count):
        when, what = ENTRY.unpack_from(memory, ENTRIES + number % KEPT * ENTRY.size)
        step, name = what >> 8, what & 0xFF
        if found and when < found[-1][0]:
            found.clear()  # the oldest were being overwritten
        if name < NAMES and when > 0:
            found.append((when, names[name], step))
    return found
