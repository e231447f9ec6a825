"""What all lines together say of each rank: timeouts, counts of collectives, exceptions, ends."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .events import LOST, VAGUE, Event
from .flight_recorder import Dump, GroupState, compare
from .lines import Origin

# in the name of the file, or the whole name of a folder
FILE_RANK = re.compile(r"(?:^|[/_.-])rank[_-]?(\d{1,6})(?:[^\d/][^/]*)?$|(?:^|/)rank[_-]?(\d{1,6})/")
SRUN_TASK = re.compile(r"srun: error: \S+: task (\d+): ")
WATCHDOG_RANK = re.compile(  # before torch 2.2; and in what a watchdog of the default group throws
    r"^(?:\[[EWF] ProcessGroupNCCL[^\]]*\] )?\[(?:PG (?:ID )?0\b[^\]]* )?Rank (\d+)\]"
)
FILE_LOCAL = re.compile(r"/attempt_\d+/(\d+)/(?:(?:stdout|stderr)\.log|error\.json)$")
ATTEMPT = re.compile(r"/attempt_(\d+)/\d+/(?:(?:stdout|stderr)\.log|error\.json)$")
FAILS = frozenset({"sign", "exception", "raised", "logged", "death", "spawned"})
LAUNCHERS = frozenset({"elastic_row", "elastic_failed", "launcher_kill", "rank_exit", "deepspeed_exit", "slurm_task"})
ENDS = FAILS | LAUNCHERS | {"timeout", "finished", "project_verdict", "slurm_cancel", "launcher_signal", "heartbeat"}
SIGNAL_BASE = 128  # a shell's exit code of a process that a signal has ended is larger by that


@dataclass(frozen=True)
class Timeout:
    """A rank gave up a collective. `group` is empty before torch 2.3, whose lines do not name it."""

    rank: int | None
    event: Event
    operation: str
    sequence: int | None
    sizes: tuple[int, int] | None
    limit_ms: int | None
    waited_ms: int | None

    @property
    def since(self) -> float | None:
        """When the wait began, by the rank's own clock."""
        if self.event.clock is None or self.waited_ms is None:
            return None
        return self.event.clock - self.waited_ms / 1000

    @property
    def collective(self) -> str:
        return self.operation + (f" {self.sequence}" if self.sequence is not None else "")


@dataclass(frozen=True)
class Counts:
    """How far a rank is in a process group: the numbers of its last enqueued and last completed collective."""

    enqueued: int
    completed: int
    event: Event


@dataclass(frozen=True)
class Exit:
    rank: int
    code: int
    event: Event


@dataclass(frozen=True)
class Step:
    """The last step that a rank has printed, and of how many, where it says so."""

    number: int
    total: int | None
    event: Event


@dataclass
class Job:
    """Everything that the input tells, by rank."""

    timeouts: list[Timeout] = field(default_factory=list)
    reported: set[tuple[int | None, str]] = field(default_factory=set)  # ranks and collectives of `timeouts`
    counts: dict[str, dict[int, Counts]] = field(default_factory=lambda: defaultdict(dict))  # group -> rank -> counts
    failures: list[tuple[str, int | None, Event]] = field(default_factory=list)  # kind, rank
    consequences: list[tuple[int | None, Event]] = field(default_factory=list)
    hints: list[tuple[int | None, Event]] = field(default_factory=list)  # of a failure that the input does not have
    vague: list[tuple[int | None, Event]] = field(default_factory=list)  # NCCL has failed, and does not say in what
    exits: list[Exit] = field(default_factory=list)
    named: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    ranks: set[int] = field(default_factory=set)
    hosts: dict[int, str] = field(default_factory=dict)
    last_seen: dict[int, float] = field(default_factory=dict)
    world_size: int | None = None
    files: int = 0
    steps: dict[int, Step] = field(default_factory=dict)
    dumps: tuple[Dump, ...] = ()
    groups: tuple[GroupState, ...] = ()  # as the dumps have it

    @property
    def first_timeout(self) -> Event | None:
        return self.timeouts[0].event if self.timeouts else None


