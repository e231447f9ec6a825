"""Reads flight-recorder dumps of several ranks, none of them trusted, and says who issued which collective.

A dump is a pickle (the files that NCCL writes) or JSON (what PyTorch's debug server answers). torch is not needed.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ddp_scaffold._errors import UsageError

MOST_BYTES = 256 * 2**20
MOST_ENTRIES = 200_000
STATES = ("scheduled", "started", "completed")
_PLAIN: Any = pickle._Unpickler  # the one written in Python: typeshed does not know its loaders
_OPCODES = (
    *("PROTO", "FRAME", "MARK", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG"),
    *("LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_LIST"),
    *("APPEND", "APPENDS", "LIST", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1"),
    *("TUPLE2", "TUPLE3", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
)


@dataclass(frozen=True)
class Collective:
    """One collective as one rank has recorded it. `state` is scheduled, started or completed."""

    group: str
    number: int
    operation: str
    sizes: str
    state: str
    line: str = ""  # the innermost frame outside torch, "train.py:88"


@dataclass(frozen=True)
class Dump:
    """What one rank has recorded; `members` gives the ranks of each group for which the dump tells them."""

    rank: int
    file: str
    collectives: tuple[Collective, ...]
    members: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Mismatch:
    """Ranks that recorded unlike collectives under one sequence number: each description, and who recorded it."""

    number: int
    ranks: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class GroupState:
    """Where the ranks of one process group stand.

    `last` has the newest collective of each rank; `lagging` the ranks that have issued fewer than the others. A rank
    in `undumped` has left no dump: it may be the one that the others wait for.
    """

    group: str
    last: Mapping[int, Collective]
    lagging: tuple[int, ...]
    undumped: tuple[int, ...]
    mismatch: Mismatch | None


class _PlainUnpickler(_PLAIN):  # type: ignore[misc]
    """Builds containers, strings and numbers only.

    The one in C is not used: it reserves memory for whatever memo index a file names, and takes nested tuples, whose
    hash recurses, for keys.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: _PLAIN.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
    }

    def _checked(self, keys: Sequence[object]) -> None:
        if not all(isinstance(key, str | int) for key in keys):
            raise pickle.UnpicklingError("a key that is neither text nor a number")

    def load_setitem(self) -> None:
        self._checked(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._checked(self.stack[::2])
        super().load_setitems()

    def load_dict(self) -> None:
        self._checked(self.stack[::2])
        super().load_dict()

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict


def _refusal(file: str, why: str) -> UsageError:
    return UsageError(f"{file} is no flight-recorder dump that can be read: {why}", "Leave it out, or copy it again.")


def plain(data: bytes, file: str) -> object:
    """Return the containers, strings and numbers of a pickle or of JSON.

    Raises UsageError where `data` is too large, is neither, or is a pickle that names a class or a function.
    """
    if len(data) > MOST_BYTES:
        raise _refusal(file, f"it is larger than {MOST_BYTES // 2**20} MiB")
    try:
        if data[:1] == b"{":
            return json.loads(data)
        return _PlainUnpickler(io.BytesIO(data)).load()
    except KeyError as error:
        raise _refusal(file, "it holds more than containers, text and numbers, or is damaged") from error
    except (pickle.UnpicklingError, ValueError, EOFError, IndexError, TypeError, AttributeError) as error:
        raise _refusal(file, "it is damaged") from error
    except (RecursionError, AssertionError, OverflowError, MemoryError) as error:
        raise _refusal(file, "it is damaged") from error


def read_dump(file: Path) -> Dump:
    """Return what a rank has recorded; its rank is the number with which the file's name ends.

    Raises UsageError where the file is no regular file, is too large, or is no dump.
    """
    if not file.is_file():
        raise _refusal(str(file), "it is no regular file")
    number = re.search(r"(\d+)(?:\.(?:json|pickle|pkl))?$", file.name)
    if not number:
        raise _refusal(str(file), "its name does not end with a rank")
    with file.open("rb") as stream:
        data = stream.read(MOST_BYTES + 1)
    return dump_of(plain(data, str(file)), int(number[1]), str(file))


def dump_of(record: object, rank: int, file: str) -> Dump:
    """Return the dump in `record`. Raises UsageError where it has another shape."""
    entries = record.get("entries") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(entries, list):
        raise _refusal(file, "it has no list of entries")
    if len(entries) > MOST_ENTRIES:
        raise _refusal(file, f"it has more than {MOST_ENTRIES} entries")
    found = (_collective(entry) for entry in entries if isinstance(entry, dict))
    return Dump(rank, file, tuple(each for each in found if each), _members(record.get("pg_config")))


def _collective(entry: dict[str, object]) -> Collective | None:
    number, group = entry.get("collective_seq_id"), entry.get("process_group")
    if entry.get("is_p2p") is True or not isinstance(number, int):
        return None
    name = group[0] if isinstance(group, list | tuple) and group else entry.get("pg_id", 0)
    state = str(entry.get("state"))[:40]
    # gloo leaves the state at "scheduled"; what it has finished is retired
    if entry.get("retired") is True or state not in STATES:
        state = "completed" if entry.get("retired") is True else "scheduled"
    operation = str(entry.get("profiling_name"))[:100].rpartition(":")[2]
    return Collective(_word(name), number, operation, _sizes(entry.get("input_sizes")), state, _line(entry))


def _word(value: object) -> str:
    return str(value)[:100] if isinstance(value, str | int) else "?"


def _sizes(value: object) -> str:
    """Return `[[4, 2]]` as "4x2". A list that refers to itself ends after the first 64 tensors of 16 dimensions."""
    shapes = value[:64] if isinstance(value, list | tuple) else []
    return ", ".join(
        "x".join(str(size) for size in shape[:16] if isinstance(size, int)) or "scalar"
        for shape in shapes
        if isinstance(shape, list | tuple)
    )


def _line(entry: dict[str, object]) -> str:
    frames = entry.get("frames")
    for frame in frames[:256] if isinstance(frames, list | tuple) else []:
        if isinstance(frame, dict) and "/torch/" not in (name := str(frame.get("filename"))[-400:]):
            return f"{name.rpartition('/')[2]}:{_word(frame.get('line'))}"
    return ""


def _members(config: object) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group. gloo leaves them empty: such a group is left out."""
    members = {}
    for name, group in list(config.items())[:10_000] if isinstance(config, dict) else []:
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, str) and len(ranks) < 2**20:
            try:
                ranks = ast.literal_eval(ranks)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
        if isinstance(ranks, list | tuple) and ranks and all(isinstance(rank, int) for rank in ranks):
            members[_word(name)] = tuple(ranks)
    return members


def compare(dumps: Sequence[Dump], world_size: int | None = None) -> tuple[GroupState, ...]:
    """Return where each process group stands, by the order in which their names sort.

    `world_size`, where it is known, tells of the group "0" which ranks have left no dump, even if no dump tells its
    members. Of the other groups, ranks that no dump lists are not known to belong to them.
    """
    groups = sorted({each.group for dump in dumps for each in dump.collectives})
    return tuple(_group_state(group, dumps, world_size) for group in groups)


def _group_state(group: str, dumps: Sequence[Dump], world_size: int | None) -> GroupState:
    listed = {rank for dump in dumps for rank in dump.members.get(group, ())}
    if group == "0" and world_size is not None:
        listed |= set(range(world_size))
    recorded = {dump.rank: [each for each in dump.collectives if each.group == group] for dump in dumps}
    last = {rank: max(own, key=lambda each: each.number) for rank, own in sorted(recorded.items()) if own}
    newest = max(each.number for each in last.values())
    silent = {rank for rank in recorded if rank in listed and rank not in last}
    lagging = silent | {rank for rank, own in last.items() if own.number < newest}
    undumped = tuple(sorted(listed - set(recorded)))
    return GroupState(group, last, tuple(sorted(lagging)), undumped, _mismatch(recorded))


def _mismatch(recorded: Mapping[int, Sequence[Collective]]) -> Mismatch | None:
    """Return the first sequence number whose operations, or sizes where those must agree, differ between ranks."""
    numbers: dict[int, dict[str, list[int]]] = {}
    for rank, own in sorted(recorded.items()):
        for each in own:
            # ranks may give other sizes to the collectives of uneven lists, and to a scatter or gather
            even = each.operation.lower().lstrip("_") in ("all_reduce", "allreduce", "broadcast", "reduce")
            what = f"{each.operation} {each.sizes}".strip() if even else each.operation
            numbers.setdefault(each.number, {}).setdefault(what, []).append(rank)
    for number, found in sorted(numbers.items()):
        if len(found) > 1:
            return Mismatch(number, {what: tuple(ranks) for what, ranks in found.items()})
    return None
