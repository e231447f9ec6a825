"""The worker processes of a loader: as many as the machine carries, and none that outlives the training process."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.queues
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from ..rng import fingerprint, seed_generators
from ..start.groups import Job
from ..start.launcher import cpus_for_this_process
from ..start.stop import leave_to_parent
from .fetch import CAUSES, loader_failure, no_more_files

log = logging.getLogger("ddp")
SHM = Path("/dev/shm")


def room(job: Job, prefetch: int, batch_mb: float) -> list[tuple[int, str]]:
    """How many workers a rank may have, and why, by CPUs, open files and /dev/shm; the tightest first."""
    cpus = cpus_for_this_process(job.place)
    found = [(max(1, cpus - 1), f"{cpus} CPUs for this task, one of them for the training process")]
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        # Each tensor in flight holds a descriptor (file_descriptor strategy, the default on Linux): 64 a batch is much.
        fitting = max(1, (hard - 256) // (64 * prefetch))
        found.append((fitting, f"this task may open {hard} files (raise ulimit -Hn)"))
    if SHM.is_dir():
        # An assumption, not a measurement: batches of batch_mb, and a training and an evaluation loader at a time.
        free, ranks = shutil.disk_usage(SHM).free / (1 << 20), job.place.local_world_size
        fitting = int(free / (2 * ranks * prefetch * batch_mb))
        how = f"{ranks} ranks, 2 loaders and {prefetch} batches of {batch_mb:g} MB a worker"
        found.append((fitting, f"{SHM} has {free:.0f} MB free for {how} (raise --shm-size, or lower loader.batch_mb)"))
    return sorted(found)


def fitting_workers(wanted: int, job: Job, prefetch: int, batch_mb: float) -> int:
    """`wanted`, or as many as this task carries, with a line that says so; 0: the training process reads by itself."""
    if wanted == 0:
        return 0
    fitting, why = room(job, prefetch, batch_mb)[0]
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if fitting < wanted:
        log.warning("loader.workers %d -> %d: %s", wanted, fitting, why)
    return min(wanted, fitting)


def worker_context(start_method: str) -> Any:
    """The multiprocessing context that starts the workers."""
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["torch"])  # workers then start in milliseconds instead of importing torch
    return context


def protect_worker(trainer: int, _worker: int) -> None:
    """In a worker: leave signals to the training process `trainer`, and end when that has gone, even stuck in a read.

    A SIGTERM to the whole job otherwise kills the workers first, and no checkpoint can be taken. A stuck worker would
    also keep its fork server alive: it holds the other end of the pipe by which the server sees that training is over.
    """
    leave_to_parent()
    threading.Thread(target=_end_with, args=(trainer,), daemon=True).start()
    # A batch that cannot be sent (tensors that collation did not share, and /dev/shm is full) would else be dropped
    # with a traceback, and the training process would wait for it until its timeout.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_cannot_send)  # type: ignore[attr-defined]
    # The thread that hands over descriptors (resource_sharer) only prints its errors, and the training process would
    # wait without any timeout, or read that a connection has ended.
    sys.excepthook = _cannot_hand_over


def own_init(trainer: int, rank: int, init: Callable[[int], object], worker: int) -> None:
    """In a worker: `protect_worker`, then the worker_init_fn that a user has put in its place.

    What that seeds from the worker's number is the same on all ranks, which would draw the same noise for other
    samples: the rank is added.
    """
    protect_worker(trainer, worker)
    before = fingerprint()
    init(worker)
    if (seeded := fingerprint()) != before:
        seed_generators(seeded + rank)


def keep_protection(loader: DataLoader[Any], rank: int) -> None:
    """Before workers are started: where user code has replaced the loader's worker_init_fn, call both."""
    init = loader.worker_init_fn
    if not loader.num_workers or (isinstance(init, partial) and init.func in (protect_worker, own_init)):
        return
    loader.worker_init_fn = partial(protect_worker, os.getpid())
    if init is not None:
        loader.worker_init_fn = partial(own_init, os.getpid(), rank, init)
        told = "worker_init_fn was replaced: it is called after the loader's own, and what it seeds gets the rank added"
        log.info(told, extra={"file_only": rank != 0})


def _end_with(trainer: int) -> None:
    while True:
        try:
            os.kill(trainer, 0)
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)


def _cannot_send(error: BaseException, _batch: object) -> None:
    traceback.print_exception(error)
    info: Any = get_worker_info()
    # Without descriptors much else fails, and says something else: a temporary directory, an import, a traceback.
    kind = "fd_exhausted" if no_more_files() else loader_failure(str(error))
    info.dataset.reading.cause[info.id] = list(CAUSES).index(kind)
    os._exit(1)


def _cannot_hand_over(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if no_more_files() or loader_failure(str(error)) in ("fd_exhausted", "shm_exhausted"):
        _cannot_send(error, None)
    sys.__excepthook__(kind, error, trace)
