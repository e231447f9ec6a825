"""Buffers that each rank changes by its own samples, like BatchNorm's running statistics: what is saved is rank 0's."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..agree import gather
from ..start.groups import Job
from ..trace.replicas import local_buffers
from .layout import STATISTICS, compare_model, fingerprint, ignored
from .rows import digest

log = logging.getLogger("ddp")


def check_network(job: Job, module: nn.Module) -> None:
    """What is looked at ahead of every DDP wrapper. Raises ConfigError, on all ranks, if the ranks' networks differ."""
    compare_model(job, module)
    note_statistics(job, module)


def note_statistics(job: Job, module: nn.Module) -> None:
    """Warn of, and note, the running statistics of normalisations in `module` that no collective makes equal."""
    found = [
        name
        for name, part in module.named_modules()
        if isinstance(part, _NormBase) and part.running_mean is not None and part.training
        if not isinstance(part, nn.SyncBatchNorm)
    ]
    names = [f"{name}.{statistic}".removeprefix(".") for name in found for statistic in STATISTICS[:2]]
    _note(job, module, names)


def note_changed(job: Job, module: nn.Module) -> None:
    """After a forward in which every rank had samples of its own: warn of, and note, buffers that differ since."""
    names, values = [], []
    for name, buffer in module.named_buffers():
        names.append(name)
        values.append(digest([fingerprint(buffer)]))
    if len(set(gather(job, digest(values)))) > 1:
        rows = gather(job, values)
        _note(job, module, [name for name, *each in zip(names, *rows, strict=True) if len(set(each)) > 1])


def _note(job: Job, module: nn.Module, names: Sequence[str]) -> None:
    known, on_purpose = local_buffers(module), set(ignored(module))
    new = [name for name in names if name not in known and name not in on_purpose]
    known |= set(names)
    if not new or job.rank or job.world_size == 1:
        return
    others = f" and {len(new) - 2} others" if len(new) > 2 else ""
    what = f"{', '.join(new[:2])}{others} of {type(module).__name__}".replace("_orig_mod.", "")
    remedy = "average them (docs/recipes/batchnorm.md of ddp-scaffold); or GroupNorm; or, on GPUs, torch.nn.SyncBatchNorm"
    log.warning("each rank changes %s by its own samples: what is saved is rank 0's\n  -> %s", what, remedy)
