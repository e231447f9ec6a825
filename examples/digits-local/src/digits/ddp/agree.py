"""Decisions that all ranks take together. No rank may stop, skip or save on its own: the others would wait for ever."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from .errors import ConfigError, Diverged, StopRequested
from .start.groups import Job
from .start.stop import StopFlags
from .trace.collectives import ledger
from .trace.drift import Digest, Drift
from .trace.heartbeat import collectives_issued, phase

log = logging.getLogger("ddp")
T = TypeVar("T")


class Agreement:
    """One small MAX all_reduce on the gloo control group, started about once a second and read about a second later.

    It never touches the GPU, so it costs no host sync (measured on 2 H200s: a 5.8 ms step stays at 5.8 ms). Every rank
    must call `poll` equally often. Beside the wish to stop, it compares how many steps and collectives each rank has
    made, and a checksum over what they were: an all_reduce that one rank skips, or makes of another type, is wrong in
    silence in PyTorch, and is caught here. So are replicas that are no longer equal, if there is a `drift` to compare
    them. And what rank 0 has to say of work that it does beside training (`news`) becomes a warning of all ranks, by
    `warn`.
    """

    def __init__(
        self,
        job: Job,
        flags: StopFlags,
        every_s: float = 1.0,
        drift: Drift | None = None,
        news: Callable[[int], str] = lambda _step: "",
        warn: Callable[[Job, str], None] | None = None,
    ) -> None:
        self.job, self._flags, self._every_s = job, flags, every_s
        self._drift, self._news, self._warn = drift, news, warn or _warn
        self._told = self._heard = 0  # numbers of the last news of this rank, and of those that all ranks know
        self._pending: tuple[dist.Work, torch.Tensor, Digest | None] | None = None
        self._polls = 0  # since the pending all_reduce began
        self._stale = 0  # votes to come whose measured speed no longer holds
        self._interval = 1  # in polls; the same on all ranks, because it follows from agreed numbers
        self._began = time.monotonic()

    def poll(self, step: int) -> None:
        """Take part in the agreement; returns at once unless the last one is due.

        Raises:
            StopRequested: some rank wants to stop; all ranks raise it at the same step.
            Diverged: the ranks have made different numbers of steps or collectives, or other collectives, or train
                different models.
        """
        self._polls += 1
        if self._pending is not None and self._polls >= self._interval:
            self.settle()
        if self._pending is None:
            self._start(step)

    def change_pace(self) -> None:
        """Between loops of unequal speed: measure anew, so that a stop does not wait for many slow polls."""
        self._interval, self._stale = 1, 2  # the votes under way and next still carry the old loop's speed

    def conclude(self, step: int) -> None:
        """After the last step: one more agreement, so that what went wrong since the last one does not go unnoticed."""
        self.settle()
        self._start(step, last=True)
        self.settle()

    def settle(self) -> None:
        """Wait for the agreement that is under way, if any, and act on it. Raises as `poll` does."""
        if self._pending is None:
            return
        work, votes, digest = self._pending
        with phase("agree"):
            work.wait()
        self._pending = None
        stop, poll_us, told, *pairs = votes.tolist()
        while self._heard < told:
            self._heard += 1
            self._warn(self.job, self.job.store.get(f"told/{self._heard}").decode())
        same = [most == -minus_least for most, minus_least in zip(pairs[::2], pairs[1::2], strict=True)]
        step, counts, replicas = -pairs[1], same[:3], same[3:]
        if not all(counts):
            what = f"between {step} and {pairs[0]} steps" if pairs[0] != step else "different collectives"
            raise Diverged(f"ranks have made {what}: sums are wrong or calls hang")
        if self._drift is not None and not all(replicas):
            self._drift.explain(step, same_keys=replicas[0])
        elif self._drift is not None and digest is not None:
            self._drift.equal_at = digest.step
        if stop:
            raise StopRequested(self.job.store.get("stop").decode())
        # At most 32: should steps become slow all at once, a stop must not wait for hundreds of them.
        if self._stale:
            self._stale -= 1
        else:
            self._interval = max(1, min(32, int(self._every_s * 1e6 / max(poll_us, 1))))

    def _start(self, step: int, last: bool = False) -> None:
        reason = self._flags.reason()
        if reason:
            self.job.store.set("stop", f"{reason} on {self.job.who(self.job.rank)}")
        if text := self._news(step):
            self._told += 1
            self.job.store.set(f"told/{self._told}", text)
        now = time.monotonic()
        poll_us = int(1e6 * (now - self._began) / max(1, self._polls))  # conclude() may come right after a poll
        digest = self._drift.digest(step, now=last) if self._drift else None
        # MAX of a number and of its negative: equal on all ranks if the one is minus the other.
        compared = [step, collectives_issued(), ledger.digest, *(digest.votes() if digest else (0, 0, 0))]
        both = (each for value in compared for each in (value, -value))
        votes = torch.tensor([int(bool(reason)), poll_us, self._told, *both])
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.job.control, async_op=True)
        assert work is not None  # None is for ranks outside the group
        self._pending, self._polls, self._began = (work, votes, digest), 0, now


def _warn(job: Job, text: str) -> None:
    log.warning("%s", text, extra={"file_only": job.rank != 0})


def total(job: Job, values: torch.Tensor) -> torch.Tensor:
    """The sum of `values` over all ranks, on the training group. Every rank must call it, with equal shapes.

    The ranks meet on the control group first, whose clock is longer: some come late, after an evaluation, say.
    """
    summed = values.detach().clone().to(job.device)
    with phase("agree"):
        dist.barrier(group=job.control)
        dist.all_reduce(summed)
        return summed.cpu()


def gather(job: Job, value: T) -> list[T]:
    """`value` of every rank, in rank order, over the control group. For small plain data."""
    found: list[T] = [value] * job.world_size
    with phase("agree"):
        dist.all_gather_object(found, value, group=job.control)
    return found


def from_rank0(job: Job, value: T) -> T:
    """Rank 0's `value` on every rank, over the control group. For small plain data; the others' argument is ignored."""
    box = [value]
    with phase("agree"):
        dist.broadcast_object_list(box, src=0, group=job.control)
    return box[0]


def same(job: Job, what: str, value: object, remedy: str) -> None:
    """Check before the first step that all ranks have the same `value` (compared as JSON).

    Raises:
        ConfigError: on every rank, with each rank's value and the remedy.
    """
    values = gather(job, json.dumps(value, sort_keys=True))
    if len(set(values)) > 1:
        listing = ", ".join(f"{job.who(rank)}: {text}" for rank, text in enumerate(values))
        problem = f"{what} differs between ranks ({listing}): some would wait for others for ever"
        raise ConfigError(problem, remedy, "uneven_inputs")
