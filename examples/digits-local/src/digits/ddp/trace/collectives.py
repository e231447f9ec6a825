"""What this rank has asked of the training group, so that ranks can be compared: operation, types, shapes, the lines.

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
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
import torch.distributed as dist

from ..process_group import handle
from ..rank_state import Entry
from .lines import of_frame, owner, standing

LINE = 1000  # bytes of each of the two things that are kept

# Method of ProcessGroup -> which argument has a shape that all ranks must share. None: the arguments may differ.
METHODS: dict[str, int | None] = {
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "broadcast": 0,
    "reduce": 0,
    "allgather": 0,
    "_allgather_base": 0,
    "all_gather_single": 0,
    "_reduce_scatter_base": 1,
    "reduce_scatter_single": 1,
    "reduce_scatter": 1,
    "gather": None,
    "scatter": None,
    "alltoall": None,
    "alltoall_base": None,
    "all_to_all_single": None,
    "barrier": None,
    "monitored_barrier": None,
}
SINGLE = ("send", "recv", "recv_anysource")  # between two ranks: never the same on all
COMPOUND = ("_object", "_object_list")  # what PyTorch makes of several collectives, in one call of the user's


@dataclass
class Ledger:
    """How many collectives, a checksum over all of them, and the last few in full."""

    count: int = 0
    decisions: int = 0  # calls on the control group. gloo's own number counts a monitored_barrier per peer on rank 0
    digest: int = 0
    recent: deque[Entry] = field(default_factory=lambda: deque(maxlen=64))
    last: tuple[str, str] = ("", "")  # lines of the last call of any group, and whose it is: "" is the training group
    file: IO[bytes] | None = None  # holds the last entry, for when this process does not live to tell
    control: dist.ProcessGroup | None = None  # the group of decisions
    opened: tuple[str, str] = ("", "")  # file and function in which the session was opened
    compound: FrameType | None = None  # the call of several collectives that is under way, held so that it is no other

    def add(self, what: str, group: object = None) -> None:
        """Note one call, which the caller outside PyTorch and this package's plumbing is about to make."""
        frame = sys._getframe(3)  # past `_note`, below, and what calls it
        call, where = standing(of_frame(frame), self.opened)
        self.last = (where, self.whose(group))
        self.decisions += group is self.control
        if self.last[1] or what in SINGLE:
            return
        self.digest = zlib.crc32(what.encode(), self.digest)
        compound = _outermost(frame) if call.endswith(COMPOUND) else None
        if compound is not None and compound is self.compound:
            return
        self.count, self.compound = self.count + 1, compound
        shapes = what.split(" ")[1:] if compound is None else []
        entry = (self.count, " ".join([call or what.split(" ")[0], *shapes]), where)
        self.recent.append(entry)
        self.keep(json.dumps(entry), 0)

    def keep(self, text: str, place: int) -> None:
        """Write `text` at this place of the file, if there is one."""
        if self.file is not None:
            with suppress(OSError):
                os.pwrite(self.file.fileno(), text.encode()[: LINE - 1].ljust(LINE), place * LINE)

    def whose(self, group: object) -> str:
        """Which group that is, in words; "" is the training group."""
        if group is None or group is dist.group.WORLD:
            return ""
        if group is self.control:
            return "the control group"
        with suppress(Exception):  # a group that is being destroyed
            ranks = dist.get_process_group_ranks(group)  # type: ignore[arg-type]
            listing = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
            return f"the group of rank{'s' * (len(ranks) > 1)} {listing}"
        return "another group"


ledger = Ledger()


def keep_ledger(path: Path | None = None, control: dist.ProcessGroup | None = None) -> None:
    """From now on, note every collective. Costs some microseconds a call.

    `path` keeps the last one in a file: gloo ends a process (SIGABRT) that receives more than it expects.
    """
    ledger.control = control
    opener = next((line for line in of_frame(sys._getframe(1)) if owner(line[0]) == "user's"), ("", 0, ""))
    ledger.opened = (opener[0], opener[2])
    if path is not None:
        with suppress(OSError):
            ledger.file = open(path, "wb", buffering=0)  # noqa: SIM115 (open until the end)
    handle(_note)


def last_entry(path: Path) -> tuple[Entry | None, dict[str, Any]]:
    """What `keep_ledger(path)` of another rank has kept: its last collective, and where it was (heartbeat.standing)."""
    entry, state = None, dict[str, Any]()
    with suppress(OSError, ValueError, TypeError):
        text = path.read_bytes()
        with suppress(ValueError, TypeError):
            number, what, where = json.loads(text[:LINE])
            entry = (int(number), str(what), str(where))
        state = json.loads(text[LINE : 2 * LINE])
    return entry, state


def _note(name: str, group: object, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if name in METHODS or name in SINGLE:
        argument = METHODS.get(name)
        shared = arguments[argument] if argument is not None and len(arguments) > argument else ()
        ledger.add(" ".join([name, *map(_kind, _tensors(shared))]), group)
    return make(*arguments, **options)


def _outermost(frame: FrameType | None) -> FrameType | None:
    """The outermost of the frames in PyTorch from here on: the call as the user has written it."""
    found = None
    while frame is not None and (found is None or owner(frame.f_code.co_filename) == "torch"):
        found = frame if owner(frame.f_code.co_filename) == "torch" else found
        frame = frame.f_back
    return found


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
    """'utils.py:12 < train.py:88': the lines outside PyTorch and this plumbing that have led here."""
    return standing(of_frame(sys._getframe(1)), ledger.opened)[1]


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
