"""One run from start to exit code: `with session(...) as run:` around the training loop."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from . import faults
from .agree import Agreement
from .checkpoint import CheckpointSettings, finished_at_the_end, resumed_at
from .checkpoint import look as look_at_checkpoints
from .checkpoint import warn as warn_of_checkpoints
from .clocks import Clocks
from .errors import (
    CONFIG,
    DONE,
    FAILED,
    STALLED,
    STOPPED,
    ConfigError,
    Diverged,
    KindName,
    RunFailed,
    RunTaken,
    StopRequested,
)
from .kinds import Verdict
from .loader import LoaderSettings
from .metrics import LogSettings, MetricLog
from .patience import early_stop
from .profiling import profiled
from .report import outcome, report, silence
from .rng import make_deterministic
from .same.buffers import check_network
from .same.sources import compare_sources
from .start import kinship, owner
from .start.again import how_to_go_on
from .start.arrival import arrive
from .start.elastic import tell_torchrun
from .start.groups import Job, meet, setup_distributed, shutdown
from .start.launcher import Place, attempt, detect, has_own_disk
from .start.logs import Rows, describe, log_to_console, log_to_file, say_last, show_whole_lines
from .start.network import check_master, interfaces
from .start.rendezvous import Waiting, rendezvous, tell_all
from .start.settings import RunSettings
from .start.stop import PreemptSettings, StopFlags, kind_of_stop
from .trace import marks, spent
from .trace.collectives import keep_ledger
from .trace.drift import Drift
from .trace.heartbeat import beat, end_with, lose, phase
from .trace.replicas import keep_models, keep_optimizers
from .watch.blame import peer_lost, verdict_of
from .watch.leave import write_heartbeat
from .watch.monitor import Monitor
from .watch.siblings import launcher_gone
from .watch.verdict import explain

log = logging.getLogger("ddp")


class SessionSettings(BaseSettings):
    """The sections that `ddp/` reads itself. A project's own settings inherit from it, and add theirs."""

    model_config = SettingsConfigDict(env_prefix="DDP_", env_nested_delimiter="__", extra="forbid")

    run: RunSettings = RunSettings()
    loader: LoaderSettings = LoaderSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()
    clocks: Clocks = Clocks()
    preempt: PreemptSettings = PreemptSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` passes in: it reads file, variables and command line itself, to know who set each value."""
        return (init_settings,)


@dataclass(frozen=True)
class Session:
    """What a training loop needs of the plumbing."""

    job: Job
    dir: Path
    flags: StopFlags
    agreement: Agreement
    metrics: MetricLog

    @property
    def dist(self) -> Job:
        """The name that `job` had before release 0.5."""
        return self.job


@contextmanager
def session(
    run: RunSettings, clocks: Clocks, logs: LogSettings, preempt: PreemptSettings, rows: Rows = ()
) -> Iterator[Session]:
    """Join the other ranks, watch over the body, and leave with the right exit code on every rank.

    The body may raise anything. StopRequested (after saving a checkpoint) ends the run with 75, ConfigError with 78;
    any other exception is reported with rank, phase, step and stack, and ends every rank within seconds.
    """
    run = run.model_copy(update={"dir": run.dir.absolute()})  # whatever directory user code goes to
    place = _place_or_exit(run)
    log_to_console(place)
    show_whole_lines(logs.console == "full")
    try:
        faults.parse(os.environ.get("DDP_FAULTS", ""))
        flags = StopFlags(preempt)
        flags.install()
        _refuse_address(place)
        job = rendezvous(place, clocks, rows, flags, arrive(place, run.device))
        directory = _run_directory(job, run, flags, logs.heartbeat_s)
        flags.stop_file = directory / "stop"
        log_to_file(directory, place)
        if place.rank == 0:
            describe(directory, job, rows)
        monitor = Monitor(job, directory, logs.heartbeat_s)
        monitor.start()
    except (Exception, StopRequested) as error:
        _give_up_early(error, run, place)
    try:
        if run.deterministic:
            make_deterministic()
        with phase("init"):
            job = setup_distributed(job, run.device)
        kept = directory / "heartbeats" / f"collective{job.rank}.json" if job.backend == "gloo" else None
        keep_ledger(kept, job.control)
        if job.device.type == "cuda":
            marks.begin()
            spent.begin()
        compare_sources(job)
        keep_models(partial(check_network, job))
        keep_optimizers()
        log.info("world size %d on %s, %s", job.world_size, ", ".join(dict.fromkeys(job.hosts)), job.backend)
        drift = Drift(job) if run.compare_replicas and job.world_size > 1 else None
        agreement = Agreement(job, flags, preempt.poll_s, drift, look_at_checkpoints, warn_of_checkpoints)
        metrics = MetricLog(job, directory, logs)
        with finished_at_the_end(job), profiled(job, directory, logs):
            yield Session(job, directory, flags, agreement, metrics)
        with phase("wait:end"), suppress(StopRequested):  # it came after the last step
            if dist.is_initialized():  # user code may have destroyed the groups after its last step
                agreement.conclude(beat.step)
        verdict = _done(rows)
    except StopRequested as stop:
        end_with(stop)
        verdict = Verdict(
            STOPPED, kind_of_stop(str(stop)), f"stopped on request: {stop}", phase=beat.phase, step=beat.step
        )
    except BaseException as error:
        _fail(monitor, job, directory, error)
    try:
        with phase("shutdown"):
            metrics.close(verdict)
            if dist.is_initialized():
                meet(job)  # still watched: a rank that dies here is named, too
    except BaseException as error:
        _fail(monitor, job, directory, error)
    monitor.stop()
    write_heartbeat(job, directory)
    _leave(job, directory, verdict)


def _done(rows: Rows) -> Verdict:
    """Of training that has ended well, and why it did so before its last step, or without a step."""
    said = [early_stop()]
    if beat.step and resumed_at() == beat.step:
        asked = next((f", and train.steps is {value}" for name, value, _ in rows if name == "train.steps"), "")
        said.append(f"no step was made, as the checkpoint is of step {beat.step}{asked}")
    why = "; ".join(filter(None, said))
    return Verdict(DONE, "benign", f"training is done{': ' if why else ''}{why}")


def _leave(job: Job, directory: Path, verdict: Verdict) -> None:
    """The orderly way out, after all ranks have met."""
    shutdown(job)
    if job.rank == 0:
        outcome.write(directory, verdict, job.place.attempt)
        told = f"; report: {directory / 'report.md'}" if report.write(directory) else ""
        log.info("%s%s", verdict.reason, told)
        owner.release(directory)
        if lines := how_to_go_on(job.place, directory, verdict.exit_code):
            say_last("\n".join(lines))
    if verdict.exit_code:
        tell_torchrun(verdict)
    logging.shutdown()
    faulthandler.cancel_dump_traceback_later()
    with suppress(RuntimeError, ValueError, OSError):  # stderr may be closed
        faulthandler.enable()
    threading.Thread(target=_leave_anyway, args=(verdict.exit_code,), daemon=True).start()
    if verdict.exit_code:
        sys.exit(verdict.exit_code)


def _fail(monitor: Monitor, job: Job, directory: Path, error: BaseException) -> NoReturn:
    """An exception left the training loop of this rank: find out who began, say so, and exit everywhere."""
    end_with(error)
    lost = isinstance(error, RunFailed) or peer_lost(error)
    if lost:
        lose(error)
    monitor.note_clock(error)
    said = {"file_only": isinstance(error, ConfigError)}  # which says what to do: its traceback helps nobody
    log.error("%s in phase %s at step %d", type(error).__name__, beat.phase, beat.step, exc_info=error, extra=said)
    if found := outcome.found_by_child(directory, job.place.attempt):  # by a process that this rank has started
        monitor.fail(found)
    mine = verdict_of(error, job)
    if isinstance(error, Diverged) and error.ranks is None and error.kind == "divergent_control_flow":
        monitor.fail(monitor.diagnose(explain))
    if lost:
        monitor.wait_for_verdict()
        found = monitor.diagnose()
        if found.kind != "unknown":
            own = job.rank in (found.first_ranks or [])
            monitor.fail(replace(found, stacks=mine.stacks) if own else found)
    monitor.fail(mine)


def _leave_anyway(code: int) -> None:
    """A thread that the user's code has left behind must not keep a finished process, and its GPU, for ever."""
    while threading.main_thread().is_alive():
        time.sleep(0.5)
    time.sleep(5)
    os._exit(code)


def _place_or_exit(run: RunSettings) -> Place:
    try:
        place = detect()
        kinship.refuse_import(f"rank {place.rank} on {place.host}")
        return place
    except ConfigError as error:
        _give_up_early(error, run, None)


def _refuse_address(place: Place) -> None:
    """What keeps this rank from the first meeting, where all else is told to all."""
    if place.world_size == 1:
        return
    _, found = check_master(place, interfaces(), alone=False)
    for finding in found:
        raise ConfigError(f"{place.who}: {finding.what}", finding.remedy, finding.kind)


def _give_up_early(error: BaseException, run: RunSettings, place: Place | None) -> NoReturn:
    """Before the ranks know each other there is nobody to tell: one line, an outcome if the run has a name, and out."""
    code = STALLED
    kind: KindName = "rendezvous_failed"
    if isinstance(error, StopRequested):
        code, kind = STOPPED, kind_of_stop(str(error))
    elif not isinstance(error, (ConfigError, OSError, RuntimeError, RunFailed, ValueError)):
        code, kind = FAILED, "rank_exception"
    elif isinstance(error, (ConfigError, OSError, ValueError)):
        code, kind = CONFIG, error.kind if isinstance(error, ConfigError) else "launcher_misconfig"
    text = str(error)
    if code == STALLED and (gone := launcher_gone()):  # and with it the store
        kind, text = "store_lost", f"{gone} on {socket.gethostname()}: {text}"
    say_last(f"error: {text}")
    verdict = Verdict(code, kind, text, phase="init", step=0)
    tell_torchrun(verdict)
    if run.id and not isinstance(error, RunTaken) and not owner.held_by_another(run.dir / run.id):
        outcome.write(run.dir / run.id, verdict, attempt(), replace=True)
    if place and place.rank == 0 and place.world_size > 1:
        time.sleep(2)  # the store goes with this process, and the others may just be finding out what is wrong
    os._exit(code)


def _run_directory(job: Job, run: RunSettings, flags: StopFlags, heartbeat_s: float) -> Path:
    """Rank 0 names, makes and takes it; the others learn the name from the store, since clocks differ."""
    if job.rank == 0:
        try:
            name = run.id or owner.new_directory(run.dir, time.strftime("%Y%m%d-%H%M%S"))
            holder = owner.claim(run.dir / name, os.getpid(), job.place.attempt, 3 * heartbeat_s)
            if said := silence.record(run.dir / name):
                log.warning("the last start of this run left no outcome: %s", said)
                report.write(run.dir / name)
            outcome.begin(run.dir / name, job.place.attempt, job.world_size)
        except RunTaken as error:
            tell_all(job.store, error)
        except OSError as error:
            remedy = "set run.dir to a directory that rank 0 can write to"
            tell_all(job.store, ConfigError(f"the run directory in {run.dir} cannot be made: {error}", remedy))
        job.store.set("holder", holder.token)
        job.store.set("run_id", name)
    Waiting(job.store, job.place, job.clocks, flags).until(["run_id"])
    os.environ[owner.CLAIM] = job.store.get("holder").decode()  # of whatever this rank may start as well
    directory = run.dir / job.store.get("run_id").decode()
    if has_own_disk():
        outcome.make_folders(directory)
    if not (directory / "logs").is_dir():
        raise ConfigError(
            f"{job.who(job.rank)} does not see {directory.resolve()}, which rank 0 has made",
            "set run.dir to a file system that all nodes share",
        )
    return directory
