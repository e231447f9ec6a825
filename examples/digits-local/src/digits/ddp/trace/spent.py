"""What the time of a step goes to, by the clock of the device: what is waited for, and what is no part of a step.

The host of a GPU runs ahead of it, so its own clock says little: a batch that it waits for costs nothing while the GPU
has work left. So a GPU's times are those between events in its stream, which are read when they have been passed, and
never waited for. A CPU's are those of the monotonic clock.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

Kind = Literal["data", "ranks", "checkpoint", "apart"]  # the last two are no part of a step
NO_PART: tuple[Kind, ...] = ("checkpoint", "apart")
APART = ("eval", "checkpoint", "guard:", "wait:")  # phases, with all that is inside them
MOST = 64  # moments that may be left unread until their step is done


@dataclass
class Spent:
    """Sums over finished steps. Times in seconds."""

    steps: int = 0
    samples: int = 0  # that all ranks have read
    batches: float = 0  # of this rank; a smaller one is a part of one
    seconds: float = 0.0  # of the steps, without what is no part of them
    kinds: dict[Kind, float] = field(default_factory=dict)

    def add(self, other: Spent) -> None:
        """Add up."""
        self.steps += other.steps
        self.samples += other.samples
        self.batches += other.batches
        self.seconds += other.seconds
        for kind, seconds in other.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0.0) + seconds


class HostClock:
    """Moments of this process."""

    def usable(self) -> bool:
        """Whether a moment can be taken now: not while a CUDA graph is recorded."""
        return True

    def now(self) -> Any:
        """A moment."""
        return time.monotonic()

    def passed(self, moment: Any) -> bool:
        """Whether it can be read."""
        return True

    def between(self, first: Any, second: Any) -> float:
        """Seconds."""
        return float(second - first)

    def give_back(self, moment: Any) -> None:
        """It is not needed any more."""


class DeviceClock(HostClock):
    """Moments in the stream of a GPU: events, which are used again."""

    def __init__(self) -> None:
        self._unused: list[torch.cuda.Event] = []

    def usable(self) -> bool:
        return not torch.cuda.is_current_stream_capturing()

    def now(self) -> Any:
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, moment: Any) -> bool:
        return bool(moment.query())

    def between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3

    def give_back(self, moment: Any) -> None:
        self._unused.append(moment)


@dataclass
class _Entry:
    """What lay between two moments: a span of a kind, or (None) a step, with what was read for it."""

    kind: Kind | None
    begin: Any
    end: Any
    samples: int = 0
    batches: float = 0


class Watch:
    """Where the time of this rank goes, from the end of its first step on: that one still warms up."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._phase = ""
        self._kind: Kind | None = None  # of the span that is open; None is this rank's own work
        self._begin: Any = None  # of that span
        self._after: Kind | None = None  # what has just ended, if it was no part of a step
        self._step_began: Any = None  # None before the first step has ended
        self._entries: deque[_Entry] = deque()
        self._samples, self._batches = 0, 0.0  # of the step under way
        self._open, self._done = Spent(), Spent()  # of a step that is not finished; of those that are

    def enter(self, name: str) -> None:
        """This rank has come to phase `name`."""
        self._phase = name
        if self._step_began is None or (self._kind in NO_PART and name != "train"):
            return
        kind = _kind(name)
        if kind == "ranks" and self._after:
            kind = self._after  # the others end it a little later, or earlier
        elif name != "train":
            self._after = None
        if kind != self._kind:
            self._after = self._kind if self._kind in NO_PART else self._after
            self._change_to(kind)

    def computed(self) -> None:
        """This rank's part of a backward is done: until the phase ends, it waits for gradients of the others."""
        if self._step_began is not None and self._kind is None and self._phase == "backward":
            self._change_to("ranks")

    def batch(self, samples: int, part: float = 1.0) -> None:
        """The training loop was given a batch; `samples` are those of all ranks, `part` is 1 for a full batch."""
        if self._kind not in NO_PART:
            self._samples += samples
            self._batches += part

    def step_done(self) -> None:
        """One more step is finished."""
        now = self._clock.now()
        if self._step_began is not None:
            self._entries.append(_Entry(None, self._step_began, now, self._samples, self._batches))
        self._step_began, self._samples, self._batches = now, 0, 0.0
        self._read(0)

    def take(self) -> Spent:
        """What the steps have taken that were finished since the last call, by the device, too."""
        self._read(0)
        done, self._done = self._done, Spent()
        return done

    def _change_to(self, kind: Kind | None) -> None:
        if not self._clock.usable():
            return
        if self._kind is not None:
            self._entries.append(_Entry(self._kind, self._begin, self._clock.now()))
            self._read(MOST)
        self._kind, self._begin = kind, self._clock.now() if kind else None

    def _read(self, most: int) -> None:
        """Add up all that has been passed, if more than `most` are left."""
        if len(self._entries) <= most:
            return
        while self._entries and self._clock.passed(self._entries[0].end):
            entry = self._entries.popleft()
            seconds = self._clock.between(entry.begin, entry.end)
            self._clock.give_back(entry.begin)
            if entry.kind is not None:
                self._clock.give_back(entry.end)
                self._open.add(Spent(kinds={entry.kind: seconds}))
                continue  # the end of a step is the beginning of the next
            apart = sum(self._open.kinds.get(kind, 0.0) for kind in NO_PART)
            self._open.add(Spent(1, entry.samples, entry.batches, max(0.0, seconds - apart)))
            self._done.add(self._open)
            self._open = Spent()


def _kind(name: str) -> Kind | None:
    """Of a phase, when the loop comes to it."""
    if name.startswith(APART):
        return "checkpoint" if name.split(":")[-1] == "checkpoint" else "apart"
    return {"data": "data", "agree": "ranks"}.get(name)  # type: ignore[return-value]


watch = Watch(HostClock())


def begin() -> None:
    """From now on, on this rank's GPU, by its clock."""
    global watch
    watch = Watch(DeviceClock())


def follow(model: DistributedDataParallel) -> None:
    """Notice when this rank's part of a backward of `model` is done.

    A hook on a parameter asks the autograd engine for a call at the end of the backward (`queue_callback`: not public;
    FSDP uses it; torch 2.6 to 2.13). It comes ahead of the one in which DDP waits for its reductions, which is asked
    for when the last gradient is there (reducer.cpp, `mark_variable_ready`).
    """

    def hook(_parameter: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: watch.computed())

    trained = next((each for each in model.module.parameters() if each.requires_grad), None)
    if trained is not None and model not in _followed:
        _followed.add(model)
        trained.register_post_accumulate_grad_hook(hook)


_followed: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
