"""Whether all ranks see the same samples: a few of a data set are read by index on every rank, and compared."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..agree import gather
from ..errors import ConfigError
from ..rng import random_state, restore_random_state, seed_generators
from ..same.rows import NOTHING, Difference, digest
from ..start.groups import Job
from ..trace.heartbeat import phase
from .fetch import begin, next_batch, patience
from .located import Reading
from .parts import Parts, parts_of, without_addresses
from .workers import protect_worker, worker_context

log = logging.getLogger("ddp")

MOST = 32  # samples
ENOUGH_S = 0.1  # of reading: then no further sample is begun
REMEDY = (
    "shuffle and split with a generator of its own, seeded alike on all ranks, and sort what a file system lists; "
    "make_loader(..., compare=False) if ranks must differ"
)
RAISES = "raises"  # the only part of a sample that cannot be read; what it says is the error


def compare_samples(dataset: Dataset[Any], job: Job, what: str, workers: int, start_method: str) -> None:
    """Check that a map-style data set holds the same samples under the same indices on all ranks.

    Each rank reads a few with equal generators, so that random augmentation comes out equal, too. What differs is read
    twice more: parts that differ on one rank by themselves are drawn from a generator elsewhere, and tell nothing. A
    loader with workers reads in a worker here as well: files that a data set opens when it is first read must not be
    open in the training process when the workers are made.

    Raises:
        ConfigError: on all ranks, naming the index and what each rank has there.
        DataFailed: the worker hung or died.
    """
    if job.world_size == 1:
        return
    length = len(dataset)  # type: ignore[arg-type]
    inner = random.Random(0).sample(range(1, length - 1), min(MOST - 2, length - 2)) if length > 2 else []
    indices = [0, length - 1, *inner][: max(length, 1)]
    found = _read(dataset, job, indices, workers, start_method)
    rows = gather(job, [digest([*parts, *parts.values()]) for parts in found])
    common = min(len(row) for row in rows)
    odd = [index for index, *each in zip(indices, *rows) if len(set(each)) > 1][:4]  # noqa: B905 (some read fewer)
    if odd:
        twice = _read(dataset, job, [index for index in odd for _ in range(2)], workers, start_method, limit_s=1e9)
        difference = _first(odd, gather(job, twice))
        name = f"the {what} data set ({type(dataset).__name__})"
        if difference:
            problem = f"{name} is not the same on all ranks: {difference.name}: {difference.text(job.hosts)}"
            raise ConfigError(problem, REMEDY, "ranks_differ")
        log.info("%s draws its samples at random by itself, so ranks could not be compared by them", name)
    broken = [(index, parts[RAISES]) for index, parts in zip(indices, found[:common], strict=False) if RAISES in parts]
    if broken and job.rank == 0:
        index, error = broken[0]
        name = type(dataset).__name__
        log.warning("index %d of %s cannot be read on any rank: %s; training will fail there", index, name, error)


def _first(indices: Sequence[int], ranks: Sequence[Sequence[Parts]]) -> Difference | None:
    """The first part that differs between ranks, and not between two readings on any of them."""
    for place, index in enumerate(indices):
        once, again = ([row[2 * place + number] for row in ranks] for number in range(2))
        errors = [f"raises {parts[RAISES]}" if RAISES in parts else "can be read" for parts in once]
        if any(RAISES in parts for parts in once):
            if not all(RAISES in parts for parts in once) and once == again:
                return Difference(f"index {index}", tuple(errors))
            continue
        for where in dict.fromkeys(where for parts in once for where in parts):
            values = [parts.get(where, NOTHING) for parts in once]
            if len(set(values)) > 1 and values == [parts.get(where, NOTHING) for parts in again]:
                return Difference(f"index {index}{where}", tuple(values))
    return None


class Probe(Dataset[Parts | None]):
    """What a few samples consist of, read one after another; None for all that come after `limit_s`."""

    def __init__(self, inner: Dataset[Any], job: Job, indices: Sequence[int], limit_s: float) -> None:
        self.inner, self.indices, self.limit_s = inner, indices, limit_s
        self.spent_s = 0.0
        self.reading = Reading(type(inner).__name__, "index", job, 1)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> Parts | None:
        if self.spent_s > self.limit_s:
            return None
        index, began = self.indices[place], time.monotonic()
        self.reading.at[0] = index
        seed_generators(index)
        try:
            return parts_of(self.inner[index])
        except Exception as error:  # a data set may raise anything
            return {RAISES: without_addresses(" ".join(f"{type(error).__name__}: {error}".split())[:300])}
        finally:
            self.spent_s += time.monotonic() - began


def _read(
    dataset: Dataset[Any],
    job: Job,
    indices: Sequence[int],
    workers: int,
    start_method: str,
    limit_s: float = ENOUGH_S,
) -> list[Parts]:
    """The parts of these samples, of as many as could be read in `limit_s`, and of the first in any case."""
    probe = Probe(dataset, job, indices, limit_s)
    with phase("data"):
        if workers == 0:
            state = random_state(job.device)
            found = [probe[place] for place in range(len(probe))]
            restore_random_state(state, job.device)
            return [parts for parts in found if parts is not None]
        loader = DataLoader(
            probe,
            batch_size=None,
            num_workers=1,
            collate_fn=_as_is,  # type: ignore[arg-type]  # the stubs do not know of batch_size=None
            timeout=patience(job),
            multiprocessing_context=worker_context(start_method),
            worker_init_fn=partial(protect_worker, os.getpid()),
            generator=torch.Generator(),  # the default one must not move
        )
        iterator = begin(loader, job, probe.reading)
        found = [next_batch(iterator, job, probe.reading, 0) for _ in indices]
        return [parts for parts in found if parts is not None]


def _as_is(sample: Parts | None) -> Parts | None:
    return sample
