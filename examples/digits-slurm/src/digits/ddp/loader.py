"""The safe DataLoader factory: sharded, equally long on every rank, resumable, with workers that fit the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from pydantic import BaseModel, Field
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from .agree import same
from .errors import ConfigError, DataFailed
from .heartbeat import phase
from .setup import Dist
from .workers import fitting_workers, protect_worker, worker_context

T = TypeVar("T")


class LoaderSettings(BaseModel, extra="forbid"):
    """How batches are read. `uneven` says what happens when the samples do not divide by the ranks."""

    workers: int = Field(0, ge=0, description="processes that read data, a rank; capped by the CPUs of the task")
    prefetch: int = Field(2, ge=1, description="batches each worker keeps ready")
    start_method: Literal["forkserver", "spawn", "fork"] = Field(
        "forkserver", description="fork is unsafe once NCCL runs (torch/nn/parallel/distributed.py)"
    )
    uneven: Literal["pad", "drop"] = Field("pad", description="repeat or drop samples: all ranks make equal steps")


class GlobalOrder(Sampler[int]):
    """This rank's part of one order that all ranks share: `order[start + rank :: world_size]`.

    The global batch at a step depends on `seed`, `epoch` and the global batch size only, so a run can go on with
    another number of ranks. With `uneven="keep"` (evaluation) nothing is repeated or dropped, and shards may differ
    by one.
    """

    def __init__(self, length: int, joined: Dist, *, seed: int, shuffle: bool, uneven: str) -> None:
        self.length, self.rank, self.world_size = length, joined.rank, joined.world_size
        self.seed, self.shuffle, self.uneven = seed, shuffle, uneven
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Order of `epoch`, without its first `start` samples (counted over all ranks)."""
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.length)
        if self.shuffle:
            order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        left = order[self.start :]
        rest = len(left) % self.world_size  # of what is left: another world size may have begun this epoch
        if rest and self.uneven == "pad":
            left = torch.cat([left, order[: self.world_size - rest]])
        elif rest and self.uneven == "drop":
            left = left[: len(left) - rest]
        return iter(left[self.rank :: self.world_size].tolist())

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch, whatever `start` is."""
        whole, rest = divmod(self.length, self.world_size)
        if self.uneven == "keep":
            return whole + (self.rank < rest)
        return whole + (rest > 0 and self.uneven == "pad")


class Located(Dataset[T]):
    """A data set that remembers which index each worker reads, so that a hang or a kill can be located."""

    def __init__(self, inner: Dataset[T], workers: int) -> None:
        self.inner = inner
        self.reading = torch.full((max(workers, 1),), -1, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> T:
        info = get_worker_info()
        self.reading[info.id if info else 0] = index
        try:
            return self.inner[index]
        except Exception as error:  # a data set may raise anything; one line, because a worker sends text only
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataFailed(f"index {index} of {type(self.inner).__name__}: {cause}") from error

    def __len__(self) -> int:
        return len(cast(Any, self.inner))


def make_loader(
    dataset: Dataset[T],
    joined: Dist,
    settings: LoaderSettings,
    *,
    batch_size: int,
    seed: int = 0,
    train: bool = True,
    collate_fn: Callable[[list[T]], Any] | None = None,
) -> DataLoader[T]:
    """A DataLoader of this rank's shard of a map-style `dataset`; `batch_size` is a rank's.

    Training loaders shuffle and have equally many batches on every rank; evaluation loaders show each sample once.

    Raises:
        ConfigError: the data set is empty or differs between ranks, or the settings do not fit the machine.
    """
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{type(dataset).__name__} is iterable: its shards may differ in length, and the longest would hang",
            "give it __len__ and __getitem__, for instance over the files or records of an index",
        )
    length = len(cast(Any, dataset))
    same(
        joined,
        "the number of training samples" if train else "the number of evaluation samples",
        length,
        "make every rank see the same files: a rank-dependent filter or a half-synced disk is the usual cause",
    )
    if length < joined.world_size:
        ranks = joined.world_size
        raise ConfigError(f"{length} samples for {ranks} ranks: some would have none", "use fewer ranks or more data")
    workers = fitting_workers(settings.workers, joined, settings.prefetch)
    order = GlobalOrder(length, joined, seed=seed, shuffle=train, uneven=settings.uneven if train else "keep")
    return DataLoader(
        Located(dataset, workers),
        batch_size=batch_size,
        sampler=order,
        num_workers=workers,
        collate_fn=collate_fn,
        timeout=joined.clocks.loader_s if workers else 0,  # PyTorch refuses a timeout without workers
        multiprocessing_context=worker_context(settings.start_method) if workers else None,
        prefetch_factor=settings.prefetch if workers else None,
        worker_init_fn=partial(protect_worker, os.getpid()) if workers else None,
        pin_memory=joined.device.type == "cuda",
        # The loader draws its workers' seeds from here: from the default generator it would disturb a resumed run.
        generator=torch.Generator().manual_seed(seed + joined.rank),
    )


def batches(loader: DataLoader[T], joined: Dist, epoch: int = 0, start: int = 0) -> Iterator[T]:
    """The batches of one epoch from global sample `start` on, each waited for in the phase `data`.

    Raises:
        DataFailed: the data set raised, or a worker hung or died; the message names rank, worker, data set and index.
    """
    order, located = cast(GlobalOrder, loader.sampler), cast("Located[T]", loader.dataset)
    order.set_epoch(epoch, start)
    if loader.generator is not None:
        loader.generator.manual_seed(order.seed + epoch * joined.world_size + joined.rank)
    with phase("data"):  # starts the workers
        iterator = iter(loader)
    while True:
        with phase("data"):
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except DataFailed as error:  # from a worker it comes with the worker's whole traceback
                cause = str(error).strip().splitlines()[-1].rpartition("DataFailed: ")[2]
                raise DataFailed(f"{joined.who(joined.rank)} could not read {cause}") from error
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, OSError, EOFError) as error:  # of the loader itself: a worker hangs or has died
                gone = "" if isinstance(error, RuntimeError) else "DataLoader worker exited unexpectedly: "
                at = [f"worker {worker} at index {index}" for worker, index in enumerate(located.reading.tolist())]
                what = f"{joined.who(joined.rank)} could not read {type(located.inner).__name__} ({', '.join(at)})"
                raise DataFailed(f"{what}: {gone}{error}") from error
        yield batch


def endless(loader: DataLoader[T], joined: Dist, epoch: int, start: int) -> Iterator[tuple[int, int, T]]:
    """Batches of epoch after epoch, each with its position for the checkpoint: epoch, global samples used of it."""
    while True:
        used = start
        for batch in batches(loader, joined, epoch, start):
            used += cast(int, loader.batch_size) * joined.world_size
            yield epoch, used, batch
        epoch, start = epoch + 1, 0
