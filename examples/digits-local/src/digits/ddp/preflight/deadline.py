"""Ends a preflight that takes too long or is asked to stop: a thread, whatever the main thread waits for."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from ..clocks import Clocks, seconds
from ..errors import STALLED, STOPPED
from ..polling import poll
from ..ranks import named
from ..start.board import values
from ..start.groups import connect_store
from ..start.launcher import Place
from ..start.stop import SIGNALS

ANSWER_S = 3.0  # at the deadline the ranks tell rank 0 where they are; who does not in this time has not answered
VERDICT = "preflight/late/verdict"


class Deadline:
    """From `start` on, `clocks.preflight_s` for all to come; from `all_here` on, as much again for the checks.

    `stage` is what this rank does just now. `end(code, message)` is called once in the thread and must not return.
    """

    def __init__(self, clocks: Clocks, end: Callable[[int, str], None]) -> None:
        self.stage = "start"
        self._limit, self._end, self._rang = clocks.preflight_s, end, False
        self._clocks = clocks.model_copy(update={"init_s": ANSWER_S})
        self._hosts: tuple[str, ...] = ()
        # The store's own clock rings first while ranks are missing, and names them.
        self._rings = time.monotonic() + self._limit + 2 * ANSWER_S
        self._wake, self._waker = os.pipe()

    def start(self, place: Place) -> None:
        """Begin to watch. Call it in the main thread: signals wake the other one, also while this one is in C code."""
        self._place = place
        os.set_blocking(self._waker, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in SIGNALS:  # launch/task.sh has them ignored until somebody listens
            signal.signal(number, lambda _number, _frame: None)
        threading.Thread(target=self._watch, daemon=True).start()
        self._rearm()

    def all_here(self, hosts: tuple[str, ...]) -> None:
        """All ranks have come: the time for the checks begins."""
        self._hosts, self._rings = hosts, time.monotonic() + self._limit
        self._rearm()

    def stop(self) -> None:
        """Everything is done."""
        self._rings = float("inf")
        faulthandler.cancel_dump_traceback_later()

    def let_it_end(self) -> None:
        """Before an error ends this process: the deadline, if it rang at the same time, can say more."""
        if self._rang:
            time.sleep(3 * ANSWER_S)

    def _rearm(self) -> None:
        # For C code that holds the GIL, where no thread of Python runs: stacks, and exit code 1.
        with suppress(ValueError, OSError, AttributeError):  # stderr may be closed, or not a file
            faulthandler.dump_traceback_later(self._limit + 5 * ANSWER_S, exit=True)

    def _watch(self) -> None:
        while (left := self._rings - time.monotonic()) > 0:
            ready, _, _ = select.select([self._wake], [], [], min(left, 1.0))
            if ready:
                number = os.read(self._wake, 1)[0]
                if signal.Signals(number) in SIGNALS:
                    self._end(STOPPED, f"signal {signal.Signals(number).name}")
        self._rang = True
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(main)) if main else ""
        late = f"{self._place.who} is not done after {self._limit:g} s: {self.stage}"
        print(f"preflight: {late}, at\n{stack}", end="", file=sys.stderr, flush=True)
        self._end(STALLED, self._call_the_roll() if self._hosts else late)

    def _call_the_roll(self) -> str:
        """Tell rank 0 where this rank is; rank 0 waits for that of the others and says who did not answer."""
        rank, size = self._place.rank, self._place.world_size
        late = f"not done after {self._limit:g} s (clocks.preflight_s)"
        try:
            store = connect_store(self._place, self._clocks, serve=False)  # the main thread may block in the first one
            store.set(_key(rank), json.dumps(self.stage))
            if rank != 0:
                store.wait([VERDICT], seconds(3 * ANSWER_S))
                return store.get(VERDICT).decode()
        except Exception as error:
            return f"{late}, and rank 0 ({self._hosts[0]}) does not answer: {str(error).splitlines()[0]}"
        poll(lambda: None not in _stages(store, size), ANSWER_S, pause_s=0.1)
        found = verdict(late, _stages(store, size), self._hosts)
        store.set(VERDICT, found)
        return found


def verdict(late: str, stages: list[str | None], hosts: tuple[str, ...]) -> str:
    """`late`, which ranks did not answer at the deadline, and what the others did then."""
    silent = [rank for rank, stage in enumerate(stages) if stage is None]
    by_stage: dict[str, list[int]] = {}
    for rank, stage in enumerate(stages):
        if stage is not None:
            by_stage.setdefault(stage, []).append(rank)
    lines = [late]
    lines += [f"  {named(silent, hosts)} did not answer: dead, suspended, or cut off"] if silent else []
    return "\n".join([*lines, *(f"  {named(ranks, hosts)}: {stage}" for stage, ranks in by_stage.items())])


def _key(rank: int) -> str:
    return f"preflight/late/{rank}"


def _stages(store: dist.Store, size: int) -> list[str | None]:
    return [json.loads(text) if text else None for text in values(store, [_key(rank) for rank in range(size)])]
