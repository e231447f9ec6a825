"""Whether the replicas of all ranks are still equal to the bit: weights, buffers and optimiser state, while training.

DDP promises that, and nothing in PyTorch looks: a loss computed beside the wrapper, a step that one rank skips, a
module that nobody wrapped or a flipped bit make each rank train a model of its own, while the loss falls everywhere.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import Diverged
from ..start.groups import Job
from .collectives import minority
from .replicas import local_buffers, models, optimizers

log = logging.getLogger("ddp")
SMALL = 1 << 20  # elements: tensors below are summed together, since a kernel for each would cost more than their bytes
SMALL_ON_CPU = 1 << 12
POOL = 1 << 22  # elements that are copied together for that, at most
EVERY = 4  # agreements for one comparison on a GPU: a pass over 4.4 GB takes 3.4 ms of an H200, which trains nothing
SHOWN = 1 << 24  # elements of a tensor that differs which are looked at one by one
MASK = (1 << 62) - 1  # votes are compared with their negative, which must be an int64, too
INTEGERS = {1: torch.uint8, 2: torch.int16}
PLAIN = (Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (Tensor, nn.Parameter)


Name = tuple[str, ...]  # the parts of a name: put together only when it is told


@dataclass(frozen=True)
class Replica:
    """Something that must be equal on all ranks: a model that DDP wraps, or an optimiser."""

    key: str  # the same on all ranks for the same thing
    tensors: list[tuple[Name, Tensor]]
    flags: list[tuple[Name, object]]  # what counts beside them: requires_grad, training mode, learning rates


@dataclass(frozen=True)
class Digest:
    """Checksums of all replicas at one step; that of the tensors may still be on its way from the GPU."""

    step: int
    keys: int
    flags: int
    sums: list[Tensor]  # int64 scalars in host memory
    event: torch.cuda.Event | None

    def votes(self) -> list[int]:
        """What the ranks compare, each below 2**62. Waits for the GPU, if it has not come so far."""
        if self.event is not None:
            self.event.synchronize()
        return [self.keys, self.flags, sum(int(each) for each in self.sums) & MASK]


@dataclass
class Drift:
    """Compares this process with the others. All ranks call its methods at the same moments."""

    job: Job
    equal_at: int = 0  # the last step at which all was equal
    _apart: set[str] = field(default_factory=set)  # keys of what only some ranks have
    _local: set[str] = field(default_factory=set)  # buffers that DDP overwrites with rank 0's
    _calls: int = 0  # of `digest`: the same on all ranks
    _next: Digest | None = None
    _held: list[object] = field(default_factory=list)  # models and optimisers: the last comparison is after the loop

    def digest(self, step: int, now: bool = False) -> Digest | None:
        """Return the digest that is to be compared now, or None.

        On a CPU that of `step`. On a GPU every fourth call begins one, a few kernels without a host sync, and the call
        after it returns it, when nobody has to wait for it any more. `now`: that of `step`, with the wait.
        """
        self._held = [*models(), *optimizers()]
        self._calls += 1
        begun, self._next = self._next, None
        if now or self.job.device.type != "cuda":
            return _begin(self._replicas(), step)
        if self._calls % EVERY == 1:
            self._next = _begin(self._replicas(), step)
        return begun

    def explain(self, step: int, same_keys: bool) -> None:
        """Say what differs, after the votes of the ranks did. Returns where that is harmless, or has gone by itself.

        Raises:
            Diverged: with the names that differ first, of kind `divergent_weights`.
        """
        self._next = None
        if not same_keys:
            self._set_apart()
        replicas = self._replicas()
        self._compare_flags(replicas, step)
        self._compare_tensors(replicas, step)

    def _replicas(self) -> list[Replica]:
        return [replica for replica in replicas(self._local) if replica.key not in self._apart]

    def _set_apart(self) -> None:
        """Leave out what not all ranks have: a model for a test on rank 0, or the parts of a sharded optimiser."""
        everyone = self._gather([replica.key for replica in self._replicas()])
        common = set(everyone[0]).intersection(*everyone)
        if only := sorted(set().union(*everyone) - common):
            self._apart |= set(only)
            names, once = ", ".join(only[:4]), {"file_only": self.job.rank != 0}
            log.info("not compared between ranks, since not all of them have it: %s", names, extra=once)

    def _compare_flags(self, replicas: list[Replica], step: int) -> None:
        mine = {f"{dotted(name)} of {each.key}": str(flag) for each in replicas for name, flag in each.flags}
        everyone = self._gather(mine)
        for name in everyone[0]:
            values = [theirs.get(name, "absent") for theirs in everyone]
            if len(set(values)) > 1:
                listing = ", ".join(f"{value} on {self.job.who(rank)}" for rank, value in enumerate(values[:8]))
                if name.startswith("parameter "):  # of several orders none is the right one
                    raise self._diverged(f"{name} is {listing}", [], step, ORDER)
                raise self._diverged(f"{name} is {listing}", values, step, FLAGS)

    def _compare_tensors(self, replicas: list[Replica], step: int) -> None:
        tensors = {dotted(name): tensor for each in replicas for name, tensor in each.tensors}
        everyone = self._gather({name: int(checksum([tensor])) for name, tensor in tensors.items()})
        odd = [name for name in everyone[0] if len({theirs.get(name) for theirs in everyone}) > 1]
        by_rank0 = [layout for model, layout in zip(models(), layouts(), strict=True) if model.broadcast_buffers]
        overwritten = {name for layout in by_rank0 for name, _, _ in layout.buffers}.intersection(odd)
        if overwritten:
            self._local |= overwritten
            log.warning(
                "buffers differ between ranks, and those of rank 0 overwrite the others at each forward: %s",
                ", ".join(sorted(overwritten)[:4]),
                extra={"file_only": self.job.rank != 0},
            )
        odd = [name for name in odd if name not in overwritten]
        if not odd:
            return
        more = f" and {len(odd) - 4} more of {len(tensors)} tensors" if len(odd) > 4 else ""
        extent = self._extent(tensors.get(odd[0]), odd[0])
        parameters = {name for layout in layouts() for name, _, _ in layout.parameters}
        buffers = {name for layout in layouts() for name, _, _ in layout.buffers}
        advice = BUFFERS if buffers.issuperset(odd) else BESIDE if parameters.intersection(odd) else OUTSIDE
        what = f"{', '.join(odd[:4])}{more} ({extent})"
        raise self._diverged(what, [theirs.get(odd[0]) for theirs in everyone], step, advice)

    def _extent(self, tensor: Tensor | None, name: str) -> str:
        """Of how many elements, and by how much: a single one is another fault than all of them."""
        mine = None if tensor is None else tensor.detach().reshape(-1)[:SHOWN].cpu()
        sizes = self._gather(None if mine is None else (str(mine.dtype), len(mine)))
        if mine is None or len(set(sizes)) > 1:
            return f"{name} is {', '.join(f'{size} on rank {rank}' for rank, size in enumerate(sizes[:8]))}"
        first = mine.clone()
        dist.broadcast(first, src=0, group=self.job.control)
        apart = (mine != first) & ~((mine != mine) & (first != first))  # NaN is not equal to itself
        most = (mine.double() - first.double()).abs()[apart].nan_to_num(nan=float("inf")).max() if apart.any() else 0.0
        found = self._gather((int(apart.sum()), float(most)))
        each = [f"{count} on rank {rank}, by up to {most:.3g}" for rank, (count, most) in enumerate(found) if count]
        return f"of {len(mine)} elements of {name} differ from rank 0: {'; '.join(each[:6]) or 'none in value'}"

    def _diverged(self, what: str, values: list[Any], step: int, advice: str) -> Diverged:
        when = f"equal at step {self.equal_at}, not at step {step}" if self.equal_at < step else f"at step {step}"
        text = f"the ranks train different models, {when}: {what}"
        return Diverged(text, minority(values), "divergent_weights", advice)

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [value] * self.job.world_size
        dist.all_gather_object(found, value, group=self.job.control)
        return found


BESIDE = (
    "compute every loss through the DDP model (never model.module), make the same optimiser steps on every rank, and "
    "the last backward before each outside no_sync(); a single element that differs is a memory error of that machine"
)
ORDER = "give the optimiser its parameters in one order on all ranks: sorted by name, where they come from a set"
BUFFERS = (
    "let all ranks change it alike, or tell PyTorch that it may differ: "
    "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names), before wrapping"
)
OUTSIDE = "no DDP model holds it, so nobody averages its gradients: wrap it, or make it part of a model that is wrapped"
FLAGS = "set it on all ranks alike: a scheduler, a freeze or model.eval() that depends on the rank or on its own data"


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a model are. Read once: a thousand names take milliseconds to make."""

    parameters: list[tuple[str, dict[str, Any], str]]  # name, and the module's dictionary and key that hold it
    buffers: list[tuple[str, dict[str, Any], str]]
    parts: list[tuple[str, nn.Module]]
    free: set[str]  # names of what may differ

    @classmethod
    def of(cls, model: DistributedDataParallel) -> Layout:
        """Free is what PyTorch is told to ignore, which is how users say so, and running statistics.

        These are of each rank's own batches, until DDP overwrites them with rank 0's at the next forward.
        """
        prefix = "" if len(models()) == 1 else f"{_label(models(), model)}."
        free = {prefix + name for name in {*model.parameters_to_ignore, *local_buffers(model.module)}}
        parameters, buffers, parts = [], [], []
        for path, part in model.module.named_modules():
            before = f"{prefix}{path}." if path else prefix
            parameters += [(before + name, part._parameters, name) for name in part._parameters]
            buffers += [(before + name, part._buffers, name) for name in part._buffers]
            parts.append((path or "the model", part))
            if isinstance(part, nn.modules.batchnorm._NormBase) and not isinstance(part, nn.SyncBatchNorm):
                free |= {before + name for name in part._buffers}
        return cls(parameters, buffers, parts, free)


