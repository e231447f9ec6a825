"""Fault injection for tests: DDP_FAULTS="kind@rank=1,step=20,phase=forward;...". Does nothing unless it is set.

`kind` is one of KINDS, or one of WORKER_KINDS for a loader worker. `rank` defaults to 0 ("all" is every rank), `step`
to 0, `phase` to forward, `attempt` to 0: a restarted job does not meet the fault again. `step` is the number of
finished optimiser steps when the phase begins; for a worker, the first of its rank, how many samples it has read.
`seconds` is for sleep, gil and slow.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import clocks
from .errors import ConfigError
from .process_group import handle, leave
from .start.launcher import detect

log = logging.getLogger("ddp")

KINDS = {
    "raise": "an exception",
    "exit": "the process ends with code 3",
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "abort": "SIGABRT",
    "sleep": "sleeps in Python",
    "gil": "sleeps in C code and holds the GIL",
    "lock": "waits for a lock that it holds itself",
    "slow": "sleeps each time the phase begins, from `step` on",
    "oom": "CUDA is out of memory (without a GPU: the same exception)",
    "nan": "the model's next output is NaN",
    "term": "SIGTERM",
    "usr2": "SIGUSR2",
    "termall": "SIGTERM to every process of the job",
    "usr2all": "SIGUSR2 to every process of the job",
    "intall": "SIGINT to every process of the job",
    "hupall": "SIGHUP to every process of the job",
    "stopfile": "someone makes the stop file",
    "extra": "one more all_reduce than the others",
    "skip": "its next all_reduce is not made",
    "shape": "its next all_reduce is of another shape",
    "dtype": "its next all_reduce is of another type of the same size",
    "order": "a broadcast in the place of its next all_reduce",
}
WORKER_KINDS = {
    "worker-raise": "an exception in a loader worker",
    "worker-hang": "a loader worker sleeps",
    "worker-kill": "SIGKILL of a loader worker",
    "worker-shm": "SIGBUS of a loader worker: what a full /dev/shm causes",
    "worker-files": "a loader worker may open no more files",
}
SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP", "abort": "SIGABRT", "term": "SIGTERM", "usr2": "SIGUSR2"}
TO_ALL = {"termall": "SIGTERM", "usr2all": "SIGUSR2", "intall": "SIGINT", "hupall": "SIGHUP"}
DEFAULTS = {"rank": "0", "step": "0", "phase": "forward", "attempt": "0", "seconds": "1000000"}
PHASES = ("init", "compile", *clocks.PHASES)
PLACES = ("checkpoint:copy", "checkpoint:write", "checkpoint:rename")  # the last two in a thread, beside any phase
VALUES = {
    "rank": r"\d+|all",
    "step": r"\d+",
    "phase": rf"({'|'.join(PHASES + PLACES)})|(guard|wait):.+",
    "attempt": r"\d+",
    "seconds": r"\d+(\.\d+)?",
}


class InjectedFault(RuntimeError):
    """Raised by the fault `raise`."""


@lru_cache
def parse(text: str) -> tuple[dict[str, str], ...]:
    """The faults in `text`, each with its kind and all options.

    Raises:
        ConfigError: an unknown kind, option or phase, or a number that is none.
    """
    found = []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        kind, _, options = entry.partition("@")
        fault = {**DEFAULTS, "kind": kind}
        if kind not in KINDS and kind not in WORKER_KINDS:
            known = ", ".join([*KINDS, *WORKER_KINDS])
            raise ConfigError(f"DDP_FAULTS: {kind!r} is not a known fault", f"use one of {known}")
        for option in filter(None, options.split(",")):
            key, _, value = option.partition("=")
            if key not in DEFAULTS:
                raise ConfigError(f"DDP_FAULTS: {key!r} is not a known option", f"use {', '.join(DEFAULTS)}")
            if not re.fullmatch(VALUES[key], value):
                allowed = "all or a number" if key == "rank" else "a number"
                allowed = f"{', '.join(PHASES + PLACES)}, guard:<name> or wait:<name>" if key == "phase" else allowed
                raise ConfigError(f"DDP_FAULTS: {value!r} is no {key}", f"use {allowed}")
            fault[key] = value
        found.append(fault)
    return tuple(found)


def inject(phase: str, step: int) -> None:
    """Called as each phase begins; carries out the faults meant for this rank, phase and step."""
    text = os.environ.get("DDP_FAULTS")
    if not text:
        return
    place = detect()
    for fault in parse(text):
        due = step >= int(fault["step"]) if fault["kind"] == "slow" else step == int(fault["step"])
        here = (fault["phase"], fault["attempt"]) == (phase, str(place.attempt))
        if due and here and fault["rank"] in ("all", str(place.rank)) and fault["kind"] in KINDS:
            _carry_out(fault)


def inject_worker(rank: int, attempt: int, samples_read: int) -> None:
    """Called in a loader worker before it reads a sample; carries out the faults meant for this rank's workers."""
    for fault in parse(os.environ.get("DDP_FAULTS", "")):
        here = (fault["attempt"], fault["step"]) == (str(attempt), str(samples_read))
        if not here or fault["rank"] not in ("all", str(rank)) or fault["kind"] not in WORKER_KINDS:
            continue
        if fault["kind"] == "worker-raise":
            raise InjectedFault(f"injected by DDP_FAULTS into a worker, after {samples_read} samples")
        if fault["kind"] == "worker-hang":
            time.sleep(float(fault["seconds"]))
        elif fault["kind"] == "worker-files":
            _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault["kind"] == "worker-kill" else signal.SIGBUS)


