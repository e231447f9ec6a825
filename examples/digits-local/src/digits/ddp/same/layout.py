"""What a network is made of, as text, so that the ranks can compare: DDP pairs tensors by position, without a look."""

from __future__ import annotations

import ctypes
import logging
import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import ConfigError
from ..start.groups import Job
from .rows import Difference, differences

log = logging.getLogger("ddp")

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of torch.nn.modules.batchnorm._NormBase
PROCESS_OWN = re.compile(r" at 0x[0-9a-f]+|(?<=cuda):\d+")  # addresses, and which GPU
RANK_OWN = ("rank", "device", "host", "seed", "gpu")  # in names of attributes that may well differ
SAMPLED = 1 << 16  # values of a buffer that are compared, spread over it

SET = "sort what it is made from: a set, or a list of files as the system gives it, has another order in each process"
REMEDIES = {
    "the order": SET,
    "parameter": "look for an `if` on the rank or on local files where the model is built or frozen, and for a set",
    "buffer": "look for an `if` on the rank or on local files where the model is built, and for a set",
    "values": "make it from sorted data and with equal generators (run.seed); when-it-fails.md: on purpose",
    "module": "look for an `if` on the rank, a variable or local files where the model is built",
    "attribute": SET,
    "training": "call train() and eval() on all ranks alike",
}


def compare_model(job: Job, module: nn.Module) -> None:
    """Check that `module` is the same on all ranks, before DDP pairs its tensors by position and overwrites them.

    Initial values of parameters may differ, since DDP makes them rank 0's. So it does with buffers; but what a buffer
    holds is more often a table that goes with the code (frequencies, masks, an order of names) than a random number.
    What `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` names is left out, as DDP does.

    Raises:
        ConfigError: on all ranks, naming the first difference and what each rank has there.
    """
    if job.world_size == 1:
        return
    refuse(job, type(module).__name__, differences(job, layout(module)))
    for found in differences(job, dict(_plain_attributes(module))):
        if job.rank == 0:
            each = found.text(job.hosts)
            what = f"{type(module).__name__}.{found.name}"
            log.warning("%s is not the same on all ranks, so they may compute other things: %s", what, each)


def compare_modes(job: Job, module: nn.Module) -> None:
    """Check that all ranks train, evaluate and freeze the same parts of `module`. Raises as `compare_model` does."""
    rows = dict(_modes(module))
    for name, parameter in module.named_parameters():
        rows[f"parameter {name}"] = "trained" if parameter.requires_grad else "frozen"
    refuse(job, type(module).__name__, differences(job, rows))


def refuse(job: Job, what: str, found: list[Difference]) -> None:
    """Raise a ConfigError about the first difference, if there is one."""
    if found:
        first, more = found[0], f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        remedy = next(text for begin, text in REMEDIES.items() if first.name.startswith(begin))
        problem = f"{what} is not the same on all ranks: {first.name}: {first.text(job.hosts)}{more}"
        problem = problem.replace("_orig_mod.", "")  # torch.compile's
        raise ConfigError(problem, remedy, "ranks_differ")


def layout(module: nn.Module) -> dict[str, str]:
    """Parameters and buffers in DDP's order, then modules and their modes: name -> what it is, without its address."""
    left_out = set(ignored(module))
    rows = {}
    for name, parameter in module.named_parameters():
        if name not in left_out:
            rows[f"parameter {name}"] = kind(parameter) + ("" if parameter.requires_grad else ", frozen")
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if name not in left_out]
    rows |= {f"buffer {name}": kind(buffer) for name, buffer in buffers}
    rows |= {f"module {name or '(itself)'}": _described(part) for name, part in module.named_modules()}
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if _comparable(key) and (text := _ordered(value)):
                rows[f"attribute {prefix}{'.' if prefix else ''}{key}"] = text
    for name, buffer in buffers:
        if name.rpartition(".")[2] not in STATISTICS:
            rows[f"values of buffer {name}"] = fingerprint(buffer)
    return rows | dict(_modes(module))


def ignored(module: nn.Module) -> list[str]:
    """Names of parameters and buffers that DDP was told to leave alone."""
    return list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def kind(tensor: torch.Tensor) -> str:
    """'float32[3, 4]'."""
    if is_lazy(tensor):
        return "not made yet"  # its shape raises; DDP will say so
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def fingerprint(tensor: torch.Tensor) -> str:
    """'[0.5, 1.0, ...] (checksum 1a2b3c4d)', or '' for what has no plain values, like a sparse or meta tensor."""
    try:
        flat = tensor.detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // SAMPLED)].cpu().contiguous()
        first = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in flat[:4].tolist()]
        checksum = zlib.crc32(ctypes.string_at(flat.data_ptr(), flat.nbytes)) if flat.nbytes else 0
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return ""
    more = ", ..." if flat.numel() > len(first) else ""
    return f"[{', '.join(first)}{more}] (checksum {checksum:08x})"


def _modes(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, part in module.named_modules():
        yield f"training of {name or 'the model'}", str(part.training)


def _described(part: nn.Module) -> str:
    """'Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))'."""
    try:
        extra = part.extra_repr()
    except Exception:  # user code
        extra = ""
    return PROCESS_OWN.sub("", f"{type(part).__qualname__}({extra})")


def _ordered(value: Any) -> str:
    """A list or dict of names, which a set may have made, or the name of a function; '' for anything else."""
    if isinstance(value, (list, tuple, dict)) and 0 < len(value) <= 1000:
        return str(list(value)) if all(isinstance(item, str) for item in value) else ""
    return str(getattr(value, "__qualname__", "")) if callable(value) else ""


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, str]]:
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if _comparable(key) and isinstance(value, (bool, int, float, str)):
                yield f"{prefix}{'.' if prefix else ''}{key}", PROCESS_OWN.sub("", repr(value))


def _comparable(attribute: str) -> bool:
    private = attribute.startswith("_") or attribute == "training"  # which is compared as such
    return not private and not any(word in attribute.lower() for word in RANK_OWN)
