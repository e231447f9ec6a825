"""Where this rank is: phase, step, last sign of progress. Other ranks read it from the store, people from the log."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from .. import faults
from ..rank_state import RankState
from . import gradients, marks, spent
from .collectives import ledger
from .lines import of_error, of_thread, standing
from .phases import phases
from .slow_steps import Pace

# Phases in which a rank waits for the others. One that stays here too long is a victim, not the cause.
WAITING = ("backward", "agree", "wait:", "shutdown")
# Where the innermost frame of a main thread is that waits for other ranks, or for a GPU that does.
WAITING_FILES = (
    *("/torch/distributed/", "/torch/autograd/", "/torch/cuda/", "/torch/_tensor.py"),
    "/torch/nn/parallel/distributed.py",  # buffers are broadcast in DDP's forward
)
NAMES = 8  # of parameters, at most, in a state


@dataclass
class Beat:
    """The state of one rank. Times are `time.monotonic()` seconds of this process."""

    phase: str = "init"
    epoch: int = 0
    step: int = 0
    note: str = ""
    progress: int = 0
    progress_at: float = field(default_factory=time.monotonic)
    entered_at: float = field(default_factory=time.monotonic)  # when the present phase began, or was come back to
    entered: int = 0  # `progress` at that time
    seconds: dict[str, float] = field(default_factory=dict)  # spent in each phase so far, without those inside it
    longest: dict[str, float] = field(default_factory=dict)  # the longest time without progress in each phase so far
    complete: int = 0  # the last step of which the GPU is known to have finished all work
    missing: list[str] = field(default_factory=list)  # parameters without a gradient after the last backward, on gloo
    lost: tuple[str, str] | None = None  # the call, and its lines, that failed because of another rank
    pace: Pace = field(default_factory=Pace)
    held_until: float = 0.0  # until then no Python code need run in this process
    backward_s: float = 0.0  # seconds in `backward` up to the end of the last step
    lock: threading.Lock = field(default_factory=threading.Lock)


beat = Beat()
at_step: list[Callable[[int], None]] = []  # told by `step_done` how many steps are done
around: list[Callable[[str], AbstractContextManager[object]]] = []  # one at most: it shows a phase in a profile
on_held: list[Callable[[], None]] = []  # called when `beat.held_until` is set
_nothing = nullcontext()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Everything inside counts as `name`: its stall limit applies, and reports and stragglers are told by it.

    Inside `compile` it does nothing: there a forward may take as long as `clocks.compile_s`. Nor at the end, after the
    training loop: whoever waits there has left it, in whatever call.
    """
    outer = beat.phase
    if outer in ("compile", "wait:end"):
        yield
        return
    _enter(name)
    try:
        faults.inject(name, beat.step)
        with around[0](name) if around else _nothing:
            yield
    except BaseException as error:
        if _failed_in(error) is None:  # else in a phase inside this one
            error.failed_in_phase = name  # type: ignore[attr-defined]
        with beat.lock:  # no sign of progress: user code may go on, or wait for others on its way out
            _change_to(outer, keep=False)  # in the picture it stays where the error came, until it goes on
        raise
    _enter(outer)


def _failed_in(error: BaseException) -> str | None:
    """The phase in which `error`, or what it followed from, was raised; None if outside all phases."""
    seen: BaseException | None = error
    while seen is not None:
        if name := getattr(seen, "failed_in_phase", None):
            return str(name)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return None


def end_with(error: BaseException) -> None:
    """This rank's loop has ended with `error`: from now on it is told to be in the phase in which that was raised."""
    with beat.lock:
        _change_to(_failed_in(error) or beat.phase)


def _enter(name: str) -> None:
    with beat.lock:
        _move_on()
        beat.note = ""
        left = beat.phase
        _change_to(name)
        marks.mark(beat.step, name)
        spent.watch.enter(name)
        if left == "backward":
            gradients.after_backward()
        _keep_standing(left == "backward")


def _keep_standing(after_backward: bool) -> None:
    """For when this process does not live to tell: on gloo, where one that receives too much is ended."""
    if ledger.file is not None:
        if after_backward:
            beat.missing = [name[:80] for name in gradients.without_gradient()[:NAMES]]
        elif beat.phase in ("data", "forward", "backward"):
            beat.missing = []
        kept = {"pid": os.getpid(), "phase": beat.phase, "step": beat.step, "missing": beat.missing}
        ledger.keep(json.dumps(kept), 1)


def _change_to(name: str, keep: bool = True) -> None:
    now = beat.progress_at
    beat.seconds[beat.phase] = beat.seconds.get(beat.phase, 0.0) + now - beat.entered_at
    beat.phase, beat.entered_at, beat.entered = name, now, beat.progress
    if keep:
        phases.add(name, beat.step)


def progress(note: str = "") -> None:
    """Say that this rank moves on inside a long phase, and optionally where it is ("DDIM step 3 of 50")."""
    with beat.lock:
        _move_on()
        beat.note = note


def _move_on() -> None:
    now = time.monotonic()
    beat.longest[beat.phase] = max(beat.longest.get(beat.phase, 0.0), now - beat.progress_at)
    beat.progress += 1
    beat.progress_at = now


