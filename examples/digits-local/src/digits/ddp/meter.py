"""How fast a run is, what its ranks wait for, and how full they are: numbers beside the metrics of training."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .report import outcome
from .start.groups import Job
from .trace import flops, spent
from .trace.replicas import optimizers

OF_A_RANK = 5  # numbers that each rank has of its own, see `Meter.own`


@dataclass(frozen=True)
class Moment:
    """When a line was begun: unix seconds, and seconds since the process of this rank began."""

    time: float
    elapsed: float


class Meter:
    """Numbers of this rank, and of all of them together. Costs no host sync, and no collective of its own.

    Where ranks differ in waiting, standing still and memory, the number is that of the rank that has most of it.

    The first step of a start is left out: it warms up. On a GPU, steps count once it has finished them: those that it
    has still to make count at the next line.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._began = time.monotonic() - (time.time() - outcome.STARTED)
        self._last = spent.Spent()  # the last steps that are known

    def now(self) -> Moment:
        """The present moment."""
        return Moment(time.time(), time.monotonic() - self._began)

    def own(self) -> list[float]:
        """Since the last call: seconds a step, shares of waiting, seconds stood still; and memory. NaN is unknown."""
        taken = spent.watch.take()
        still = taken.kinds.get("checkpoint", 0.0)
        if taken.steps:
            self._last = taken
        last = self._last
        if not last.steps or not last.seconds:
            return [math.nan, math.nan, math.nan, still, self._memory()]
        shares = [last.kinds.get(kind, 0.0) / last.seconds for kind in ("data", "ranks")]
        return [last.seconds / last.steps, *shares, still, self._memory()]

    def _memory(self) -> float:
        if self._job.device.type != "cuda":
            return math.nan
        return float(torch.cuda.max_memory_allocated(self._job.device)) / 2**30

    def together(self, ranks: Sequence[Sequence[float]], learning_rate: float | None) -> dict[str, float]:
        """The numbers of a line, from what `own` has given on each rank. What is not known is left out."""
        step_s, data, waiting, still, memory = (_known(column) for column in zip(*ranks, strict=True))
        numbers = {"checkpoint_seconds": max(still, default=math.nan)}
        if step_s:
            seconds = sum(step_s) / len(step_s)
            numbers |= {"step_seconds": seconds, "data_wait_share": max(data), "rank_wait_share": max(waiting)}
            numbers |= self._rates(seconds)
        if memory:
            numbers["peak_memory_gib"] = max(memory)
        if learning_rate is not None:
            numbers["learning_rate"] = learning_rate
        return numbers

    def _rates(self, seconds: float) -> dict[str, float]:
        """What this rank's steps hold, a second."""
        steps, samples, batches = self._last.steps, self._last.samples, self._last.batches
        rates: dict[str, float] = {}
        if not steps or not samples:
            return rates
        rates["samples_per_second"] = samples / steps / seconds
        work = flops.of_a_batch()
        if work and self._job.device.type == "cuda":
            rates["tflops_per_gpu"] = work.flops * batches / steps / seconds / 1e12
            if work.least_s is not None:
                rates["mfu"] = work.least_s * batches / steps / seconds
        return rates


def learning_rate_of_the_only_optimizer() -> float | None:
    """Of its first parameter group, where there is one optimiser, and the number is on the host."""
    found = optimizers()
    rate = found[0].param_groups[0]["lr"] if len(found) == 1 else None
    return float(rate) if isinstance(rate, (int, float)) else None


def leading(numbers: Mapping[str, float]) -> list[str]:
    """What one looks at first: ['0.118 s/step', '542 samples/s', 'lr 0.008'], as far as it is known."""
    forms = {"step_seconds": "{:.3g} s/step", "samples_per_second": "{:.4g} samples/s", "learning_rate": "lr {:.3g}"}
    return [form.format(numbers[name]) for name, form in forms.items() if name in numbers]


def in_words(numbers: Mapping[str, float]) -> str:
    """For people, in one line: '0.118 s a step, 542 samples/s, waits 1% for data, 3% for ranks, 12.4 GiB, mfu 41%'."""
    shown = {
        "step_seconds": "{:.3g} s a step",
        "samples_per_second": "{:.4g} samples/s",
        "data_wait_share": "waits {:.0%} for data",
        "rank_wait_share": "{:.0%} for ranks",
        "checkpoint_seconds": "{:.3g} s for checkpoints",
        "peak_memory_gib": "{:.3g} GiB",
        "tflops_per_gpu": "{:.3g} TFLOP/s a GPU",
        "mfu": "mfu {:.1%}",
    }
    known = {name: numbers[name] for name in shown if name in numbers and math.isfinite(numbers[name])}
    return ", ".join(shown[name].format(value) for name, value in known.items() if value or "checkpoint" not in name)


def _known(column: Sequence[float]) -> list[float]:
    return [value for value in column if not math.isnan(value)]
