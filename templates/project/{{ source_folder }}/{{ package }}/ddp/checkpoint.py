"""Checkpoints that a kill cannot spoil and training does not wait for; the newest good one is loaded.

Rank 0 copies the state to host memory, and a thread writes that copy, aside, synced, checksummed and renamed.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel, Field

from .agree import from_rank0, gather
from .best import METRIC, Rating, best_of, checkpoints
from .errors import CheckpointFailed, ConfigError, RunFailed, StopRequested
from .guard import Progress, on_rank0
from .metrics import write_pending
from .restore import WRAPPED, compare_orders, fill, parameter_orders, wrapped
from .restore import Stateful as Stateful
from .rng import random_state, restore_random_state
from .saving import directory, mounts, snapshot, writer
from .start.groups import Job
from .storable import Refusal, not_loadable, refusal, refuse_parts, remember, warn_of_own_states
from .summary import tell_summary
from .trace.heartbeat import phase, progress

log = logging.getLogger("ddp")


class CheckpointSettings(BaseModel, extra="forbid"):
    """How often, and how many to keep."""

    every_steps: int = Field(500, ge=1, description="optimiser steps between two checkpoints")
    keep: int = Field(2, ge=1, description="newest checkpoints that stay on disk")
    keep_best: bool = Field(False, description="the best one by METRIC of evaluate.py stays, too: one more on disk")


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


@dataclass(frozen=True)
class _Saved:
    """What rank 0 tells all ranks of a save."""

    problem: str | None  # why it was not written
    in_flight: bool


@dataclass
class _Watched:
    """The metric by which a checkpoint is the best, and what the last evaluation has found."""

    name: str
    higher_is_better: bool
    step: int = -1  # of the last evaluation
    rating: Rating | None = None  # None if it was NaN or infinite
    is_best: bool = False  # whether it is better than all before, and not saved yet


_watched: list[_Watched] = []  # on every rank: one at most, where the best checkpoint is kept
_on_its_way: list[Rating] = []  # on rank 0: that of the checkpoint that was last given to the writer
_in_flight: list[int] = []  # on every rank: the step of the checkpoint that is being written beside training
_to_copy: list[tuple[Objects, int]] = []  # on rank 0: what checkpoints will hold, and the step it began with
_resumed: list[int] = []  # on every rank: the step of the checkpoint that was loaded last
_said: set[str] = set()
_told: set[str] = set()  # on every rank: warnings that have come by one of their two ways, see `warn`


def save(job: Job, run_dir: Path, counters: dict[str, int], objects: Objects, *, keep: int, must: bool = False) -> bool:
    """Write `<run_dir>/checkpoints/step_<counters["step"]>` on rank 0. Every rank must call it at the same step.

    Returns once the state is copied, and all but that goes on beside training, unless `must` is set. One checkpoint
    is written at a time: the next waits for it. If it fails, all ranks warn at their next agreement, or here.

    Returns: whether it is, or is being, written. A full disk keeps the last good checkpoint, and training goes on.

    Raises:
        CheckpointFailed: on all ranks, when it could not be written and `must` is set (the run is about to end).
        ConfigError: on all ranks, when it could not be loaded again, or would be a part of the state only.
        NonFinite: on all ranks, when trained parameters or the optimiser's moments hold NaN or infinity.
    """
    write_pending()  # a run that goes on from this checkpoint does not make the steps before it again
    began, step = time.monotonic(), counters["step"]
    refuse_parts(objects)
    finish(job)  # what became of the one before is said before anything of this one
    with phase("checkpoint"):
        rng = gather(job, random_state(job.device))
        warn_of_own_states(job, objects)
    payload: dict[str, Any] = {"format": directory.FORMAT, "counters": dict(counters), "rng": rng}
    if rating := _rating_to_save(step):
        payload[METRIC] = rating.as_json()
    if job.rank == 0:  # replicas are equal on all ranks; only rank 0 needs to copy them
        payload["objects"] = {name: item.state_dict() for name, item in objects.items()}
        payload["orders"] = parameter_orders(objects)

    def check_and_write(progress: Progress) -> Refusal | _Saved:
        if refused := refusal(objects, payload["objects"]):
            return refused
        _note_wrappers(run_dir, objects)
        return _Saved(*_write(run_dir / "checkpoints", payload, keep, must, began, progress))

    saved = from_rank0(job, on_rank0(job, "checkpoint", check_and_write))
    assert saved is not None
    if isinstance(saved, Refusal):
        raise saved.error()
    _in_flight[:] = [step] if saved.in_flight else []
    if saved.problem:
        _warn(job, _not_written(step, saved.problem))
        if must:
            raise CheckpointFailed(f"the checkpoint of step {step} could not be written: {saved.problem}")
    return not saved.problem


def keep_best(evaluation: Any) -> None:
    """From now on the best checkpoint stays beside the newest; see `rate` and `is_best`. Every rank must call it.

    Args:
        evaluation: the project's evaluate.py: `METRIC`, the name of the number to watch, and `HIGHER_IS_BETTER`.
            Without the first, no checkpoint is the best, which is logged.

    Raises:
        ConfigError: only the second is missing. Which direction is better is not guessed from a name.
    """
    name, higher = getattr(evaluation, "METRIC", None), getattr(evaluation, "HIGHER_IS_BETTER", None)
    if name is None:
        log.info("no checkpoint is kept as the best one: evaluate.py has no METRIC, the name of the number to watch")
        return
    if not isinstance(name, str) or not isinstance(higher, bool):
        missing = "HIGHER_IS_BETTER, True or False" if isinstance(name, str) else "METRIC, the name of a metric"
        remedy = "write it there, below the imports, or set checkpoint.keep_best to false"
        problem = f"checkpoint.keep_best is on, and evaluate.py does not have {missing}"
        raise ConfigError(problem, remedy, "bad_settings")
    _watched[:] = [_Watched(name, higher)]


def rate(job: Job, run_dir: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Take note of an evaluation of the weights of `step`, if the best is kept. Every rank must call it.

    A checkpoint of this step will have the metric in its manifest. NaN and infinity are never the best.
    """
    for watched in _watched:
        if watched.name not in metrics and watched.step == step:
            continue  # of a further validation set: the first has rated these weights
        value = float(metrics.get(watched.name, math.nan))
        watched.step = step
        watched.rating = Rating(watched.name, value, watched.higher_is_better) if math.isfinite(value) else None
        with phase("checkpoint"):  # one decision for all, even if the ranks should have measured different values
            watched.is_best = from_rank0(job, job.rank == 0 and _beats_all(watched, run_dir / "checkpoints"))
        if watched.name not in metrics and watched.name not in _said:
            _said.add(watched.name)
            _warn(job, f"no checkpoint is the best: evaluate() has returned no {watched.name}, which METRIC names")