_layouts = weakref.WeakKeyDictionary[DistributedDataParallel, Layout]()


def layouts() -> list[Layout]:
    """Of all models. Made anew when their number changes, since it decides how long names are."""
    present = models()
    if len(_layouts) != len(present):
        _layouts.clear()
        _layouts.update({model: Layout.of(model) for model in present})
    return [_layouts[model] for model in present]


def replicas(without: set[str]) -> Iterator[Replica]:
    """All that is to be equal, except buffers named in `without`."""
    names: dict[int, str] = {}
    free = without.union(*(layout.free for layout in layouts()))
    for model, layout in zip(models(), layouts(), strict=True):
        held = [(name, where[key]) for name, where, key in layout.parameters if where.get(key) is not None]
        names |= {id(tensor): name for name, tensor in held}
        flags: list[tuple[Name, object]] = [(("requires_grad", name), each.requires_grad) for name, each in held]
        flags += [(("training", name), part.training) for name, part in layout.parts]
        held += [(name, where[key]) for name, where, key in layout.buffers]
        tensors: list[tuple[Name, Tensor]] = [((name,), each) for name, each in held if name not in free]
        tensors = [(name, each) for name, each in tensors if _is_plain(each)]
        yield Replica(f"{_label(models(), model)} ({_size(each for _, each in tensors)})", tensors, flags)
    for optimizer in optimizers():
        label = _label(optimizers(), optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = [(name, each) for name, each in _state(optimizer, label, names, free) if _is_plain(each)]
        order: list[tuple[Name, object]] = [
            ((f"parameter {place}",), names.get(id(each))) for place, each in enumerate(parameters)
        ]
        yield Replica(f"{label} ({_size(parameters)})", state, [*order, *_rates(optimizer)])


def _label(group: Sequence[object], one: object) -> str:
    """'Encoder', or 'Encoder 2' for the second of its class."""
    kind = type(getattr(one, "module", one))
    same = [each for each in group if type(getattr(each, "module", each)) is kind]
    number = 1 + next(place for place, each in enumerate(same) if each is one)
    return kind.__name__ if number == 1 else f"{kind.__name__} {number}"


def _state(optimizer: Any, label: str, names: dict[int, str], free: set[str]) -> Iterator[tuple[Name, Any]]:
    """What the optimiser keeps for each parameter, and parameters that no model holds."""
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                name = f"parameter {position} {list(parameter.shape)} in group {number} of {label}"
                yield (name,), parameter
            if name not in free:
                state = optimizer.state.get(parameter, {})
                yield from (
                    (((label, part, name)), value) for part, value in state.items() if isinstance(value, Tensor)
                )


def _rates(optimizer: Any) -> list[tuple[Name, object]]:
    """Learning rates and the like."""
    return [
        ((name, f"group {number}"), value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, (bool, int, float, tuple))
    ]


def dotted(name: Name) -> str:
    """'AdamW exp_avg of layers.0.weight'."""
    *parts, last = name
    return f"{' '.join(parts)} of {last}" if parts else last


def _is_plain(tensor: Any) -> bool:
    """Not the part of one that FSDP keeps, and with elements to look at."""
    return type(tensor) in PLAIN and tensor.layout == torch.strided


def _size(tensors: Iterable[Tensor]) -> str:
    sizes = [tensor.numel() for tensor in tensors]
    return f"{len(sizes)} tensors, {sum(sizes)} elements"


def _begin(replicas: Sequence[Replica], step: int) -> Digest:
    keys = zlib.crc32("\n".join(each.key for each in replicas).encode())
    flags = zlib.crc32(repr([flag for each in replicas for _, flag in each.flags]).encode())
    tensors = [tensor for replica in replicas for _, tensor in replica.tensors]
    sums = [checksum([tensor for tensor in tensors if not tensor.is_cuda])]
    if not (on_gpu := [tensor for tensor in tensors if tensor.is_cuda]):
        return Digest(step, keys, flags, sums, None)
    host = torch.empty((), dtype=torch.int64, pin_memory=True)
    host.copy_(checksum(on_gpu), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Digest(step, keys, flags, [*sums, host], event)


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """An int64 scalar on their device that any changed bit changes, without a host sync.

    Integer sums of the bits, which wrap and so do not depend on the order of the additions, unlike a norm. The same
    tensors in another order give another sum.
    """
    sums, pool, waiting = list[Tensor](), list[Tensor](), 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        bits = _bits(tensor)
        size = bits.numel()
        if size >= (SMALL if bits.is_cuda else SMALL_ON_CPU):
            sums.append(bits.sum(dtype=torch.int32))  # on a CPU ten times as fast as in 64 bits
            continue
        pool.append(bits)
        waiting += size
        if waiting > POOL - SMALL:
            sums.append(_sum_of_pool(pool))
            pool, waiting = [], 0
    if pool:
        sums.append(_sum_of_pool(pool))
    if not sums:
        return torch.zeros((), dtype=torch.int64)
    together = torch.stack(sums).long()
    return (together * _odd(together)).sum()


def _bits(tensor: Tensor) -> Tensor:
    """Its elements as int32, one-dimensional: two of half precision as one, a long one as two."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    width = flat.element_size()
    if flat.numel() * width % 4:
        return flat.view(INTEGERS[width]).int()
    return (flat.clone() if flat.storage_offset() * width % 4 else flat).view(torch.int32)


def _sum_of_pool(pool: Sequence[Tensor]) -> Tensor:
    together = torch.cat(list(pool))
    return (together * _odd(together)).sum(dtype=torch.int32)


def _odd(values: Tensor) -> Tensor:
    """1, 3, 5, ...: a product with an odd number loses no bit, and tells positions apart."""
    return torch.arange(1, 2 * len(values), 2, dtype=values.dtype, device=values.device)
