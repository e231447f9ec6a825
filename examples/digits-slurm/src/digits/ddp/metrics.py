"""Norms and logging that never stall a rank: values stay on the device until they have arrived by themselves."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, SupportsFloat

import torch
import torch.distributed as dist
from pydantic import Field, field_validator

from .errors import DONE
from .kinds import Verdict
from .meter import OF_A_RANK, Meter, Moment, in_words, leading, learning_rate_of_the_only_optimizer
from .report import json_lines
from .report.speed import NUMBERS
from .start.groups import Job
from .trace.heartbeat import beat, phase
from .trackers import Trackers, TrackerSettings

log = logging.getLogger("ddp")
DETACHED = "no parameter has a gradient: the loss does not lead back to the model (detached? no_grad?)"
SKIPPED = (
    "no parameter has a gradient, and this rank has made no backward since the last step, while the others wait in "
    "theirs: a batch that it skips by itself? Let it through: a step with a NaN is skipped on all ranks"
)


LED_BY = ("step_seconds", "samples_per_second", "learning_rate")  # stand before the rest of a line
DIAGNOSTIC = ("grad_norm", "param_norm", "nonfinite_steps")  # ends of the names of metrics that wait to be asked for


class LogSettings(TrackerSettings, extra="forbid"):
    """What is written down, and how often."""

    every_steps: int = Field(20, ge=1, description="optimiser steps between two lines of training metrics")
    heartbeat_s: float = Field(30, gt=0, description="seconds between two heartbeat lines in each rank's log")
    console: Literal["short", "full"] = Field(
        "short", description="full: lines as in rank 0's log, with norms, waits and memory, and each heartbeat"
    )
    profile: str = Field("", description="steps to profile, --profile 100:110: from when 100 are done to when 110 are")
    profile_ranks: str = Field("0", pattern=r"^(all|\d+(,\d+)*)$", description="which ranks of them: 0,8 or all")

    @field_validator("profile")
    @classmethod
    def _is_range(cls, text: str) -> str:
        found = re.fullmatch(r"\s*(\d{1,12})\s*:\s*(\d{1,12})\s*", text)
        if text and not (found and int(found[1]) < int(found[2])):
            what = "its end is not after its beginning" if found else "that is no range of steps"
            raise ValueError(f"{text!r}: {what}\nwrite FIRST:LAST, as in --profile 100:110")
        return text

    @property
    def profile_steps(self) -> tuple[int, int]:
        """How many steps are done when the profile begins, and when it ends; (0, 0) without one."""
        first, _, last = self.profile.partition(":")
        return int(first or 0), int(last or 0)


@torch.no_grad()
def global_norm(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """The 2-norm of all tensors together, as a scalar on their device, without a host sync.

    A few fused kernels: 1% of a step on an H200. Copying every gradient to the CPU instead made a step 24 times slower.

    Raises:
        ValueError: there is no tensor, as where no parameter has a gradient.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        raise ValueError(DETACHED if beat.seconds.get("backward", 0.0) > beat.backward_s else SKIPPED)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(present)))
    return norm