def is_best(step: int) -> bool:
    """Whether the weights of `step` are the best that were evaluated, and not saved yet. The same on all ranks."""
    return any(watched.is_best and watched.step == step for watched in _watched)


def _beats_all(watched: _Watched, root: Path) -> bool:
    """On rank 0: whether what was evaluated last is better than all that is on the disk, or on its way there."""
    flying = list(_on_its_way) if writer.in_flight() else []  # looked at first: a moment later it may be on the disk
    found = best_of(checkpoints(root))
    before = [*([found[1]] if found else []), *flying]
    mine = watched.rating
    if mine is None or not all(mine.beats(other) for other in before):
        return False
    log.info("%s %.6g at step %d is the best so far", mine.name, mine.value, watched.step)
    return True


def _rating_to_save(step: int) -> Rating | None:
    """What is known of the weights of `step`, which are about to be saved."""
    rating = next((each.rating for each in _watched if each.step == step), None)
    for watched in _watched:
        watched.is_best = False
    _on_its_way[:] = [rating] if rating else []
    return rating


def finish(job: Job) -> bool:
    """Wait for the checkpoint that is being written beside training, if any. Every rank must call it.

    Returns: whether the last one is there. If not, all ranks have been told.
    """
    if not _in_flight:
        return True
    step = _in_flight.pop()

    def wait(progress: Progress) -> tuple[str | None, bool]:
        write = writer.wait(progress)
        return (write.result(), write.told) if write else (None, False)

    if dist.is_initialized():
        problem, told = from_rank0(job, on_rank0(job, "checkpoint", wait)) or (None, False)
    else:  # user code has destroyed the groups after its last step
        problem, told = wait(progress) if job.rank == 0 else (None, False)
    if problem and told:
        warn(job, _not_written(step, problem))
    elif problem:
        _warn(job, _not_written(step, problem))
    return not problem