def gather(events: Iterable[Event], dumps: Sequence[Dump] = ()) -> Job:
    """Return what the events of all files and the flight-recorder dumps say together, in the order of files and lines.

    Of several dumps of a rank, as after a restart, the last counts.
    """
    every = _without_survived(_last_attempt(list(events)))
    job = Job(files=len({event.file for event in every}))
    rows = [event for event in every if event.name == "elastic_row"]
    local = LocalRanks(rows)
    launcher = bool(rows) or any(event.name in {"launcher_kill", "elastic_failed"} for event in every)
    for event in every:
        rank = _rank(event, local, tasks_are_ranks=not launcher)
        if rank is not None:
            job.ranks.add(rank)
            if event.origin.host:
                job.hosts.setdefault(rank, event.origin.host)
            if event.clock is not None:
                job.last_seen[rank] = max(event.clock, job.last_seen.get(rank, 0.0))
        _take(job, event, rank)
    job.world_size = _world_size(job)
    newest = {dump.rank: dump for dump in dumps}
    job.dumps = tuple(newest[rank] for rank in sorted(newest))
    job.groups = compare(job.dumps, job.world_size)
    job.ranks.update(newest)
    return job


def _last_attempt(every: list[Event]) -> list[Event]:
    """Return the events since torchrun started all ranks anew for the last time, where something ended since then."""
    begun: dict[str, int] = {}
    for event in every:
        if event.name == "restart":
            begun[event.file] = event.line
    attempts = {event.file: int(found[1]) for event in every if (found := ATTEMPT.search(event.file))}
    newest = max(attempts.values(), default=0)
    if not begun and not newest:
        return every
    late = [e for e in every if e.line > begun.get(e.file, 0) and attempts.get(e.file, newest) == newest]
    ended = any(e.name in ENDS and (e.file in begun or e.file in attempts) for e in late)
    return late if ended else every


def _without_survived(every: list[Event]) -> list[Event]:
    """Return the events without the failures that a job has survived: it took steps after them, and was done at last.

    A rank that is done says nothing of the others, and a launcher that tells of an end is right.
    """
    done = {event.file: event for event in every if event.name == "finished"}
    if not done or any(event.name in LAUNCHERS for event in every):
        return every
    steps = [event for event in every if event.name == "step"]

    def survived(event: Event) -> bool:
        end = done.get(event.file)
        if end is None or event.name not in FAILS or not _alike(event, end):
            return False
        return any(s.file == event.file and event.line < s.line < end.line and _alike(event, s) for s in steps)

    return [event for event in every if not survived(event)]


def _alike(one: Event, other: Event) -> bool:
    """Tell whether two lines may be of one rank: their prefixes do not say otherwise."""
    return one.origin == other.origin or other.origin == Origin()


class LocalRanks:
    """Which rank a local rank is, by the tables of torchelastic: each speaks for one node only."""

    def __init__(self, rows: Iterable[Event]) -> None:
        self.seen: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.tables = False
        for row in rows:
            self.tables = True
            for place in (row.file, _folder(row.file), ""):
                self.seen[place, int(row.values["lr"])].add(int(row.values["r"]))

    def rank(self, file: str, local: int) -> int | None:
        """Return the rank: by the table in the same file, else of the same folder, else of all, if that is one."""
        for place in (file, _folder(file), ""):
            if ranks := self.seen.get((place, local)):
                return next(iter(ranks)) if len(ranks) == 1 else None
        return None if self.several_nodes() else local

    def several_nodes(self) -> bool:
        """Tell whether a table shows that ranks are not local ranks, or that one local rank is several ranks."""
        return any({local} != ranks for (place, local), ranks in self.seen.items() if not place)


def _folder(file: str) -> str:
    return file.rpartition("/")[0] + "/"


