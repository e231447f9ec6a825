"""How far this rank's GPU has come. It runs behind the host, and a kernel that never ends shows nowhere else.

An event at the beginning of each phase of a step: 6 microseconds on an H200's host, and nobody waits for it. The flight
recorder knows which collectives have started only with TORCH_NCCL_ENABLE_TIMING.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import torch

KEPT = 256  # marks: some tens of steps, since the host may run that far ahead
PHASES = ("forward", "backward", "agree", "optim")

Mark = tuple[int, int, str]  # step, number of the mark within it, phase

_marks: deque[tuple[Mark, torch.cuda.Event]] = deque(maxlen=KEPT)
_unused: list[torch.cuda.Event] = []
_last: list[tuple[int, int]] = [(0, 0)]  # step and number of the last mark


def begin() -> None:
    """Leave marks from now on; call it where there is a GPU."""
    _unused[:] = [torch.cuda.Event() for _ in range(KEPT + 1)]


def mark(step: int, phase: str) -> None:
    """The host has come to `phase` of `step`: the GPU will, when it has done all that was asked of it before."""
    if not _unused or phase not in PHASES or torch.cuda.is_current_stream_capturing():
        return
    number = _last[0][1] + 1 if _last[0][0] == step else 0
    _last[0] = (step, number)
    event = _unused.pop()
    event.record()
    if len(_marks) == KEPT:
        _unused.append(_marks[0][1])
    _marks.append(((step, number, phase), event))


def reached() -> Mark | None:
    """The last mark that the GPU has passed, or None if that cannot be told. From any thread."""
    with suppress(RuntimeError):  # the GPU has failed, or a mark was left meanwhile
        return next((place for place, event in reversed(_marks) if event.query()), None)
    return None
