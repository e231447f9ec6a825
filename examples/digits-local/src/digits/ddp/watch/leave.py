"""The end of a run that went wrong: stacks, verdict, report, and a non-zero exit of every rank within seconds."""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, NoReturn

import torch.distributed as dist

from .. import trackers
from ..kinds import Verdict
from ..polling import poll
from ..rank_state import RankState
from ..report import outcome, report
from ..report.timeline import Rang
from ..saving import writer
from ..start import owner
from ..start.again import how_to_go_on
from ..start.board import post
from ..start.elastic import tell_torchrun
from ..start.groups import Job
from ..start.logs import say_last, silence_console
from ..trace.collectives import last_entry
from ..trace.heartbeat import beat, snapshot
from ..trace.phases import phases
from . import records
from .siblings import Siblings

log = logging.getLogger("ddp")
_ending = threading.Lock()  # taken once, by the thread that ends the process


def end(
    job: Job,
    store: dist.Store,
    run_dir: Path,
    stacks: IO[str],
    siblings: Siblings,
    verdict: Verdict,
    rang: Rang | None,
    mine: bool = True,
    gone: int = 0,
) -> NoReturn:
    """End this process, and through the store the others. Does not wait for PyTorch, whose abort can take minutes.

    The first verdict of any rank counts, and its author writes the report. `mine` is False for a verdict that another
    rank has announced: this rank writes the report only if the author dies before it has. `rang` is the clock that has
    brought it about, if one has; `gone` says how many ranks will not answer.
    """
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # for ever: the other thread is ending the process
    beat_s = job.clocks.beat_s
    # From here on nothing may hold the exit up: not the store, not a dead file system.
    faulthandler.dump_traceback_later(23 * beat_s, exit=True, file=stacks)
    silence_console()  # another thread may hold it, and wait for a reader
    for child in multiprocessing.active_children():
        child.kill()  # loader workers, which may be stuck
    stack, known = main_stack(), store
    faulthandler.dump_traceback(file=stacks, all_threads=True)
    try:
        store.set(f"stack/{job.rank}", stack)
        if mine:
            text = json.dumps(asdict(verdict))
            winner = store.compare_set("verdict", "", text).decode()
            number = post(store, "verdict")  # also when another rank's counts: it may have died before it could say so
            if gone < job.world_size - 1:  # the news thread hears it as well, at the moment at which the others do
                poll(lambda: number in phases.heard, beat_s, pause_s=0.005)
            mine, verdict = winner == text, Verdict(**json.loads(winner))
        records.publish(job, store, siblings, verdict)
        if mine and not verdict.stacks and verdict.kind not in ("rank_killed", "store_lost"):
            verdict = replace(verdict, stacks=_stacks_of(store, verdict.first_ranks or [], 3 * beat_s))
    except RuntimeError:
        log.warning("the store no longer answers: this rank reports what it knows by itself")
        known = dist.HashStore()
        records.publish(job, known, siblings, verdict)  # with the phases of all ranks of this host
    trackers.end_with(verdict)
    write_heartbeat(job, run_dir)
    tell_torchrun(verdict, job.place, stack, time.time() - (time.monotonic() - beat.progress_at))
    if not mine:
        poll((run_dir / "outcome.json").exists, 6 * beat_s)
    owner.release(run_dir)
    wrote = outcome.write(run_dir, verdict, job.place.attempt)
    if wrote or (mine and not (run_dir / "report.md").exists()):
        records.write(job, known, run_dir, verdict, rang, gone)
        words = [f"{verdict.kind}: {verdict.reason}"]
        words += [f"report: {run_dir / 'report.md'}"] if report.write(run_dir) else []
        say_last("\n".join([*words, *how_to_go_on(job.place, run_dir, verdict.exit_code)]))
    log.error("%s: %s", verdict.kind, verdict.reason)
    _leave_together(job, store, verdict, mine, gone)


def write_heartbeat(job: Job, run_dir: Path) -> None:
    """Leave this rank's state in the run directory. A full disk is no reason to stop training."""
    path = run_dir / "heartbeats" / f"rank{job.rank}.json"
    try:
        aside = path.with_suffix(".new")  # the report may read it at this moment
        aside.write_text(snapshot(job.rank, job.place.host).to_json())
        os.replace(aside, path)
    except OSError as error:
        log.warning("heartbeat not written: %s", error)


def _stacks_of(store: dist.Store, ranks: list[int], wait_s: float) -> dict[str, str]:
    """Where the blamed ranks are. They publish it when they see the verdict, unless they are gone."""
    found: dict[str, str] = {}

    def all_there() -> bool:
        for rank in ranks:
            if str(rank) not in found and store.check([f"stack/{rank}"]):
                found[str(rank)] = store.get(f"stack/{rank}").decode()
        return len(found) == len(ranks)

    poll(all_there, wait_s)
    return found


def _leave_together(job: Job, store: dist.Store, verdict: Verdict, author: bool, gone: int) -> NoReturn:
    """The author, and the rank that serves the store, leave last, so that all others can still read the verdict."""
    try:
        if verdict.kind == "rank_killed":
            Siblings(job, store).kill(verdict.first_ranks or [])
        store.add("left", 1)
        if author or job.rank == 0:
            poll(lambda: store.add("left", 0) >= job.world_size - gone, 5 * job.clocks.beat_s)
    except RuntimeError:
        log.warning("the store went away while this rank was leaving")
    writer.let_finish(5 * job.clocks.beat_s)
    trackers.close(3 * job.clocks.beat_s)
    os._exit(verdict.exit_code)


def with_last_entry(state: RankState, run_dir: Path) -> RankState:
    """Where a rank was that did not live to tell, and its last collective, from the file that it has kept."""
    entry, kept = last_entry(run_dir / "heartbeats" / f"collective{state.rank}.json")
    if kept.get("pid") != state.pid:  # the last attempt has left it
        return state
    missing = tuple(kept["missing"])
    state = replace(state, phase=kept["phase"], step=kept["step"], without_gradient=missing)
    if entry and entry[0] > (state.recent[-1][0] if state.recent else 0):
        state = replace(state, python_collectives=entry[0], recent=(*state.recent, entry))
    return state


def main_stack() -> str:
    """The Python stack of the main thread, innermost frame last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-12:]) if frame else ""
