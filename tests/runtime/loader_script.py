"""Run by torchrun in test_loader.py: read with the loader of a rendered project and say what each rank has got.

loader_script.py streams        one JSON object on rank 0: scenario -> what each rank has seen
loader_script.py orders         the same
loader_script.py fault          with DDP_FAULTS: the DataFailed of this process, its kind first
"""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing.reduction
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from digits.ddp.agree import Agreement, gather
from digits.ddp.clocks import Clocks
from digits.ddp.errors import ConfigError, DataFailed, StopRequested
from digits.ddp.loader import LoaderSettings, batches, endless, make_loader
from digits.ddp.loading import workers
from digits.ddp.loading.lockstep import polled
from digits.ddp.start.groups import Job
from digits.ddp.start.launcher import detect
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Numbers(IterableDataset[Any]):
    """first, first + 1, ...: a stream that does not know its length. `shared`: a worker yields only its share."""

    def __init__(self, length: int, first: int = 0, shared: bool = False) -> None:
        self.length, self.first, self.shared = length, first, shared

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info() if self.shared else None
        start, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(self.first + start, self.first + self.length, step))


class Counted(Numbers):
    def __len__(self) -> int:
        return self.length


class Squares(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index**2)


class CannotHandOver(Squares):
    """Worker 0 has no descriptor left when the training process fetches its batches."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info().id == 0:
            multiprocessing.reduction.send_handle = self._refuse
        return super().__getitem__(index)

    @staticmethod
    def _refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")


def join() -> Job:
    dist.init_process_group("gloo")
    control = dist.new_group(backend="gloo")
    store = dist.distributed_c10d._get_default_store()
    hosts = ("n1",) * dist.get_world_size()
    return replace(Job(detect(), Clocks(loader_s=float(os.environ["LOADER_S"])), store, hosts), control=control)


def streams(job: Job) -> dict[str, Any]:
    rank, found = job.rank, {}
    for count in (0, 2):
        workers.room = lambda *_, count=count: [(count, "")]
        for uneven in ("pad", "drop"):
            name, settings = f"{uneven}, {count} workers", LoaderSettings(workers=count, uneven=uneven)

            def read(
                stream: Any, start: int = 0, settings: LoaderSettings = settings, **options: Any
            ) -> list[list[int]]:
                made = make_loader(stream, job, settings, batch_size=2, **options)
                lists = []
                for batch in batches(made, job, 0, start):
                    dist.all_reduce(torch.ones(1))  # what each step does: it hangs unless all make equally many
                    lists.append(batch.tolist())
                return lists

            found[f"one stream, {name}"] = read(Numbers(26))
            found[f"resumed, {name}"] = read(Numbers(26), 12)
            found[f"resumed from two ranks, {name}"] = read(Numbers(26), 8)
            own = Numbers([5, 9, 12][rank], 100 * rank, shared=True)
            found[f"own streams, {name}"] = read(own, sharded=True)
            found[f"own streams resumed, {name}"] = read(own, 6, sharded=True)
            if count == 0:
                found[f"streams that should be equal, {name}"] = read(Numbers(20 + 6 * rank))
    workers.room = lambda *_: [(0, "")]
    settings = LoaderSettings()

    polls: list[int] = []
    counting: Any = SimpleNamespace(job=job, poll=polls.append, change_pace=lambda: None)
    own = Numbers([5, 9, 12][rank], 100 * rank)
    shard = make_loader(own, job, settings, batch_size=2, train=False, sharded=True)
    found["evaluation"] = [b.tolist() for b in polled(batches(shard, job), counting, 7, None)]
    found["polls"] = polls

    # A stop while a question of the loader is under way, with the agreement's own on the same group.
    flags: Any = SimpleNamespace(reason=lambda: "SIGTERM" if steps == 5 and rank == 1 else "")
    agreement, steps = Agreement(job, flags, 0.0), 0
    loader = make_loader(Numbers(1000), job, settings, batch_size=2)
    feed = endless(loader, job, 0, 0)
    try:
        while True:
            agreement.poll(steps)
            next(feed)
            dist.all_reduce(torch.ones(1))
            steps += 1
    except StopRequested as stop:
        found["stopped"] = [steps, str(stop)]

    for name, wrong, options in (
        ("nothing for rank 1", Numbers(0 if rank == 1 else 9), {"sharded": True}),
        ("lengths differ", Squares(20 + rank), {}),
        ("stream lengths differ", Counted(20 + rank), {}),
        ("an empty part", Counted(9 * rank), {"sharded": True}),
    ):
        try:
            list(batches(make_loader(wrong, job, settings, batch_size=2, **options), job))
        except ConfigError as error:
            found[name] = [error.kind, str(error)]
    next(iter(batches(loader, job)))  # left with a question under way
    dist.monitored_barrier(job.control)
    return found


def shuffled(epoch: int, seed: int, length: int = 20) -> torch.Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(100 * seed + epoch))


def orders(job: Job) -> dict[str, Any]:
    rank, found = job.rank, {}

    def read(order: Any, epoch: int = 0, start: int = 0, data: Any = None, **options: Any) -> list[list[int]]:
        made = make_loader(
            data or range(20), job, options.pop("settings", settings), order=order, batch_size=3, **options
        )
        return [batch.tolist() for batch in batches(made, job, epoch, start)]

    for count in (0, 2):
        workers.room = lambda *_, count=count: [(count, "")]
        settings = LoaderSettings(workers=count)
        found[f"epoch 0, {count} workers"] = read(shuffled, seed=7)
        found[f"epoch 1, {count} workers"] = read(shuffled, 1, seed=7)
        found[f"resumed, {count} workers"] = read(shuffled, 1, 12, seed=7)
        found[f"resumed from four ranks, {count} workers"] = read(shuffled, 1, 8, seed=7)
    workers.room, settings = lambda *_: [(0, "")], LoaderSettings()
    odd = [*range(15)]  # repeats nothing, leaves samples out, and does not divide by the ranks
    found["pad"] = read(lambda epoch, seed: odd)
    found["drop"] = read(lambda epoch, seed: odd, settings=LoaderSettings(uneven="drop"))
    found["full"] = read(lambda epoch, seed: odd, full=True)

    asked: list[int] = []

    def longer(epoch: int, seed: int) -> list[int]:
        """Of another length in each epoch."""
        asked.append(epoch)
        return [3] * (6 + 6 * epoch)

    def run(steps: int, *at: int) -> list[Any]:
        loader = make_loader(range(20), job, settings, order=longer, batch_size=3)
        return [[counters["epoch"], counters["used"]] for counters, _ in islice(endless(loader, job, *at), steps)]

    found["endless"], found["asked"] = run(7, 0, 0), asked[:]
    found["goes on"] = run(4, *found["endless"][2])
    for name, order, options in (
        ("another order", lambda epoch, seed: [*range(12 + epoch)][:: 1 - 2 * rank], {}),
        ("a float", lambda epoch, seed: [0.5] * 12, {}),
        ("too high", lambda epoch, seed: [*range(11), 19 + rank], {}),
        ("negative", lambda epoch, seed: [*range(11), -1], {}),
        ("too short", lambda epoch, seed: range(5), {}),
        ("nothing on rank 1", lambda epoch, seed: None if rank else [*range(12)], {}),
        ("text", lambda epoch, seed: ["a.png", "b.png"] * 6, {}),
        ("batches of unequal size", lambda epoch, seed: [[0, 1, 2], [3, 4]], {}),
        ("numpy's uint64", lambda epoch, seed: numpy.arange(12, dtype=numpy.uint64), {}),
        ("a tensor of uint64", lambda epoch, seed: torch.tensor([*range(12)]).to(torch.uint64), {}),
        ("complex numbers", lambda epoch, seed: torch.ones(12, dtype=torch.complex64), {}),
        ("evaluation", shuffled, {"train": False}),
        ("a stream", shuffled, {"data": Numbers(26)}),
    ):
        try:
            read(order, **options)
        except ConfigError as error:
            found[name] = [error.kind, str(error)]
    return found


def fault(job: Job) -> None:
    workers.room = lambda *_: [(2, "")]
    settings = LoaderSettings(workers=2, start_method=os.environ["START_METHOD"])
    dataset = {"map": Squares, "stream": Numbers, "cannot hand over": CannotHandOver}[os.environ["DATA"]](10_000)
    try:
        for _ in islice(batches(make_loader(dataset, job, settings, batch_size=4), job), 1000):
            pass
    except DataFailed as error:
        print(f"{error.kind} | {error}", flush=True)
        os._exit(0)  # as a run does; else DataLoader's end would wait 5 s for each stuck worker
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    raise AssertionError("no fault was met")


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    here = join()
    if sys.argv[1] == "fault":
        fault(here)
    everything = gather(here, orders(here) if sys.argv[1] == "orders" else streams(here))
    if here.rank == 0:
        print(json.dumps({name: [one.get(name) for one in everything] for name in everything[0]}), flush=True)
    dist.destroy_process_group()
