"""Equally many batches on every rank when nobody can know beforehand how many there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..agree import Agreement, gather
from ..errors import ConfigError
from ..start.groups import Job
from ..storable import compare_remembered
from ..trace.heartbeat import phase

log = logging.getLogger("ddp")
T = TypeVar("T")
END: Any = object()


def in_step(
    job: Job, source: Iterator[T], uneven: str, whole: bool = True, remark: str = ""
) -> Iterator[tuple[T, bool]]:
    """The batches of this rank's `source`, and whether every rank still has one of its own.

    `drop`: all ranks stop when any has run out. `pad`: a rank that has run out repeats its first batch until all have.
    `keep`: each stops for itself. The answer to "who has another batch?" comes from a small all_reduce on the control
    group that runs while the current batch is used. All ranks must ask for batches equally often, also when they stop
    early: then a question under way harms nobody, since every rank has asked it.

    Args:
        whole: the epoch is read from its beginning, so a rank without any batch is a mistake.
        remark: a warning to log when some ranks run out before others.

    Raises:
        ConfigError: on every rank, when some rank has no batch at all.
    """
    batch: T = next(source, END)
    everyone, anyone = ask(job, batch is not END)()
    if not everyone and uneven != "keep" and (whole or (anyone and uneven == "pad")):
        _refuse(job, batch is not END)
    first = batch if uneven == "pad" else END
    while everyone or (anyone and uneven == "pad"):
        ahead: T = next(source, END)
        answer = ask(job, ahead is not END)
        yield first if batch is END else batch, everyone
        batch, could = ahead, everyone
        everyone, anyone = answer()
        if could and anyone and not everyone and remark:
            log.warning("some ranks have run out of batches before others: %s", remark)
    while batch is not END and uneven == "keep":
        yield batch, False
        batch = next(source, END)


def polled(batches: Iterable[T], agreement: Agreement, step: int, rounds: int | None) -> Iterator[T]:
    """Iterate, polling before each of the first `rounds` items: equal on all ranks and at most the shortest shard.

    None, for an iterable data set: the ranks ask each other for how long all of them have another batch.
    """
    compare_remembered(agreement.job, step)
    agreement.change_pace()
    if rounds is None:
        for batch, everyone in in_step(agreement.job, iter(batches), "keep"):
            if everyone:
                agreement.poll(step)
            yield batch
    else:
        for index, batch in enumerate(batches):
            if index < rounds:
                agreement.poll(step)
            yield batch
    agreement.change_pace()


def ask(job: Job, mine: bool) -> Callable[[], tuple[bool, bool]]:
    """Ask all ranks a question, without waiting; the result waits for the answers: all say yes, any says yes."""
    if job.world_size == 1:
        return lambda: (mine, mine)
    votes = torch.tensor([int(mine), -int(mine)])
    work = dist.all_reduce(votes, dist.ReduceOp.MAX, group=job.control, async_op=True)
    assert work is not None  # None is for ranks outside the group

    def answer() -> tuple[bool, bool]:
        with phase("agree"):
            work.wait()
        most, minus_least = votes.tolist()
        return minus_least == -1, most == 1

    return answer


def _refuse(job: Job, mine: bool) -> None:
    found = gather(job, mine) if job.world_size > 1 else [mine]
    empty = [job.who(rank) for rank, some in enumerate(found) if not some]
    listing = ", ".join(empty[:8]) + (f" and {len(empty) - 8} others" if len(empty) > 8 else "")
    raise ConfigError(
        f"the data stream has no batch at all for {listing}: the other ranks would wait for ever",
        "give every rank data (more files or samples than ranks), or use fewer ranks",
        "uneven_inputs",
    )
