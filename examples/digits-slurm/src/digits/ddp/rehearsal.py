"""One step of the largest batch before the first real one: what cannot work fails now, on a clock of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, default_collate

from .agree import from_rank0, gather
from .errors import DataFailed, Diverged
from .loading.collation import put_together
from .loading.shards import lengths_of
from .polling import poll
from .rng import random_state, restore_random_state
from .same.buffers import note_changed
from .same.layout import compare_modes
from .same.unused import refuse_changed, refuse_unused, without_gradient
from .start.groups import Job
from .start.stop import shielded
from .trace import flops
from .trace.heartbeat import phase, progress

log = logging.getLogger("ddp")
T = TypeVar("T")
CPU = torch.device("cpu")
_rehearsals = count()
_of_longest: list[bool] = []  # set where the rehearsal has another batch than a usual one: it counts for no step


def largest_batch(dataset: Dataset[Any], batch_size: int, first: T) -> T:
    """The batch that needs the most memory: of a data set with `lengths` the longest samples, else its `first` batch.

    Leaves no trace in the random generators.

    Raises:
        DataFailed: a sample cannot be read; the message names it.
    """
    lengths = lengths_of(dataset)
    if lengths is None:
        return first
    _of_longest[:] = [True] if len(set(lengths)) > 1 else []
    random, samples = random_state(CPU), []
    longest = sorted(range(len(lengths)), key=lambda index: -lengths[index])[:batch_size]
    with phase("data"):
        for index in longest:
            try:
                samples.append(dataset[index])
            except Exception as error:
                what = f"could not read index {index} of {type(dataset).__name__}: {type(error).__name__}: {error}"
                raise DataFailed(what) from error
    restore_random_state(random, CPU)
    collate = getattr(dataset, "collate", default_collate)
    batch: T = put_together(collate, samples, longest, type(dataset).__name__)
    return batch


def rehearse(job: Job, models: Sequence[DistributedDataParallel], step: Callable[[], object]) -> None:
    """Run `step` (forward and backward of all `models`) twice, compare the ranks, and leave no trace of it.

    The first time each rank is alone, off the collective clock: this is where torch.compile compiles and cuDNN chooses,
    for as long as `clocks.compile_s` allows, however differently long the ranks take. The second time they reduce their
    gradients. What must hold afterwards: the gradients are equal on all ranks. They are not if the loss was computed
    around the DDP wrapper, and then each rank would train a model of its own. What activations need too much memory for
    fails here; the optimiser's own state comes with its first step.

    If `step` returns a tensor that is not finite, such as a loss, the ranks are named in a warning.

    Raises:
        ConfigError: on all ranks, naming parameters without a gradient or unknown to DDP, or modes that differ.
        Diverged: on all ranks, naming the parameter and the ranks whose gradients differ.
    """
    device = job.device
    for model in models:
        refuse_changed(job, model)
    random, buffers = random_state(device), [(buffer, buffer.clone()) for model in models for buffer in model.buffers()]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.monotonic()
    with phase("compile"), shielded(), ExitStack() as alone:  # torch.compile starts compilers, and keeps some of them
        for model in models:
            alone.enter_context(model.no_sync())
            model.require_forward_param_sync = False  # buffers, too, are broadcast with the others only
        step()
        _synchronize(device)
        first = time.monotonic() - began
        without = [without_gradient(model) for model in models]
        if not _of_longest:
            flops.count(models, step, device)
            _synchronize(device)
    _zero(models)
    _wait_for_all(job)
    for model, found in zip(models, without, strict=True):
        compare_modes(job, model.module)  # they may have changed since the wrapper was made
        refuse_unused(job, type(model.module).__name__, found)

    if device.type == "cuda":
        torch.cuda.empty_cache()  # what only the count has needed
        torch.cuda.reset_peak_memory_stats(device)
    began = time.monotonic()
    for model in models:
        model.require_forward_param_sync = True
    loss = step()
    norms = _norms(models)
    second = time.monotonic() - began
    for model in models:
        note_changed(job, model.module)
    _zero(models)
    restore_random_state(random, device)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    finite = not isinstance(loss, Tensor) or bool(loss.isfinite().all())
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    _compare_gradients(job, norms)
    _tell(job, gather(job, (first, second, peak)))
    _warn_of_loss(job, gather(job, finite))


def _norms(models: Sequence[DistributedDataParallel]) -> dict[str, float]:
    """The norm of each gradient, and that of all of them as ""."""
    found = {
        (f"{name} of model {number}" if len(models) > 1 else name).replace("_orig_mod.", ""): parameter.grad
        for number, model in enumerate(models)
        for name, parameter in model.module.named_parameters()
        if parameter.grad is not None
    }
    norms = torch.stack(torch._foreach_norm(list(found.values()))).double()
    return {"": torch.linalg.vector_norm(norms).item(), **dict(zip(found, norms.tolist(), strict=True))}


def _compare_gradients(job: Job, norms: dict[str, float]) -> None:
    """They must be equal after the reduction. Names are exchanged only if they are not."""
    totals = gather(job, norms[""])
    odd = _odd(totals)
    if not odd:
        return
    everywhere = gather(job, norms)
    apart = [name for name in norms if name and _odd([theirs.get(name, 0.0) for theirs in everywhere])]
    name = from_rank0(job, apart[0] if apart else "")
    each = ", ".join(f"{job.who(rank)}: {theirs.get(name, 0.0):.6g}" for rank, theirs in enumerate(everywhere[:8]))
    raise Diverged(
        f"after the reduction gradients must be equal, but their norms are not (the first that differs is "
        f"{name or 'that of all'}: {each}; {len(apart)} of {len(norms) - 1} differ): compute the loss with the DDP "
        "model, not with the module inside it",
        odd if 2 * len(odd) < len(totals) else list(range(len(totals))),
    )


def _odd(norms: list[float]) -> list[int]:
    """Ranks that have another one than the middle. None if it is not finite: fp16's scale may be too large at first."""
    usual = sorted(norms)[len(norms) // 2]
    if not torch.tensor(norms).isfinite().all():
        return []
    return [rank for rank, norm in enumerate(norms) if abs(norm - usual) > 1e-3 * abs(usual)]


def _tell(job: Job, found: list[tuple[float, float, float]]) -> None:
    slowest = max(range(len(found)), key=lambda rank: found[rank][0])
    work = flops.of_a_batch()
    operations = f", {work.flops / 1e9:.3g} GFLOP on each rank" if work else ""
    memory = f", at most {max(row[2] for row in found):.2f} GiB of GPU memory" if job.device.type == "cuda" else ""
    log.info(
        "rehearsal: a step of the largest batch took %.2f s the first time (%s), then %.2f s%s%s",
        found[slowest][0],
        job.who(slowest),
        max(row[1] for row in found),
        operations,
        memory,
    )


def _warn_of_loss(job: Job, finite: list[bool]) -> None:
    """Nothing has been learnt yet, so it is the samples or the model, not the learning rate."""
    if odd := [job.who(rank) for rank, its in enumerate(finite) if not its]:
        where = "all ranks" if len(odd) == len(finite) else f"{', '.join(odd[:4])}{', ...' * (len(odd) > 4)} only"
        text = "rehearsal: the loss of the first batch is NaN or infinite on %s, before any step"
        remedy = "\n  -> look at its samples, and at what the model makes of them"
        log.warning(text + remedy, where, extra={"file_only": job.rank != 0})


def _wait_for_all(job: Job) -> None:
    """On the store, so that one rank may compile for longer than a collective may take."""
    store, size, spoke = job.store, job.world_size, time.monotonic()
    key = f"rehearsal/{next(_rehearsals)}"  # a process may rehearse more than one model
    ready = store.add(key, 1)

    def all_ready() -> bool:
        nonlocal ready, spoke
        before, ready = ready, store.add(key, 0)
        if ready != before:
            progress(f"{ready} of {size} ranks are ready")
        if time.monotonic() - spoke > 10:
            spoke = time.monotonic()
            log.info("waiting for %d ranks in phase compile", size - ready)
        return ready >= size

    with phase("wait:compile"):
        poll(all_ready, pause_s=0.01, longest_s=1.0)


def _zero(models: Sequence[nn.Module]) -> None:
    for model in models:
        model.zero_grad(set_to_none=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
