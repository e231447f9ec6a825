"""The thread that watches: publishes this rank's heartbeat, notices stalled and silent ranks, ends the job."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import torch.distributed as dist

from .clocks import seconds
from .ending import end, states, write_heartbeat
from .errors import STALLED
from .heartbeat import line, snapshot
from .setup import Dist, connect_store
from .verdict import Verdict, judge, stragglers

log = logging.getLogger("ddp")


class Monitor:
    """One daemon thread a rank, with its own store client: it works while the main thread waits in a dead collective.

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
        self._stacks: IO[str] = open(run_dir / "stacks" / f"rank{self._rank}.txt", "a")  # noqa: SIM115 (open until the end)
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> (its last beat, when it changed)
        self._beats, self._spoke, self._stopping = 0, time.monotonic(), threading.Event()
        self._previous: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._publish()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; call it on every rank before anyone leaves in good order."""
        self._stopping.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def fail(self, verdict: Verdict, mine: bool = True) -> NoReturn:
        """End the job, from any thread. An earlier verdict of another rank is kept."""
        end(self._joined, self._store, self._run_dir, self._stacks, verdict, mine)

    def wait_for_verdict(self) -> None:
        """Give whoever failed first a few beats to say so; the process ends if someone does."""
        time.sleep(4 * self._clocks.beat_s)

    def diagnose(self) -> Verdict:
        """Compare the ranks' heartbeats over three beats: who moves, who waits, who is gone."""
        everyone = range(self._joined.world_size)
        self._silent(everyone, 0)
        for _ in range(3):
            time.sleep(self._clocks.beat_s)
            self._publish()
        silent = self._silent(everyone, 2.5 * self._clocks.beat_s)
        known = {state["rank"]: state for state in states(self._store, everyone)}
        counts = dict.fromkeys(("step", "age_s", "collectives", "control"), 0)
        never = {"phase": "init", "note": "no heartbeat yet", "phase_s": {}, **counts}
        hosts = self._joined.hosts
        return judge([known.get(rank, {**never, "rank": rank, "host": hosts[rank]}) for rank in everyone], silent)

    def _run(self) -> None:
        while not self._stopping.wait(self._clocks.beat_s):
            try:
                self._tick()
            except RuntimeError as error:  # every store error is one
                if not self._stopping.is_set():
                    host = self._joined.hosts[0]
                    reason = f"the store on the host of rank 0 ({host}) no longer answers: {error}"
                    advice = "look at rank 0's output, and whether that host and the launcher are still up"
                    self.fail(Verdict(STALLED, "store_lost", reason, [0], advice=advice))

    def _tick(self) -> None:
        state = self._publish()
        if self._store.check(["verdict"]):
            self.fail(Verdict(**json.loads(self._store.get("verdict"))), mine=False)
        # Rank 0 watches everyone, everyone watches rank 0: work that grows with the number of ranks, not its square.
        watched = range(1, self._joined.world_size) if self._rank == 0 else range(1)
        if state["age_s"] > self._clocks.stall_limit(state["phase"]) or self._silent(watched, self._clocks.silent_s):
            self.fail(self.diagnose())
        if time.monotonic() - self._spoke >= self._heartbeat_s:
            self._spoke = time.monotonic()
            log.info("%s", line(state), extra={"file_only": self._rank != 0})
            write_heartbeat(self._joined, self._run_dir)
            if self._rank == 0 and self._joined.world_size > 1:
                self._compare_ranks()

    def _publish(self) -> dict[str, Any]:
        faulthandler.dump_traceback_later(1.5 * self._clocks.silent_s, exit=True, file=self._stacks)
        self._beats += 1
        state = {**snapshot(self._rank, self._joined.place.host), "beat": self._beats, "pid": os.getpid()}
        self._store.set(f"beat/{self._rank}", json.dumps(state))
        return state

    def _silent(self, ranks: Sequence[int], limit: float) -> list[int]:
        """Those of `ranks` whose beat has not changed for `limit` seconds of this rank's clock."""
        now, silent = time.monotonic(), []
        beats = {state["rank"]: state["beat"] for state in states(self._store, ranks)}
        for rank in ranks:  # one that has never sent a beat counts from the first look
            beat, since = self._seen.setdefault(rank, (0, now))
            if beats.get(rank, 0) != beat:
                self._seen[rank] = (beats[rank], now)
            elif now - since > limit:
                silent.append(rank)
        return silent

    def _compare_ranks(self) -> None:
        now = states(self._store, range(self._joined.world_size))
        for text in stragglers(self._previous, now) if len(now) == len(self._previous) else []:
            log.warning("%s", text)
        self._previous = now
