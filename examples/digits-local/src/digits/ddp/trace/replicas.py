"""The DDP models and optimisers of this process, noted as they appear: whatever compares ranks finds them here."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import spent

_made: list[weakref.ref[DistributedDataParallel]] = []
_stepped: list[weakref.ref[torch.optim.Optimizer]] = []
_before: list[Callable[[nn.Module], None]] = []  # one: that of the session that began last
_wrapped: weakref.WeakKeyDictionary[DistributedDataParallel, dict[str, tuple[nn.Parameter, bool]]]
_wrapped = weakref.WeakKeyDictionary()
_local: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def models() -> list[DistributedDataParallel]:
    """Those that are still in use, in the order in which they were made: the same on all ranks."""
    return [model for each in _made if (model := each()) is not None]


def optimizers() -> list[torch.optim.Optimizer]:
    """Those that have made a step and are still in use, in the order of their first step."""
    return [optimizer for each in _stepped if (optimizer := each()) is not None]


def local_buffers(module: nn.Module) -> set[str]:
    """Names of buffers of this network that each rank changes by its own samples, like running statistics."""
    return _local.setdefault(module, set())


def wrapped(model: DistributedDataParallel) -> dict[str, tuple[nn.Parameter, bool]]:
    """The parameters that `model` had when DDP was made, and whether they were trained: DDP knows no others."""
    return _wrapped.get(model, {})


def keep_models(before: Callable[[nn.Module], None]) -> None:
    """From now on, call `before(module)` ahead of each DDP wrapper over all ranks, and note the wrapper.

    At the constructor, so that networks which user code wraps by itself are seen as well. Models of a smaller process
    group or a device mesh differ between groups by intention: those are left alone.
    """
    _before[:] = [before]
    construct = DistributedDataParallel.__init__
    if hasattr(construct, "noting"):
        return

    @wraps(construct)
    def noting(self: DistributedDataParallel, module: nn.Module, *arguments: Any, **options: Any) -> None:
        whole = options.get("process_group") is None and options.get("device_mesh") is None and len(arguments) < 6
        if whole:
            _before[0](module)
        construct(self, module, *arguments, **options)
        if whole:
            _made.append(weakref.ref(self))
            spent.follow(self)
            _wrapped[self] = {name: (each, each.requires_grad) for name, each in module.named_parameters()}

    noting.noting = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = noting  # type: ignore[method-assign]


def keep_optimizers() -> None:
    """From now on, note each optimiser of this process at its first step."""
    known = weakref.WeakSet[torch.optim.Optimizer]()

    def note(optimizer: torch.optim.Optimizer, _arguments: Any, _options: Any) -> None:
        if optimizer not in known:
            known.add(optimizer)
            _stepped.append(weakref.ref(optimizer))

    register_optimizer_step_post_hook(note)
