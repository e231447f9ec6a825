"""What a checkpoint may hold: what can be loaded again, belongs to rank 0 as a whole, and is finite."""

from __future__ import annotations

import dataclasses
import enum
import io
import logging
import re
import sys
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn

from .agree import gather
from .errors import ConfigError, NonFinite
from .restore import Stateful
from .start.groups import Job
from .trace.drift import checksum
from .trace.replicas import models, optimizers

log = logging.getLogger("ddp")
_told: set[str] = set()
_kept: list[tuple[Mapping[str, Stateful], int]] = []  # what a checkpoint will hold, and the step it began with
PLAIN = {int, float, bool, complex, str, bytes, type(None), Tensor, nn.Parameter}
ORDERED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # what `aminmax` takes
REMEDY = "store plain numbers, strings, lists, dicts and tensors: {advice}, and make it anew in load_state_dict()"
WHOLE = "wrap the network in DistributedDataParallel, or save and load it with torch.distributed.checkpoint"


@dataclass(frozen=True)
class Refusal:
    """Why rank 0 writes no checkpoint, in a form that can be sent to the others."""

    problem: str
    remedy: str = ""  # empty: the weights are not finite

    def error(self) -> Exception:
        """What every rank raises."""
        return ConfigError(self.problem, self.remedy) if self.remedy else NonFinite(self.problem)


def refuse_parts(objects: Mapping[str, Stateful]) -> None:
    """Before a state is made, on every rank: of what is split over the ranks, rank 0 has only its own part.

    Making that state may even need all ranks (FSDP), and would hang on rank 0 alone.

    Raises:
        ConfigError: an object is split by FSDP, fully_shard or ZeroRedundancyOptimizer.
    """
    for name, item in objects.items():
        if how := _split(item):
            problem = f"{name} is split over the ranks ({how}), and a checkpoint holds the state of rank 0 alone"
            raise ConfigError(problem, WHOLE)


def refusal(objects: Mapping[str, Stateful], states: Mapping[str, Any]) -> Refusal | None:
    """On rank 0: why `states`, those of `objects`, must not be written; None if they may."""
    if found := next(_not_loadable(dict(states)), None):
        path, value = found
        name, kind = next(iter(path), ""), f"{type(value).__module__}.{type(value).__qualname__}"
        where = name + ".state_dict()" + "".join(f"[{key!r}]" for key in path[1:])
        if isinstance(value, _of("torch.distributed.tensor", "DTensor")):
            return Refusal(f"{where} is a DTensor, split over the ranks, and rank 0 has only its own part", WHOLE)
        problem = f"{where} is of type {kind}, which torch.load() does not load again with weights_only=True"
        return Refusal(problem, REMEDY.format(advice=_advice(value)))
    if names := _not_finite(objects):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return Refusal(f"{', '.join(names[:3])}{more} is not finite: no checkpoint is made of it, the last one is kept")
    return None


def remember(objects: Mapping[str, Stateful], step: int) -> None:
    """What checkpoints will hold, before training goes on from `step`: for `compare_remembered`."""
    _kept[:] = [(objects, step)]


def compare_remembered(job: Job, step: int) -> None:
    """`warn_of_own_states` once training has moved on, if no checkpoint came first. All ranks must call it."""
    if job.world_size > 1 and _kept and step > _kept[0][1]:
        warn_of_own_states(job, _kept[0][0])


def warn_of_own_states(job: Job, objects: Mapping[str, Stateful]) -> None:
    """Say once which objects are not the same on all ranks: rank 0's are saved, and every rank goes on from them.

    An average that only rank 0 updates, say, or the position of a sampler of the user's own. Models in DDP and
    optimisers are compared while training. All ranks must call it.
    """
    _kept.clear()
    held = {id(model.module) for model in models()} | {id(optimizer) for optimizer in optimizers()}
    mine = {name: dict(_leaves(item.state_dict(), name)) for name, item in objects.items() if id(item) not in held}
    digests = {name: zlib.crc32(repr(leaves).encode()) for name, leaves in mine.items()}
    everyone = gather(job, digests)
    for name in digests:
        if name in _told or len({theirs.get(name) for theirs in everyone}) == 1:
            continue
        _told.add(name)
        leaves = gather(job, mine[name])
        first = next((key for key in leaves[0] if len({theirs.get(key) for theirs in leaves}) > 1), name)
        each = [f"{theirs.get(first, 'absent')} on {job.who(rank)}" for rank, theirs in enumerate(leaves[:4])]
        log.warning(
            "%s is not the same on all ranks (%s: %s): a checkpoint holds rank 0's and all ranks go on from it, "
            "and an evaluation on several ranks mixes them; make it the same on all ranks",
            *(name, first, ", ".join(each)),
            extra={"file_only": job.rank != 0},
        )


def not_loadable(file: Path, error: Exception) -> ConfigError:
    """What to raise for a checkpoint that `torch.load` refuses. Its text names the class, "GLOBAL module.name"."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if not found:
        return ConfigError(f"{file} cannot be loaded: {' '.join(str(error).split())[:300]}", "begin a new run (run.id)")
    problem = f"{file} holds something of type {found[1]}, which torch.load() does not load with weights_only=True"
    allow = f"torch.serialization.add_safe_globals([{found[1]}]) before checkpoint.load() if the file is your own"
    return ConfigError(problem, f"{REMEDY.format(advice='what it is made of')}; to go on from this file, {allow}")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Where each number, text and tensor is, and a short text that differs if it does."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)) and not {type(inner) for inner in value} <= PLAIN - {Tensor, nn.Parameter}:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    elif isinstance(value, Tensor):
        yield path, _tensor_in_words(value)
    else:
        text = repr(value)
        yield path, text if len(text) < 40 else f"{text[:30]}... (checksum {zlib.crc32(text.encode()):x})"


def _tensor_in_words(tensor: Tensor) -> str:
    """Of a tensor whose bits do not stand in a row (sparse, quantised, nested, without data) only the type."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return f"{tensor.dtype}, {tensor.layout}"
    return str(tensor.item()) if tensor.numel() == 1 else f"checksum {int(checksum([tensor])):x}"


