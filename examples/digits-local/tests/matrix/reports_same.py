"""What people reported of ranks that were not the same: their lines, where they had them."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset, IterableDataset, Subset

from digits.config import Settings
from digits.data import DataSettings, build_datasets
from digits.ddp import batches, checkpoint, gather, make_loader, polled, rehearse
from digits.ddp.loading import overlap
from digits.ddp.same.sources import compare_sources
from digits.ddp.session import Session


class Frequencies(nn.Module):
    """Buffers named by a set: their order follows the hash seed of each process (transformers PR #48162)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        for kind in list({"full", "sliding"}):
            self.register_buffer(f"{kind}_freq", torch.full((4,), float(len(kind))))


def buffers_of_a_set(_settings: Settings, _run: Session) -> None:
    """Harmless in one of two starts."""
    DistributedDataParallel(Frequencies())


def modules_of_a_set(_settings: Settings, _run: Session) -> None:
    """The same with modules of equal shapes."""
    parts = {kind: nn.Linear(4, 4) for kind in list({"full", "sliding"})}
    DistributedDataParallel(nn.ModuleDict(parts))


class Rows(Dataset[Tensor]):
    """Shuffles its rows when it is made (Qwen3-VL #1947): the ranks read some twice, and others never."""

    def __init__(self, shuffle: Callable[[list[int]], None]) -> None:
        self.rows = list(range(512))
        shuffle(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(self.rows[index])) + torch.rand(())  # augmentation by the global generator


def shuffled_rows(settings: Settings, run: Session) -> None:
    """By a generator that nobody can seed."""
    make_loader(Rows(random.SystemRandom().shuffle), run.job, settings.loader, batch_size=4)


def held_out_at_random(settings: Settings, run: Session) -> None:
    """Each rank holds out other samples, and trains on the validation data of the others."""
    torch.manual_seed(run.job.rank)
    data = Rows(lambda _rows: None)
    train, val = torch.randperm(len(data)).split([400, 112])
    make_loader(Subset(data, train.tolist()), run.job, settings.loader, batch_size=4, compare=False)
    make_loader(Subset(data, val.tolist()), run.job, settings.loader, batch_size=4, train=False)


def shuffled_by_random(settings: Settings, run: Session) -> None:
    """By the global generator, which train.py has seeded alike on all ranks when it makes the data sets."""

    def build(data: DataSettings) -> tuple[Any, Any]:
        order = list(range(512))
        random.shuffle(order)
        orders = gather(run.job, order)
        print(f"all ranks have one order: {orders[0] == orders[-1]}", flush=True)
        return build_datasets(data)

    train_module: Any = import_module("digits.train")
    train_module.build_datasets = build
    train_module.train(train_module.with_precision(settings, run.job), run)


def cannot_be_read(settings: Settings, run: Session) -> None:
    """A file that only rank 0's host has; and, in the other set, one that nobody has."""
    make_loader(Missing(every=True), run.job, settings.loader, batch_size=4)
    make_loader(Missing(every=run.job.rank > 0), run.job, settings.loader, batch_size=4, train=False)


class Missing(Dataset[int]):
    """A thousand million samples, of which none, or all, can be read."""

    def __init__(self, every: bool) -> None:
        self.every = every

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        if self.every:
            raise FileNotFoundError(f"part {index} is not here")
        return index


class Network(nn.Module):
    """Small, and with a normalisation that keeps running statistics."""

    def __init__(self, unused: bool = False, act: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.act = act or nn.ReLU()
        self.head = nn.Linear(4, 1)
        if unused:
            self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.act(self.norm(inputs)))
        return output


def _rehearse(run: Session, network: nn.Module, detached: bool = False) -> None:
    model = DistributedDataParallel(network.to(run.job.device))

    def step() -> None:
        loss = model(torch.randn(8, 4, device=run.job.device)).sum()
        (loss.detach().requires_grad_() if detached else loss).backward()

    torch.manual_seed(run.job.rank)
    rehearse(run.job, [model], step)


def running_statistics(_settings: Settings, run: Session) -> None:
    """Each rank's own: said once, and no more than a warning."""
    _rehearse(run, Network())


def one_evaluates(_settings: Settings, run: Session) -> None:
    """Rank 1 freezes statistics that the others go on with."""
    network = Network()
    model = DistributedDataParallel(network.to(run.job.device))
    network.norm.train(run.job.rank != 1)
    samples = torch.randn(8, 4, device=run.job.device)
    rehearse(run.job, [model], lambda: model(samples).sum().backward())


def another_activation(_settings: Settings, run: Session) -> None:
    """No parameter tells that this is another network."""
    _rehearse(run, Network(act=nn.GELU() if run.job.rank == 1 else None))


def never_used(_settings: Settings, run: Session) -> None:
    """A parameter that no forward uses, on any rank."""
    _rehearse(run, Network(unused=True))


def detached_loss(_settings: Settings, run: Session) -> None:
    """The loss of rank 1 does not lead back to the model."""
    _rehearse(run, Network(), detached=run.job.rank == 1)


def another_version(_settings: Settings, run: Session) -> None:
    """A module that each host imports from a directory of its own, and rank 1 has an older copy of it."""
    directory = run.dir / f"host{run.job.rank}"
    directory.mkdir()
    (directory / "widths.py").write_text(f"WIDTH = {64 if run.job.rank == 1 else 128}\n")
    sys.path.insert(0, str(directory))
    import_module("widths")
    compare_sources(run.job)


class Noisy(Dataset[float]):
    """Draws from a generator of its own, which every worker copies."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> float:
        return index + self.rng.random()


def own_generator(settings: Settings, run: Session) -> None:
    """Read by each rank itself: the draws of one rank are those of the other."""
    make_loader(Subset(Noisy(), range(48)), run.job, settings.loader, batch_size=4)


class Files(IterableDataset[tuple[Tensor, int]]):
    """A stream in the order of its files, with augmentation that may differ."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return ((torch.rand(3), number) for number in self.order)


def streams_shuffled_apart(settings: Settings, run: Session) -> None:
    """Evaluated in one order, trained in another one on each rank."""
    val_loader = make_loader(Files(list(range(40))), run.job, settings.loader, batch_size=4, train=False)
    print(f"evaluated {len(list(batches(val_loader, run.job)))} batches", flush=True)
    order = list(range(100 * run.job.rank, 100 * run.job.rank + 40))
    next(batches(make_loader(Files(order), run.job, settings.loader, batch_size=4), run.job))


class Stored(Dataset[int]):
    """Bytes of a file that is opened when the data set is made: fine without workers, wrong in forked ones."""

    def __init__(self) -> None:
        self.file = open(__file__, "rb")  # noqa: SIM115 (as it was reported)

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> int:
        self.file.seek(index)
        return self.file.read(1)[0]


def open_file(settings: Settings, run: Session) -> None:
    """With workers, by whatever start method the case asks for."""
    make_loader(Subset(Stored(), range(200)), run.job, settings.loader, batch_size=4)


def unnamed_collate(settings: Settings, run: Session) -> None:
    """Only the batches need it: the samples could be compared."""
    rows = Rows(lambda _rows: None)
    loader = make_loader(rows, run.job, settings.loader, batch_size=4, collate_fn=lambda samples: samples)
    next(batches(loader, run.job))


def average_of_rank0(_settings: Settings, run: Session) -> None:
    """Evaluated by all: a part of the number is of weights that have never been trained."""
    network = nn.Linear(4, 4)
    average = AveragedModel(network)
    checkpoint.load(run.job, run.dir, {"model": network, "average": average})
    if run.job.rank == 0:
        average.update_parameters(network)
    for _ in polled([0], run.agreement, 1, 1):
        pass


class Parts(IterableDataset[Tensor]):
    """The part of a rank: 24 files of 8 samples, shuffled and then shared out. One sample in 32 is a duplicate."""

    def __init__(self, run: Session, seed: int) -> None:
        files = list(torch.arange(192).split(8))
        random.Random(seed).shuffle(files)
        self.samples = torch.cat(files[run.job.rank :: run.job.world_size])

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((3,), number - 8.0 * (number % 32 == 9)) for number in self.samples.tolist())


