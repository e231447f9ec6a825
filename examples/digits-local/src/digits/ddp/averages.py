"""The moving average of the weights: a copy of the network that shares nothing with the one that is trained."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .errors import ConfigError

OWN = ("_modules", "_parameters", "_buffers")  # of a module: copied, and averaged or left as they are
MOST = 10_000  # objects that an attribute is followed through
REMEDY = "make it a method, or a functools.partial that is given the module: both are copied along"


def moving_average(network: nn.Module, decay: float) -> AveragedModel:
    """A copy of `network` for the exponential moving average of its weights; `module` of it is what to evaluate.

    It is made by `copy.deepcopy`, for which a function is a constant: what a patched forward, a hook or a lambda of a
    module holds on to is not copied, and would compute with the weights that are trained (docs.python.org, `copy`).

    Raises:
        ConfigError: the network cannot be copied, or the copy holds on to a part of `network`; it says what, and where.
    """
    try:
        average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(decay))
    except Exception as error:  # deepcopy calls __reduce__ and __deepcopy__ of whatever is there
        raise ConfigError(*_not_copied(network, error)) from error
    if found := _held(network, average.module):
        attribute, part = found
        problem = f"train.ema evaluates a copy of the network, but {attribute} holds on to {part} itself"
        raise ConfigError(f"{problem}, whose weights are not averaged", f"{REMEDY}; or set train.ema to 0")
    return average


def _held(network: nn.Module, copy: nn.Module) -> tuple[str, str] | None:
    """The first attribute of a module of `copy` that leads to a part of `network`, and the name of that part."""
    parts: dict[int, str] = {id(part): name or "the network" for name, part in network.named_modules()}
    parts |= {id(tensor): name for name, tensor in network.named_parameters(remove_duplicate=False)}
    parts |= {id(tensor): name for name, tensor in network.named_buffers(remove_duplicate=False)}
    for name, attribute, value in _attributes(copy):
        for each in _reachable(value):
            if id(each) in parts:
                return _named(copy, name, attribute), parts[id(each)]
    return None


def _attributes(network: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """What each module has beside parameters, buffers and modules: hooks, patched methods. Module, name, value."""
    for name, module in network.named_modules():
        yield from ((name, attribute, value) for attribute, value in vars(module).items() if attribute not in OWN)


def _reachable(value: Any) -> Iterator[Any]:
    """`value` and what it leads to through functions, methods, containers and callable objects: what a call may use."""
    seen, waiting = set[int](), [value]
    while waiting and len(seen) < MOST:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += _held_by(each)


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        return [*_cells(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, (type, nn.Module)) or not callable(value):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    inner = [getattr(value, name, None) for name in slots if isinstance(name, str) and name != "__weakref__"]
    return [*inner, *getattr(value, "__dict__", {}).values(), getattr(value, "__wrapped__", None)]


def _cells(function: FunctionType) -> Iterator[Any]:
    """What a function has from around it; a cell is empty as long as that has no value yet."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def _not_copied(network: nn.Module, error: Exception) -> tuple[str, str]:
    """What is wrong, and what to do, when `network` cannot be copied: the first part that cannot be copied alone."""
    modules = {id(module): module for module in network.modules()}
    where, remedy = type(network).__name__, "keep what cannot be copied out of the network"
    tensors = [
        (name, own, tensor)
        for name, module in network.named_modules()
        for own, tensor in {**module._parameters, **module._buffers}.items()
    ]
    for name, attribute, value in [*_attributes(network), *tensors]:
        try:
            deepcopy(value, dict[int, Any](modules))  # a module in it is taken for copied already
        except Exception as cause:  # the same as above
            error, where = cause, _named(network, name, attribute)
            if isinstance(value, torch.Tensor):
                remedy = "compute it in forward, as torch.nn.utils.parametrizations do, or detach() it"
            break
    said = " ".join(f"{type(error).__name__}: {error}".split()).partition(". ")[0]
    problem = f"train.ema needs a copy of the network, and {where} cannot be copied: {said}"
    return problem, f"{remedy}; or set train.ema to 0"


def _named(network: nn.Module, name: str, attribute: str) -> str:
    """'forward of blocks.0 (Block)'."""
    kind = type(network.get_submodule(name)).__name__
    return f"{attribute.lstrip('_')} of {name} ({kind})" if name else f"{attribute.lstrip('_')} of {kind}"