@contextmanager
def finished_at_the_end(job: Job) -> Iterator[None]:
    """Around a training loop: when it ends or stops, the checkpoint in flight is waited for.

    Raises:
        CheckpointFailed: on all ranks, when a stop waited for it and it could not be written.
    """
    try:
        yield
    except StopRequested as stop:
        if not finish(job):
            raise CheckpointFailed("the last checkpoint before the stop could not be written") from stop
        raise
    finish(job)


def look(step: int) -> str:
    """For the agreement of all ranks, now and then while training: what has failed since, on rank 0; "" if nothing.

    After the first step, when the optimiser has its state, memory is made ready for the first copy.
    """
    if _to_copy and step > _to_copy[0][1]:
        objects, _ = _to_copy.pop()
        snapshot.prepare(objects.values())
    failed = writer.failure()
    return _not_written(*failed) if failed else ""


def warn(job: Job, text: str) -> None:
    """Say what `look` has returned on rank 0, on every rank.

    It comes twice, from the agreement and from whoever waits for the write: the first of the two says it.
    """
    if text in _told:
        _told.remove(text)
        return
    _told.add(text)
    _warn(job, text)


def load(job: Job, run_dir: Path, objects: Objects) -> dict[str, int] | None:
    """Fill `objects` from the newest complete checkpoint and return its counters, or None where there is none.

    One that is being written beside training is waited for.
    Random states are restored per rank; a rank that the checkpoint does not know (another world size) keeps its own.

    Raises:
        RunFailed: rank 0 found a checkpoint that another rank cannot read.
        ConfigError: it is of another model or optimiser, it cannot be loaded, or these objects could not be saved.
    """
    refuse_parts(objects)
    finish(job)
    compare_orders(job, objects)
    root, found = run_dir / "checkpoints", dict[str, dict[str, Any]]()

    def find(progress: Progress) -> Refusal | str | None:
        refused = refusal({}, {name: item.state_dict() for name, item in objects.items()})  # now, not after an hour
        if refused:
            return refused
        try:
            newest = directory.read_newest(root, progress)
        except directory.NoneWhole as error:  # to begin anew would put another run in the place of this one
            remedy = "look at them and at that file system; run.resume false sets them aside and begins anew"
            return Refusal(f"no checkpoint in {root} can be loaded: {error}", remedy)
        except pickle.UnpicklingError as error:  # of an older release, or another torch
            problem, remedy = str(not_loadable(root, error)).split("\n  -> ")
            return Refusal(problem, remedy)
        found.update([newest] if newest else [])
        return newest[0] if newest else None

    name = from_rank0(job, on_rank0(job, "find-checkpoint", find))
    if isinstance(name, Refusal):
        raise name.error()
    if name is None:
        _begin(job, run_dir, objects, 0)
        return None
    path = root / name
    payload = found.pop(name) if found else _read_as_rank0_has(job, path)
    fill(objects, payload["objects"], path, payload.get("orders"))
    if job.rank < len(payload["rng"]):
        restore_random_state(payload["rng"][job.rank], job.device)
    step = payload["counters"].get("step", 0)
    _begin(job, run_dir, objects, step)
    _resumed[:] = [step]
    log.info("resumed from %s", path)
    return dict(payload["counters"])


