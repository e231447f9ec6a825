"""Early stopping: all ranks end at the same step, with everything that belongs to the end of a run."""

from __future__ import annotations

import logging
import math
from typing import Any

from .agree import from_rank0
from .start.groups import Job

log = logging.getLogger("ddp")
_over: list[str] = []  # on every rank: what is said of the patience that is used up


class Patience:
    """Is used up after `evaluations` evaluations in a row without a better value; with 0 evaluations, never.

    Rank 0's values count. The state belongs into the checkpoint, by `Learner.checkpoint_objects`: a resumed run goes on
    counting, and one that was over is over at once.
    """

    def __init__(self, evaluations: int, higher_is_better: bool) -> None:
        self.evaluations = evaluations
        self.sign = 1 if higher_is_better else -1
        self.best = -math.inf  # times `sign`
        self.since = 0  # evaluations without a better value

    @property
    def over(self) -> bool:
        """Whether training has to end, the same on all ranks."""
        return 0 < self.evaluations <= self.since

    def note(self, job: Job, step: int, value: float) -> None:
        """Take in what an evaluation has found; NaN is never better. Every rank must call it."""
        value = self.sign * from_rank0(job, value)
        if value > self.best:
            self.best, self.since = value, 0
            _over.clear()  # a loop that went on all the same
            return
        self.since += 1
        if self.over:
            _over[:] = [f"early stop at step {step}: {self._why()}"]
            log.info("%s", _over[0], extra={"file_only": job.rank != 0})

    def _why(self) -> str:
        return f"no better value than {self.sign * self.best:.4g} in the last {self.since} of the evaluations"

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self.sign * self.best, "since": self.since}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.best, self.since = self.sign * state_dict["best"], state_dict["since"]
        _over[:] = [f"early stop: {self._why()}"] if self.over else []


def early_stop() -> str:
    """Why training has ended before its last step, for the outcome of the run; "" if no patience is used up."""
    return _over[0] if _over else ""
