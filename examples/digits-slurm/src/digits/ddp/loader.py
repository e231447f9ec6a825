"""The safe DataLoader factory: sharded, equally long on every rank, resumable, with workers that fit the machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeVar, cast

import torch
from pydantic import BaseModel, Field
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .agree import gather, same
from .errors import ConfigError
from .loading.collation import Collation
from .loading.draws import warn_of_generators
from .loading.fetch import begin, next_batch, patience
from .loading.held import warn_of_shared_files
from .loading.located import Located
from .loading.lockstep import in_step
from .loading.orders import Order, OwnOrder
from .loading.overlap import watched
from .loading.samples import compare_samples
from .loading.shards import END, GlobalOrder, LocatedStream, lengths_of
from .loading.streams import compare_streams
from .loading.workers import fitting_workers, keep_protection, protect_worker, worker_context
from .start.groups import Job
from .trace import spent
from .trace.heartbeat import phase
from .trace.replicas import models

log = logging.getLogger("ddp")

T = TypeVar("T")


class LoaderSettings(BaseModel, extra="forbid"):
    """How batches are read. `uneven` says what happens when the samples do not divide by the ranks."""

    workers: int = Field(0, ge=0, description="processes that read data, a rank; capped by CPUs, open files, /dev/shm")
    prefetch: int = Field(2, ge=1, description="batches each worker keeps ready")
    batch_mb: float = Field(16, gt=0, description="MB of one batch, assumed to see how many workers /dev/shm holds")
    start_method: Literal["forkserver", "spawn", "fork"] = Field(
        "forkserver", description="fork is unsafe once NCCL runs (torch/nn/parallel/distributed.py)"
    )
    uneven: Literal["pad", "drop"] = Field("pad", description="repeat or drop data: all ranks make equal steps")
    drop_last: bool = Field(False, description="leave out the smaller batch at the end of an epoch of training")
    eval_batches: int = Field(0, ge=0, description="batches that each rank evaluates, at most, always the same; 0: all")
    seed_samples: bool = Field(
        False, description="what a sample draws follows from run.seed, epoch and index: exact resume with workers"
    )


def make_loader(
    dataset: Dataset[T],
    job: Job,
    settings: LoaderSettings,
    *,
    batch_size: int,
    seed: int = 0,
    train: bool = True,
    collate_fn: Callable[[list[T]], Any] | None = None,
    sharded: bool = False,
    full: bool = False,
    compare: bool = True,
    order: Order | None = None,
) -> DataLoader[T]:
    """A DataLoader of this rank's shard of `dataset`; `batch_size` is a rank's. All ranks must call it.

    Training loaders have equally many batches on every rank; evaluation loaders show each sample once. With
    `settings.eval_batches`, evaluation has that many batches of each rank at most: of a map-style data set, samples
    evenly spread over it, of a stream its first ones.

    A map-style data set is shuffled for training, and each rank reads its own samples only. If it has `lengths` (one
    number a sample), the samples of a step are about equally long on all ranks; if it has `collate(samples)`, that
    makes the batches. In the place of a sampler of your own, `order(epoch, seed)` returns the indices of an epoch for
    all ranks together, in which some may be missing and others repeated: each rank takes `batch_size` of them in a row,
    in turn. It must follow from its arguments alone, and `lengths` have no say then.

    An IterableDataset must be
    the same stream on every rank: sample i goes to rank i % world_size, and each process reads all of it to take its
    own. Its order is its own business: if it has `set_epoch(epoch)`, that is called before each epoch. For a stream
    that is slow to read, let the data set itself yield this rank's samples (and in a worker, of `get_worker_info`, that
    worker's), and say `sharded=True`; then `uneven` repeats or drops batches.

    What samples draw at random, such as augmentation, comes from the default generators, in the order of reading. With
    workers that order is not known, so a run that was stopped within an epoch draws others than if it had gone on; with
    `settings.seed_samples` each sample of a map-style data set draws by `seed`, epoch and index.

    `full` leaves out the smaller batch at the end of an epoch, for which torch.compile would compile once more, as
    `settings.drop_last` does in training.
    `compare=False` is for data sets that differ between ranks on purpose: else a few samples are compared, here, or of
    a stream once its first batch has been read. Of a `sharded` one, the first samples must not be those of other ranks.

    Raises:
        ConfigError: the data set is empty or differs between ranks, the settings do not fit the machine, or `order` is
            given for evaluation or a stream. An order by itself is looked at as its epoch begins: see `batches`.
        DataFailed: the worker that read samples to compare them hung or died.
    """
    full = full or (train and settings.drop_last)
    what, least = "training" if train else "evaluation", batch_size if full else 1
    if order is not None and (not train or isinstance(dataset, IterableDataset)):
        problem = f"make_loader has an order for {'a stream' if train else 'evaluation'}, which has one of its own"
        raise ConfigError(problem, "leave out `order`; a stream may shuffle in its set_epoch(epoch)")
    _compare_lengths(dataset, job, what, settings.uneven, sharded, least)
    workers = fitting_workers(settings.workers, job, settings.prefetch, settings.batch_mb)
    uneven = settings.uneven if train else "keep"
    most = 0 if train else settings.eval_batches * batch_size * job.world_size
    located: Located[T] | LocatedStream[T]
    if train:
        warn_of_generators(dataset, job, workers)
    if workers and settings.start_method == "fork":
        warn_of_shared_files(dataset, job)
    sampler: GlobalOrder | None = None
    if isinstance(dataset, IterableDataset):
        located = LocatedStream(dataset, job, workers, seed, batch_size, uneven, sharded)
        located.most = 0 if train else settings.eval_batches
        if located.most:
            log.info("evaluation reads %d batches of each rank at most (loader.eval_batches)", located.most)
        located.compared = sharded or not compare or job.world_size == 1
        located.given.compared = not (sharded and compare and train)
    else:
        if compare:
            compare_samples(dataset, job, what, workers, settings.start_method)
        length = len(cast(Any, dataset))
        if 0 < most < length:
            log.info("evaluation takes %d of %d samples, evenly spread (loader.eval_batches)", most, length)
        if train and length < batch_size * job.world_size:
            many = f"{job.world_size} x {batch_size} samples" if job.world_size > 1 else f"{batch_size} samples"
            text = "a batch of %s is more than the data set has, %d: each step trains on all of it"
            log.warning(text + "\n  -> a smaller train.batch_size", many, length, extra={"file_only": job.rank != 0})
        if order is not None:
            sampler = OwnOrder(order, length, job, seed=seed, uneven=uneven, batch=batch_size)
        else:
            lengths = lengths_of(dataset)
            sampler = GlobalOrder(
                length, job, seed=seed, shuffle=train, uneven=uneven, lengths=lengths, batch=batch_size, most=most
            )
        if train and not full:
            _warn_of_single_sample(len(sampler) % batch_size, job)
        located = Located(dataset, job, workers, seed if settings.seed_samples else None)
    return DataLoader(
        located,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=workers,
        drop_last=full or (sharded and uneven == "drop"),  # else only some ranks might have a smaller last batch
        collate_fn=Collation(collate_fn or getattr(dataset, "collate", None), located.reading),
        timeout=patience(job) if workers else 0,  # PyTorch refuses a timeout without workers
        multiprocessing_context=worker_context(settings.start_method) if workers else None,
        prefetch_factor=settings.prefetch if workers else None,
        worker_init_fn=partial(protect_worker, os.getpid()) if workers else None,
        pin_memory=job.device.type == "cuda",
        # The loader draws its workers' seeds from here: from the default generator it would disturb a resumed run.
        generator=torch.Generator().manual_seed(seed + job.rank),
    )


def _warn_of_single_sample(last: int, job: Job) -> None:
    """`last` are the samples that are left for a smaller batch at the end of an epoch of this rank."""
    parts = ((name, part) for model in models() for name, part in model.module.named_modules())
    name = next((name for name, part in parts if isinstance(part, nn.BatchNorm1d)), None)
    if last == 1 and name is not None:
        text = "each epoch ends with a batch of one sample, for which BatchNorm1d (%s) raises at one value a channel"
        remedy = "\n  -> loader.drop_last true leaves that batch out; or take another train.batch_size"
        log.warning(text + remedy, name, extra={"file_only": job.rank != 0})


def _compare_lengths(dataset: Dataset[Any], job: Job, what: str, uneven: str, sharded: bool, least: int) -> None:
    stream = isinstance(dataset, IterableDataset)
    try:
        length = len(cast(Any, dataset))
    except TypeError:
        if not stream:
            raise
        length = None  # found out while reading: see lockstep.py
    if stream and sharded:
        lengths = gather(job, length)
        if 0 in lengths:
            problem = f"the stream of {what} samples is empty on {job.who(lengths.index(0))}"
            raise ConfigError(problem, "give every rank files or samples, or use fewer ranks", "uneven_inputs")
        if len(set(lengths)) > 1:
            log.info("the ranks have different numbers of %s samples, loader.uneven is %s", what, uneven)
        return
    remedy = "make every rank see the same files: a rank-dependent filter or a half-synced disk is the usual cause"
    if stream:
        remedy = "make it the same stream on every rank, or pass sharded=True if each rank reads its own part"
    same(job, f"the number of {what} samples", length, remedy)
    if length is not None and length < least * job.world_size:
        problem = f"{length} {what} samples for {job.world_size} ranks: not even {least} for each"
        raise ConfigError(problem, "use fewer ranks, smaller batches or more data")


def batches(loader: DataLoader[T], job: Job, epoch: int = 0, start: int = 0, begun: int = 0) -> Iterator[T]:
    """The batches of one epoch from global sample `start` on, each waited for in the phase `data`.

    Of a stream, nobody knows how many there will be, so training reads one batch ahead and asks the other ranks
    whether they have one, too: see lockstep.py. A `sharded` stream cannot be entered in the middle: the batches before
    `start` are read once more and thrown away, which is exact with equally many ranks and workers.

    Raises:
        DataFailed: the data set raised, or a worker hung or died; the message names rank, worker, data set and index.
        ConfigError: on all ranks: a stream has no batch at all for some rank, or the order of your own that the epoch
            has differs between ranks, has an index that is not there, or is shorter than a batch of all ranks.
    """
    order = loader.dataset if isinstance(loader.dataset, LocatedStream) else loader.sampler
    training = cast("LocatedStream[T] | GlobalOrder", order).uneven != "keep"
    if isinstance(order, OwnOrder):
        order.set_epoch(epoch, start)  # only now it is known how long the epoch is
    full = cast(int, loader.batch_size)
    left = order.share(start) if isinstance(order, GlobalOrder) else None  # nobody knows how long a stream is
    for batch in _common(loader, job, epoch, start, begun):
        size = full if left is None else min(full, left)
        left = None if left is None else left - size
        if training:
            spent.watch.batch(size * job.world_size, size / full)
        yield batch


def _common(loader: DataLoader[T], job: Job, epoch: int, start: int, begun: int) -> Iterator[T]:
    """As many on every rank, but for evaluation."""
    located = loader.dataset
    if not isinstance(located, LocatedStream) or located.uneven == "keep":
        most = getattr(located, "most", 0) or None
        yield from islice(_own(loader, job, epoch, start, begun), most)
        return
    # A sharded stream begins from its beginning, and may well differ in length between ranks.
    begin_at, skipped = (0, start // (located.batch * job.world_size)) if located.sharded else (start, 0)
    remark = "" if located.sharded else "the ranks do not read the same stream: samples are missed or read twice"
    common = in_step(job, _own(loader, job, epoch, begin_at), located.uneven, begin_at == 0, remark)
    if not located.given.compared:
        common = watched(common, located.given, located.reading.name, job, located.batch)
    yield from (batch for batch, _ in islice(common, skipped, None))


def _own(loader: DataLoader[T], job: Job, epoch: int, start: int, begun: int = 0) -> Iterator[T]:
    """This rank's batches, however many the others have."""
    located = cast("Located[T] | LocatedStream[T]", loader.dataset)
    order = located if isinstance(located, LocatedStream) else cast(GlobalOrder, loader.sampler)
    if isinstance(order, GlobalOrder):
        order.begun = begun or order.begun
    order.set_epoch(epoch, start)
    if isinstance(located, Located):
        located.epoch = epoch
    if loader.generator is not None:
        loader.generator.manual_seed(order.seed + epoch * job.world_size + job.rank)
    keep_protection(loader, job.rank)
    with phase("data"):
        iterator = begin(loader, job, located.reading)
    while True:
        with phase("data"):
            try:
                batch = next_batch(iterator, job, located.reading, start if order is located else 0)
            except StopIteration:
                batch = END
        if isinstance(located, LocatedStream) and not located.compared:
            located.compared = True
            compare_streams(located.beginning, located.reading.name, job)
        if batch is END:
            return
        yield batch


def endless(
    loader: DataLoader[T], job: Job, epoch: int, start: int, begun: int = 0
) -> Iterator[tuple[dict[str, int], T]]:
    """Batches of epoch after epoch, each with its position for the checkpoint.

    That is: `epoch`; `used`, how many samples of it all ranks have read; and `begun`, the size of the global batch with
    which it began, on which the order of samples by length depends. Another one counts from the next epoch on.
    """
    size = cast(int, loader.batch_size) * job.world_size
    begun = begun or size
    while True:
        used = start
        for batch in batches(loader, job, epoch, start, begun):
            used += size
            yield {"epoch": epoch, "used": used, "begun": begun}, batch
        epoch, start, begun = epoch + 1, 0, size


def full_batches(dataset: Dataset[Any], job: Job, batch_size: int) -> int | None:
    """Whole batches that every rank has of `dataset`, for `polled`; None for an iterable one: nobody knows before."""
    if isinstance(dataset, IterableDataset):
        return None
    return len(cast(Any, dataset)) // job.world_size // batch_size


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`: one, or those in tuples, lists (which become lists) and dicts.

    What is no tensor, like names, stays as it is. From pinned memory, as the loader has it, the copy does not wait.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(part, device) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [to_device(part, device) for part in batch]
    return batch
