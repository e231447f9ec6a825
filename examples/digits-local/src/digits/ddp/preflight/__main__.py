"""Before the job: `python -m <package>.ddp.preflight`, started like the training, looks at every machine and link.

Takes the arguments of training and leaves those alone that it does not need; `--json` prints one JSON object in the
place of the tables. Exit code 78 when something is wrong, 70 when not all ranks came or answered, 75 on a signal.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import NoReturn

from pydantic_settings import BaseSettings, SettingsConfigDict

from ..clocks import Clocks
from ..errors import CONFIG, STALLED, STOPPED, ConfigError, KindName, RunFailed
from ..kinds import Verdict
from ..loader import LoaderSettings
from ..report import outcome
from ..start.arrival import Arrival, crowded
from ..start.board import values
from ..start.elastic import tell_torchrun
from ..start.findings import Finding, merged, text
from ..start.groups import Job, setup_distributed, shutdown
from ..start.launcher import Place, attempt, detect
from ..start.owner import held_by_another
from ..start.rendezvous import rendezvous
from ..start.settings import RunSettings, load_settings
from . import compare
from .deadline import ANSWER_S, Deadline
from .disk import checkpoint_directory, shared
from .links import clock_offsets, measure
from .machine import Row, look
from .tables import Report, as_json, plain

log = logging.getLogger("ddp")
SECTIONS = ("run", "loader", "clocks")


class PreflightSettings(BaseSettings):
    """The sections of configs/train.yaml that matter here; the others are left alone."""

    model_config = SettingsConfigDict(env_prefix="DDP_", env_nested_delimiter="__", extra="ignore")
    run: RunSettings = RunSettings()
    loader: LoaderSettings = LoaderSettings()
    clocks: Clocks = Clocks()


def main() -> None:
    """Look at this machine, join the other ranks, time the links, print what was found on rank 0."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    settings, _ = load_settings(PreflightSettings, ours(sys.argv[1:]), strict_variables=False)
    limit = settings.clocks.preflight_s
    # Later than the deadline, which can say more than a collective that timed out.
    longer = {"init_s": min(limit, settings.clocks.init_s), "collective_s": limit + 10 * ANSWER_S}
    clocks = settings.clocks.model_copy(update=longer)
    ending = Ending(settings.run)
    deadline = Deadline(clocks, ending.leave)
    try:
        ending.place = place = detect()
        deadline.start(place)
        deadline.stage = "looking at its machine"
        row, ending.found = look(place, settings.run, settings.loader)
        ending.found = [replace(finding, ranks=(place.rank,)) for finding in ending.found]
        if any(finding.alone for finding in ending.found):
            ending.leave(CONFIG, "it cannot meet the others")
        deadline.stage, ending.stalled = "waiting for the other ranks to start", "rendezvous_failed"
        job = rendezvous(place, clocks)
        ending.stalled = "unknown"
        deadline.all_here(job.hosts)
        report = _check(job, deadline, settings.run, row, ending.found)
        code = CONFIG if report and report.problems else 0
        if report:
            print(as_json(report, code) if "--json" in sys.argv else plain(report), flush=True)
            if code:
                ending.write(code, text(report.problems[0], job.hosts).partition(": ")[2], report.problems[0].kind)
        deadline.stage = "waiting for rank 0's verdict"
        code = int(_from_rank0(job, "code", str(code)))
    except ConfigError as error:
        ending.leave(CONFIG, str(error))
    except Exception as error:
        if not isinstance(error, (RunFailed, RuntimeError, OSError)):
            traceback.print_exc()
        deadline.let_it_end()
        ending.leave(STALLED, str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}")
    deadline.stop()
    shutdown(job)
    sys.exit(code)


def ours(arguments: Sequence[str]) -> list[str]:
    """Those of training's arguments that preflight has settings for."""
    kept, keep = [], False
    for argument in arguments:
        if argument.startswith("--"):
            name = argument[2:].partition("=")[0]
            keep = name in ("config", "help") or name.partition(".")[0] in SECTIONS
        if keep:
            kept.append(argument)
    return kept


