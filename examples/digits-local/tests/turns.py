"""Several ranks in one process, in turn: what each would read, draw and keep; and what came of it, to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from digits.config import Settings
from digits.ddp.clocks import Clocks
from digits.ddp.loading.shards import GlobalOrder, LocatedStream
from digits.ddp.rng import random_state, restore_random_state, seed_generators
from digits.ddp.start.groups import Job
from digits.ddp.start.launcher import Place

CPU = torch.device("cpu")
FAR = 0.02  # a parameter may end so far from where it should, in units of the way it went
SEVERAL_RANKS = (
    "Several ranks must train like one process with all their samples, or more GPUs make another model.\n"
    "  -> training_loss returns the sum over the batch and the number of its terms, calls the wrapped model, and draws"
    " from torch's default generator; a sample depends on its index and on that generator alone"
)
NUDGE = 1e-6  # of each weight: some 16 times what rounding may change in it


def job_of(rank: int, world_size: int) -> Job:
    """What a rank on one machine knows, without a process group."""
    place = Place("none", rank, rank, world_size, world_size, "n1", "127.0.0.1", 1, 0, False)
    return Job(place, Clocks(), torch.distributed.HashStore(), ("n1",) * world_size)


def batches_of(data: Dataset[Any], rank: int, world_size: int, settings: Settings) -> Iterator[Any]:
    """What the loader of this rank would read, epoch after epoch. Draws no random number but those of the samples."""
    lengths, size, seed = getattr(data, "lengths", None), settings.train.batch_size, settings.run.seed
    job, collate, own = job_of(rank, world_size), getattr(data, "collate", None), torch.Generator()
    order: GlobalOrder | LocatedStream[Any]
    loader: DataLoader[Any]
    if isinstance(data, IterableDataset):
        order = LocatedStream(deepcopy(data), job, 0, seed, size, "pad", False)  # a stream may hold its own position
        loader = DataLoader(order, size, collate_fn=collate, generator=own)
    else:
        length = len(data)  # type: ignore[arg-type, unused-ignore]
        order = GlobalOrder(length, job, seed=seed, shuffle=True, uneven="pad", lengths=lengths, batch=size)
        loader = DataLoader(data, size, sampler=order, collate_fn=collate, generator=own)
    for epoch in count():
        order.set_epoch(epoch)
        yield from one_ahead(loader) if isinstance(order, LocatedStream) else loader


def one_ahead(loader: DataLoader[Any]) -> Iterator[Any]:
    """Its batches, each when the next has been read: as the ranks do with a stream, whose end they do not know."""
    read = iter(loader)
    batch = next(read)
    for ahead in read:
        yield batch
        batch = ahead
    yield batch


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


def nudge(network: nn.Module) -> None:
    """Change each weight by no more than some steps of rounding would. Draws nothing from the default generator."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + NUDGE * (2 * torch.rand(parameter.shape, generator=generator) - 1))


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

    def compare(self, trained: dict[str, Tensor], buffers: dict[str, Tensor], again: Callable[[], Path]) -> None:
        """Fail unless `trained`, the state of the same network from a checkpoint, is where this path has ended.

        `again` is for parameters that are not: it goes the same way from weights that differ by no more than rounding.
        Where that ends elsewhere, too, nobody can tell where the parameter belongs: of gradients that cancel, like
        those of a bias ahead of a norm, only rounding is left, and Adam makes whole steps of it.
        """
        pull = sum(self.pull.values())
        assert pull > 0, "no parameter got a gradient: let the loss depend on the network's parameters"
        far = []
        for name, parameter in self.network.named_parameters():
            if self.pull[name] == 0:
                # Frozen, or not used: nothing but weight decay moves it, to the bit or nearly so.
                assert torch.allclose(trained[name], parameter, rtol=1e-5), f"{name} has no gradient, and has moved"
            elif not self.is_near(name, trained[name], FAR):
                far.append(name)
        other = dict(again().network.named_parameters()) if far else {}
        far = [name for name in far if self.is_near(name, other[name], FAR / 4)]
        assert far == [], f"{far} ended elsewhere than in one process. {SEVERAL_RANKS}"
        for name, buffer in buffers.items():
            if name in trained:  # not those with persistent=False
                same = torch.allclose(trained[name].double(), buffer.double(), rtol=1e-3, atol=1e-4)
                assert same, f"the buffer {name} is not what it is in one process. {SEVERAL_RANKS}"

    def is_near(self, name: str, weights: Tensor, far: float) -> bool:
        """Tell whether these weights of a parameter are where it has ended, up to `far` times the way it went."""
        parameter = self.network.get_parameter(name)
        return bool((weights - parameter).norm() <= far * (parameter - self.start[name]).norm())
