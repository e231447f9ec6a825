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
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ddp_scaffold._errors import UsageError

MOST_ENTRIES = 200_000
# An entry has about 150 bytes, 17 of them of these. What is hostile asks by one byte for a list of 56 bytes.
MOST_BYTES = 64 * 2**20
MOST_CONTAINERS = 5_000_000
CONTAINERS = (b"]", b"}", b")", b"(", b"[", b"{", pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
STATES = ("scheduled", "started", "completed")
SAME_ON_ALL_RANKS = frozenset(
    {"all_reduce", "allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "all_reduce_barrier"}
    | {"_all_gather_base", "all_gather_into_tensor_coalesced", "all_gather_single"}
    | {"_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single"}
)
# The opcodes of a fixed size in what NCCL and gloo write, other than tuples, but for a pair of two texts that were met
# before. A memo index is below 2**20. Tuples are not put into the memo: not at once, nor behind a mark without items.
_PUT = rb"(?:q.|r..[\x00-\x0f]\x00)"
_RUN = re.compile(
    rb"(?:\](?:%b)?(?:\(e)?|\}(?:%b)?(?:\(u)?|\((?![eu])|[)Neuas\x88\x89]|h.h.\x86(?![qr])|[Kh].|%b|M..|[Jj]....|G.{8})"
    rb"{1,2000}" % (_PUT, _PUT, _PUT),
    re.DOTALL,
)
MOST_PAIRS = 16
_PLAIN: Any = pickle._Unpickler  # the one written in Python: typeshed does not know its loaders
_OPCODES = (
    *("PROTO", "FRAME", "MARK", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG"),
    *("LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_LIST"),
    *("APPEND", "APPENDS", "LIST", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1"),
    *("TUPLE2", "TUPLE3", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
)


class Collective(NamedTuple):
    """One collective as one rank has recorded it. `state` is scheduled, started or completed.

    A tuple: there may be a million of them, which one process hands to another.
    """

    group: str
    number: int
    operation: str
    sizes: str
    state: str
    line: str = ""  # the innermost frame outside torch, "train.py:88"
    types: str = ""  # of the elements, "Float"

    @property
    def form(self) -> str:
        """What all ranks of the group must have alike under one number."""
        return _form(self.operation, self.sizes, self.types)


@lru_cache(maxsize=4096)
def _form(operation: str, sizes: str, types: str) -> str:
    # Ranks may give other sizes to the collectives of uneven lists, and to a scatter or gather.
    return f"{operation} {sizes} {types}".strip() if operation.lower() in SAME_ON_ALL_RANKS else operation


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send or recv that is not completed. `peer` is a rank of the job; None where the dump does not tell it."""

    operation: str
    peer: int | None
    line: str = ""


@dataclass(frozen=True)
class Dump:
    """What one rank has recorded; `members` gives the ranks of each group for which the dump tells them.

    `whole` where nothing has been overwritten: the recorder is a ring that all groups of a rank share.
    """

    rank: int
    file: str
    collectives: tuple[Collective, ...]
    members: Mapping[str, tuple[int, ...]]
    descriptions: Mapping[str, str] = field(default_factory=dict)  # of the groups
    transfers: tuple[Transfer, ...] = ()
    whole: bool = True


@dataclass(frozen=True)
class Mismatch:
    """Ranks that recorded unlike collectives under one sequence number: each description, and who recorded it."""

    number: int
    ranks: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Skipped:
    """From this number on, what `ranks` have issued is that of the others, shifted by one collective."""

    number: int
    ranks: tuple[int, ...]
    extra: bool  # they have issued one more, rather than left one out


@dataclass(frozen=True)
class GroupState:
    """Where the ranks of one process group stand.

    `last` has the newest collective of each rank; `lagging` the ranks that have issued fewer than the others. A rank
    in `undumped` has left no dump: it may be the one that the others wait for. `skipped` tells what a mismatch comes
    from, where what follows shows it: the ranks that have left a collective out, or that alone have issued one.
    """

    group: str
    last: Mapping[int, Collective]
    lagging: tuple[int, ...]
    undumped: tuple[int, ...]
    mismatch: Mismatch | None
    members: tuple[int, ...] = ()
    skipped: Skipped | None = None

    @property
    def newest(self) -> int:
        return max(each.number for each in self.last.values())


class _FastUnpickler(pickle.Unpickler):
    """The one in C, for what `_is_harmless` has let through: a tenth of the time."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a persistent id")


def _is_harmless(data: bytes) -> bool:
    """Tell whether the unpickler in C may read a pickle, by looking at each opcode without carrying it out.

    It builds containers, text and numbers only; but on its own it reserves memory for whatever memo index a file names,
    and takes nested tuples for keys, whose hash recurses, without bound. Neither is in what NCCL and gloo write: memo
    indices are small, and pairs of two texts are the only tuples.
    """
    at, pairs = 0, 0
    while True:
        if run := _RUN.match(data, at):
            at = run.end()
        code = data[at : at + 1]
        if code == pickle.BINUNICODE:
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif code == pickle.LONG1:
            at += 2 + int.from_bytes(data[at + 1 : at + 2], "little")
        elif code == pickle.PROTO:
            at += 2
        elif code == pickle.TUPLE2 and pairs < MOST_PAIRS and data[at + 1 : at + 2] not in b"qr":
            pairs, at = pairs + 1, at + 1
        elif not run:
            return code == pickle.STOP


class _PlainUnpickler(_PLAIN):  # type: ignore[misc]
    """Builds containers, strings and numbers only, whatever a pickle asks for; keys are text and numbers."""

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
    if sum(map(data.count, CONTAINERS)) > MOST_CONTAINERS:
        raise _refusal(file, f"it may hold more than {MOST_CONTAINERS} containers")
    try:
        if data[:1] == b"{":
            return json.loads(data)
        if _is_harmless(data):
            return _FastUnpickler(io.BufferedReader(io.BytesIO(data))).load()
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
    entries = [entry for entry in entries if isinstance(entry, dict)]
    members, words = _members(record.get("pg_config")), _Words()
    return Dump(
        rank,
        file,
        tuple(_collective(entry, words) for entry in entries if _is_collective(entry)),
        members,
        _descriptions(entries),
        tuple(_transfer(entry, members) for entry in entries if _is_open_transfer(entry)),
        not entries or entries[0].get("record_id", 0) == 0,
    )


class _Words(dict[str, str]):
    """Keeps one copy of each text: thousands of entries have the same operation, sizes and line."""

    def __missing__(self, text: str) -> str:
        self[text] = text
        return text


def _is_collective(entry: dict[str, object]) -> bool:
    return entry.get("is_p2p") is not True and isinstance(entry.get("collective_seq_id"), int)


def _is_open_transfer(entry: dict[str, object]) -> bool:
    name = str(entry.get("profiling_name"))[:100].rpartition(":")[2]
    return entry.get("is_p2p") is True and _state(entry) != "completed" and name.startswith(("send ", "recv "))


def _state(entry: dict[str, object]) -> str:
    # gloo leaves the state at "scheduled"; what it has finished is retired
    state = str(entry.get("state"))[:40]
    if entry.get("retired") is True or state not in STATES:
        return "completed" if entry.get("retired") is True else "scheduled"
    return state


def _group(entry: dict[str, object]) -> str:
    group = entry.get("process_group")
    return _word(group[0] if isinstance(group, list | tuple) and group else entry.get("pg_id", 0))


def _collective(entry: dict[str, object], words: _Words) -> Collective:
    operation = str(entry.get("profiling_name"))[:100].rpartition(":")[2]
    types = entry.get("input_dtypes")
    return Collective(
        words[_group(entry)],
        int(str(entry["collective_seq_id"])),
        words[operation],
        words[_sizes(entry.get("input_sizes"))],
        words[_state(entry)],
        words[_line(entry)],
        words[", ".join(sorted({_word(each) for each in types[:64]})) if isinstance(types, list | tuple) else ""],
    )


def _transfer(entry: dict[str, object], members: Mapping[str, tuple[int, ...]]) -> Transfer:
    """Return a send or recv; in its name ("nccl:recv 3<-0") the ranks are those within the group."""
    name = str(entry.get("profiling_name"))[:100].rpartition(":")[2]
    found = re.fullmatch(r"(?:send|recv) \d{1,6}(?:->|<-)(\d{1,6})", name)
    ranks = members.get(_group(entry), ())
    peer = int(found[1]) if found else -1
    return Transfer(name.partition(" ")[0], ranks[peer] if 0 <= peer < len(ranks) else None, _line(entry))


def _descriptions(entries: Sequence[dict[str, object]]) -> dict[str, str]:
    found = {}
    for entry in entries:
        group = entry.get("process_group")
        if isinstance(group, list | tuple) and len(group) > 1 and group[1] not in {"", "undefined"}:
            found[_word(group[0])] = _word(group[1])
    return found


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
    members. Of the other groups, ranks that no dump lists are not known to belong to them. Groups of one name that
    have other members (`split_group` makes such) are groups of their own.
    """
    listings: dict[str, set[tuple[int, ...]]] = {}
    for dump in dumps:
        for group, ranks in dump.members.items():
            listings.setdefault(group, set()).add(ranks)
    recorded: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = {}
    for dump in dumps:
        groups: dict[str, list[Collective]] = {}
        for each in dump.collectives:
            groups.setdefault(each.group, []).append(each)
        for group, own in groups.items():
            ranks = dump.members.get(group, ())
            if not ranks:
                ranks = next((known for known in sorted(listings.get(group, ())) if dump.rank in known), ())
            recorded.setdefault((group, ranks), {})[dump.rank] = own
    return tuple(_group_state(group, ranks, own, dumps, world_size) for (group, ranks), own in sorted(recorded.items()))


def _group_state(
    group: str,
    members: tuple[int, ...],
    recorded: Mapping[int, Sequence[Collective]],
    dumps: Sequence[Dump],
    world_size: int | None,
) -> GroupState:
    listed = set(members)
    if group == "0" and world_size is not None:
        listed |= set(range(world_size))
    last = {rank: max(own, key=lambda each: each.number) for rank, own in sorted(recorded.items())}
    newest = max(each.number for each in last.values())
    # of a rank whose ring has turned over, the collectives of a group that is seldom used are gone
    silent = {dump.rank for dump in dumps if dump.whole and dump.rank in listed and dump.rank not in last}
    lagging = silent | {rank for rank, own in last.items() if own.number < newest}
    undumped = tuple(sorted(listed - {dump.rank for dump in dumps}))
    mismatch = _mismatch(recorded)
    skipped = _skipped(recorded, mismatch) if mismatch else None
    return GroupState(group, last, tuple(sorted(lagging)), undumped, mismatch, tuple(sorted(listed)), skipped)


def _mismatch(recorded: Mapping[int, Sequence[Collective]]) -> Mismatch | None:
    """Return the first sequence number whose operations, or sizes where those must agree, differ between ranks."""
    numbers: dict[int, dict[int, str]] = {}
    for rank, own in sorted(recorded.items()):
        for each in own:  # those that were coalesced have one number
            forms, form = numbers.setdefault(each.number, {}), each.form
            forms[rank] = f"{forms[rank]} + {form}" if rank in forms else form
    for number, forms in sorted(numbers.items()):
        if len(set(forms.values())) > 1:
            return Mismatch(number, {form: tuple(r for r in forms if forms[r] == form) for form in forms.values()})
    return None


def _skipped(recorded: Mapping[int, Sequence[Collective]], mismatch: Mismatch) -> Skipped | None:
    """Compare what the few and the many issued from the mismatch on, shifted by one, over two collectives or more."""
    if len(mismatch.ranks) != 2:
        return None
    few, many = sorted(mismatch.ranks.values(), key=len)
    if len(few) == len(many):
        return None
    forms = [
        [each.form for each in sorted(recorded[rank], key=lambda each: each.number) if each.number >= mismatch.number]
        for rank in (few[0], many[0])
    ]
    for extra, (longer, shorter) in ((True, forms), (False, forms[::-1])):
        length = min(len(longer) - 1, len(shorter))
        if length >= 2 and len(set(shorter[:length])) > 1 and longer[1 : 1 + length] == shorter[:length]:
            return Skipped(mismatch.number, few, extra)
    return None
