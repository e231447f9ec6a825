"""Checkpoints that a kill cannot spoil: written aside, synced, checksummed, renamed; the newest good one is loaded."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import pickle
import re
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field

from .agree import from_rank0, gather
from .errors import CheckpointFailed, RunFailed
from .guard import Progress, on_rank0
from .restore import Stateful as Stateful
from .restore import compare_orders, fill, parameter_orders
from .rng import random_state, restore_random_state
from .start.groups import Job
from .storable import Refusal, not_loadable, refusal, refuse_parts, remember, warn_of_own_states
from .trace.heartbeat import phase

log = logging.getLogger("ddp")
FORMAT = 1


class CheckpointSettings(BaseModel, extra="forbid"):
    """How often, and how many to keep."""

    every_steps: int = Field(500, ge=1, description="optimiser steps between two checkpoints")
    keep: int = Field(2, ge=1, description="newest checkpoints that stay on disk")


Objects = dict[str, Stateful]  # name in the checkpoint -> what it holds


@dataclass
class Position:
    """Where a run stands, in whole steps."""

    step: int = 0  # optimiser steps that are done
    epoch: int = 0
    samples: int = 0  # of this epoch, that all ranks together have read
    global_batch: int = 0  # samples that all ranks read at once when the epoch began: its order depends on that
    evaluated: int = 0  # the steps at which these were last done
    sampled: int = 0
    saved: int = -1  # never

    @classmethod
    def of(cls, counters: Mapping[str, int]) -> Position:
        """From what a checkpoint holds; what it lacks begins at 0."""
        position = cls()
        position.move(counters)
        return position

    def move(self, counters: Mapping[str, int]) -> None:
        """Take over what `counters` has: those of a checkpoint, or of a batch (see `ddp.loader.endless`)."""
        for name, counter in _COUNTERS.items():
            setattr(self, name, counters.get(counter, getattr(self, name)))

    def counters(self) -> dict[str, int]:
        """Under the names that they have in the files of all releases."""
        return {counter: getattr(self, name) for name, counter in _COUNTERS.items()}


_COUNTERS = {field.name: field.name for field in fields(Position)} | {"samples": "used", "global_batch": "begun"}


def save(job: Job, run_dir: Path, counters: dict[str, int], objects: Objects, *, keep: int, must: bool = False) -> bool:
    """Write `<run_dir>/checkpoints/step_<counters["step"]>` on rank 0. Every rank must call it at the same step.

    Returns: whether it was written. A full disk keeps the last good checkpoint, and training goes on with a warning.

    Raises:
        CheckpointFailed: on all ranks, when it could not be written and `must` is set (the run is about to end).
        ConfigError: on all ranks, when it could not be loaded again, or would be a part of the state only.
        NonFinite: on all ranks, when trained parameters or the optimiser's moments hold NaN or infinity.
    """
    refuse_parts(objects)
    with phase("checkpoint"):
        rng = gather(job, random_state(job.device))
        warn_of_own_states(job, objects)
    payload: dict[str, Any] = {"format": FORMAT, "counters": counters, "rng": rng}
    if job.rank == 0:  # replicas are equal on all ranks; only rank 0 needs to copy them
        payload["objects"] = {name: item.state_dict() for name, item in objects.items()}
        payload["orders"] = parameter_orders(objects)

    def check_and_write(progress: Progress) -> Refusal | str | None:
        refused = refusal(objects, payload["objects"])
        return refused or _write(run_dir / "checkpoints", payload, keep, progress)

    problem = from_rank0(job, on_rank0(job, "checkpoint", check_and_write))
    if isinstance(problem, Refusal):
        raise problem.error()
    if problem:
        log.warning("checkpoint of step %d not written: %s. The last good one is kept.", counters["step"], problem)
        if must:
            raise CheckpointFailed(f"the checkpoint of step {counters['step']} could not be written: {problem}")
    return not problem


def load(job: Job, run_dir: Path, objects: Objects) -> dict[str, int] | None:
    """Fill `objects` from the newest complete checkpoint and return its counters, or None where there is none.

    Random states are restored per rank; a rank that the checkpoint does not know (another world size) keeps its own.

    Raises:
        RunFailed: rank 0 found a checkpoint that another rank cannot read.
        ConfigError: it is of another model or optimiser, it cannot be loaded, or these objects could not be saved.
    """
    refuse_parts(objects)
    compare_orders(job, objects)

    def find(progress: Progress) -> Refusal | str | None:
        refused = refusal({}, {name: item.state_dict() for name, item in objects.items()})  # now, not after an hour
        return refused or _newest_good(run_dir / "checkpoints", progress)

    name = from_rank0(job, on_rank0(job, "find-checkpoint", find))
    if isinstance(name, Refusal):
        raise name.error()
    if name is None:
        remember(objects, 0)
        return None
    path = run_dir / "checkpoints" / name / "state.pt"
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        who = job.who(job.rank)
        raise RunFailed(f"{who} cannot read {path}: is {run_dir} on a file system that all nodes share?") from error
    except pickle.UnpicklingError as error:  # of an older release, or another torch; the same on all ranks
        raise not_loadable(path, error) from error
    fill(objects, payload["objects"], path.parent, payload.get("orders"))
    if job.rank < len(payload["rng"]):
        restore_random_state(payload["rng"][job.rank], job.device)
    remember(objects, payload["counters"].get("step", 0))
    log.info("resumed from %s", path.parent)
    return dict(payload["counters"])


def set_aside(job: Job, run_dir: Path, objects: Objects | None = None) -> None:
    """Before a run that starts from nothing: move an earlier one's checkpoints away, so that the two never mix.

    `objects` are those that will be saved: the first evaluation sees whether they are the same on all ranks.
    """
    remember(objects or {}, 0)
    root, kept = run_dir / "checkpoints", run_dir / time.strftime("checkpoints-before-%Y%m%d-%H%M%S")
    on_rank0(job, "set-aside", lambda _progress: _checkpoints(root) and root.rename(kept))


def _write(root: Path, payload: dict[str, Any], keep: int, progress: Progress) -> str | None:
    """Write one checkpoint directory; returns what went wrong, or None. Only the final rename makes it visible."""
    aside = root / f".writing-{socket.gethostname()}-{os.getpid()}"  # a requeued job may meet its predecessor
    try:
        _remove_leftovers(root)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        state = aside / "state.pt"
        with open(state, "wb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())
        progress("checkpoint written, computing its checksum")
        manifest = {
            "format": FORMAT,
            "counters": payload["counters"],
            "world_size": len(payload["rng"]),
            "torch": torch.__version__,
            "files": {state.name: {"bytes": state.stat().st_size, "sha256": _sha256(state)}},
        }
        with open(aside / "manifest.json", "w") as file_:
            json.dump(manifest, file_, indent=1)
            file_.flush()
            os.fsync(file_.fileno())
        while True:
            try:
                os.replace(aside, root / _new_name(root, payload["counters"]["step"]))
                break
            except OSError as error:  # another job took the name a moment ago
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        _sync_directory(root)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(aside, ignore_errors=True)
        return f"{type(error).__name__}: {error}"
    for old in _checkpoints(root)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return None


def _remove_leftovers(root: Path) -> None:  # of killed writers: nobody takes an hour between two files
    for path in root.glob(".writing-*"):
        with suppress(OSError):
            if time.time() - max(each.stat().st_mtime for each in (path, *path.iterdir())) > 3600:
                shutil.rmtree(path, ignore_errors=True)


def _new_name(root: Path, step: int) -> str:
    """A name that sorts after all of this step: an older one is never taken away before the new one is there."""
    name = f"step_{step:08d}"
    taken = [int(path.suffix[1:] or 0) for path in _checkpoints(root) if path.stem == name]
    return f"{name}.{max(taken) + 1:03d}" if taken else name


def _checkpoints(root: Path) -> list[Path]:
    """Directories with a name that `_new_name` gives, oldest first; what people or file systems add is left alone."""
    return sorted(path for path in root.glob("step_*") if re.fullmatch(r"step_\d{8,}(\.\d{3,})?", path.name))


def _newest_good(root: Path, progress: Progress) -> str | None:
    """Name of the newest checkpoint whose files have the size and checksum of its manifest; others are reported."""
    for candidate in reversed(_checkpoints(root)):
        progress(f"verifying {candidate.name}")
        try:
            manifest = json.loads((candidate / "manifest.json").read_text())
            for name, expected in manifest["files"].items():
                file = candidate / name
                if file.stat().st_size != expected["bytes"] or _sha256(file) != expected["sha256"]:
                    raise ValueError(f"{name} does not match its checksum")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("skipping broken checkpoint %s: %s", candidate, error)
            # Under another name it is neither tried again nor counted among those to keep.
            with suppress(OSError):
                candidate.rename(root / f"broken-{candidate.name}")
            continue
        return candidate.name
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_directory(path: Path) -> None:
    """Without it a rename can be lost in a power failure (POSIX leaves it to the directory's own fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