def _carry_out(fault: dict[str, str]) -> None:
    kind, seconds = fault["kind"], float(fault["seconds"])
    if kind != "slow":
        log.warning("injecting %s in phase %s at step %s: %s", kind, fault["phase"], fault["step"], KINDS[kind])
    if kind in SIGNALS:
        os.kill(os.getpid(), getattr(signal, SIGNALS[kind]))
    elif kind in TO_ALL:
        signal_all(getattr(signal, TO_ALL[kind]))
    elif kind == "raise":
        raise InjectedFault(f"injected by DDP_FAULTS in {fault['phase']} at step {fault['step']}")
    elif kind == "exit":
        os._exit(3)
    elif kind in ("sleep", "slow"):
        time.sleep(seconds)
    elif kind == "gil":
        ctypes.PyDLL(None).sleep(int(seconds))  # unlike CDLL, PyDLL keeps the GIL during the call
    elif kind == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif kind == "oom":
        if torch.cuda.is_available():
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        raise torch.OutOfMemoryError("CUDA out of memory (injected by DDP_FAULTS)")
    elif kind == "nan":
        _spoil_next_output()
    elif kind == "stopfile":
        Path(os.environ["DDP_RUN__DIR"], os.environ["DDP_RUN__ID"], "stop").touch()
    elif kind == "extra":
        dist.all_reduce(torch.ones(1, device="cuda" if dist.get_backend() == "nccl" else "cpu"))
    else:
        _change_next_all_reduce(kind)


def signal_all(number: signal.Signals) -> None:
    """Send it to every process of this run on this host, as Slurm without cgroups does: launchers and helpers, too.

    They are those whose environment names the run.
    """
    wanted = {f"{name}={os.environ[name]}".encode() for name in ("DDP_RUN__DIR", "DDP_RUN__ID")}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if wanted <= set(path.read_bytes().split(b"\0")):
                os.kill(int(path.parent.name), number)


def _spoil_next_output() -> None:
    """As a bad sample would: the loss, and after DDP's averaging the gradients of all ranks, become NaN."""

    def spoil(_module: object, _inputs: object, output: Any) -> Any:
        hook.remove()
        return output * float("nan")

    hook = torch.nn.modules.module.register_module_forward_hook(spoil)


def _change_next_all_reduce(kind: str) -> None:
    """Only those made from Python; DDP's own are not seen here."""

    def changed(name: str, group: Any, make: Callable[..., Any], tensors: Any, *arguments: Any, **options: Any) -> Any:
        if name != "allreduce" or group is not dist.group.WORLD:
            return make(tensors, *arguments, **options)
        leave(changed)
        given = tensors[0] if isinstance(tensors, list) else tensors
        instead: dict[str, Callable[[], Any]] = {
            "skip": lambda: _Done(),
            "shape": lambda: make([torch.cat([given.flatten()] * 2)], *arguments, **options),
            "dtype": lambda: make([given.view(torch.int32)], *arguments, **options),
            "order": partial(dist.broadcast, given, 0, async_op=True),
        }
        return instead[kind]()

    handle(changed)


class _Done:
    """What a collective that was not made returns."""

    def wait(self, *_arguments: Any) -> bool:
        return True