def _read_parts(settings: Settings, run: Session, seed: int) -> None:
    data = Parts(run, seed)
    loader = make_loader(data, run.job, settings.loader, batch_size=4, sharded=True)
    for epoch in range(2):
        list(batches(loader, run.job, epoch))


def parts_that_overlap(settings: Settings, run: Session) -> None:
    """Said once, after the first epoch."""
    _read_parts(settings, run, seed=run.job.rank)


def workers_that_overlap(settings: Settings, run: Session) -> None:
    """Each worker gives all that its rank has."""
    loading: Any = import_module("digits.ddp.loader")
    loading.fitting_workers = lambda wanted, *_: wanted  # two on any machine
    _read_parts(settings, run, seed=0)


def parts_apart(settings: Settings, run: Session) -> None:
    """Duplicates of the data itself are nobody's mistake."""
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return True

    overlap.log.addFilter(keep)
    _read_parts(settings, run, seed=0)
    if run.job.rank == 0:  # which says it
        print(f"overlaps told: {sum('as well' in each for each in said)}", flush=True)


class Noise(Dataset[Tensor]):
    """A number from torch's own generator, which each worker seeds."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(())


def seed_worker(worker: int) -> None:
    """What PyTorch's page on reproducibility shows, without the rank."""
    torch.manual_seed(42 + worker)


def own_worker_seeds(settings: Settings, run: Session) -> None:
    """A worker_init_fn of the user's own: equal seeds on all ranks would give them equal noise."""
    fork = settings.loader.model_copy(update={"workers": 1, "start_method": "fork"})
    loader = make_loader(Noise(), run.job, fork, batch_size=4, compare=False)
    loader.worker_init_fn = seed_worker
    drawn = gather(run.job, [batch.tolist() for batch in batches(loader, run.job)])
    if run.job.rank == 0:
        print("the ranks draw", "the same" if drawn[0] == drawn[1] else "numbers of their own", flush=True)
