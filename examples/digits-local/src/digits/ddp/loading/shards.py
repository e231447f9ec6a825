"""Which samples are this rank's: of a map-style data set, a part of one order; of a stream, every so many-th."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from ..errors import ConfigError
from ..start.groups import Job
from ..trace.heartbeat import progress
from .located import Reading, alone
from .overlap import Given
from .streams import Beginning

T = TypeVar("T")
END: Any = object()


class GlobalOrder(Sampler[int]):
    """This rank's part of one order that all ranks share: `order[start + rank :: world_size]`.

    The global batch at a step depends on `seed`, `epoch` and the global batch size only, so a run can go on with
    another number of ranks. With `uneven="keep"` (evaluation) nothing is repeated or dropped, and shards may differ
    by one. With `lengths`, the samples of one global batch are about equally long: see `by_length`. The order then
    depends on `begun`, the size of the global batch with which the epoch began.
    """

    def __init__(
        self,
        length: int,
        job: Job,
        *,
        seed: int,
        shuffle: bool,
        uneven: str,
        lengths: Sequence[int] | None = None,
        batch: int = 1,
        most: int = 0,
    ) -> None:
        self.whole = length  # of the data set: with `most`, fewer samples are taken, evenly spread over it
        length = min(length, most or length)
        self.length, self.rank, self.world_size = length, job.rank, job.world_size
        self.seed, self.shuffle, self.uneven = seed, shuffle, uneven
        self.lengths, self.begun = lengths, batch * job.world_size
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Order of `epoch`, without its first `start` samples (counted over all ranks)."""
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.length)
        if self.length < self.whole and not self.shuffle:
            order = order * self.whole // self.length
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator)
            if self.lengths is not None:
                order = by_length(order, self.lengths, self.begun, generator)
        left = order[self.start :]
        rest = len(left) % self.world_size  # of what is left: another world size may have begun this epoch
        if rest and self.uneven == "pad":
            left = torch.cat([left, order[: self.world_size - rest]])
        elif rest and self.uneven == "drop":
            left = left[: len(left) - rest]
        return iter(left[self.rank :: self.world_size].tolist())

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch, whatever `start` is."""
        return self.share(0)

    def share(self, start: int) -> int:
        """Samples of this rank in an epoch without its first `start` samples (counted over all ranks)."""
        whole, rest = divmod(max(0, self.length - start), self.world_size)
        if self.uneven == "keep":
            return whole + (self.rank < rest)
        return whole + (rest > 0 and self.uneven == "pad")


def lengths_of(dataset: Any) -> list[int] | None:
    """The `lengths` of a data set as plain numbers, one a sample, or None if it has none.

    Raises:
        ConfigError: there are more or fewer than samples.
    """
    if getattr(dataset, "lengths", None) is None:
        return None
    lengths = [int(length) for length in dataset.lengths]
    if len(lengths) != len(dataset):
        problem = f"{type(dataset).__name__} has {len(dataset)} samples and {len(lengths)} lengths"
        raise ConfigError(problem, "give `lengths` one number a sample")
    return lengths


def by_length(order: torch.Tensor, lengths: Sequence[int], batch: int, generator: torch.Generator) -> torch.Tensor:
    """`order`, int64 [N], rearranged so that each `batch` samples in a row have about the same length.

    Within pools of 50 batches samples are sorted, and then the batches are shuffled, so that lengths do not rise
    through an epoch. As ranks take the samples of a global batch in turn, each gets the same amount of work.
    """
    size = torch.tensor(lengths)[order]
    pools = [pool[size[pool].argsort(stable=True)] for pool in torch.arange(len(order)).split(50 * batch)]
    *whole, last = torch.cat(pools).split(batch)
    mixed = [whole[index] for index in torch.randperm(len(whole), generator=generator).tolist()]
    return order[torch.cat([*mixed, last])]


class LocatedStream(IterableDataset[T]):
    """This rank's part of a stream: sample `start + i` belongs to rank `i % world_size`.

    A worker takes whole batches of its rank, and DataLoader takes them from the workers in turn: the batches are those
    of a single reading process, whatever the number of workers. Every process therefore reads the whole stream. With
    `sharded`, the data set is left alone: it yields this rank's, and this worker's, samples by itself.
    """

    def __init__(
        self, inner: IterableDataset[T], job: Job, workers: int, seed: int, batch: int, uneven: str, sharded: bool
    ) -> None:
        self.inner, self.rank, self.world_size = inner, job.rank, job.world_size
        self.seed, self.batch, self.uneven, self.sharded = seed, batch, uneven, sharded
        self.start = self.most = 0  # most: batches of evaluation, 0 is all
        self.reading = Reading(type(inner).__name__, "sample", job, workers)
        self.beginning, self.compared = Beginning(), False
        self.given = Given(workers)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Begin `epoch` without its first `start` samples (counted over all ranks); before the workers are started."""
        self.start = start
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[T]:
        return self._all() if self.sharded else self._share()

    def _share(self) -> Iterator[T]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        first = mine = END  # first: of the whole epoch, to pad with
        mine_at = -1
        position, taken = -1, 0

        def is_ours() -> bool:
            return taken // self.batch % workers == worker

        for position, sample in enumerate(self._all()):
            if position == self.rank:
                first = sample
            if position < self.start:
                if info is None:
                    progress(f"skipping to sample {self.start}")
                continue
            place = (position - self.start) % self.world_size
            if place == self.rank:
                mine, mine_at = sample, position
            if place == self.world_size - 1:  # only now is it known that every rank has one
                if is_ours():
                    self.reading.given.append(mine_at)
                    yield mine
                taken += 1
        rest = max(0, position + 1 - self.start) % self.world_size
        last = mine if self.rank < rest else first if self.uneven == "pad" else END
        if rest and self.uneven != "drop" and last is not END and is_ours():
            self.reading.given.append(mine_at if self.rank < rest else self.rank)
            yield last

    def _all(self) -> Iterator[T]:
        with alone(not self.sharded):
            iterator = iter(self.inner)
        for position in count():
            with self.reading.of(position), alone(not self.sharded):
                sample = next(iterator, END)
            if sample is END:
                return
            if self.sharded:
                self.reading.given.append(position)
                self.given.note(position, sample)
            else:
                self.beginning.note(position, sample)
            yield sample
