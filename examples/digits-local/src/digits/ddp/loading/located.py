"""What a loader's workers run: a data set that says where it is, so that a hang, a kill or an error can be located."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ..errors import DataFailed
from ..faults import inject_worker
from ..rng import draws_of
from ..start.groups import Job

T = TypeVar("T")


class Reading:
    """Which sample each worker reads, and why it could not send one, in memory that the training process sees."""

    def __init__(self, name: str, unit: str, job: Job, workers: int) -> None:
        self.name, self.unit = name, unit
        self.rank, self.attempt = job.rank, job.place.attempt
        self.at = torch.full((max(workers, 1),), -1, dtype=torch.int64).share_memory_()
        self.cause = torch.full_like(self.at, -1).share_memory_()  # a position in fetch.CAUSES
        self.samples = 0  # read so far, by this process
        self.given: list[int] = []  # by this process, and not yet put into a batch

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """Around the reading of one sample. Faults are put into worker 0 only: the others must not be blamed."""
        info = get_worker_info()
        self.at[info.id if info else 0] = index
        try:
            if info and info.id == 0:
                inject_worker(self.rank, self.attempt, self.samples)
            yield
        except Exception as error:  # a data set may raise anything; one line, because a worker sends text only
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            worker = f" (worker {info.id})" if info else ""
            raise DataFailed(f"{self.unit} {index} of {self.name}{worker}: {cause}") from error
        self.samples += 1

    def taken(self, count: int) -> list[int]:
        """Which samples the last `count` were that were given for a batch."""
        indices, self.given = self.given[-count:], []
        return indices


class Located(Dataset[T]):
    """A map-style data set that remembers which index each worker reads.

    With a `seed`, what a sample draws follows from that, the epoch and its index, whoever reads it, and in what order.
    """

    def __init__(self, inner: Dataset[T], job: Job, workers: int, seed: int | None = None) -> None:
        self.inner, self.seed = inner, seed
        self.epoch = 0  # set before workers are started: each begins an epoch with a copy
        self.reading = Reading(type(inner).__name__, "index", job, workers)

    def __getitem__(self, index: int) -> T:
        with self.reading.of(index), self._drawing(index):
            sample = self.inner[index]
        self.reading.given.append(index)
        return sample

    def _drawing(self, index: int) -> AbstractContextManager[None]:
        if self.seed is None:
            return nullcontext()
        return draws_of(self.seed, self.epoch, index, put_back=get_worker_info() is None)

    def __len__(self) -> int:
        return len(cast(Any, self.inner))


@contextmanager
def alone(hidden: bool) -> Iterator[None]:
    """Hide from the data set that it is in a worker: one that shards by get_worker_info would lose samples in silence.

    `_worker_info` is not public (torch 2.6 to 2.13); tests/test_loader.py sees to it.
    """
    info = torch_worker._worker_info
    if hidden:
        torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
