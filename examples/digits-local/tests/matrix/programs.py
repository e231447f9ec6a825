"""Small programs that do what people do, wrong or unusual: `python -m matrix.programs NAME`, under the launchers."""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

from digits.config import Settings
from digits.ddp import (
    Progress,
    batches,
    checkpoint,
    load_settings,
    make_loader,
    on_rank0,
    phase,
    rehearse,
    step_done,
    total,
)
from digits.ddp.session import Session, session


def sums(settings: Settings, run: Session) -> None:
    """Identical sums, one a step: what goes wrong between them, PyTorch does not notice."""
    for step in range(settings.train.steps):
        run.agreement.poll(step)
        with phase("forward"):
            dist.all_reduce(torch.ones(4, device=run.job.device))
            time.sleep(0.05)
        step_done(step + 1, 0)


def disk_full(settings: Settings, run: Session) -> None:
    """No file can grow beyond 100 kB any more (for a full disk) when a checkpoint is written beside these steps."""
    layer = torch.nn.Linear(512, 512).to(run.job.device)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for step in range(settings.train.steps):
        run.agreement.poll(step)
        if step == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            checkpoint.save(run.job, run.dir, {"step": step}, {"layer": layer}, keep=1)
        with phase("forward"):
            dist.all_reduce(torch.ones(4, device=run.job.device))
            time.sleep(0.05)
        step_done(step + 1, 0)


def long_guard(settings: Settings, run: Session) -> None:
    """Rank 0 works for ten times the collective timeout, and says so."""

    def work(progress: Progress) -> None:
        for part in range(100):
            time.sleep(settings.clocks.collective_s / 10)
            progress(f"part {part + 1} of 100")

    on_rank0(run.job, "slow", work)
    ranks = total(run.job, torch.ones(1))
    if run.job.rank == 0:
        print(f"all {ranks.item():.0f} ranks went on", flush=True)


def lonely_guard(_settings: Settings, run: Session) -> None:
    """A guard that only rank 0 enters, before one that all enter."""
    if run.job.rank == 0:
        on_rank0(run.job, "mine", lambda _progress: None)
    on_rank0(run.job, "ours", lambda _progress: None)


def nested_guard(_settings: Settings, run: Session) -> None:
    """A guard inside a guard."""
    on_rank0(run.job, "outer", lambda _progress: on_rank0(run.job, "inner", lambda _inner: None))


def broken_pipe(_settings: Settings, run: Session) -> None:
    """An error of the user's own, in the words of one that a lost peer causes."""
    if run.job.rank == 1:
        raise RuntimeError("ffmpeg: Broken pipe")
    total(run.job, torch.ones(1))


def stuck_at_the_end(_settings: Settings, run: Session) -> None:
    """What is left to do after the last meeting hangs on one rank."""
    if run.job.rank == 1:
        dist.destroy_process_group = partial(time.sleep, 1_000_000)


def collective_in_guard(_settings: Settings, run: Session) -> None:
    """A collective that only rank 0 reaches."""
    on_rank0(run.job, "sum", lambda _progress: dist.all_reduce(torch.ones(1)))


class Numbers(Dataset[int]):
    """As many samples as it is told."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The same without a length: nobody knows beforehand when it ends."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def around_ddp(_settings: Settings, run: Session) -> None:
    """A loss that passes the DDP model by: without a reduction, each rank would train a model of its own."""
    network = torch.nn.Linear(4, 1).to(run.job.device)
    samples = torch.full((1, 4), 1.0 + run.job.rank, device=run.job.device)
    rehearse(run.job, [DistributedDataParallel(network)], lambda: network(samples).sum().backward())


def uneven_lengths(settings: Settings, run: Session) -> None:
    """A data set that is longer on rank 1."""
    make_loader(Numbers(100 + run.job.rank), run.job, settings.loader, batch_size=4)


def uneven_stream(settings: Settings, run: Session) -> None:
    """Streams that shard themselves, and end earlier on rank 0."""
    stream = Stream(30 + 20 * run.job.rank)
    loader = make_loader(stream, run.job, settings.loader, batch_size=4, sharded=True)
    made = 0
    for _ in batches(loader, run.job):
        total(run.job, torch.ones(1))  # what each step does: it hangs unless all ranks make equally many
        made += 1
    print(f"rank {run.job.rank} made {made} batches", flush=True)


def destroyed_group(_settings: Settings, run: Session) -> None:
    """User code that cleans up on its way out of an error."""
    try:
        if run.job.rank == 1:
            raise ValueError("a bug in user code")
        total(run.job, torch.ones(1))
    finally:
        dist.destroy_process_group()


PROGRAMS: dict[str, Callable[[Settings, Session], None]] = {
    program.__name__: program
    for program in (
        *(sums, disk_full, long_guard, lonely_guard, nested_guard, collective_in_guard, around_ddp),
        *(uneven_lengths, uneven_stream, destroyed_group, broken_pipe, stuck_at_the_end),
    )
}


def find(name: str) -> Callable[[Settings, Session], None]:
    """A program of this file, or `reports_x.y`: the function y of reports_x.py beside it."""
    module, _, function = name.rpartition(".")
    return getattr(import_module(f"matrix.{module}"), function) if module else PROGRAMS[name]


def main(name: str, arguments: list[str]) -> None:
    """Run one program inside a session, like train.py."""
    settings, _ = load_settings(Settings, arguments)
    if name == "group_first":  # some other library was faster
        dist.init_process_group("gloo")
        name = "sums"
    program = find(name)
    if hasattr(program, "before_session"):  # it starts one itself, or has others do so
        program.before_session(settings)
        return
    with session(settings.run, settings.clocks, settings.log, settings.preempt) as run:
        program(settings, run)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