@torch.no_grad()
def gradient_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The norm of this rank's gradients, which after DDP's backward all ranks have alike but for the last bit."""
    return global_norm(parameter.grad for parameter in parameters)


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[torch.Tensor],
    factor: torch.Tensor | float,
    max_norm: float,
    norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply gradients in place by `factor`, then scale them down to a global norm of at most `max_norm`.

    `norm` is that before the factor, if it is known already. One that all ranks share makes them clip alike to the bit:
    sums of other numbers of threads, or on another kind of processor, may differ in the last one.

    One pass over the gradients for both. Returns: their norm after the first and before the second, a scalar.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = (global_norm(gradients) if norm is None else norm) * factor
    torch._foreach_mul_(gradients, factor * (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@torch.no_grad()
def step_if_finite(optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> torch.Tensor:
    """Step the optimiser unless `norm` is NaN or infinite; returns 1 when it was skipped, else 0, on the device.

    `norm` must be equal on all ranks, so that they decide alike. Fused optimisers skip on the device when `found_inf`
    is 1: it is what `torch.amp.GradScaler` sets (torch/amp/grad_scaler.py, `_step_supports_amp_scaling`). The others
    know nothing of it or refuse it, so the host waits for the norm, and does not call them.
    """
    skipped = (~torch.isfinite(norm)).float()
    # Not the first step: fused SGD leaves momentum that it skips uninitialised, and uses it at the next (torch 2.13).
    if optimizer.state and skips_on_device(optimizer):
        optimizer.grad_scale, optimizer.found_inf = None, skipped  # type: ignore[attr-defined]
        optimizer.step()
        return skipped
    if not hasattr(optimizer, "waits_for_norm"):
        optimizer.waits_for_norm = True  # type: ignore[attr-defined]
        if norm.is_cuda and not skips_on_device(optimizer):
            log.info("%s cannot skip a step on the GPU: each step waits for its norm", type(optimizer).__name__)
    if not skipped.item():
        optimizer.step()
    return skipped


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimiser reads `found_inf`: only the fused kinds do, and a checkpoint's groups may not be fused."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and fused


class MetricLog:
    """Training scalars, averaged over ranks, to metrics.jsonl, the tracker and the console of rank 0.

    Beside them stand the numbers of meter.py: they travel in the same all_reduce.
    A full disk or a broken tracker is a warning: training goes on, and waits for neither. `scalars` starts one
    all_reduce and a copy to pinned memory; the values are read at the next call, when they have long arrived. The names
    are fixed by the first call, so that all ranks always reduce the same thing.
    """

    def __init__(self, job: Job, run_dir: Path, settings: LogSettings) -> None:
        self._job, self._path = job, run_dir / "metrics.jsonl"
        self._names: list[str] = []
        self._pending: _Line | None = None
        self._warned, self._all_shown = False, settings.console == "full"
        self._meter = Meter(job)
        self.latest: dict[str, float] = {}
        self._trackers = Trackers(settings, run_dir) if job.rank == 0 else None
        _of_this_run[:] = [self]

    def scalars(self, step: int, values: dict[str, torch.Tensor], learning_rate: float | None = None) -> None:
        """Average scalar tensors over the ranks. Every rank must call it at the same step, with the same names.

        `learning_rate` is written beside them; without it that of the optimiser, if there is only one.
        """
        with phase("log"):
            self.flush()
        names = sorted(values)
        self._names = self._names or names
        if names != self._names:
            raise ValueError(f"metrics {names} at step {step}, but {self._names} before: the names must stay the same")
        rate = learning_rate_of_the_only_optimizer() if learning_rate is None else learning_rate
        averaged = torch.stack([values[name].detach().float() for name in names])
        stacked = torch.cat([averaged, self._of_this_rank(averaged.device)])
        with phase("agree"):
            dist.all_reduce(stacked)
        event = None
        if stacked.is_cuda:
            host = torch.empty_like(stacked, device="cpu", pin_memory=True)
            host.copy_(stacked, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            stacked = host
        self._pending = _Line(step, stacked, event, self._meter.now(), rate)

    def _of_this_rank(self, device: torch.device) -> torch.Tensor:
        """The numbers of each rank, where all but this one's are 0: the sum over all ranks is a table of them."""
        table = torch.zeros(self._job.world_size, OF_A_RANK, pin_memory=device.type == "cuda")
        table[self._job.rank] = torch.tensor(self._meter.own())
        return table.flatten().to(device, non_blocking=True)

    def flush(self) -> None:
        """Write what `scalars` started last."""
        if self._pending is None:
            return
        line, self._pending = self._pending, None
        if line.event is not None:
            line.event.synchronize()
            beat.complete = line.step
        count, size = len(self._names), self._job.world_size
        means = (line.sums[:count] / size).tolist()
        numbers = self._meter.together(line.sums[count:].view(size, OF_A_RANK).tolist(), line.learning_rate)
        self._write(line.step, dict(zip(self._names, means, strict=True)), numbers, line.began)

    def write(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Record numbers that are equal on all ranks already (evaluation results): Python's, numpy's, or tensors."""
        plain = {name: each if isinstance(each, (int, float)) else float(each) for name, each in values.items()}
        self._write(step, plain, {}, self._meter.now())

    def glance(self, *names: str) -> dict[str, str]:
        """The latest of these metrics and the rate, for a progress bar; all numbers with `log.console` full."""
        shown = {name: f"{self.latest[name]:.4g}" for name in names if name in self.latest}
        if "samples_per_second" in self.latest:
            shown["samples/s"] = f"{self.latest['samples_per_second']:.4g}"
        for name, number, form in (
            ("data wait", "data_wait_share", "{:.0%}"),
            ("rank wait", "rank_wait_share", "{:.0%}"),
            ("GiB", "peak_memory_gib", "{:.3g}"),
            ("mfu", "mfu", "{:.0%}"),
        ):
            if self._all_shown and number in self.latest:
                shown[name] = form.format(self.latest[number])
        return shown

    def _write(self, step: int, values: dict[str, float], numbers: dict[str, float], when: Moment) -> None:
        self.latest.update(values | numbers)
        if self._job.rank != 0:
            return
        short, rest = _in_a_line(step, values, numbers)
        log.info("%s%s", short, f"  ({', '.join(rest)})" if rest else "", extra={"short": short})
        values = values | {name: numbers[name] for name in NUMBERS if name in numbers}
        values |= {"elapsed_seconds": round(when.elapsed, 3)}
        # JSON has no NaN or infinity: null keeps the file readable by everything.
        row = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        row["time"] = round(when.time, 3)
        try:
            json_lines.append(self._path, [row])
        except OSError as error:
            if not self._warned:
                log.warning("metrics are no longer written to %s: %s", self._path, error)
            self._warned = True
        assert self._trackers is not None
        self._trackers.numbers(step, values)

    def drawn(self, step: int, path: Path) -> None:
        """Give the trackers the pictures and texts that `draw` of sample.py has written, by rank 0, as `path`*.

        Each has the name `samples`, with what its file's name has after that of `path`.
        """
        if self._trackers is not None:
            files = sorted(file for file in path.parent.glob(f"{path.name}*") if file.suffix in (".png", ".txt"))
            self._trackers.drawn(step, [(f"samples{file.stem.removeprefix(path.name)}", file) for file in files])

    def close(self, verdict: Verdict | None = None) -> None:
        """Write the rest, and how it ended; gives trackers that hang five seconds and no more."""
        self.flush()
        if self._trackers is not None:
            self._trackers.end(verdict or Verdict(DONE, "benign", "training is done"))
            self._trackers.close()


_of_this_run: list[MetricLog] = []  # the newest


def write_pending() -> None:
    """Write what `MetricLog.scalars` of this run has started last, if anything."""
    with phase("log"):
        for each in _of_this_run:
            each.flush()


def _in_a_line(step: int, values: dict[str, float], numbers: dict[str, float]) -> tuple[str, list[str]]:
    """What a line begins with: step, losses, speed, learning rate, and metrics of the user's own; and the rest.

    Steps that were skipped are told as soon as there are any.
    """
    losses = sorted((name for name in values if name.endswith("loss")), key=lambda name: (name != "loss", name))
    told = {name for name, value in values.items() if name == "nonfinite_steps" and value}
    asked_for = {name for name in values if name.endswith(DIAGNOSTIC)} - told
    own = sorted(set(values) - set(losses) - asked_for)
    words = {name: f"{name} {value:.4g}" for name, value in values.items()}
    more = in_words({name: number for name, number in numbers.items() if name not in LED_BY})
    begin = [f"step {step}", *(words[name] for name in losses), *leading(numbers), *(words[name] for name in own)]
    return "  ".join(begin), [*(words[name] for name in sorted(asked_for)), *([more] if more else [])]


@dataclass(frozen=True)
class _Line:
    """A line under way: sums over the ranks of the metrics, and of each rank's numbers."""

    step: int
    sums: torch.Tensor
    event: torch.cuda.Event | None  # after which they have arrived
    began: Moment
    learning_rate: float | None
