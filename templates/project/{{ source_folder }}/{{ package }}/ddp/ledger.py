"""What this rank has asked of the training group, so that ranks can be compared: operation, types, shapes, the line.

Only calls from Python are seen; DDP's own, which it checks when it is made, are counted by the sequence number.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

Entry = tuple[int, str, str]  # number from 1 on, "allreduce float32[3]", "train.py:88"
LINE = 300  # bytes of the kept entry
HERE, TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)

# Method of ProcessGroup -> which argument has a shape that all ranks must share. None: the arguments may differ.
METHODS: dict[str, int | None] = {
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "broadcast": 0,
    "reduce": 0,
    "allgather": 0,
    "_allgather_base": 0,
    "_reduce_scatter_base": 1,
    "reduce_scatter": 1,
    "gather": None,
    "scatter": None,
    "alltoall": None,
    "alltoall_base": None,
    "barrier": None,
}


@dataclass
class Ledger:
    """How many collectives, a checksum over all of them, and the last few in full."""

    count: int = 0
    digest: int = 0
    recent: deque[Entry] = field(default_factory=lambda: deque(maxlen=64))
    file: IO[bytes] | None = None  # holds the last entry, for when this process does not live to tell

    def add(self, what: str) -> None:
        """Note one collective, which the caller outside PyTorch and this package's plumbing is about to make."""
        self.count += 1
        self.digest = zlib.crc32(what.encode(), self.digest)
        entry = (self.count, what, caller())
        self.recent.append(entry)
        if self.file is not None:
            with suppress(OSError):
                os.pwrite(self.file.fileno(), json.dumps(entry).ljust(LINE).encode(), 0)


ledger = Ledger()


def keep_ledger(path: Path | None = None) -> None:
    """From now on, note every collective of the training group. Costs a few microseconds a call.

    `path` keeps the last one in a file: gloo ends a process (SIGABRT) that receives more than it expects.
    """
    if path is not None:
        with suppress(OSError):
            ledger.file = open(path, "wb", buffering=0)  # noqa: SIM115 (open until the end)
    for name, argument in METHODS.items():
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None and not hasattr(method, "noted"):
            setattr(dist.ProcessGroup, name, _noting(name, method, argument))


def last_entry(path: Path) -> Entry | None:
    """What `keep_ledger(path)` of another rank has kept."""
    try:
        number, what, where = json.loads(path.read_text())
        return int(number), str(what), str(where)
    except (OSError, ValueError, TypeError):
        return None


def _noting(name: str, method: Callable[..., Any], argument: int | None) -> Callable[..., Any]:
    @wraps(method)
    def noting(group: Any, *arguments: Any, **options: Any) -> Any:
        if group is dist.group.WORLD:
            shared = arguments[argument] if argument is not None and len(arguments) > argument else ()
            ledger.add(" ".join([name, *map(_kind, _tensors(shared))]))
        return method(group, *arguments, **options)

    noting.noted = True  # type: ignore[attr-defined]
    return noting


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in nested lists; all_gather's [[a, b]] counts as one list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def caller() -> str:
    """'train.py:88': the innermost line outside PyTorch and this plumbing, or the plumbing's own if all of it is."""
    frame, own = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(TORCH) and name != __file__:
            here = f"{Path(name).name}:{frame.f_lineno}"
            if not name.startswith(HERE):
                return here
            own = own or here
        frame = frame.f_back  # type: ignore[assignment]
    return own or "an unknown line"


def first_difference(recents: Sequence[Sequence[Entry]]) -> tuple[str, list[int] | None] | None:
    """Where the collectives of the ranks part: what each asked for there, and the ranks in the minority.

    Args:
        recents: the last entries of every rank, in rank order.

    Returns: None when nothing that two ranks remember differs. The minority is None when it cannot be told.
    """
    asked = [{number: (what, where) for number, what, where in recent} for recent in recents]
    for number in sorted(set().union(*asked)):
        there = [entries.get(number) for entries in asked]
        whats = [entry[0] for entry in there if entry is not None]
        if len(set(whats)) > 1:
            texts = [entry and f"rank {rank} {entry[0]} ({entry[1]})" for rank, entry in enumerate(there)]
            listing = _shortened([text for text in texts if text])
            return f"collective {number} was {listing}", minority([entry and entry[0] for entry in there])
    return None


def minority(values: Sequence[object]) -> list[int] | None:
    """The ranks whose value is not that of more than half of all ranks, or None if there are none or no majority."""
    for value in values:
        if 2 * values.count(value) > len(values):
            return [rank for rank, other in enumerate(values) if other != value] or None
    return None


def _shortened(texts: list[str], most: int = 6) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} others" if len(texts) > most else "")
