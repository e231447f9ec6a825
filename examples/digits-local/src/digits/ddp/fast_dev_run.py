"""A trial of everything in a few steps: train, evaluate, draw, save; then load that checkpoint, and go on.

It is real training with small settings (start/shortened.py), so what works here is what a long run will do.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from pydantic_settings import BaseSettings

from . import checkpoint
from .report import outcome
from .start.groups import Job
from .trace.heartbeat import beat

log = logging.getLogger("ddp")
S = TypeVar("S", bound=BaseSettings)
# Work of rank 0 that is none of the project's.
OWN_GUARDS = ("checkpoint", "find-checkpoint", "set-aside", "profile")


def parts(settings: S, job: Job, run_dir: Path) -> Iterator[S]:
    """The settings to train with: once, in a fast dev run twice, the second time from the first one's checkpoint.

    The loop must let go of its model between the two: both at once may not fit on the GPU. At its end a fast dev run
    says in one line what it has tried, and what it has not.
    """
    steps = getattr(cast(Any, settings).train, "fast_dev_run", 0)
    yield settings
    if not steps:
        return
    checkpoint.let_go(job)
    gc.collect()  # the model and its DDP wrapper know each other
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
    first, more = beat.step, max(1, steps // 2)
    log.info("fast dev run: a new model goes on from the checkpoint of step %d", first)
    longer = cast(Any, settings).train.model_copy(update={"steps": steps + more})
    resuming = cast(Any, settings).run.model_copy(update={"resume": True})
    yield settings.model_copy(update={"train": longer, "run": resuming})
    _tell(job, run_dir, first, beat.step - first)


def _tell(job: Job, run_dir: Path, first: int, more: int) -> None:
    guards = [name.removeprefix("guard:") for name in beat.seconds if name.startswith("guard:")]
    drawn = ", ".join(name for name in guards if name not in OWN_GUARDS)
    resumed = checkpoint.resumed_at() == first
    size = f"{job.world_size} ranks" if job.world_size > 1 else "1 rank"
    tried = {
        f"{first} step{'s' * (first != 1)} on {size}": bool(first) and "backward" in beat.seconds,
        "evaluation": "eval" in beat.seconds,
        f"work of rank 0 ({drawn or 'a sample'})": bool(drawn) or job.rank != 0,
        "a checkpoint": "checkpoint" in guards or job.rank != 0,
        f"resuming from it for {more} more step{'s' * (more != 1)}": resumed and more > 0,
    }
    worked = ", ".join(name for name, done in tried.items() if done)
    missing = ", ".join(name for name, done in tried.items() if not done)
    took = f"{time.time() - outcome.STARTED:.0f} s; its files: {run_dir}"
    if missing:
        log.warning("fast dev run: these worked: %s. NOT tried: %s. %s", worked or "none", missing, took)
    else:
        log.info("fast dev run: all of it worked: %s. %s", worked, took)
