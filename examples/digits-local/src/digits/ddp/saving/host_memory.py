"""Memory of this host that is taken once, and holds one copied state after the other.

On a GPU's host its pages are pinned, so that the GPU writes into them by itself: 4.4 GB in 0.08 s on an H200. It is one
mapping of its own, exactly as large as needed. PyTorch's pinned memory comes in powers of two, and its plain memory
would be shared, page by page, with every process that is forked meanwhile, as loader workers are.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

ALIGNED = 64  # bytes; what torch.save aligns tensors to in a file
PAGE = 4096
TOUCHED = 1 << 26  # bytes that are asked of the system in one call, which a training step may have to wait for
SHARE = 0.8  # of the memory that is free, which a copy may take at most
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of this process


@dataclass
class Block:
    """Memory for one copied state. It is given back when nothing refers to it any more."""

    memory: mmap.mmap
    pinned: bool = False

    def part(self, offset: int, size: int) -> Tensor:
        """`size` bytes from `offset` on: uint8 [size], with a storage of its own."""
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=offset)

    def holds(self, view: memoryview) -> bool:
        """Whether `view` is of this memory."""
        address = numpy.asarray(view).__array_interface__["data"][0]
        return bool(0 <= address - self.part(0, 1).data_ptr() < len(self.memory))


class HostMemory:
    """The block of this process, and who is making it ready."""

    def __init__(self) -> None:
        self._block: Block | None = None
        self._why = ""  # there is none
        self._thread: threading.Thread | None = None  # who changes it; one at a time

    def prepare(self, size: int, device: torch.device) -> threading.Thread:
        """Begin to make `size` bytes ready, in a thread: system and driver need seconds for gigabytes."""
        self._thread = threading.Thread(target=self._take, args=(size, device), name="host memory", daemon=True)
        self._thread.start()
        return self._thread

    def take(self, size: int, device: torch.device) -> Block | str:
        """At least `size` bytes, or why there are none. What the last block holds is lost.

        Args:
            device: from which will be copied; its driver pins the memory.
        """
        if self._thread is not None:
            self._thread.join()
        if self._block is None or len(self._block.memory) < size:
            # In a thread, since a failure of cudaHostRegister stays with the thread, and PyTorch would raise it later.
            self.prepare(size, device).join()
        if self._block is not None and len(self._block.memory) >= size:
            return self._block
        return self._why

    def _take(self, size: int, device: torch.device) -> None:
        if self._block is not None:
            _unpin(self._block)
        self._block = None
        free = available()
        self._why = f"a copy needs {size / 1e9:.2f} GB of host memory, and {free / 1e9:.2f} GB are free"
        if size <= SHARE * free:
            try:
                self._block = _new_block(size, device)
            except (OSError, ValueError) as error:  # a limit of its own (ulimit -v)
                self._why = f"a copy needs {size / 1e9:.2f} GB of host memory: {error}"


def available() -> float:
    """Bytes of memory that are free for this process, infinity where the system does not tell."""
    return min((float("inf"), _free_of_host(), *_free_of_groups()))


def _new_block(size: int, device: torch.device) -> Block:
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    block = Block(mmap.mmap(-1, max(PAGE, size), **private))
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a child has no use for it; not on every system
        with suppress(OSError, AttributeError):
            block.memory.madvise(getattr(mmap, advice))
    for start in range(0, size, TOUCHED):
        block.part(start, min(TOUCHED, size - start))[::PAGE].zero_()
    if device.type == "cuda" and size:
        with suppress(RuntimeError, AttributeError):  # copies are slower then, and as right
            torch.cuda.set_device(device)
            address = block.part(0, size).data_ptr()
            block.pinned = int(torch.cuda.cudart().cudaHostRegister(address, size, PORTABLE)) == 0
    return block


def _unpin(block: Block) -> None:
    if block.pinned:
        torch.cuda.cudart().cudaHostUnregister(block.part(0, 1).data_ptr())
        block.pinned = False


def _free_of_host() -> float:
    """MemAvailable: what can be had without swapping (proc_meminfo(5))."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return float("inf")


def _free_of_groups() -> Iterator[float]:
    """What the control groups of this process leave: beyond it, the kernel kills. Version 2, then version 1."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from _free_along(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _free_along(Path("/sys/fs/cgroup/memory"), path, *names)


def _free_along(root: Path, path: str, limit: str, used: str, cache: str) -> Iterator[float]:
    """Of a group and all above it. In a container the path may be one of the host, and only the root be there."""
    group = root / path.lstrip("/")
    for directory in (group, *group.parents):
        with suppress(OSError, ValueError):
            most, now = (int((directory / name).read_text()) for name in (limit, used))  # "max": no limit, a ValueError
            fields = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            yield float(most - now + int(fields.get(cache, 0)))
        if directory == root:
            return
