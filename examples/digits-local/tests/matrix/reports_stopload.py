"""What people have reported about samples, workers and checkpoints: programs for reports_stopload.yaml."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from digits.config import Settings
from digits.ddp import batches, checkpoint, make_loader
from digits.ddp.session import Session


class Images(Dataset[Any]):
    """Pictures of one size, but for one."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3, 8, 9 if index == 123 else 8), index % 10


class Stream(IterableDataset[Any]):
    """The same as a stream."""

    def __iter__(self) -> Any:
        images = Images()
        return (images[index] for index in range(512))


def odd_shape(settings: Settings, run: Session) -> None:
    """A sample that has another shape than the others of its batch."""
    for _ in batches(make_loader(Images(), run.job, settings.loader, batch_size=8), run.job):
        pass


def odd_shape_in_a_stream(settings: Settings, run: Session) -> None:
    """The same in a stream, where nobody else counts the samples."""
    for _ in batches(make_loader(Stream(), run.job, settings.loader, batch_size=8), run.job):
        pass


class Options:
    """What the user of the report put into a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {"args": argparse.Namespace(width=64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("there is none to load")


def saves_options(_settings: Settings, run: Session) -> None:
    """Settings in a checkpoint as an object: saved, and refused when it is loaded."""
    checkpoint.save(run.job, run.dir, {"step": 1}, {"model": nn.Linear(2, 2), "options": Options()}, keep=1)


def loads_options(_settings: Settings, run: Session) -> None:
    """The same, seen before the first step."""
    checkpoint.load(run.job, run.dir, {"model": nn.Linear(2, 2), "options": Options()})


def fully_sharded(_settings: Settings, run: Session) -> None:
    """FSDP2: each rank has some rows of each parameter, and only those of rank 0 would be saved."""
    from torch.distributed.fsdp import fully_shard

    network = nn.Linear(8, 8)
    fully_shard(network)
    checkpoint.load(run.job, run.dir, {"model": network})


def fsdp(_settings: Settings, run: Session) -> None:
    """FSDP1: its state_dict() needs all ranks, and would hang on rank 0 alone."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    network = FullyShardedDataParallel(nn.Linear(8, 8), device_id=run.job.device)
    checkpoint.save(run.job, run.dir, {"step": 1}, {"model": network}, keep=1)


def zero_optimizer(_settings: Settings, run: Session) -> None:
    """Each rank has the state of some parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    network = nn.Linear(8, 8)
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.SGD, lr=0.1)
    checkpoint.save(run.job, run.dir, {"step": 1}, {"model": network, "optimizer": optimizer}, keep=1)


def saves_nan(_settings: Settings, run: Session) -> None:
    """Weights that are lost already."""
    network = nn.Linear(8, 8)
    with torch.no_grad():
        network.bias[3] = float("nan")
    checkpoint.save(run.job, run.dir, {"step": 1}, {"model": network}, keep=1)