def _rank(event: Event, local: LocalRanks, *, tasks_are_ranks: bool) -> int | None:
    origin = event.origin
    if origin.rank is not None:
        return origin.rank
    if event.name == "group_status" and (event.values.get("id") or event.values.get("short")) != "0":
        return None  # the rank within a sub-group, which is not the rank of the job
    if event.name in {"sign", "thread_ended"} and (found := WATCHDOG_RANK.search(event.text)):
        return int(found[1])
    if (
        event.name in {"elastic_row", "rank_exit", "lightning", "timeout", "group_status", "heartbeat_of_rank"}
        and "r" in event.values
    ):
        return int(event.values["r"])
    if tasks_are_ranks and (found := SRUN_TASK.search(event.text)):
        return int(found[1])
    if found := FILE_RANK.search(event.file):
        return int(found[1] or found[2])
    here = origin.local_rank
    if here is None and (found := FILE_LOCAL.search(event.file)):
        here = int(found[1])
    if here is not None:
        return local.rank(event.file, here)
    return origin.task if tasks_are_ranks else None


def _take(job: Job, event: Event, rank: int | None) -> None:
    job.named[event.name].append(event)
    if event.name == "step" and rank is not None:
        total = event.number("total")
        job.steps[rank] = Step(event.number("step") or 0, total, event)
    values = event.values
    if event.name == "timeout":
        sizes = (int(values["nin"]), int(values["nout"])) if "nin" in values else None
        entry = Timeout(rank, event, values["op"], event.number("seq"), sizes, event.number("to"), event.number("ran"))
        if (rank, entry.collective) not in job.reported:
            job.reported.add((rank, entry.collective))
            job.timeouts.append(entry)
    elif event.name == "group_status" and rank is not None:
        group = values.get("guid") or values.get("short") or "0"
        job.counts[group].setdefault(rank, Counts(int(values["e"]), int(values["c"]), event))
    elif event.name == "elastic_row":
        job.exits.append(Exit(int(values["r"]), int(values["x"]), event))
        job.hosts.setdefault(int(values["r"]), values["host"])
    elif event.name == "rank_exit":
        code = int(values["x"]) if "x" in values else -int(values["signal"])
        code = SIGNAL_BASE - code if SIGNAL_BASE < code < SIGNAL_BASE + 32 else code
        job.exits.append(Exit(int(values["r"]), code, event))
    elif event.name in {"spawned", "logged"}:
        job.hints.append((rank, event))
    elif event.name == "death" and not aborted(event):
        job.failures.append(("rank_killed", rank, event))
    elif event.name in {"sign", "exception", "raised"}:
        _take_failure(job, event, rank)


def aborted(event: Event) -> bool:
    """Tell whether a process is said to have aborted: that is often what something else has led to."""
    return "Aborted" in event.values.values()


def _take_failure(job: Job, event: Event, rank: int | None) -> None:
    kind = event.values.get("kind", "rank_exception")
    if "launcher" in event.values or kind in LOST:
        job.consequences.append((rank, event))
    elif kind == VAGUE:
        job.vague.append((rank, event))
    else:
        job.failures.append((kind, rank, event))


def _world_size(job: Job) -> int | None:
    """Return the number of ranks, where a line states it or the sizes of a gathering collective give it.

    These give the size of a process group: that is the job only where no line tells of a second group.
    """
    for event in (*job.named["lightning"], *job.named["world_size"]):
        if size := event.number("w") or event.number("n"):
            return size
    within = [timeout.event for timeout in job.timeouts if timeout.event.values.get("r")]
    if len(job.counts) > 1 or any(e.origin.rank not in {None, e.number("r")} for e in within):
        return None
    for timeout in job.timeouts:
        if timeout.sizes and min(timeout.sizes) > 0:
            small, large = sorted(timeout.sizes)
            if any(part in timeout.operation for part in ("ALLGATHER", "REDUCE_SCATTER")) and large % small == 0:
                return large // small if large // small > max(job.ranks, default=0) and large > small else None
    return None
