"""Every timeout of a run in one place, with the order that they must keep."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

from pydantic import BaseModel, Field, model_validator

WEEK_S = 7 * 86400.0
# Phases whose limit can be set apart: the others have clocks of their own (init_s, compile_s, guard_s).
PHASES = ("train", "data", "forward", "backward", "optim", "eval", "log", "agree", "checkpoint", "shutdown")


class Clocks(BaseModel, extra="forbid", allow_inf_nan=False):
    """Timeouts in seconds. The order makes the most specific clock ring first, so that its message names the cause:

    a loader that hangs is reported by the loader, a rank that hangs by the heartbeat monitor, and only what both missed
    by the collective timeout of PyTorch, which names a victim and needs 65 s more to end the job.
    """

    init_s: float = Field(300, gt=0, description="rendezvous, process group and warm-up: all ranks must be there")
    loader_s: float = Field(90, gt=0, description="one batch from a loader worker; must stay below stall_s")
    stall_s: float = Field(180, gt=0, description="no progress inside one phase; must stay below collective_s")
    collective_s: float = Field(300, gt=0, description="one collective of the training group; must stay below guard_s")
    guard_s: float = Field(1800, gt=0, description="rank-0 work without a sign of progress")
    compile_s: float = Field(1800, gt=0, description="the first forward and backward of each rank, see rehearsal.py")
    phase_s: dict[str, float] = Field({}, description="stall limits of single phases: {data: 60, eval: 240}")
    learn_factor: float = Field(
        0, ge=0, description="tighten stall limits to this many times the longest wait so far, 10 s at least; 0: off"
    )
    silent_s: float = Field(15, gt=0, description="a rank whose heartbeat stops (killed, suspended, stuck in C code)")
    beat_s: float = Field(1, gt=0, description="a heartbeat is published this often; at most silent_s / 3")
    preflight_s: float = Field(60, gt=0, description="preflight: all ranks come by then, and as long for its checks")

    @model_validator(mode="after")
    def _ordered(self) -> Clocks:
        for name, value in self:
            if isinstance(value, float) and value > WEEK_S:
                raise ValueError(f"clocks.{name} ({value:g}) is more than a week: a clock that never rings is none")
        chain = ["loader_s", "stall_s", "collective_s", "guard_s"]
        for shorter, longer in pairwise(chain):
            if getattr(self, shorter) >= getattr(self, longer):
                raise ValueError(
                    f"clocks.{shorter} ({getattr(self, shorter):g}) must be below clocks.{longer} "
                    f"({getattr(self, longer):g}): the clock that knows more must ring first"
                )
        for phase, limit in self.phase_s.items():
            if phase not in PHASES:
                raise ValueError(f"clocks.phase_s: {phase!r} is no phase with a limit of its own: {', '.join(PHASES)}")
            if not 0 < limit < self.collective_s:
                raise ValueError(
                    f"clocks.phase_s.{phase} ({limit:g}) must be above 0 and below clocks.collective_s "
                    f"({self.collective_s:g}): the others wait in a collective meanwhile"
                )
        if self.phase_s.get("data", self.collective_s) <= self.loader_s:
            raise ValueError(
                f"clocks.phase_s.data ({self.phase_s['data']:g}) must be above clocks.loader_s ({self.loader_s:g}), "
                "which names worker and index"
            )
        if self.beat_s * 3 > self.silent_s:
            raise ValueError(
                f"clocks.beat_s ({self.beat_s:g}) must be at most a third of clocks.silent_s ({self.silent_s:g})"
            )
        return self

    def stall_limit(self, phase: str, longest: float | None = None) -> float:
        """Seconds without progress after which a rank in `phase` counts as stalled.

        `longest` is how long this rank has been without progress in that phase so far, None while it is too early to
        learn from.
        """
        if phase == "init":
            return self.init_s
        if phase.startswith("guard:"):
            return self.guard_s
        if phase.endswith("compile"):  # the ranks that wait for others get more time than those that compile
            return self.compile_s + (2 * self.silent_s if phase.startswith("wait:") else 0)
        if phase.startswith("wait:") and phase != "wait:end":
            # Rank 0's own limit rings first: this one is for a rank 0 that cannot speak
            return self.guard_s + 2 * self.silent_s
        limit = self.phase_s.get(phase, self.stall_s)
        if self.learn_factor and longest is not None:
            limit = min(limit, max(self.learn_factor * longest, 10.0))
        if phase == "data":  # the loader's own clock knows worker and index
            limit = max(limit, min(self.stall_s, 1.1 * self.loader_s))
        return limit


def seconds(value: float) -> timedelta:
    """The `timedelta` that every torch.distributed call wants (a bare number raises TypeError there)."""
    return timedelta(seconds=value)
