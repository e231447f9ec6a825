"""Parameters to which DDP waits for a gradient that this rank has not computed: frozen since, or not used."""

from __future__ import annotations

import weakref

from torch.nn.parallel import DistributedDataParallel

from .replicas import models

_awaited: weakref.WeakKeyDictionary[DistributedDataParallel, list[str]] = weakref.WeakKeyDictionary()


def after_backward() -> None:
    """Note which parameters each DDP model trains. It goes by what they were when it was made: look early."""
    for model in models():
        if model not in _awaited:
            _awaited[model] = [name for name, each in model.module.named_parameters() if each.requires_grad]


def named(indices: list[int]) -> list[str]:
    """The parameters that DDP means by these numbers, where there is only one model."""
    names = next(iter(_awaited.values()), []) if len(_awaited) == 1 else []
    return [names[index] for index in indices if index < len(names)]


def without_gradient() -> list[str]:
    """After a backward: the names of those that have no gradient, and yet are awaited.

    All ranks then wait for each other, this one in whatever comes next, the others in their backward. A model of which
    no parameter has a gradient has had no backward; one that looks for unused parameters waits for none.
    """
    found = []
    for number, model in enumerate(models()):
        if model.find_unused_parameters or model.static_graph:
            continue
        parameters = dict(model.module.named_parameters())
        awaited = [name for name in _awaited.get(model, ()) if name in parameters]
        missing = [name for name in awaited if parameters[name].grad is None or not parameters[name].requires_grad]
        if len(missing) < len(awaited):
            names = [name.replace("_orig_mod.", "") for name in missing]  # torch.compile's
            found += [f"{name} of model {number}" if len(_awaited) > 1 else name for name in names]
    return found
