"""The worker processes of a loader: as many as the machine carries, and none that outlives the training process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

from .env import cpus_for_this_process
from .setup import Dist

log = logging.getLogger("ddp")


def fitting_workers(wanted: int, joined: Dist, prefetch: int) -> int:
    """`wanted`, or as many as the CPUs and the open-file limit of this task carry, with a line that says so."""
    if wanted == 0:
        return 0
    cpus = max(1, cpus_for_this_process(joined.place) - 1)  # one for the training process itself
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Each tensor in flight holds a descriptor (file_descriptor strategy, the default on Linux): 64 a batch is generous.
    files = sys.maxsize if hard == resource.RLIM_INFINITY else max(1, (hard - 256) // (64 * prefetch))
    fitting = min(wanted, cpus, files)
    if fitting < wanted:
        log.warning(
            "loader.workers %d -> %d: this task has %d CPUs and may open %s files",
            wanted,
            fitting,
            cpus + 1,
            "any number of" if hard == resource.RLIM_INFINITY else hard,
        )
    return fitting


def protect_worker(trainer: int, _worker: int) -> None:
    """In a worker: leave signals to the training process `trainer`, and end when that has gone, even stuck in a read.

    A SIGTERM to the whole job otherwise kills the workers first, and no checkpoint can be taken. A stuck worker would
    also keep its fork server alive: it holds the other end of the pipe by which the server sees that training is over.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(trainer,), daemon=True).start()


def _end_with(trainer: int) -> None:
    while True:
        try:
            os.kill(trainer, 0)
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)


def worker_context(start_method: str) -> Any:
    """The multiprocessing context that starts the workers."""
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["torch"])  # workers then start in milliseconds instead of importing torch
    return context