def _check(job: Job, deadline: Deadline, run: RunSettings, row: Row, found: list[Finding]) -> Report | None:
    """Everything from the first meeting on. Returns the report on rank 0, None on the others."""

    def stage(name: str) -> None:
        deadline.stage = name

    stage("telling rank 0 what it found")
    job.store.set(f"preflight/row/{job.rank}", json.dumps([row, [asdict(finding) for finding in found]]))
    rows, so_far = [row], found
    if job.rank == 0:
        keys = [f"preflight/row/{rank}" for rank in range(job.world_size)]
        told = [json.loads(text or b"") for text in values(job.store, keys, complete=True)]  # waits for all
        rows = [row for row, _ in told]
        so_far = [Finding(**{**one, "ranks": tuple(one["ranks"])}) for _, some in told for one in some]
        so_far += compare.differences(rows) + crowded(Arrival.from_json(row["arrival"]) for row in rows)
    blocked = any(finding.blocks for finding in so_far)
    if _from_rank0(job, "blocked", str(blocked)) == "True":
        return Report(job.hosts, rows, merged(so_far), time.time() - outcome.STARTED) if job.rank == 0 else None

    stage("making the process groups")
    job = setup_distributed(job, run.device)
    offsets = clock_offsets(job, stage)
    stage("looking for the others' files in the run directory")
    so_far += shared(job, checkpoint_directory(run))
    links, corrupt, whole = measure(job, stage) if job.world_size > 1 else ([], [], True)
    if job.rank != 0:
        return None
    so_far += [*corrupt, *compare.clocks(offsets, job.hosts[0]), *compare.slow(links, job.hosts)]
    so_far += compare.tcp_beside_adapters(links, rows, job.hosts)
    return Report(job.hosts, rows, merged(so_far), time.time() - outcome.STARTED, links, whole, offsets)


def _from_rank0(job: Job, name: str, value: str) -> str:
    """Rank 0's `value` on every rank, through the store: there may be no process group."""
    key = f"preflight/{name}"
    if job.rank == 0:
        job.store.set(key, value)
    return job.store.get(key).decode()  # waits for it


class Ending:
    """The ways out other than the orderly one: this rank says what it knows and is gone, whatever the others do."""

    def __init__(self, run: RunSettings) -> None:
        self.place: Place | None = None
        self.found: list[Finding] = []  # what this rank has found before it met the others
        self.stalled: KindName = "unknown"  # the kind of the outcome if this rank gets no further than it is
        self._run, self._lock = run, threading.Lock()

    def write(self, code: int, reason: str, kind: KindName = "launcher_misconfig") -> None:
        """Leave outcome.json if the run has a name: torchrun turns every exit code into 1."""
        if self._run.id and not held_by_another(self._run.dir / self._run.id):
            kinds: dict[int, KindName] = {STOPPED: "preempted", STALLED: self.stalled}
            kind = kinds.get(code, kind)
            words = "; ".join(line.strip() for line in reason.splitlines())
            verdict = Verdict(code, kind, f"preflight: {words}", phase="init", step=0)
            tell_torchrun(verdict)
            outcome.write(self._run.dir / self._run.id, verdict, attempt(), replace=True)

    def leave(self, code: int, message: str) -> NoReturn:
        """End the process; with 78 in the place of 70 where this rank has found a reason itself."""
        self._lock.acquire()  # for good: the first one to come here ends the process
        place = self.place
        problems = [finding for finding in self.found if not finding.warning]
        code = CONFIG if problems and code == STALLED else code
        message = f"asked to stop: {message}" if code == STOPPED else message
        who = f"{place.who}: " if place and place.world_size > 1 else ""
        hosts = [place.host] * (place.rank + 1) if place else []
        lines = [f"preflight: {who}{message}", *(text(finding, hosts) for finding in problems)]
        with suppress(OSError, ValueError):
            print("\n".join(lines), file=sys.stderr, flush=True)
        try:
            if code == CONFIG and problems:
                self.write(code, text(problems[0], hosts).partition(": ")[2], problems[0].kind)
            else:
                self.write(code, message)
            if place and place.rank == 0 and place.world_size > 1 and code != STOPPED:
                time.sleep(2)  # the store goes with this process, and the others may just be finding out what is wrong
        finally:
            os._exit(code)


if __name__ == "__main__":
    main()