def set_aside(job: Job, run_dir: Path, objects: Objects | None = None) -> None:
    """Before a run that starts from nothing: move an earlier one's checkpoints away, so that the two never mix.

    `objects` are those that will be saved: the first evaluation sees whether they are the same on all ranks.
    """
    _begin(job, run_dir, objects or {}, 0)
    root, kept = run_dir / "checkpoints", run_dir / time.strftime("checkpoints-before-%Y%m%d-%H%M%S")
    on_rank0(job, "set-aside", lambda _progress: checkpoints(root) and root.rename(kept))


def resumed_at() -> int | None:
    """The step of the checkpoint that this process has loaded last, None if it has loaded none."""
    return _resumed[-1] if _resumed else None


def let_go(job: Job) -> None:
    """Of what checkpoints hold, so that its memory is free. Every rank must call it; `load` takes up the next."""
    finish(job)
    remember({}, 0)
    _to_copy.clear()


def _begin(job: Job, run_dir: Path, objects: Objects, step: int) -> None:
    """Training goes on from `step`, and checkpoints will hold `objects`."""
    tell_summary(job, run_dir, objects)
    remember(objects, step)
    _to_copy[:] = [(objects, step)] if job.rank == 0 else []


def _read_as_rank0_has(job: Job, path: Path) -> dict[str, Any]:
    who = job.who(job.rank)
    try:
        return directory.read(path, progress)
    except OSError as error:
        where = path.parents[1]
        raise RunFailed(f"{who} cannot read {path}: is {where} on a file system that all nodes share?") from error
    except directory.Damaged as error:
        raise RunFailed(f"{who} does not read from {path} what rank 0 has read: {error}") from error


def _write(
    root: Path, payload: dict[str, Any], keep: int, must: bool, began: float, note: Progress
) -> tuple[str | None, bool]:
    """Write a copy of the state beside training; if there is no room for a copy, the state itself.

    Args:
        began: when training began to stand still, in monotonic seconds.

    Returns: why it was not written, and whether it is still being written.
    """
    step = payload["counters"]["step"]
    frozen = snapshot.freeze(payload["objects"], step)
    if isinstance(frozen, str):
        if frozen not in _said:
            log.info("training stands still while a checkpoint is written: %s", frozen)
            _said.add(frozen)
        told = mounts.naming(lambda text: note(f"checkpoint of step {step}: {text}"), root)
        return directory.write(root, payload, keep, told, keep_best=bool(_watched)), False
    whole = payload | {"objects": frozen.state}
    stood_s = time.monotonic() - began

    def work(note: Progress) -> str | None:
        problem = directory.write(
            root, whole, keep, mounts.naming(note, root), frozen.block.holds, keep_best=bool(_watched)
        )
        if problem is None:
            still = "" if must else f", beside training, which stood still for {stood_s:.2f} s"
            log.info("checkpoint of step %d written in %.1f s%s", step, time.monotonic() - began, still)
        return problem

    writer.begin(step, work)
    if not must:
        return None, True
    done = writer.wait(note)
    assert done is not None
    return done.result(), False


def _note_wrappers(run_dir: Path, objects: Objects) -> None:
    """For export, beside the checkpoints: what in their names is no name of the bare module."""
    text = json.dumps({name: wrapped(item) for name, item in objects.items()})
    if (key := f"{run_dir} {text}") in _said:
        return
    _said.add(key)
    try:
        (run_dir / WRAPPED).write_text(text + "\n")
    except OSError as error:
        log.warning("%s not written, so export has to guess: %s", WRAPPED, error)


def _not_written(step: int, problem: str) -> str:
    return f"checkpoint of step {step} not written: {problem}. The last good one is kept."


def _warn(job: Job, text: str) -> None:
    log.warning("%s: %s", job.who(0), text, extra={"file_only": job.rank != 0})
