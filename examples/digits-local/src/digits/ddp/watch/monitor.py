"""The threads that watch: publish this rank's heartbeat, notice stalled and silent ranks, end the job."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, NoReturn

import torch.distributed as dist

from ..clocks import seconds
from ..errors import STALLED
from ..kinds import KINDS, Verdict
from ..rank_state import RankState
from ..start.board import Beats, answers, beat_interval, post, send_beat
from ..start.groups import Dist, connect_store
from ..trace.heartbeat import beat, detailed, line, snapshot
from .exits import tell_exits
from .leave import end, last_words, with_last_entry, write_heartbeat
from .siblings import LAUNCHER_ADVICE, Siblings, launcher_gone
from .slow_ranks import compare_ranks, tell
from .verdict import Judge, judge
from .whereabouts import waits

log = logging.getLogger("ddp")
WEEK_S = 7 * 86400.0  # a wait that nothing but news ends; poll(2) takes at most 24 days
SMALL = 128  # ranks
WATCHERS = 8  # ranks that watch rank 0, spread over the job


class Monitor:
    """Daemon threads with store clients of their own: they work while the main thread waits in a dead collective.

    One beats and watches, one waits for news, and one watches the first: no request to a TCPStore times out when the
    server's host is silent (tried with torch 2.13), so the rank must be ended from outside the request. If no Python
    code can run (the GIL is held in C code), a timer inside the interpreter writes the stacks and ends the process
    (`faulthandler.dump_traceback_later`); the others see this rank fall silent.
    """

    def __init__(self, joined: Dist, run_dir: Path, heartbeat_s: float) -> None:
        self._joined, self._run_dir, self._heartbeat_s = joined, run_dir, heartbeat_s
        self._clocks, self._rank, size = joined.clocks, joined.rank, joined.world_size
        self._store, self._news = joined.store, joined.store
        if size > 1:
            self._store, self._news = (connect_store(joined.place, joined.clocks, serve=False) for _ in range(2))
            self._store.set_timeout(seconds(self._clocks.silent_s))
        self._stacks: IO[str] = open(run_dir / "stacks" / f"rank{self._rank}.txt", "a")  # noqa: SIM115 (open until the end)
        print(f"=== attempt {joined.place.attempt}, pid {os.getpid()}", file=self._stacks, flush=True)
        faulthandler.enable(self._stacks)  # a crash in C code leaves its stack there
        tell_exits(self._stacks)
        self._interval = beat_interval(size, self._clocks)
        # Rank 0 watches everyone, a few watch rank 0: work that grows with the number of ranks, not its square.
        watched = range(1, size) if self._rank == 0 else range(int(self._rank % max(1, size // WATCHERS) == 0))
        self._others = Beats(self._store, watched, self._clocks.silent_s)
        self._siblings = Siblings(joined, self._store)
        self._beats = self._beat_slot = self._look_slot = self._heard = 0
        self._spoke = self._compared = time.monotonic()
        self._answer_by = float("inf")  # until when the request under way must be answered
        self._stopping, self._failing = threading.Event(), threading.Event()
        self._gone, self._previous = 0, list[RankState]()  # ranks not to wait for; states at the last comparison
        self._patient_until = 0.0  # a rank that others wait for moves on: so long nobody asks again
        works = [self._watch, self._guard, *([self._listen] if size > 1 else [])]
        self._threads = [threading.Thread(target=work, name=f"monitor{work.__name__}", daemon=True) for work in works]

    def start(self) -> None:
        """Begin to watch."""
        self._arm()
        self._publish(self._store)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching; call it on every rank before anyone leaves in good order."""
        self._stopping.set()
        self._siblings.wake()
        post(self._store, "bye")  # no thread may be left waiting in the store when it goes
        for thread in self._threads:
            thread.join()
        # What is left to do can hang, too: destroying the groups, files. `session` takes the timer back at its end.
        faulthandler.dump_traceback_later(self._clocks.stall_s, exit=True, file=self._stacks)

    def fail(self, verdict: Verdict, mine: bool = True, store: dist.Store | None = None) -> NoReturn:
        """End the job, from any thread. An earlier verdict of another rank is kept."""
        self._failing.set()
        end(self._joined, store or self._store, self._run_dir, self._stacks, verdict, mine, self._gone)

    def wait_for_verdict(self) -> None:
        """Give whoever failed first a few beats to say so; the process ends if someone does."""
        time.sleep(1.5 * self._clocks.beat_s)

    def diagnose(self, judge: Judge = judge) -> Verdict:
        """Ask every rank where it is and compare the answers: who waits, who is behind, who does not answer."""
        try:
            found = self._ask(judge)
            assert found is not None  # None is for the patient
            return found
        except RuntimeError as error:  # every store error is one
            self._store_lost(str(error))
            raise

    def _ask(self, judge: Judge, patient: bool = False) -> Verdict | None:
        size, text, number = self._joined.world_size, f"diagnose {self._rank} {time.monotonic_ns()}", self._heard + 1
        wait_s = 3 * self._clocks.beat_s + size / 1000  # a server and a reader take their time for many answers
        if self._store.compare_set(f"news/{number}", "", text).decode() != text:
            time.sleep(3 * wait_s)  # another rank was first: its verdict ends this process in here, unless it dies
            if patient and time.monotonic() < self._patient_until:
                return None
            number = post(self._store, text)
        self._publish(self._store, number)
        found, silent = answers(self._store, number, self._joined.hosts, wait_s, wait_s / 15, self._siblings.dead())
        self._gone = len(silent)
        for rank in silent[:16]:
            found[rank] = with_last_entry(found[rank], self._run_dir)
        return judge(found, silent, {rank: last_words(self._run_dir, rank) for rank in silent[:16]})

    def _watch(self) -> None:
        beat_s, silent_s, size = self._clocks.beat_s, self._clocks.silent_s, self._joined.world_size
        while not self._stopping.is_set():
            self._siblings.wait(beat_s - time.time() % beat_s)  # all ranks wake together
            try:
                self._answer_by = time.monotonic() + silent_s
                if gone := launcher_gone():  # on another node than the store's, nothing else would tell
                    what = f"{gone} on {self._joined.place.host}"
                    self.fail(Verdict(STALLED, "store_lost", what, advice=LAUNCHER_ADVICE))
                if self._tick() and not self._stopping.is_set():
                    self._answer_by += 15 * beat_s + size / 200
                    self._find_out()
                if time.monotonic() - self._spoke >= self._heartbeat_s:
                    self._speak()
                self._answer_by = float("inf")
            except RuntimeError as error:
                self._store_lost(str(error))
            except Exception:  # a rank that nobody watches is worse than a heartbeat that is not told
                log.exception("the monitor of this rank has stumbled, and goes on")

    def _find_out(self) -> None:
        """End the job, unless those whom others wait for are only slow: then all are told, and nobody asks for a while.

        Not for longer than `clocks.guard_s`: waits on the store have no other end.
        """
        found = self._ask(judge, patient=True)
        if found is None:
            return
        if found.kind != "straggler" or time.monotonic() - beat.progress_at > self._clocks.guard_s:
            self.fail(found)
        else:
            post(self._store, f"slow {found.reason}. Training goes on")

    def _tick(self) -> bool:
        """Beat and look when it is time; whether something is wrong."""
        slot = time.time() / self._interval
        if int(slot) != self._beat_slot:
            self._beat_slot, self._beats = int(slot), self._beats + 1
            send_beat(self._store, self._rank, self._beats, self._interval, self._clocks)
            if self._joined.world_size <= SMALL:
                self._publish(self._store)  # where a rank that vanishes was a beat ago; in large jobs, heartbeat_s ago
        look = int(slot / (1 if self._interval == self._clocks.beat_s else 2) + 0.25)  # large jobs: every other beat
        if look != self._look_slot:
            self._look_slot = look
            if self._others.silent():
                return True
        if self._siblings.dead():
            return True
        with beat.lock:
            phase, age_s = beat.phase, time.monotonic() - beat.progress_at
            longest = beat.longest.get(phase, 0.0) if beat.pace.settled else None
        stalled = age_s > self._clocks.stall_limit(phase, longest)
        return stalled and not (time.monotonic() < self._patient_until and waits(self._state()))

    def _listen(self) -> None:
        try:
            while True:
                key = f"news/{self._heard + 1}"
                self._news.wait([key], seconds(WEEK_S))
                news, self._heard = self._news.get(key).decode(), self._heard + 1
                if news == "verdict":
                    self.fail(Verdict(**json.loads(self._news.get("verdict"))), mine=False, store=self._news)
                if news == "bye":  # all ranks have met for the last time, so nobody needs watching any more
                    self._stopping.set()
                    return
                if news.startswith("slow "):
                    self._patient_until = time.monotonic() + self._clocks.stall_s
                    tell(self._run_dir, self._rank, [news.removeprefix("slow ")])
                else:
                    self._publish(self._news)
        except RuntimeError as error:
            time.sleep(self._clocks.beat_s)  # if the main thread knows more, it says so first
            self._store_lost(str(error))

    def _guard(self) -> None:
        while not self._stopping.wait(self._clocks.beat_s) and not self._failing.is_set():
            self._arm()
            if time.monotonic() > self._answer_by:
                # Behind a cut link the store lives on, and whoever still has it knows which host has vanished.
                self._store_lost(f"no answer within {self._clocks.silent_s:g} s", len(set(self._joined.hosts)) == 1)

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self._clocks.silent_s, exit=True, file=self._stacks)

    def _store_lost(self, problem: str, mine: bool = True) -> None:
        reason = f"the store on the host of rank 0 ({self._joined.hosts[0]}) no longer answers: {problem}"
        advice = KINDS["store_lost"].advice
        blamed = None if self._joined.place.agent_store else [0]  # torchrun serves it there, and no rank
        if gone := launcher_gone():
            reason, advice = f"{gone} on {self._joined.place.host}", LAUNCHER_ADVICE
        # The real store could block: with a local one, this rank ends by itself and waits for no other.
        self._gone = self._joined.world_size - 1
        if not self._stopping.is_set():
            self.fail(Verdict(STALLED, "store_lost", reason, blamed, advice=advice), mine, dist.HashStore())

    def _publish(self, store: dist.Store, news: int | None = None) -> None:
        news = self._heard if news is None else news  # an answer must stand until the one who asked has seen it
        state = replace(self._state(), pid=os.getpid(), news=news, ended=self._siblings.endings())
        if news:  # a diagnosis wants more than the regular look
            state = detailed(state)
        store.set(f"state/{self._rank}", state.to_json())

    def _state(self) -> RankState:
        return snapshot(self._rank, self._joined.place.host)

    def _speak(self) -> None:
        """Every `heartbeat_s`: a line, a file, and the state, in which rank 0 looks for stragglers."""
        self._spoke = time.monotonic()
        log.info("%s", line(self._state()), extra={"file_only": self._rank != 0})
        write_heartbeat(self._joined, self._run_dir)
        slow = beat.pace.take_notes()
        if self._spoke - self._compared >= self._heartbeat_s * (self._joined.world_size // 1000):  # large jobs: rarely
            self._compared = self._spoke
            self._publish(self._store)
            if self._rank == 0:
                lines, self._previous = compare_ranks(self._store, self._joined.world_size, self._previous)
                slow += lines
        tell(self._run_dir, self._rank, slow)
