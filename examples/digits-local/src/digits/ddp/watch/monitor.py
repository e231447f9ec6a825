"""The threads that watch: publish this rank's heartbeat, notice stalled and silent ranks, end the job.

Ranks talk by messages in the store, `news/1`, `news/2` and so on: "diagnose ..." asks every rank to publish where it
is, "slow ..." says that a rank is slow and not stuck, "verdict" that the job ends (the key `verdict` says why), and
"bye" that it has ended in good order.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, NoReturn

import torch.distributed as dist

from ..clocks import seconds
from ..errors import STALLED
from ..kinds import KINDS, Verdict
from ..rank_state import RankState
from ..report.silence import last_words
from ..report.timeline import Rang
from ..start.board import Beats, answers, beat_interval, post, send_beat
from ..start.groups import Job, connect_store
from ..trace.heartbeat import beat, detailed, line, on_held, snapshot
from ..trace.phases import phases
from .exits import tell_exits
from .leave import end, with_last_entry, write_heartbeat
from .records import clock_that_rang, microseconds, stall_clock
from .siblings import LAUNCHER_ADVICE, Siblings, launcher_gone
from .slow_ranks import compare_ranks, warn_of_slow_ranks
from .verdict import Judge, judge
from .whereabouts import waits

log = logging.getLogger("ddp")
WEEK_S = 7 * 86400.0  # for ever, in effect; poll(2) takes at most 24 days
SMALL = 128  # ranks of a job in which each publishes its state with every beat
WATCHERS = 8  # ranks that watch rank 0, spread over the job; up to twice as many where that does not divide


@dataclass
class Shared:
    """What the threads of one rank share. Each has a store client of its own, and passes it."""

    job: Job
    run_dir: Path
    stacks: IO[str]
    siblings: Siblings
    stopping: threading.Event = field(default_factory=threading.Event)
    failing: threading.Event = field(default_factory=threading.Event)
    heard: int = 0  # number of the last message
    patient_until: float = 0.0  # no diagnosis before that: the rank that others wait for makes progress
    gone: int = 0  # ranks that do not answer any more, so nobody waits for them at the end
    rang: Rang | None = None  # the clock that has brought about the end, or a diagnosis

    def fail(self, store: dist.Store, verdict: Verdict, mine: bool = True) -> NoReturn:
        """End the job, from any thread. An earlier verdict of another rank is kept."""
        self.failing.set()
        end(self.job, store, self.run_dir, self.stacks, self.siblings, verdict, self.rang, mine, self.gone)

    def store_lost(self, problem: str, mine: bool = True) -> None:
        """End this rank by itself, unless an orderly end is under way."""
        reason = f"the store on the host of rank 0 ({self.job.hosts[0]}) no longer answers: {problem}"
        advice = KINDS["store_lost"].advice
        blamed = None if self.job.place.agent_store else [0]  # torchrun's agent serves it, and no rank is to blame
        if gone := launcher_gone():
            reason, advice = f"{gone} on {self.job.place.host}", LAUNCHER_ADVICE
            self.rang = None
        # The real store could block: with a local one, this rank ends by itself and waits for no other.
        self.gone = self.job.world_size - 1
        if not self.stopping.is_set():
            self.fail(dist.HashStore(), Verdict(STALLED, "store_lost", reason, blamed, advice=advice), mine)

    def state(self) -> RankState:
        """Where this rank is."""
        return snapshot(self.job.rank, self.job.place.host)

    def publish(self, store: dist.Store, news: int | None = None) -> None:
        """Tell the others where this rank is; `news` is the number of the question that this answers."""
        news = self.heard if news is None else news  # an answer stays until whoever asked has seen it
        state = replace(self.state(), pid=os.getpid(), news=news, ended=self.siblings.endings())
        if news:  # a diagnosis wants more than the regular look
            state = detailed(state)
        store.set(f"state/{self.job.rank}", state.to_json())

    def ask(self, store: dist.Store, judge: Judge, patient: bool = False) -> Verdict | None:
        """Ask every rank where it is, and judge. None if `patient` and another rank has just said "slow"."""
        size, text, number = self.job.world_size, f"diagnose {self.job.rank} {time.monotonic_ns()}", self.heard + 1
        wait_s = 3 * self.job.clocks.beat_s + size / 1000  # 1 ms for each answer
        if store.compare_set(f"news/{number}", "", text).decode() != text:  # the first writer wins
            time.sleep(3 * wait_s)  # another rank asks: its verdict ends this process in here, unless it dies first
            if patient and time.monotonic() < self.patient_until:
                return None
            number = post(store, text)
        self.publish(store, number)
        found, silent = answers(store, number, self.job.hosts, wait_s, wait_s / 15, self.siblings.dead())
        self.gone = len(silent)
        for rank in silent[:16]:
            found[rank] = with_last_entry(found[rank], self.run_dir)
        words = {rank: last_words(self.run_dir, rank) for rank in silent[:16]}
        if any("Timeout (" in text for text in words.values()):  # its own interpreter has ended it
            self.rang = Rang("silent_s", self.job.clocks.silent_s, microseconds())
        return judge(found, silent, words)


class HeartbeatThread(threading.Thread):
    """Beats, and looks whether this rank moves on and the others beat."""

    def __init__(self, shared: Shared, store: dist.Store, heartbeat_s: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._shared, self._store, self._heartbeat_s = shared, store, heartbeat_s
        self._clocks, rank, size = shared.job.clocks, shared.job.rank, shared.job.world_size
        self._interval = beat_interval(size, self._clocks)
        # Rank 0 watches everyone, a few watch rank 0: work that grows with the number of ranks, not its square.
        watches_rank0 = rank % max(1, size // WATCHERS) == 0
        watched = range(1, size) if rank == 0 else range(1) if watches_rank0 else range(0)
        self._other_beats = Beats(store, watched, self._clocks.silent_s)
        self._beats = self._beat_slot = self._look_slot = 0
        self._spoke = self._compared = time.monotonic()
        self._previous = list[RankState]()  # states at the last comparison
        self._step = 0  # at the last line
        self.answer_by = float("inf")  # until when the request under way must be answered

    def run(self) -> None:
        """Beat and look, until the job ends."""
        beat_s, silent_s, job = self._clocks.beat_s, self._clocks.silent_s, self._shared.job
        while not self._shared.stopping.is_set():
            self._shared.siblings.wait(beat_s - time.time() % beat_s)  # all ranks wake together
            try:
                self.answer_by = time.monotonic() + silent_s
                if gone := launcher_gone():  # on another node than the store's, nothing else would tell
                    what = f"{gone} on {job.place.host}"
                    self._shared.fail(self._store, Verdict(STALLED, "store_lost", what, advice=LAUNCHER_ADVICE))
                if self._tick() and not self._shared.stopping.is_set():
                    self.answer_by += 15 * beat_s + job.world_size / 200
                    self._find_out()
                if time.monotonic() - self._spoke >= self._heartbeat_s:
                    self._speak()
                self.answer_by = float("inf")
            except RuntimeError as error:
                self._shared.store_lost(str(error))
            except Exception:  # a rank that nobody watches is worse than a heartbeat that is missing
                log.exception("an error in the monitor of this rank, which goes on")

    def _tick(self) -> bool:
        """Beat, and look around, when it is time; returns whether something seems wrong."""
        slot = time.time() / self._interval
        if int(slot) != self._beat_slot:
            self._beat_slot, self._beats = int(slot), self._beats + 1
            send_beat(self._store, self._shared.job.rank, self._beats, self._interval, self._clocks)
            if self._shared.job.world_size <= SMALL:
                self._shared.publish(self._store)  # where a rank that vanishes was a beat ago; else heartbeat_s ago
        look = int(slot / (1 if self._interval == self._clocks.beat_s else 2) + 0.25)  # large jobs: every other beat
        if look != self._look_slot:
            self._look_slot = look
            if self._other_beats.silent():
                self._shared.rang = Rang("silent_s", self._clocks.silent_s, microseconds())
                return True
        if self._shared.siblings.dead():
            self._shared.rang = None
            return True
        with beat.lock:
            phase, age_s = beat.phase, time.monotonic() - beat.progress_at
            longest = beat.longest.get(phase, 0.0) if beat.pace.settled else None
        limit_s = self._clocks.stall_limit(phase, longest)
        patient = time.monotonic() < self._shared.patient_until and waits(self._shared.state())
        if age_s <= limit_s or patient:
            return False
        self._shared.rang = stall_clock(self._clocks, phase, limit_s)
        return True

    def _find_out(self) -> None:
        """Diagnose, and end the job, unless the ranks that others wait for are merely slow: that is only announced.

        Not for longer than `clocks.guard_s`: waits on the store have no other end.
        """
        found = self._shared.ask(self._store, judge, patient=True)
        if found is None:
            return
        if found.kind != "straggler" or time.monotonic() - beat.progress_at > self._clocks.guard_s:
            self._shared.fail(self._store, found)
        else:
            post(self._store, f"slow {found.reason}. Training goes on")

    def _speak(self) -> None:
        """Every `heartbeat_s`: a line, a file, and the state, in which rank 0 looks for stragglers.

        The console has lines of metrics while steps are made: there the line is for when none was.
        """
        job, run_dir = self._shared.job, self._shared.run_dir
        self._spoke = time.monotonic()
        now = self._shared.state()
        console = {"short": ""} if now.step != self._step else {}
        log.info("%s", line(now), extra={"file_only": job.rank != 0, **console})
        self._step = now.step
        write_heartbeat(job, run_dir)
        slow = beat.pace.take_notes()
        if self._spoke - self._compared >= self._heartbeat_s * (job.world_size // 1000):  # from 2000 ranks on: rarely
            self._compared = self._spoke
            self._shared.publish(self._store)
            if job.rank == 0:
                lines, self._previous = compare_ranks(self._store, job.world_size, self._previous)
                slow += lines
        warn_of_slow_ranks(run_dir, job.rank, slow)


class NewsThread(threading.Thread):
    """Waits for messages of the other ranks."""

    def __init__(self, shared: Shared, store: dist.Store) -> None:
        super().__init__(name="news", daemon=True)
        self._shared, self._store = shared, store

    def run(self) -> None:
        """Handle messages until "bye"."""
        try:
            while self._take(self._next()):
                pass
        except RuntimeError as error:
            time.sleep(self._shared.job.clocks.beat_s)  # if the main thread knows more, it says so first
            self._shared.store_lost(str(error))

    def _next(self) -> str:
        key = f"news/{self._shared.heard + 1}"
        self._store.wait([key], seconds(WEEK_S))
        news = self._store.get(key).decode()
        self._shared.heard += 1
        phases.hear(self._shared.heard)
        return news

    def _take(self, news: str) -> bool:
        """Handle one message; returns False after the last."""
        if news == "verdict":
            self._shared.fail(self._store, Verdict(**json.loads(self._store.get("verdict"))), mine=False)
        if news == "bye":  # all ranks have met for the last time, so nobody needs watching any more
            self._shared.stopping.set()
            return False
        if news.startswith("slow "):
            self._shared.patient_until = time.monotonic() + self._shared.job.clocks.stall_s
            warn_of_slow_ranks(self._shared.run_dir, self._shared.job.rank, [news.removeprefix("slow ")])
        else:
            self._shared.publish(self._store)
        return True


class WatchdogThread(threading.Thread):
    """Watches the heartbeat thread: no request to a TCPStore times out when the server's host has fallen silent.

    (Tried with torch 2.13.) So the rank must be ended from outside the request. If no Python code can run, because the
    GIL is held in C code, a timer inside the interpreter writes the stacks and ends the process
    (`faulthandler.dump_traceback_later`); the others see this rank fall silent.
    """

    def __init__(self, shared: Shared, heartbeats: HeartbeatThread) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._shared, self._heartbeats = shared, heartbeats

    def run(self) -> None:
        """Re-arm the interpreter's timer with each beat, and end the rank when the store is late."""
        job = self._shared.job
        while not self._shared.stopping.wait(job.clocks.beat_s) and not self._shared.failing.is_set():
            self.arm()
            if time.monotonic() > max(self._heartbeats.answer_by, beat.held_until):
                self._shared.rang = Rang("silent_s", job.clocks.silent_s, microseconds())
                # The store may live on for others, across a cut link: they know better which host has vanished.
                self._shared.store_lost(f"no answer within {job.clocks.silent_s:g} s", len(set(job.hosts)) == 1)

    def arm(self) -> None:
        """From now on, `clocks.silent_s` without Python code end the process, or more where that is announced."""
        limit_s = max(self._shared.job.clocks.silent_s, beat.held_until - time.monotonic())
        faulthandler.dump_traceback_later(limit_s, exit=True, file=self._shared.stacks)


