"""The next batch of a loader, or why it does not come: which worker, of which data set, at which sample."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from ..errors import CONFIG, ConfigError, DataFailed, KindName
from ..start.groups import Job
from ..start.stop import shielded
from ..trace.heartbeat import progress
from .held import refuse_unsendable
from .located import Reading

T = TypeVar("T")

# Kind of outcome -> what tells it in a message of PyTorch, Python or the C library. The first that matches counts.
CAUSES: dict[KindName, str] = {
    "fd_exhausted": r"Too many open files|received \d+ items of ancdata",
    "shm_exhausted": r"allocate shared memory|Bus error|(/dev/shm|/torch_\d).*No space left",
    "dataloader_stalled": r"DataLoader timed out",
    "dataloader_worker_died": r"DataLoader worker.* (exited unexpectedly|is killed by signal)",
    "rank_exception": r"",
}


def loader_failure(text: str) -> KindName:
    """The kind of outcome that a message about data stands for."""
    return next(kind for kind, pattern in CAUSES.items() if re.search(pattern, text))


def patience(job: Job) -> float:
    """Seconds that DataLoader waits at a time: about two, and a whole part of `clocks.loader_s`."""
    return job.clocks.loader_s / max(1, round(job.clocks.loader_s / 2))


def begin(loader: DataLoader[T], job: Job, reading: Reading) -> Iterator[T]:
    """`iter(loader)`, which starts the workers and, the first time, their fork server.

    PyTorch then raises in a handler of SIGCHLD, wherever the training process is, when a forked worker ends: in the
    middle of C++ that is an abort. So the handler that was there before is put back, and `next_batch` looks itself.

    Raises:
        DataFailed: the machine cannot carry them: no more processes, memory or open files.
        ConfigError: unless they are forked: they cannot import the program again, or the data set cannot be sent.
    """
    _refuse_lost_main(loader)
    before = signal.getsignal(signal.SIGCHLD)
    try:
        with shielded():
            return iter(loader)
    except OSError as error:
        what = f"{job.who(job.rank)} could not start the workers that read {reading.name}: {error}"
        raise DataFailed(what, loader_failure(what)) from error
    except Exception as error:  # of pickle, which says neither the data set nor the attribute
        data = {reading.name: getattr(loader.dataset, "inner", None)}
        refuse_unsendable(error, data | {f"the collate_fn of {reading.name}": loader.collate_fn})
        raise
    finally:
        if before is not None and signal.getsignal(signal.SIGCHLD) is not before:  # None: one that is not Python's
            signal.signal(signal.SIGCHLD, before)


def _refuse_lost_main(loader: DataLoader[Any]) -> None:
    """Workers that are not forked import the file that was started (multiprocessing.spawn). Is there one?"""
    context, main = loader.multiprocessing_context, sys.modules["__main__"]
    if not loader.num_workers or context is None or context.get_start_method() == "fork" or main.__spec__ is not None:
        return
    file, own = getattr(main, "__file__", None), getattr(loader.dataset, "inner", None)
    if (file is None and type(own).__module__ == "__main__") or (file is not None and not os.path.exists(file)):
        came = "a notebook or -c" if file is None else file
        problem = f"the workers must import the program again, which came from {came} and not from a file"
        raise ConfigError(problem, "put it into a file, or set loader.workers to 0")


def next_batch(iterator: Iterator[T], job: Job, reading: Reading, start: int) -> T:
    """`next(iterator)`, with a look at the workers every two seconds or so.

    DataLoader itself looks at them when its timeout is over. A timeout does not end its iterator, so its own is short
    (`patience`) and asked again. `start`: samples at the beginning of a resumed stream that workers only read past,
    which may take long.

    Raises:
        StopIteration: there is no more.
        DataFailed: naming rank, worker, data set and index, for whatever DataLoader or the data set has raised.
        ConfigError: a worker was about to train itself.
    """
    began, before = time.monotonic(), reading.at.tolist()
    while True:
        try:
            return next(iterator)
        except (StopIteration, torch.OutOfMemoryError):
            raise
        except DataFailed as error:  # from a worker it comes with the worker's whole traceback
            cause = str(error).strip().splitlines()[-1].rpartition("DataFailed: ")[2]
            raise DataFailed(f"{job.who(job.rank)} could not read {cause}", loader_failure(cause)) from error
        except Exception as error:
            now, waited = reading.at.tolist(), time.monotonic() - began
            if not _timed_out(error) or _pinning_ended(iterator):
                raise _explained(error, iterator, job, reading) from error
            if now != before and min(now) < start:
                progress(f"skipping to sample {start}")
                began, before = time.monotonic(), now
            elif waited + patience(job) / 2 > job.clocks.loader_s:
                raise _explained(error, iterator, job, reading) from error


def _timed_out(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader timed out")


def _explained(error: Exception, iterator: Any, job: Job, reading: Reading) -> Exception:
    """What to raise instead of `error`."""
    if any(process.exitcode == CONFIG for process in getattr(iterator, "_workers", [])):
        problem = f"a worker that reads {reading.name} imported the script that was started, and so called main(), too"
        return ConfigError(problem, 'put the call under `if __name__ == "__main__":`')
    text = (str(error).strip() or type(error).__name__).splitlines()[-1]
    if isinstance(error, (EOFError, ConnectionError)):
        text = f"DataLoader worker exited unexpectedly: {text}"
    elif _pinning_ended(iterator):
        text = "the thread that receives batches has ended, its traceback is above"
        text += ": Too many open files" if no_more_files() else ""
    elif _timed_out(error):
        text = f"DataLoader timed out after {job.clocks.loader_s:g} seconds"
    at = {worker: f"worker {worker} at {reading.unit} {index}" for worker, index in enumerate(reading.at.tolist())}
    culprits = _culprits(error, iterator)
    told = {worker: list(CAUSES)[cause] for worker, cause in enumerate(reading.cause.tolist()) if cause >= 0}
    kind = next(iter(told.values()), None)  # a worker has said so before it ended
    places = [at[worker] + how for worker, how in (culprits or dict.fromkeys(told, "")).items()] or list(at.values())
    text += f": it could not send a batch ({kind}), its traceback is in the output" if told else ""
    what = f"{job.who(job.rank)} could not read {reading.name} ({', '.join(places)}): {text}"
    return DataFailed(what, kind or loader_failure(what))


def _culprits(error: Exception, iterator: Any) -> dict[int, str]:
    """The workers at fault, each with how it ended; empty when that cannot be told.

    DataLoader's iterator keeps its processes in `_workers`, and whose turn it is in `_task_info` (torch 2.6 to 2.13).
    """
    if caught := re.search(r"DataLoader worker process (\d+)", str(error)):
        return {int(caught[1]): ""}
    processes = getattr(iterator, "_workers", [])
    if isinstance(error, (EOFError, ConnectionError)):  # a connection ends a moment before its process
        wait([process.sentinel for process in processes], timeout=1)
    if ended := {worker: _how(process.exitcode) for worker, process in enumerate(processes) if process.exitcode}:
        return ended
    if _timed_out(error) and not _pinning_ended(iterator):
        turn = getattr(iterator, "_task_info", {}).get(getattr(iterator, "_rcvd_idx", -1))
        return {turn[0]: ""} if turn else {}
    return {}


def _how(code: int) -> str:
    return f", exit code {code}" if code > 0 else f", signal {-code}: {signal.strsignal(-code)}"


def _pinning_ended(iterator: Any) -> bool:
    """On CUDA a thread receives the batches. If it fails (out of descriptors, say), nobody waits for its error."""
    thread = getattr(iterator, "_pin_memory_thread", None)
    return thread is not None and not thread.is_alive()


def no_more_files() -> bool:
    """Whether this process has about as many open files as it may have."""
    try:
        return len(os.listdir("/proc/self/fd")) + 16 > resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except OSError as error:
        return error.errno == errno.EMFILE
