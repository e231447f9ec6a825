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

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .errors import Diverged, RunFailed, StopRequested
from .start.groups import Dist
from .start.stop import StopFlags
from .trace.collectives import caller
from .trace.heartbeat import beat, phase, progress

log = logging.getLogger("ddp")
T = TypeVar("T")
Progress = Callable[[str], None]
_calls = count()
_inside: list[str] = []  # the guard in which rank 0 works; not the phase, which stays as it is after an exception

_BEGINNINGS = ("all", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv", "monitored")
COLLECTIVES = [name for name in vars(dist.ProcessGroup) if name.lstrip("_").startswith(_BEGINNINGS)]


def on_rank0(joined: Dist, name: str, work: Callable[[Progress], T], flags: StopFlags | None = None) -> T | None:
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
    if joined.rank == 0:
        return _work(joined, name, key, work, flags)
    _wait(joined, name, key, flags)
    return None


def _work(joined: Dist, name: str, key: str, work: Callable[[Progress], T], flags: StopFlags | None) -> T:
    store = joined.store
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
            raise StopRequested(f"{reason} on {joined.who(0)}")
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


def _wait(joined: Dist, name: str, key: str, flags: StopFlags | None) -> None:
    """Poll rather than block: a blocked store call can neither print, nor notice a signal, nor see progress."""
    store, began, pause = joined.store, time.monotonic(), 0.01
    note, moved, spoke = "", began, began
    with phase(f"wait:{name}"):
        while not store.check([key]):
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)
            now = time.monotonic()
            reason = flags and flags.reason()
            if reason and not store.check(["guard/stop"]):
                store.set("guard/stop", f"{reason} on {joined.who(joined.rank)}")
            if pause >= 0.5 and store.check([f"{key}/progress"]):
                latest = store.get(f"{key}/progress").decode()
                if latest != note:
                    note, moved = latest, now
                    progress(f"rank 0: {note}")
            if now - spoke >= min(10.0, joined.clocks.guard_s / 2):
                spoke = now
                log.info(
                    "waiting for %s in guard:%s for %.0f s; last progress %.0f s ago%s, deadline %g s without any",
                    joined.who(0),
                    name,
                    now - began,
                    now - moved,
                    f" ({note})" if note else "",
                    joined.clocks.guard_s,
                )
        what = store.get(f"{key}/what").decode()
        if what != (mine := f"{name} at step {beat.step}"):
            problem = f"{joined.who(0)} called on_rank0 for {what} where {joined.who(joined.rank)} did for {mine}"
            raise Diverged(f"{problem}: every rank must call it, as often and in the same order", [0])
        answer = json.loads(store.get(key))
        if "stop" in answer:
            raise StopRequested(answer["stop"])
        if "error" in answer:
            raise RunFailed(f"{joined.who(0)} failed in guard:{name}: {answer['error']}")


@contextmanager
def no_collectives(name: str) -> Iterator[None]:
    """Make every collective of this process raise: only rank 0 is inside a guard, so the call would never return.

    The methods of the class `ProcessGroup` are replaced, so it does not matter how the caller imported the function.
    """
    targets: list[tuple[type, str]] = [(dist.ProcessGroup, method) for method in COLLECTIVES]
    targets.append((DistributedDataParallel, "forward"))
    saved = [vars(owner)[method] for owner, method in targets]

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"a collective inside guard:{name} at {caller()}: only rank 0 is here, so it would never return. "
            "Take the call out of the guarded function, and call model.module instead of a DDP model"
        )

    _inside.append(name)
    try:
        for owner, method in targets:
            setattr(owner, method, refuse)
        yield
    finally:
        _inside.remove(name)
        for (owner, method), original in zip(targets, saved, strict=True):
            setattr(owner, method, original)
