"""Several ranks in one process, in turn: what each would read, draw and keep; and what came of it, to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from digits.config import Settings
from digits.ddp.clocks import Clocks
from digits.ddp.loading.shards import GlobalOrder
from digits.ddp.rng import random_state, restore_random_state, seed_generators
from digits.ddp.start.groups import Job
from digits.ddp.start.launcher import Place

CPU = torch.device("cpu")
# A bias ahead of BatchNorm has only what rounding leaves of gradients that cancel: 1e-10 to 2e-8 of the norms of all
# gradients in a convolutional VAE, where others have 3e-5 and more, there and in all examples. Adam makes whole steps
# of it, in a direction that depends on the order of summation.
NEGLIGIBLE = 1e-6
FAR = 0.02  # a parameter may end so far from where it should, in units of the way it went


def job_of(rank: int, world_size: int) -> Job:
    """What a rank on one machine knows, without a process group."""
    place = Place("none", rank, rank, world_size, world_size, "n1", "127.0.0.1", 1, 0, False)
    return Job(place, Clocks(), torch.distributed.HashStore(), ("n1",) * world_size)


def batches_of(data: Dataset[Any], rank: int, world_size: int, settings: Settings) -> Iterator[Any]:
    """What the loader of this rank would read, epoch after epoch. Draws no random number but those of the samples."""
    lengths, size, seed = getattr(data, "lengths", None), settings.train.batch_size, settings.run.seed
    length, job = len(data), job_of(rank, world_size)  # type: ignore[arg-type, unused-ignore]
    order = GlobalOrder(length, job, seed=seed, shuffle=True, uneven="pad", lengths=lengths, batch=size)
    own, collate = torch.Generator(), getattr(data, "collate", None)
    loader: DataLoader[Any] = DataLoader(data, size, sampler=order, collate_fn=collate, generator=own)
    for epoch in count():
        order.set_epoch(epoch)
        yield from loader


class Turns:
    """The random state and the buffers of each rank; in a `turn` the process has those of one of them."""

    def __init__(self, networks: Sequence[nn.Module], world_size: int, seed: int) -> None:
        self.modules = [module for network in networks for module in network.modules()]
        self.random = []
        for rank in range(world_size):
            seed_generators(seed + 1 + rank)  # as train.py does
            self.random.append(random_state(CPU))
        self.buffers = [self._copied()] * world_size

    def begin_step(self) -> None:
        """All ranks go on with rank 0's buffers: DDP broadcasts them ahead of the forward after a reduction."""
        self.buffers = [self.buffers[0]] * len(self.buffers)

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """Be this rank. Buffers are exchanged, not overwritten: the backward of an earlier turn may need its own."""
        for module, buffers in zip(self.modules, self.buffers[rank], strict=True):
            for name, buffer in buffers.items():
                setattr(module, name, buffer.clone())
        restore_random_state(self.random[rank], CPU)
        yield
        self.random[rank], self.buffers[rank] = random_state(CPU), self._copied()

    def equal_buffers(self, network: nn.Module) -> dict[str, Tensor]:
        """Those that are the same on all ranks. Others, like BatchNorm's statistics, each rank keeps for itself."""
        found = {}
        for prefix, module in network.named_modules():
            ranks = [buffers[self.modules.index(module)] for buffers in self.buffers]
            for name, buffer in ranks[0].items():
                if all(torch.equal(buffer, other[name]) for other in ranks[1:]):
                    found[f"{prefix}.{name}".removeprefix(".")] = buffer
        return found

    def _copied(self) -> list[dict[str, Tensor]]:
        own = [dict(module.named_buffers(recurse=False)) for module in self.modules]
        return [{name: buffer.clone() for name, buffer in buffers.items()} for buffers in own]


class Path:
    """The way of a network's parameters through a training: where they began, and how they were pulled."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.start = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
        self.pull = dict.fromkeys(self.start, 0.0)

    def note_gradients(self) -> None:
        """Call it when the gradients of a step are complete."""
        for name, parameter in self.network.named_parameters():
            if parameter.grad is not None:
                self.pull[name] += parameter.grad.norm().item()

    def compare(self, trained: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        """Fail unless `trained`, the state of the same network from a checkpoint, is where this path has ended."""
        pull = sum(self.pull.values())
        assert pull > 0, "no parameter got a gradient"
        for name, parameter in self.network.named_parameters():
            if self.pull[name] == 0:
                # Frozen, or not used: nothing but weight decay moves it, to the bit or nearly so.
                assert torch.allclose(trained[name], parameter, rtol=1e-5), name
            elif self.pull[name] > NEGLIGIBLE * pull:
                way = (parameter - self.start[name]).norm()
                assert (trained[name] - parameter).norm() <= FAR * way, name
        for name, buffer in buffers.items():
            if name in trained:  # not those with persistent=False
                assert torch.allclose(trained[name].double(), buffer.double(), rtol=1e-3, atol=1e-4), name
