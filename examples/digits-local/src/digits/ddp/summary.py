"""What is trained, in a line or two: parameters, and the memory that they cost on each GPU, before the first step."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.swa_utils import AveragedModel

from .start.groups import Job
from .trace.replicas import models

log = logging.getLogger("ddp")
_said: set[str] = set()


def tell_summary(job: Job, run_dir: Path, objects: Mapping[str, object]) -> None:
    """Rank 0 says once what `objects`, those of a checkpoint, hold, and adds it to environment.txt."""
    if job.rank != 0 or (text := "\n".join(summary(objects))) in _said or not text:
        return
    _said.add(text)
    for line in text.splitlines():
        log.info("%s", line)
    try:
        with open(run_dir / "environment.txt", "a") as file:
            file.write(text + "\n")
    except OSError as error:
        log.warning("the summary of the model is not in environment.txt: %s", error)


def summary(objects: Mapping[str, object]) -> list[str]:
    """Two lines: parameters, trained and frozen, and buffers; and the memory that they need. None without a network."""
    networks = {name: each for name, each in objects.items() if isinstance(each, nn.Module)}
    averages = {name for name, each in networks.items() if isinstance(each, AveragedModel)}
    seen = set[int]()
    each = {name: list(_new(network.parameters(), seen)) for name, network in networks.items() if name not in averages}
    if not each:
        return []
    parameters = [parameter for some in each.values() for parameter in some]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    buffers = [item for name in each for item in _new(networks[name].buffers(), seen)]
    averaged = [item for name in averages for item in _new([*networks[name].parameters()], seen)]

    shares = ", ".join(f"{name} {_count(some):,}" for name, some in each.items()) if len(each) > 1 else ""
    frozen = f"{_count(parameters) - _count(trained):,} frozen" if len(trained) < len(parameters) else "none frozen"
    late = sum(isinstance(parameter, UninitializedParameter) for parameter in parameters)
    counted = f"{_count(trained):,} trained, {frozen}{f' ({shares})' if shares else ''}"
    counted += f", {late} not made yet" if late else ""
    first = f"model: parameters {counted}; {_count(buffers):,} numbers in buffers"

    buckets = [item for model in models() if not model.gradient_as_bucket_view for item in model.module.parameters()]
    parts = {
        "weights and buffers": _bytes([*parameters, *buffers]),
        "gradients": _bytes(trained),
        "DDP's buckets": _bytes(item for item in buckets if item.requires_grad),
        "their moving average": _bytes(averaged),
    }
    unknown = []
    for optimizer in (item for item in objects.values() if isinstance(item, torch.optim.Optimizer)):
        state = state_bytes(optimizer)
        name = f"state of {type(optimizer).__name__}"
        if state is None:
            unknown.append(f"{name} is known after its first step")
        else:
            parts[name] = parts.get(name, 0) + state
    listed = ", ".join(f"{name} {_mib(size)}" for name, size in parts.items() if size)
    rest = "; ".join([*dict.fromkeys(unknown), "activations come on top"])
    return [first, f"memory of it on each rank: {_mib(sum(parts.values()))} MiB ({listed}); {rest}"]


def state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Bytes of the state of `optimizer`, before its first step as well; None where that cannot be told.

    Before it, one of PyTorch's own makes a step of parameters without memory (the meta device): one for each shape. One
    of another origin may do anything in a step, communicate for example.
    """
    if optimizer.state:
        return _bytes(_tensors(optimizer.state.values()))
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return None
    total = 0
    for group in optimizer.param_groups:
        shapes = Counter((tuple(each.shape), each.dtype) for each in group["params"] if each.requires_grad)
        for (shape, dtype), many in shapes.items():
            parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
            parameter.grad = torch.empty_like(parameter)
            twin = object.__new__(kind)
            twin.__dict__.update({name: value for name, value in vars(optimizer).items() if "hook" not in name})
            twin.state = defaultdict(dict)
            plain = {"params": [parameter], "foreach": False, "fused": False, "capturable": False}
            twin.param_groups = [group | plain]
            try:
                kind.step.__wrapped__(twin)  # type: ignore[attr-defined]  # without the hooks around it
            except Exception:  # an option that the meta device does not know
                return None
            total += many * _bytes(_tensors(twin.state.values()))
    return total


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _new(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[Tensor]:
    """Those that are not in `seen`, which they are then: networks may share some."""
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _known(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [each for each in tensors if not isinstance(each, (UninitializedParameter, nn.UninitializedBuffer))]


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in _known(tensors))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _known(tensors))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}" if size >= 100 * 2**20 else f"{size / 2**20:.3g}"
