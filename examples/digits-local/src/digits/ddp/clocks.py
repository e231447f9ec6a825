"""Every timeout of a run in one place, with the order that they must keep."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

from pydantic import BaseModel, Field, model_validator


class Clocks(BaseModel, extra="forbid"):
    """Timeouts in seconds. The order makes the most specific clock ring first, so that its message names the cause:

    a loader that hangs is reported by the loader, a rank that hangs by the heartbeat monitor, and only what both missed
    by the collective timeout of PyTorch, which names a victim and needs 65 s more to end the job.
    """

    init_s: float = Field(300, gt=0, description="rendezvous, process group and warm-up: all ranks must be there")
    loader_s: float = Field(90, gt=0, description="one batch from a loader worker; must stay below stall_s")
    stall_s: float = Field(180, gt=0, description="no progress inside one phase; must stay below collective_s")
    collective_s: float = Field(300, gt=0, description="one collective of the training group; must stay below guard_s")
    guard_s: float = Field(1800, gt=0, description="rank-0 work without a sign of progress")
    silent_s: float = Field(15, gt=0, description="a rank whose heartbeat stops (killed, suspended, stuck in C code)")
    beat_s: float = Field(1, gt=0, description="a heartbeat is published this often; at most silent_s / 3")

    @model_validator(mode="after")
    def _ordered(self) -> Clocks:
        chain = ["loader_s", "stall_s", "collective_s", "guard_s"]
        for shorter, longer in pairwise(chain):
            if getattr(self, shorter) >= getattr(self, longer):
                raise ValueError(
                    f"clocks.{shorter} ({getattr(self, shorter):g}) must be below clocks.{longer} "
                    f"({getattr(self, longer):g}): the clock that knows more must ring first"
                )
        if self.beat_s * 3 > self.silent_s:
            raise ValueError(
                f"clocks.beat_s ({self.beat_s:g}) must be at most a third of clocks.silent_s ({self.silent_s:g})"
            )
        return self

    def stall_limit(self, phase: str) -> float:
        """Seconds without progress after which a rank in `phase` counts as stalled."""
        if phase == "init":
            return self.init_s
        if phase.startswith("guard:"):
            return self.guard_s
        if phase.startswith("wait:"):  # rank 0's own limit rings first: this one is for a rank 0 that cannot speak
            return self.guard_s + 2 * self.silent_s
        return self.stall_s


def seconds(value: float) -> timedelta:
    """The `timedelta` that every torch.distributed call wants (a bare number raises TypeError there)."""
    return timedelta(seconds=value)