class Monitor:
    """The three threads. They are daemons, and work while the main thread waits in a dead collective."""

    def __init__(self, job: Job, run_dir: Path, heartbeat_s: float) -> None:
        self._store = news = job.store
        if job.world_size > 1:
            self._store = connect_store(job.place, job.clocks, serve=False)
            news = connect_store(job.place, job.clocks, serve=False)
            self._store.set_timeout(seconds(job.clocks.silent_s))
        stacks: IO[str] = open(run_dir / "stacks" / f"rank{job.rank}.txt", "a")  # noqa: SIM115 (open until the end)
        print(f"=== attempt {job.place.attempt}, pid {os.getpid()}", file=stacks, flush=True)
        faulthandler.enable(stacks)  # a crash in C code leaves its stack there
        tell_exits(stacks)
        phases.begin()
        phases.add(beat.phase, beat.step)
        self._shared = Shared(job, run_dir, stacks, Siblings(job, self._store))
        heartbeats = HeartbeatThread(self._shared, self._store, heartbeat_s)
        self._watchdog = WatchdogThread(self._shared, heartbeats)
        self._threads: list[threading.Thread] = [heartbeats, self._watchdog]
        if job.world_size > 1:
            self._threads.append(NewsThread(self._shared, news))

    def start(self) -> None:
        """Begin to watch."""
        self._watchdog.arm()
        on_held.append(self._watchdog.arm)
        self._shared.publish(self._store)
        write_heartbeat(self._shared.job, self._shared.run_dir)  # if all are killed before the next, it is all there is
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching; call it on every rank before anyone leaves in good order."""
        self._shared.stopping.set()
        self._shared.siblings.wake()
        post(self._store, "bye")  # no thread may be left waiting in the store when it goes
        for thread in self._threads:
            thread.join()
        # What is left to do can hang, too: destroying the groups, files. `session` takes the timer back at its end.
        faulthandler.dump_traceback_later(self._shared.job.clocks.stall_s, exit=True, file=self._shared.stacks)

    def fail(self, verdict: Verdict) -> NoReturn:
        """End the job. An earlier verdict of another rank is kept."""
        self._shared.fail(self._store, verdict)

    def note_clock(self, error: BaseException) -> None:
        """Remember which clock `error` tells of, for the report."""
        self._shared.rang = clock_that_rang(error, self._shared.job.clocks)

    def wait_for_verdict(self) -> None:
        """Give whoever failed first a few beats to say so; the process ends if someone does."""
        time.sleep(1.5 * self._shared.job.clocks.beat_s)

    def diagnose(self, judge: Judge = judge) -> Verdict:
        """Ask every rank where it is and compare the answers: who waits, who is behind, who does not answer."""
        try:
            found = self._shared.ask(self._store, judge)
            assert found is not None  # which only a patient question gives
            return found
        except RuntimeError as error:  # every store error is one
            self._shared.store_lost(str(error))
            raise
