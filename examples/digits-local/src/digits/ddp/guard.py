"""Long work on rank 0 alone, off the collective clock. The others wait on the store, never in a collective."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

from torch.nn.parallel import DistributedDataParallel

from .errors import Diverged, RunFailed, StopRequested
from .polling import poll
from .process_group import handled_by
from .start.groups import Job
from .start.stop import StopFlags
from .trace.collectives import caller
from .trace.heartbeat import beat, phase, progress

log = logging.getLogger("ddp")
T = TypeVar("T")
Progress = Callable[[str], None]
_calls = count()
_inside: list[str] = []  # the guard in which rank 0 works


def on_rank0(job: Job, name: str, work: Callable[[Progress], T], flags: StopFlags | None = None) -> T | None:
    """Run `work(progress)` on rank 0 while the others wait. Every rank must call it.

    `work` calls `progress("step 3 of 50")` as it moves on. A rank 0 without progress for `clocks.guard_s` ends the job
    with its stack; with progress it may take as long as it needs, however short the collective timeout is.

    Returns: what `work` returned on rank 0, None elsewhere.

    Raises:
        RunFailed: on the other ranks, when `work` raised on rank 0 (where the exception itself goes on).
        StopRequested: on all ranks, when `flags` is given, any rank was told to stop and `work` called `progress`.
    """
    if _inside:
        where = f"inside guard:{_inside[-1]}"
        raise RuntimeError(f"on_rank0({name!r}) {where}: only rank 0 is here. Call it after that one")
    key = f"guard/{next(_calls)}"
    if job.rank == 0:
        return _work(job, name, key, work, flags)
    _wait(job, name, key, flags)
    return None


def _work(job: Job, name: str, key: str, work: Callable[[Progress], T], flags: StopFlags | None) -> T:
    store = job.store
    store.set(f"{key}/what", f"{name} at step {beat.step}")
    told = 0.0

    def tell(note: str) -> None:
        nonlocal told
        progress(note)
        if time.monotonic() - told < 0.5:
            return
        told = time.monotonic()
        store.set(f"{key}/progress", note)
        if flags is None:  # not to be interrupted: the checkpoint that a stop waits for is written in a guard, too
            return
        if reason := flags.reason():
            raise StopRequested(f"{reason} on {job.who(0)}")
        if store.check(["guard/stop"]):
            raise StopRequested(store.get("guard/stop").decode())

    with phase(f"guard:{name}"):
        try:
            with no_collectives(name):
                result = work(tell)
        except StopRequested as stop:
            store.set(key, json.dumps({"stop": str(stop)}))
            raise
        except BaseException as error:
            text = "".join(traceback.format_exception_only(type(error), error)).strip()
            store.set(key, json.dumps({"error": text}))
            raise
        store.set(key, json.dumps({}))
    return result


def _wait(job: Job, name: str, key: str, flags: StopFlags | None) -> None:
    store, began = job.store, time.monotonic()
    note, moved, looked, spoke = "", began, began, began

    def answered() -> bool:
        nonlocal note, moved, looked, spoke
        if store.check([key]):
            return True
        now = time.monotonic()
        reason = flags and flags.reason()
        if reason and not store.check(["guard/stop"]):
            store.set("guard/stop", f"{reason} on {job.who(job.rank)}")
        if now - looked >= 0.5 and store.check([f"{key}/progress"]):
            looked, latest = now, store.get(f"{key}/progress").decode()
            if latest != note:
                note, moved = latest, now
                progress(f"rank 0: {note}")
        if now - spoke >= min(10.0, job.clocks.guard_s / 2):
            spoke = now
            log.info(
                "waiting for %s in guard:%s for %.0f s; last progress %.0f s ago%s, deadline %g s without any",
                job.who(0),
                name,
                now - began,
                now - moved,
                f" ({note})" if note else "",
                job.clocks.guard_s,
            )
        return False

    with phase(f"wait:{name}"):
        poll(answered, pause_s=0.01, longest_s=0.5)
        what = store.get(f"{key}/what").decode()
        if what != (mine := f"{name} at step {beat.step}"):
            problem = f"{job.who(0)} called on_rank0 for {what} where {job.who(job.rank)} did for {mine}"
            raise Diverged(f"{problem}: every rank must call it, as often and in the same order", [0])
        answer = json.loads(store.get(key))
        if "stop" in answer:
            raise StopRequested(answer["stop"])
        if "error" in answer:
            raise RunFailed(f"{job.who(0)} failed in guard:{name}: {answer['error']}")


@contextmanager
def no_collectives(name: str) -> Iterator[None]:
    """Make every collective of this process raise: only rank 0 is inside a guard, so the call would never return.

    So does the forward of a DDP model, whose collectives do not come from Python.
    """
    forward = DistributedDataParallel.forward

    def refuse(*_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError(
            f"a collective inside guard:{name} at {caller()}: only rank 0 is here, so it would never return. "
            "Take the call out of the guarded function, and call model.module instead of a DDP model"
        )

    _inside.append(name)
    try:
        DistributedDataParallel.forward = refuse  # type: ignore[method-assign]
        with handled_by(refuse):
            yield
    finally:
        _inside.remove(name)
        DistributedDataParallel.forward = forward  # type: ignore[method-assign]
