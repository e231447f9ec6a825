"""Filling objects from what a checkpoint holds. What does not fit is one line, and not torch's page of names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from .agree import gather
from .errors import ConfigError
from .start.groups import Job

log = logging.getLogger("ddp")
SORT = "a set has no order: collect parameters in a list or a dict, in the order of named_parameters()"
WRAPPED = "wrapped.json"  # in the run directory: of each object in its checkpoints, what `wrapped` finds
LOADED_BY_TORCH = torch.optim.Optimizer.load_state_dict
WRAPPERS = (DistributedDataParallel, nn.DataParallel, AveragedModel)
Orders = dict[str, list[str]]  # name of an optimiser -> the names of its parameters, "" where no module has it


class Stateful(Protocol):
    """What can be checkpointed: modules, optimisers, schedulers, scalers."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def fill(
    objects: Mapping[str, Stateful], saved: Mapping[str, Any], checkpoint: Path, orders: Orders | None = None
) -> None:
    """Load each object's state. Says which of them the checkpoint lacks, and which it holds for nobody.

    Args:
        orders: of the optimisers when they were saved, if the checkpoint has them.

    Raises:
        ConfigError: the state is that of another model or optimiser, on every rank alike.
    """
    now = parameter_orders(objects)
    for name in objects.keys() & saved.keys():
        found = _another_order((orders or {}).get(name, []), now.get(name, []))
        if found := found or _misfit(objects[name], saved[name]):
            raise ConfigError(f"the {name} holds its parameters in another order than {checkpoint}: {found}", SORT)
        try:
            objects[name].load_state_dict(saved[name])
        except (RuntimeError, ValueError, KeyError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(
                f"{checkpoint} does not fit the {name} of these settings: {why[:200]}{'...' * (len(why) > 200)}",
                "resume with the settings of that run, or begin a new one (another run.id, or run.resume false)",
            ) from error
        _keep_types(objects, name, saved)
    if new := sorted(objects.keys() - saved.keys()):  # switched on since
        log.warning("%s holds no %s: that begins anew", checkpoint, ", ".join(new))
    if old := sorted(saved.keys() - objects.keys()):
        log.warning("%s holds %s, which is switched off: dropped", checkpoint, ", ".join(old))


def _keep_types(objects: Mapping[str, Stateful], name: str, saved: Mapping[str, Any]) -> None:
    """Give the state of an optimiser back the types that it was saved with.

    `Optimizer.load_state_dict` casts all but `step` to the type of its parameter (torch/optim/optimizer.py,
    `_process_value_according_to_param_policy`): moments in bfloat16, counters, NAdam's float32 product beside weights
    in bfloat16 would be others than before. Where a parameter has another type than then, torch's rule stays; so does
    what an optimiser with rules of its own makes of it.
    """
    item = objects[name]
    if not isinstance(item, torch.optim.Optimizer) or type(item).load_state_dict is not LOADED_BY_TORCH:
        return
    types: dict[int, torch.dtype] = {}  # of the parameters, as they were saved
    for key, module in objects.items():
        if isinstance(module, nn.Module) and key in saved:
            types |= {id(own): saved[key][path].dtype for path, own in module.named_parameters() if path in saved[key]}
    for place, parameter in enumerate(_held(item)):
        before, now = saved[name]["state"].get(place, {}), item.state.get(parameter, {})
        for key, value in before.items() if types.get(id(parameter)) == parameter.dtype else ():
            if isinstance(value, Tensor) and key != "step" and value.dtype != now[key].dtype:
                now[key] = value.to(now[key].device)


def parameter_orders(objects: Mapping[str, Stateful]) -> Orders:
    """How the optimisers among `objects` have ordered their parameters: their state is saved by position."""
    names: dict[int, str] = {}
    for item in objects.values():
        if isinstance(item, nn.Module):
            for name, parameter in item.named_parameters():
                names.setdefault(id(parameter), name)
    optimizers = {name: item for name, item in objects.items() if isinstance(item, torch.optim.Optimizer)}
    return {name: [names.get(id(each), "") for each in _held(item)] for name, item in optimizers.items()}


def wrapped(item: Stateful) -> list[str]:
    """Where a wrapper holds what it wraps: 'module' of DDP and of averages, '_orig_mod' of torch.compile, in any depth.

    The names of these modules, in `item`: a child of the user's own that has such a name is not among them.
    """
    if not isinstance(item, nn.Module):
        return []
    found = []
    for path, module in item.named_modules():
        inner = "module" if isinstance(module, WRAPPERS) else "_orig_mod" if _compiled(module) else ""
        found += [f"{path}.{inner}".lstrip(".")] if inner else []
    return found


def _compiled(module: nn.Module) -> bool:
    """By its name: torch._dynamo takes seconds to import, where nothing is compiled."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch.")


def compare_orders(job: Job, objects: Mapping[str, Stateful]) -> None:
    """Before the first step: an order that differs between ranks is one that nobody has chosen.

    Raises:
        ConfigError: on all ranks, with the first parameter that differs.
    """
    everywhere = gather(job, parameter_orders(objects))
    for rank, theirs in enumerate(everywhere):
        for name in everywhere[0].keys() & theirs.keys():
            if found := _another_order(everywhere[0][name], theirs[name]):
                problem = f"the {name} holds its parameters in another order on {job.who(rank)} than on rank 0"
                raise ConfigError(f"{problem}: {found}", SORT, "ranks_differ")


def _held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _another_order(before: list[str], now: list[str]) -> str:
    """The first place that differs, if the names are the same ones: others have been renamed, and may well fit."""
    if before == now or sorted(before) != sorted(now):
        return ""
    place = next(place for place, (old, new) in enumerate(zip(before, now, strict=True)) if old != new)
    return f"place {place} is {now[place]} in the one, and {before[place]} in the other"


def _misfit(item: Stateful, saved: Any) -> str:
    """Of a checkpoint without names: state of another shape than its parameter, which torch does not look at."""
    kind = type(item)
    of_torch = kind.__module__.startswith("torch.optim.") and kind.__name__ not in ("LBFGS", "Adafactor")
    if not isinstance(item, torch.optim.Optimizer) or not of_torch:
        return ""  # others keep what they like: factors, blocks, a flat vector
    for place, parameter in enumerate(_held(item)):
        for key, value in saved.get("state", {}).get(place, {}).items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                return f"{key} of place {place} is {list(value.shape)}, its parameter {list(parameter.shape)}"
    return ""