def _split(item: object) -> str:
    """By what an object is split over the ranks."""
    part = _of("torch.distributed.tensor", "DTensor")
    if isinstance(item, _of("torch.distributed.optim", "ZeroRedundancyOptimizer")):
        return "ZeroRedundancyOptimizer"
    if isinstance(item, nn.Module):
        sharded = _of("torch.distributed.fsdp", "FullyShardedDataParallel")
        if any(isinstance(module, sharded) for module in item.modules()):
            return "FullyShardedDataParallel"
        named: list[tuple[str, Tensor]] = [*item.named_parameters(), *item.named_buffers()]
        for name, tensor in named:
            if isinstance(tensor, part):
                return f"{name} is a DTensor, as fully_shard makes them"
    if isinstance(item, torch.optim.Optimizer):
        kinds = (*part, *_of("torch.distributed.fsdp", "FlatParameter"))
        if any(isinstance(tensor, kinds) for group in item.param_groups for tensor in group["params"]):
            return "its parameters are those of fully_shard or FSDP"
    return ""


def _of(module: str, name: str) -> tuple[type, ...]:
    """For isinstance(): nothing where the module has not been imported, for then there can be no such object."""
    kind = getattr(sys.modules.get(module), name, None)
    return (kind,) if kind else ()


def _not_loadable(states: dict[str, Any]) -> Iterator[tuple[list[Any], Any]]:
    """Path and value of what `torch.load` would refuse; not only known types, but what this torch really does."""
    todo: list[tuple[list[Any], Any]] = [([], states)]
    seen: set[int] = set()  # a state may hold itself
    while todo:
        path, value = todo.pop()
        if type(value) in PLAIN or id(value) in seen:
            continue
        if type(value) in (dict, OrderedDict):
            seen.add(id(value))
            inner = list(value.items()) + list(vars(value).items() if type(value) is OrderedDict else ())
            inner += [(f"the key {key!r}", key) for key in value if type(key) not in PLAIN]
            todo += [([*path, key], element) for key, element in reversed(inner) if type(element) not in PLAIN]
        elif type(value) in (list, tuple):
            seen.add(id(value))
            if not {type(element) for element in value} <= PLAIN:
                todo += [([*path, index], element) for index, element in reversed(list(enumerate(value)))]
        elif isinstance(value, _of("torch.distributed.tensor", "DTensor")) or not _survives(value):
            yield path, value


def _survives(value: object) -> bool:
    """Whether it can be saved and loaded: also what the user has allowed by torch.serialization.add_safe_globals."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # of pickle, of the object's own methods
        return False
    return True


def _advice(value: Any) -> str:
    if isinstance(value, Namespace):
        return "vars(...) of it"
    if dataclasses.is_dataclass(value):
        return "dataclasses.asdict(...) of it"
    if isinstance(value, enum.Enum):
        return "its .value"
    if isinstance(value, PurePath):
        return "str(...) of it"
    if hasattr(value, "dtype") and hasattr(value, "item"):  # numpy, without importing it
        return "its .item()" if getattr(value, "shape", ()) == () else "torch.from_numpy(...) of it"
    return "what it is made of"


def _not_finite(objects: Mapping[str, Stateful]) -> list[str]:
    """Names of the parameters, and of the optimisers' moments, that hold NaN or infinity. One host sync a device.

    Not buffers, and not parameters that are not trained: masks hold -inf on purpose.
    """
    tensors = dict(_trained(objects))
    flags: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        flags.setdefault(tensor.device, {})[name] = _finite(tensor.detach())
    good = {name: flag for group in flags.values() for name, flag in zip(group, _together(group), strict=True)}
    return [name for name in tensors if not good[name]]


def _finite(tensor: Tensor) -> Tensor:
    """Whether all of it is, as a flag on its device.

    `aminmax` passes NaN on, and needs no memory. `isfinite` makes copies of the tensor. On a CPU, those below 32 MB
    come from glibc's heap, in which its aligned allocations may leave holes that the next one does not fit into:
    with 2.36, one run in three grew by 9 MB with each checkpoint of 9 MB.
    """
    if tensor.numel() and tensor.dtype in ORDERED:
        return torch.stack(tensor.aminmax()).isfinite().all()
    return tensor.isfinite().all()


def _together(flags: dict[str, Tensor]) -> list[bool]:
    return [bool(flag) for flag in torch.stack(list(flags.values())).tolist()]


def _trained(objects: Mapping[str, Stateful]) -> Iterator[tuple[str, Tensor]]:
    for name, item in objects.items():
        if isinstance(item, nn.Module):
            for key, parameter in item.named_parameters():
                if parameter.requires_grad and parameter.is_floating_point() and parameter.device.type != "meta":
                    yield f"{name}.{key}", parameter
        if isinstance(item, torch.optim.Optimizer):
            for number, (owner, state) in enumerate(item.state.items()):
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor) and value.is_floating_point() and value.shape == owner.shape:
                        yield f"{key} of parameter {number} in {name}", value
