"""From the phases that each rank has kept to one file, `timeline.jsonl`, written by whoever writes the report.

They travel through the store, as stacks do: one file a run, and not one a rank, on a file system that hundreds of nodes
share. Ranks that cannot speak (killed, suspended, stuck in C code) are spoken for by those on their host.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..clocks import Clocks
from ..errors import FAILED, STALLED, DataFailed
from ..kinds import Verdict
from ..polling import poll
from ..report import outcome
from ..report.timeline import FILE, VERSION, Rang
from ..start.board import values
from ..start.groups import Job
from ..trace.heartbeat import beat, detailed, snapshot
from ..trace.phases import Change, phases, read_from
from .siblings import Siblings
from .whereabouts import waits

log = logging.getLogger("ddp")
MOST = 1 << 17  # changes of all ranks together: some megabytes, in the store and on disk
# What PyTorch says when others are late, in milliseconds: gloo, its monitored_barrier, NCCL's watchdog, and the store.
LATE = re.compile(
    r"Timed out waiting (\d+)ms|monitoredBarrier in (\d+) ms|Timeout\(ms\)=(\d+)|wait timeout after (\d+)ms"
)


def microseconds(seconds: float | None = None) -> int:
    """`time.monotonic()`, of now or as given, in the unit of the file."""
    return int(1e6 * (time.monotonic() if seconds is None else seconds))


def clock_that_rang(error: BaseException, clocks: Clocks) -> Rang | None:
    """The clock of PyTorch or of the loader that `error` tells of, if it does."""
    now = microseconds()
    if isinstance(error, DataFailed):
        return Rang("loader_s", clocks.loader_s, now) if error.kind == "dataloader_stalled" else None
    with suppress(Exception):  # its text is user code
        if found := LATE.search(str(error)):
            limit = next(int(each) for each in found.groups() if each) / 1000
            names = ("collective_s", "guard_s", "init_s")
            name = min(names, key=lambda each: abs(getattr(clocks, each) - limit))
            return Rang(name, limit, now)
    return None


def stall_clock(clocks: Clocks, phase: str, limit_s: float) -> Rang:
    """That `phase` took longer than `Clocks.stall_limit` allows."""
    known: Mapping[str, str] = {"init": "init_s", "compile": "compile_s", "wait:compile": "compile_s"}
    name = known.get(phase, "guard_s" if phase.startswith(("guard:", "wait:")) and phase != "wait:end" else "stall_s")
    if phase in clocks.phase_s and name == "stall_s":
        name = f"phase_s.{phase}"
    return Rang(name, limit_s, microseconds())


def publish(job: Job, store: dist.Store, siblings: Siblings, verdict: Verdict) -> None:
    """Put this rank's phases into the store, and those of ranks on this host that may not be able to."""
    try:
        _publish(job, store, siblings, verdict)
    except RuntimeError:  # of the store
        raise
    except Exception:  # an end without a picture is better than one that does not come
        log.exception("the phases of rank %d are missing in the picture", job.rank)


def _publish(job: Job, store: dist.Store, siblings: Siblings, verdict: Verdict) -> None:
    store.set(_key(job.rank), json.dumps(_own(job)))
    gone = siblings.endings()
    alone = isinstance(store, dist.HashStore)  # the real one is lost: this rank speaks for all of its host
    for rank, descriptor in siblings.phases().items():
        if not (alone or rank in gone or rank in (verdict.first_ranks or [])):
            continue
        try:
            changes = read_from(descriptor)
        except (OSError, ValueError) as error:
            log.warning("the phases of rank %d cannot be read: %s", rank, error)
            continue
        about = {"ended": gone.get(rank), "gone_at": siblings.gone_at(rank)}
        found = {**_record(job, rank, changes), **{name: value for name, value in about.items() if value is not None}}
        store.compare_set(_key(rank), "", json.dumps(found))  # what it says itself counts


def write(job: Job, store: dist.Store, run_dir: Path, verdict: Verdict, rang: Rang | None, gone: int) -> None:
    """Collect what all ranks have published, and leave it in the run directory.

    Waits two beats at most for those that are not `gone`. A problem is a warning: the report is written without it.
    """
    if verdict.exit_code not in (FAILED, STALLED):
        return
    found: list[bytes | None] = []
    awaited = 0 if isinstance(store, dist.HashStore) else job.world_size - gone  # there, all is known that will be
    keys = [_key(rank) for rank in range(job.world_size)]

    def all_there() -> bool:
        found[:] = values(store, keys)
        there = [each for each in found if each is not None]
        if len(there) < awaited or len(there) == len(found):
            return len(there) >= awaited
        # Some are of ranks that others have spoken for, and do not stand for those that have yet to speak.
        return sum("until" in json.loads(each) for each in there) >= awaited

    try:
        with suppress(RuntimeError):  # the store is going away: what has been found counts
            poll(all_there, 2 * job.clocks.beat_s)
        starts = sum(event["event"] == "start" for event in outcome.attempts(run_dir))
        head = {
            "version": VERSION,
            "start": starts,
            "world_size": job.world_size,
            "hosts": job.hosts,
            "author": job.rank,
            "now": microseconds(),
            "time": round(time.time(), 3),
            "rang": asdict(rang) if rang else None,
        }
        lines = [json.dumps(head), *(each.decode() for each in found if each is not None)]
        aside = run_dir / f".{FILE}-{os.getpid()}"
        aside.write_text("\n".join(lines) + "\n")
        os.replace(aside, run_dir / FILE)
    except OSError as error:
        log.warning("%s not written: %s", FILE, error)


def _key(rank: int) -> str:
    return f"phases/{rank}"


def _own(job: Job) -> dict[str, Any]:
    state = detailed(snapshot(job.rank, job.place.host))
    call = state.unfinished[0][1].removeprefix("nccl:") if state.unfinished else state.waits_in
    about = {
        "until": microseconds(),
        "moved": microseconds(beat.progress_at),
        "waiting": waits(state),
        "call": call,
        "group": state.group,
        "line": state.line,
        "heard": phases.heard,
    }
    return {**_record(job, job.rank, phases.changes()), **about}


def _record(job: Job, rank: int, changes: Sequence[Change]) -> dict[str, Any]:
    most = max(256, MOST // job.world_size)
    listed = [[when // 1000, name, step] for when, name, step in changes[-most:]]
    return {"rank": rank, "host": job.hosts[rank], "clock": _clock(), "changes": listed}


def _clock() -> str:
    """What `time.monotonic()` counts from: the start of this kernel, in this namespace of times."""
    found = []
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found.append(os.readlink("/proc/self/ns/time"))
    return " ".join(found) or os.uname().nodename
