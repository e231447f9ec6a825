"""One run from start to exit code: `with session(...) as run:` around the training loop."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from . import faults, outcome, report
from .agree import Agreement
from .clocks import Clocks
from .env import Place, detect
from .errors import CONFIG, DONE, FAILED, STALLED, STOPPED, ConfigError, Diverged, RunFailed, StopRequested
from .heartbeat import beat, phase
from .logs import Rows, describe, log_to_console, log_to_file
from .metrics import LogSettings, MetricLog
from .monitor import Monitor
from .preempt import PreemptSettings, StopFlags
from .settings import RunSettings
from .setup import Dist, meet, rendezvous, setup_distributed, shutdown
from .verdict import Verdict

log = logging.getLogger("ddp")

# What PyTorch says when a peer has gone. The rank that reads it is a victim.
PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
)


@dataclass(frozen=True)
class Session:
    """What a training loop needs of the plumbing."""

    dist: Dist
    dir: Path
    flags: StopFlags
    agreement: Agreement
    metrics: MetricLog


@contextmanager
def session(
    run: RunSettings, clocks: Clocks, logs: LogSettings, preempt: PreemptSettings, rows: Rows = ()
) -> Iterator[Session]:
    """Join the other ranks, watch over the body, and leave with the right exit code on every rank.

    The body may raise anything. StopRequested (after saving a checkpoint) ends the run with 75, ConfigError with 78;
    any other exception is reported with rank, phase, step and stack, and ends every rank within seconds.
    """
    place = _place_or_exit(run)
    log_to_console(place)
    try:
        faults.parse(os.environ.get("DDP_FAULTS", ""))
        joined = rendezvous(place, clocks)
        directory = _run_directory(joined, run)
    except (ConfigError, RunFailed, OSError, ValueError) as error:
        _give_up_early(error, run, place.attempt)
    log_to_file(directory, place)
    flags = StopFlags(preempt, directory / "stop")
    flags.install()
    if place.rank == 0:
        describe(directory, joined, rows)

    monitor = Monitor(joined, directory, logs.heartbeat_s)
    monitor.start()
    verdict = Verdict(DONE, "benign", "training is done")
    try:
        with phase("init"):
            joined = setup_distributed(joined, run.device)
        log.info("%d ranks on %s, %s", joined.world_size, ", ".join(dict.fromkeys(joined.hosts)), joined.backend)
        agreement, metrics = Agreement(joined, flags), MetricLog(joined, directory, logs)
        yield Session(joined, directory, flags, agreement, metrics)
        with suppress(StopRequested):  # it came after the last step
            agreement.settle()
    except StopRequested as stop:
        verdict = Verdict(STOPPED, "preempted", f"stopped on request: {stop}", phase=beat.phase, step=beat.step)
    except BaseException as error:
        _fail(monitor, joined, error)
    try:
        with phase("shutdown"):
            metrics.close()
            meet(joined)  # still watched: a rank that dies here is named, too
    except BaseException as error:
        _fail(monitor, joined, error)
    monitor.stop()
    monitor.write_heartbeat()
    _leave(joined, directory, verdict)


def _leave(joined: Dist, directory: Path, verdict: Verdict) -> None:
    """The orderly way out, after all ranks have met."""
    shutdown(joined)
    if joined.rank == 0:
        outcome.write(directory, verdict, joined.place.attempt)
        report.write(directory)
        log.info("%s; report: %s", verdict.reason, directory / "report.md")
    logging.shutdown()
    if verdict.exit_code:
        sys.exit(verdict.exit_code)


def _fail(monitor: Monitor, joined: Dist, error: BaseException) -> NoReturn:
    """An exception left the training loop of this rank: find out who began, say so, and exit everywhere."""
    log.error("%s in phase %s at step %d", type(error).__name__, beat.phase, beat.step, exc_info=error)
    if isinstance(error, RunFailed) or _peer_lost(error):
        monitor.wait_for_verdict()
        found = monitor.diagnose()
        if found.kind == "rank_killed":
            monitor.fail(found)
    monitor.fail(_verdict_of(error, joined))


def _peer_lost(error: BaseException) -> bool:
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in PEER_LOST)


def _verdict_of(error: BaseException, joined: Dist) -> Verdict:
    code, kind, advice = FAILED, "rank_exception", ""
    text = str(error)
    if isinstance(error, ConfigError):
        code, kind = CONFIG, error.kind
    elif isinstance(error, torch.OutOfMemoryError):
        kind, advice = "cuda_oom", "use a smaller batch or activation checkpointing"
    elif isinstance(error, Diverged):
        kind, advice = "divergent_control_flow", "look for an `if` on rank-local data around a collective or a forward"
    elif isinstance(error, FloatingPointError):
        kind, advice = "nonfinite_loss", "lower the learning rate, clip gradients, or look at the data of that step"
    elif "DataLoader" in text:
        kind = "dataloader_stalled" if "timed out" in text else "dataloader_worker_died"
    elif isinstance(error, RunFailed):
        code, kind = STALLED, "unknown"
        advice = "look at the log of rank 0, which says more"
    elif _peer_lost(error):
        code, kind = STALLED, "network_unreachable"
        advice = "no rank has failed by itself: look at the network between the hosts, then at the logs of all ranks"
    reason = f"{joined.who(joined.rank)} raised {type(error).__name__}: {text} (phase {beat.phase}, step {beat.step})"
    first = None if kind in ("network_unreachable", "unknown") else [joined.rank]
    stacks = {str(joined.rank): "".join(traceback.format_exception(error))}
    return Verdict(code, kind, reason, first, beat.phase, beat.step, advice, stacks)


def _place_or_exit(run: RunSettings) -> Place:
    try:
        return detect()
    except ConfigError as error:
        _give_up_early(error, run, attempt=0)


def _give_up_early(error: Exception, run: RunSettings, attempt: int) -> NoReturn:
    """Before the ranks know each other there is nobody to tell: one line, an outcome if the run has a name, and out."""
    code = STALLED if isinstance(error, RunFailed) else CONFIG
    print(f"error: {error}", file=sys.stderr, flush=True)
    if run.id:
        kind = "rendezvous_failed" if code == STALLED else "launcher_misconfig"
        outcome.write(run.dir / run.id, Verdict(code, kind, str(error), phase="init", step=0), attempt)
    os._exit(code)


def _run_directory(joined: Dist, run: RunSettings) -> Path:
    """Rank 0 names and makes it; the others learn the name from the store, since clocks differ."""
    if joined.rank == 0:
        name = run.id or time.strftime("%Y%m%d-%H%M%S")
        outcome.begin(run.dir / name, joined.place.attempt, joined.world_size)
        joined.store.set("run_id", name)
    directory = run.dir / joined.store.get("run_id").decode()
    if not (directory / "logs").is_dir():
        raise ConfigError(
            f"{joined.who(joined.rank)} does not see {directory.resolve()}, which rank 0 has made",
            "set run.dir to a file system that all nodes share",
        )
    return directory