def step_done(step: int, epoch: int) -> None:
    """`step` optimiser steps are finished (counted from the start of the run, not of this attempt).

    Called once before the loop as well: what follows is no longer "init", and outside any other phase it is "train".
    """
    with beat.lock:
        _move_on()
        beat.step, beat.epoch = step, epoch
        beat.backward_s = beat.seconds.get("backward", 0.0)
        if beat.phase == "init":
            _change_to("train")
        else:
            spent.watch.step_done()
        _keep_standing(after_backward=False)
    beat.pace.step_done(step, beat.seconds)
    for tell in at_step:
        tell(step)


def collectives_issued(group: dist.ProcessGroup | None = None) -> int:
    """How many collectives this rank has issued on `group` (default: the training group), or -1 if it cannot tell.

    `_get_sequence_number_for_group` is not public; on gloo and NCCL it answers at once, also while a collective hangs.
    """
    if not dist.is_initialized():
        return 0
    counter = getattr(group or dist.group.WORLD, "_get_sequence_number_for_group", None)
    return int(counter()) if counter else -1


def collectives_open() -> int:
    """How many collectives of the training group this rank's GPU has not finished, or -1 if that cannot be told.

    Read from NCCL's flight record without its entries (under 1 ms, not public; torch 2.6 to 2.13 have it). On gloo
    the answer is -1: there the main thread itself waits, and its stack shows it.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None or not dist.is_initialized() or dist.get_backend() != "nccl":
        return -1
    with suppress(RuntimeError, ValueError, KeyError, TypeError):
        status = json.loads(dump(includeCollectives=False))["pg_status"]["0"]
        return int(status["last_enqueued_collective"]) - int(status["last_completed_collective"])
    return -1


def collectives_unfinished() -> list[tuple[int, str, str]]:
    """The first collectives of the training group that this rank's GPU has not finished: number, name, state.

    The state is "started" or "scheduled", from NCCL's flight recorder, which tells them apart only with
    TORCH_NCCL_ENABLE_TIMING: without start events all are "scheduled" (FlightRecorder.hpp, `update_state`; torch 2.6 to
    2.13). It queries CUDA events, so it is asked in a diagnosis only.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None or not dist.is_initialized() or dist.get_backend() != "nccl":
        return []
    with suppress(RuntimeError, ValueError, KeyError, TypeError):
        entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
        mine = [each for each in entries if each["process_group"][0] == "0" and not each.get("is_p2p")]
        found = [(int(each["collective_seq_id"]), each["profiling_name"], each["state"]) for each in mine]
        return sorted(each for each in found if each[2] != "completed")[:4]
    return []


def stand() -> tuple[str, str]:
    """The collective or synchronisation in which the main thread waits ("all_reduce"; "" if it does not), and where.

    A rank whose call has failed because of another rank counts as waiting in it.
    """
    if beat.lost:
        return beat.lost
    lines = list(of_thread(sys._current_frames().get(threading.main_thread().ident or 0)))
    call, where = standing(lines, ledger.opened)
    waits = bool(lines) and any(part in lines[0][0] for part in WAITING_FILES)
    return call if waits else "", where


def lose(error: BaseException) -> None:
    """This rank's call has failed because of another rank: from now on it is one that waits, for whoever asks."""
    call, where = standing(of_error(error), ledger.opened)
    beat.lost = (call or "a call that lost its peers", where)


def snapshot(rank: int, host: str) -> RankState:
    """The state of this rank: what is published, logged and judged."""
    waits_in, at = stand()
    with beat.lock:
        return RankState(
            rank=rank,
            host=host,
            phase=beat.phase,
            epoch=beat.epoch,
            step=beat.step,
            note=beat.note,
            progress=beat.progress,
            phase_progress=beat.progress - beat.entered,
            in_phase_s=round(time.monotonic() - beat.entered_at, 2),
            idle_s=round(time.monotonic() - beat.progress_at, 2),
            collectives=collectives_issued(),
            decisions=ledger.decisions,
            open_collectives=collectives_open(),
            waits_in=waits_in,
            lost_peers=beat.lost is not None,
            line=at,
            group=ledger.last[1] if waits_in and at == ledger.last[0] else "",
            python_collectives=ledger.count,
            phase_seconds={name: round(total, 3) for name, total in beat.seconds.items()},
        )


def detailed(state: RankState) -> RankState:
    """The state with what a diagnosis wants to know beside: it takes longer, and is asked for only then."""
    return replace(
        state,
        recent=tuple(ledger.recent),
        unfinished=tuple(collectives_unfinished()),
        without_gradient=tuple(gradients.without_gradient()[:NAMES]) if beat.phase != "backward" else (),
        reached=marks.reached(),
    )


def line(state: RankState) -> str:
    """One heartbeat line, the same for every rank, so that `grep` and `sort` work on them."""
    note = f" note={state.note!r}" if state.note else ""
    return (
        f"heartbeat rank={state.rank} host={state.host} phase={state.phase} epoch={state.epoch} "
        f"step={state.step} collectives={state.collectives} idle_s={state.idle_s:.1f}{note}"
    )
