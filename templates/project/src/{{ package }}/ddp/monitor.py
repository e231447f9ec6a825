"""The thread that watches: publishes this rank's heartbeat, notices stalled and silent ranks, and ends the job everywhere."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NoReturn

import torch.distributed as dist

from . import outcome, report
from .clocks import seconds
from .errors import STALLED
from .heartbeat import line, snapshot
from .setup import Dist, connect_store
from .verdict import Verdict, judge, stragglers

log = logging.getLogger("ddp")


class Monitor:
    """One daemon thread a rank, with a store client of its own: it works while the main thread waits in a dead collective.

    If even this thread cannot run (the GIL is held in C code), a timer inside the interpreter that needs no GIL writes
    the stacks and ends the process (`faulthandler.dump_traceback_later`); the others see this rank fall silent.
    """

    def __init__(self, joined: Dist, run_dir: Path, heartbeat_s: float) -> None:
        self._joined, self._run_dir, self._heartbeat_s = joined, run_dir, heartbeat_s
        self._clocks, self._rank = joined.clocks, joined.rank
        self._store: dist.Store = joined.store
        if joined.world_size > 1:
            self._store = connect_store(joined.place, joined.clocks, serve=False)
            self._store.set_timeout(seconds(self._clocks.silent_s))
        self._stacks: IO[str] = open(run_dir / "stacks" / f"rank{self._rank}.txt", "a")  # noqa: SIM115 (lives as long as the process)
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> (its last beat, when it changed)
        self._beats, self._spoke, self._stopping = 0, time.monotonic(), threading.Event()
        self._previous: list[dict[str, Any]] = []
        self._ending = threading.Lock()  # taken once, by the thread that ends the process
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; call it on every rank before anyone leaves in good order."""
        self._stopping.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._stopping.wait(self._clocks.beat_s):
            faulthandler.dump_traceback_later(1.5 * self._clocks.silent_s, exit=True, file=self._stacks)
            try:
                self._tick()
            except RuntimeError as error:  # every store error is one
                if not self._stopping.is_set():
                    self._end(Verdict(
                        STALLED, "store_lost", f"the store on the host of rank 0 ({self._joined.hosts[0]}) no longer answers: {error}",
                        [0], advice="look at rank 0's output, and whether that host is still up",
                    ), announce=False)  # fmt: skip

    def _tick(self) -> None:
        state = self._publish()
        if self._store.check(["verdict"]):
            self._end(Verdict(**json.loads(self._store.get("verdict"))), announce=False)
        if state["age_s"] > self._clocks.stall_limit(state["phase"]) or self._silent(self._watched(), self._clocks.silent_s):
            self._end(self.diagnose())
        if time.monotonic() - self._spoke >= self._heartbeat_s:
            self._spoke = time.monotonic()
            log.info("%s", line(state), extra={"file_only": self._rank != 0})
            (self._run_dir / "heartbeats" / f"rank{self._rank}.json").write_text(json.dumps(state))
            if self._rank == 0 and self._joined.world_size > 1:
                self._compare_ranks()

    def _publish(self) -> dict[str, Any]:
        self._beats += 1
        state = {**snapshot(self._rank, self._joined.place.host), "beat": self._beats}
        self._store.set(f"beat/{self._rank}", json.dumps(state))
        return state

    def _watched(self) -> range:
        """Rank 0 watches everyone and everyone watches rank 0: work that grows with the number of ranks, not its square."""
        return range(1, self._joined.world_size) if self._rank == 0 else range(1)

    def _states(self, ranks: range) -> list[dict[str, Any]]:
        """The last heartbeat of those `ranks` that have sent one."""
        keys = [key for rank in ranks if self._store.check([key := f"beat/{rank}"])]
        return [json.loads(self._store.get(key)) for key in keys]

    def _silent(self, ranks: range, limit: float) -> list[int]:
        now, silent = time.monotonic(), []
        for state in self._states(ranks):
            beat, since = self._seen.get(state["rank"], (-1, now))
            if state["beat"] != beat:
                self._seen[state["rank"]] = (state["beat"], now)
            elif now - since > limit:
                silent.append(state["rank"])
        return silent

    def _compare_ranks(self) -> None:
        states = self._states(range(self._joined.world_size))
        if len(states) == len(self._previous):
            for text in stragglers(self._previous, states):
                log.warning("%s", text)
        self._previous = states

    def diagnose(self) -> Verdict:
        """Compare the ranks' heartbeats over three beats: who moves, who waits, who is gone."""
        everyone = range(self._joined.world_size)
        self._silent(everyone, 0)
        for _ in range(3):
            time.sleep(self._clocks.beat_s)
            self._publish()
        silent = self._silent(everyone, 2.5 * self._clocks.beat_s)
        states = {state["rank"]: state for state in self._states(everyone)}
        blank = {**snapshot(self._rank, ""), "phase": "init", "note": "", "age_s": 0.0, "step": 0, "collectives": 0}
        return judge([states.get(rank, {**blank, "rank": rank, "host": self._joined.hosts[rank]}) for rank in everyone], silent)

    def fail(self, verdict: Verdict) -> NoReturn:
        """End the job from the main thread. Never returns; another rank's earlier verdict is kept."""
        self._end(verdict)
        raise AssertionError("unreachable: the process has ended")

    def wait_for_verdict(self) -> None:
        """Give whoever failed first a few beats to say so; ends the process if someone does."""
        time.sleep(4 * self._clocks.beat_s)

    def _end(self, verdict: Verdict, announce: bool = True) -> None:
        """Stacks, verdict, report, exit: non-zero and without waiting for PyTorch, whose abort can take minutes."""
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # the other thread is ending the process
        stack = main_stack()
        first = True
        try:
            faulthandler.dump_traceback(file=self._stacks, all_threads=True)
            self._store.set(f"stack/{self._rank}", stack)
            if announce:
                text = self._store.compare_set("verdict", "", json.dumps(verdict.__dict__)).decode()
                first, verdict = text == json.dumps(verdict.__dict__), Verdict(**json.loads(text))
            first = first and announce
            if first:
                verdict = replace(verdict, stacks=self._stacks_of(verdict.first_ranks or []))
        except RuntimeError:
            log.warning("the store no longer answers: this rank reports what it knows by itself")
        log.error("%s: %s", verdict.kind, verdict.reason)
        if outcome.write(self._run_dir, verdict, self._joined.place.attempt):
            report.write(self._run_dir)
        self._leave_together(first, verdict)

    def _stacks_of(self, ranks: list[int]) -> dict[str, str]:
        """Where the blamed ranks are. They publish it when they see the verdict, unless they are gone."""
        deadline, found = time.monotonic() + 3 * self._clocks.beat_s, {}
        while len(found) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if str(rank) not in found and self._store.check([f"stack/{rank}"]):
                    found[str(rank)] = self._store.get(f"stack/{rank}").decode()
            time.sleep(0.05)
        return found

    def _leave_together(self, first: bool, verdict: Verdict) -> NoReturn:
        """The rank that serves the store leaves last, so that all others can still read the verdict."""
        try:
            self._store.add("left", 1)
            deadline = time.monotonic() + 5 * self._clocks.beat_s
            while (first or self._rank == 0) and time.monotonic() < deadline:
                if self._store.add("left", 0) >= self._joined.world_size:
                    break
                time.sleep(0.05)
        except RuntimeError:
            log.warning("the store went away while this rank was leaving")
        logging.shutdown()
        sys.stdout.flush()
        os._exit(verdict.exit_code)


def main_stack() -> str:
    """The Python stack of the main thread, innermost frame last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-12:]) if frame else ""
