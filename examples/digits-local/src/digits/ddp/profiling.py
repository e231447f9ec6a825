"""A profile of some steps, for Perfetto: `log.profile`, or --profile 100:110 on the command line.

The ranks begin and end together, outside of a step: what is slow about a profile, its beginning and the writing of the
trace, is no part of a step and no collective's business.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .errors import ConfigError, StopRequested
from .metrics import LogSettings
from .polling import poll
from .start.board import may_be_silent
from .start.groups import Job
from .trace.heartbeat import around, at_step, beat, on_held, phase

log = logging.getLogger("ddp")
NAME = "profile"  # of the work and of the wait for it
HOW = "open it at https://ui.perfetto.dev or chrome://tracing"


@contextmanager
def profiled(job: Job, run_dir: Path, settings: LogSettings) -> Iterator[None]:
    """Around a training loop: profile the steps that `log.profile` names, by what `step_done` is told.

    A loop that ends, stops or raises in the middle of them leaves what there is.

    Raises:
        ConfigError: `log.profile_ranks` names a rank that there is not.
    """
    if not settings.profile:
        yield
        return
    some = _Profile(job, run_dir, settings)
    at_step.append(some.step_done)
    try:
        yield
        some.end(together=True)
    except StopRequested:
        some.end(together=True)  # all ranks stop at the same step
        raise
    except BaseException:
        some.end(together=False)
        raise
    finally:
        at_step.remove(some.step_done)


class _Profile:
    """On every rank, also on those that are not profiled: they wait for the others."""

    def __init__(self, job: Job, run_dir: Path, settings: LogSettings) -> None:
        ranks = range(job.world_size)
        if settings.profile_ranks != "all":
            ranks = sorted({int(rank) for rank in settings.profile_ranks.split(",")})  # type: ignore[assignment]
        if ranks[-1] >= job.world_size:
            problem = f"log.profile_ranks names rank {ranks[-1]}, and the run has {job.world_size}"
            raise ConfigError(problem, f"give ranks from 0 to {job.world_size - 1}, or all", "bad_settings")
        self._job, self._dir, self._ranks = job, run_dir / "profile", ranks
        self._text, (self._first, self._last) = settings.profile, settings.profile_steps
        self._mine = job.rank in ranks
        self._began = self._step = -1  # how many steps were done when it began; how many are done
        self._over = False
        self._profiler: profile | None = None
        self._meetings = count()

    def step_done(self, step: int) -> None:
        """So many steps are done."""
        known, self._step = self._step >= 0, step
        if self._over:
            return
        if self._began < 0 and step >= self._last:
            self._over = True
            if not known:
                text = "no profile: step %d is done already, and log.profile is %s"
                log.warning(text, step, self._text, extra={"file_only": self._job.rank != 0})
        elif self._began < 0 and step >= self._first:
            if step > self._first:
                text = "the profile of steps %s begins at step %d only: the steps before are done already"
                log.warning(text, self._text, step, extra={"file_only": self._job.rank != 0})
            self._began = step
            self._meet(self._start)
            if self._profiler is not None:
                around.append(record_function)
        elif self._began >= 0 and step >= self._last:
            self.end(together=True)

    def end(self, together: bool) -> None:
        """Write what was recorded, if anything; `together` with all ranks, which wait for each other."""
        if self._over or self._began < 0:
            return
        self._over = True
        around.clear()
        if together:
            self._meet(self._write)
        elif self._mine:
            self._guarded(self._write)

    def _meet(self, work: Callable[[], None]) -> None:
        """`work` on the ranks that are profiled. The others wait on the store, where no collective's clock runs."""
        key, store = f"profile/{next(self._meetings)}", self._job.store
        if self._mine:
            self._guarded(work)
            store.add(key, 1)
        with phase(f"wait:{NAME}"):
            poll(lambda: store.add(key, 0) >= len(self._ranks), pause_s=0.01, longest_s=0.5)

    def _guarded(self, work: Callable[[], None]) -> None:
        with phase(f"guard:{NAME}"), interpreter_held(self._job):
            try:
                work()
            except (OSError, RuntimeError, AssertionError) as error:  # a full disk, or another profiler that is on
                around.clear()
                log.warning("no profile of steps %s: %s", self._text, error)

    def _start(self) -> None:
        kinds = [ProfilerActivity.CPU]
        kinds += [ProfilerActivity.CUDA] if self._job.device.type == "cuda" else []
        self._profiler = profile(activities=kinds)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Profiler clears events")  # of other cycles: there is one only
            self._profiler.start()

    def _write(self) -> None:
        if self._profiler is None:
            return
        done, self._profiler = self._profiler, None
        if self._job.device.type == "cuda":
            torch.cuda.synchronize(self._job.device)
        done.stop()
        self._dir.mkdir(parents=True, exist_ok=True)
        path = self._dir / f"steps{self._began}-{self._step}.rank{self._job.rank}.json.gz"
        plain, aside = (path.with_name(f".{os.getpid()}.{suffix}") for suffix in ("json", "json.gz"))
        try:
            done.export_chrome_trace(str(plain))
            with open(plain, "rb") as source, gzip.open(aside, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, 2**20)
            os.replace(aside, path)
        finally:
            for left in (plain, aside):
                with suppress(OSError):
                    left.unlink()
        size = path.stat().st_size / 2**20
        where = f"{path} ({size:.1f} MiB): {HOW}"
        who = "" if len(self._ranks) == 1 else f" of {self._job.who(self._job.rank)}"
        log.info("profile of steps %d to %d%s: %s", self._began, self._step, who, where)


@contextmanager
def interpreter_held(job: Job) -> Iterator[None]:
    """Around a long call of C code that lets no other thread run Python code, and so silences this rank's heartbeat.

    It has `clocks.guard_s`, like all work that others wait for, in the place of `clocks.silent_s`: on this rank, whose
    own timer would end it, and in the eyes of the others. Stopping PyTorch's profiler is such a call: 10 s for a
    trace of 280 MB, on a CPU (torch 2.13).
    """
    limit = job.clocks.guard_s
    may_be_silent(job.store, job.rank, limit)
    beat.held_until = time.monotonic() + limit
    for arm in on_held:
        arm()
    try:
        yield
    finally:
        beat.held_until = time.monotonic() + job.clocks.silent_s  # for threads that were in the middle of something
        may_be_silent(job.store, job.rank, 0)
