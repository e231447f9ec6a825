"""Random generators that a data set keeps for itself: what is copied to every worker and rank draws the same there."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Iterator
from typing import Any

import torch

from ..agree import gather
from ..same.rows import digest
from ..start.groups import Job
from .held import held

log = logging.getLogger("ddp")

REMEDY = (
    "draw from torch, random or numpy.random themselves, which are seeded for each rank, worker and epoch, "
    "or make a generator in the worker from torch.initial_seed()"
)


def warn_of_generators(dataset: Any, job: Job, workers: int) -> None:
    """Say once if a generator that `dataset` holds will repeat its draws, by worker, by epoch or by rank.

    PyTorch seeds the global generators of torch, random and numpy in each worker (torch/utils/data/_utils/worker.py,
    2.6 to 2.13), from a number that is another one on each rank and in each epoch: see loader.py.
    """
    found = dict(generators(dataset, type(dataset).__name__))
    states = gather(job, {where: digest([state]) for where, (_, state) in found.items()})
    if job.rank:
        return
    for where, (kind, _) in found.items():
        if workers:
            why = "each worker, in each epoch, begins with a copy of it"
        elif job.world_size > 1 and all(row.get(where) == states[0][where] for row in states):
            why = "it is the same on all ranks"
        else:
            continue
        log.warning("%s (%s) repeats its draws: %s\n  -> %s", where, kind, why, REMEDY)
        return


def generators(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """'Rows.rng' -> ('numpy Generator', its state as text), for those that `value` and what it holds have."""
    for place, item in held(value, where):
        kind = type(item)
        if isinstance(item, torch.Generator):
            yield place, ("torch.Generator", str(item.get_state().tolist()))
        elif isinstance(item, random.Random) and not isinstance(item, random.SystemRandom):
            yield place, ("random.Random", str(item.getstate()))
        elif kind.__module__.startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState"):
            yield place, (f"numpy.random.{kind.__name__}", pickle.dumps(item).hex())
