"""What a data set holds on to: found in its attributes, and in theirs."""

from __future__ import annotations

import io
import logging
import pickle
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from ..errors import ConfigError
from ..start.groups import Job

log = logging.getLogger("ddp")

DEPTH = 4  # a data set in a Subset in a ConcatDataset, and what that has
MOST = 1000  # objects looked at
LAZILY = "open it at the first read in the worker"
OTHERWISE = "or loader.workers 0"


def held(value: Any, where: str, depth: int = 0, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """'Subset.dataset.file' -> the open file: `value`, what it has, and what that has."""
    seen = set() if seen is None else seen
    if id(value) in seen or len(seen) > MOST:
        return
    seen.add(id(value))
    yield where, value
    if depth < DEPTH and isinstance(value, (list, tuple)):
        for place, item in enumerate(value[:16]):
            yield from held(item, f"{where}[{place}]", depth + 1, seen)
    elif depth < DEPTH and not isinstance(value, (type, torch.Tensor)):
        with suppress(TypeError):  # no attributes
            for name, item in list(vars(value).items()):
                yield from held(item, f"{where}.{name}", depth + 1, seen)


def warn_of_shared_files(dataset: Any, job: Job) -> None:
    """Before workers are forked: say if `dataset` holds an open file. They would all move one position in it."""
    for where, value in held(dataset, type(dataset).__name__) if job.rank == 0 else ():
        if _is_open_file(value):
            what = f"{where} ({type(value).__name__}) is open, and forked workers share its position"
            log.warning("%s: they read wrong or broken samples\n  -> %s", what, f"{LAZILY}, {OTHERWISE}")
            return


def _is_open_file(value: Any) -> bool:
    module, name = type(value).__module__.partition(".")[0], type(value).__name__
    if isinstance(value, io.IOBase):
        with suppress(OSError, ValueError):  # in memory, closed
            return value.fileno() >= 0
        return False
    return isinstance(value, sqlite3.Connection) or (module, name) in {
        ("h5py", "File"),
        ("h5py", "Group"),
        ("h5py", "Dataset"),
        ("lmdb", "Environment"),
    }


def refuse_unsendable(error: Exception, parts: Mapping[str, Any]) -> None:
    """After workers could not be started: was it because one of `parts`, name -> object, cannot be sent to them?

    Raises:
        ConfigError: naming the innermost attribute that cannot be pickled.
    """
    for name, part in parts.items():
        if not (found := _unsendable(part)):
            continue
        where, value, why = found
        problem = f"{name} cannot be sent to its worker processes: "
        kind = getattr(value, "__qualname__", type(value).__name__)
        problem += f"attribute `{where}` ({kind}) cannot be pickled" if where else f"it cannot be pickled: {why}"
        remedy = f"{LAZILY}, or drop it in __getstate__; {OTHERWISE}"
        if hasattr(value, "__qualname__") or "local object" in why:  # a lambda, a function, a class in a function
            remedy = f"define it with a name at the top of a module, not in a function; {OTHERWISE}"
        raise ConfigError(problem, remedy) from error


def _unsendable(value: Any, where: str = "", depth: int = 0) -> tuple[str, Any, str] | None:
    """Path, value and error of the innermost part of `value` that cannot be pickled as a worker's arguments are."""
    try:
        ForkingPickler.dumps(value)
        return None
    except Exception as error:  # pickle raises anything, and so do classes that refuse
        why = " ".join(str(error).split())[:200]
    if "through inheritance" in why:  # a lock or queue of multiprocessing: it may be sent, but only while one starts
        return None
    inner = list(_state(value))[:MOST] if depth < 2 * DEPTH else []
    found = (_unsendable(item, f"{where}{path}", depth + 1) for path, item in inner)
    path, item, why = next((each for each in found if each), (where, value, why))
    return path.removeprefix("."), item, why


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    """What pickle would take of `value`: its items, or its attributes as __getstate__ leaves them."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", item) for place, item in enumerate(value))
    elif not isinstance(value, (type, torch.Tensor)):
        with suppress(Exception):
            for state in value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2:3]:
                for attributes in state if isinstance(state, tuple) else (state,):  # a pair: those of __slots__, too
                    yield from ((f".{name}", item) for name, item in (attributes or {}).items())
