"""The ways a run ends, and their exit codes. Launch scripts restart on 70 and 75, but not after a stop file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

DONE, FAILED, STALLED, STOPPED, CONFIG = 0, 1, 70, 75, 78
OUTCOMES = {DONE: "done", FAILED: "failed", STALLED: "stalled", STOPPED: "stopped", CONFIG: "config"}

# What has happened, as outcome.json says it. kinds.py has what each means and what to do.
KindName = Literal[
    "benign",
    "preempted",
    "time_limit",
    "rank_exception",
    "cuda_oom",
    "nonfinite_loss",
    "mismatched_collectives",
    "divergent_control_flow",
    "divergent_weights",
    "dataloader_stalled",
    "dataloader_worker_died",
    "shm_exhausted",
    "fd_exhausted",
    "checkpoint_failed",
    "missing_rank",
    "straggler",
    "hardware_fault",
    "rank0_work",
    "rank_killed",
    "rendezvous_failed",
    "store_lost",
    "network_unreachable",
    "unknown",
    "device_mapping",
    "port_in_use",
    "bad_settings",
    "launcher_misconfig",
    "uneven_inputs",
    "ranks_differ",
]


class ConfigError(Exception):
    """A setting, variable or file is wrong, and starting again cannot help (exit code 78).

    Args:
        problem: one line that says what is wrong.
        remedy: one line that says what to do.
        kind: the kind of the outcome, see kinds.py.
    """

    def __init__(self, problem: str, remedy: str, kind: KindName = "launcher_misconfig") -> None:
        super().__init__(f"{problem}\n  -> {remedy}")
        self.kind = kind


class RunTaken(ConfigError):
    """The run directory belongs to another start that is still alive: nothing may be written there."""


class StopRequested(BaseException):
    """All ranks agreed to stop: a signal, the time limit or a stop file (exit code 75 once a checkpoint is saved)."""


class DataFailed(Exception):
    """A batch could not be read; the message names rank, data set, worker and index. The cause is chained.

    Args:
        message: a single argument must do, since that is how PyTorch passes a worker's exception on.
        kind: the kind of the outcome, see kinds.py.
    """

    def __init__(self, message: str, kind: KindName = "rank_exception") -> None:
        super().__init__(message)
        self.kind = kind


class CheckpointFailed(Exception):
    """The checkpoint that a stop waits for could not be written (exit code 1: again would fare no better)."""


class RunFailed(Exception):
    """Another rank failed or vanished; this one is a victim and only passes on what is known."""


class Diverged(BaseException):
    """Ranks no longer do the same thing: another number of steps, other collectives. The heartbeats tell which.

    Like StopRequested no Exception: an `except Exception` around a training step must not keep it.

    Args:
        message: what was noticed.
        ranks: those that began it, if the message says all there is to say.
        kind: the kind of the outcome, see kinds.py.
        advice: what to do, if it is known here.
    """

    def __init__(
        self, message: str, ranks: list[int] | None = None, kind: KindName = "divergent_control_flow", advice: str = ""
    ) -> None:
        super().__init__(message)
        self.ranks, self.kind, self.advice = ranks, kind, advice


class NonFinite(FloatingPointError):
    """Too many steps had a NaN or infinite gradient. A class of its own: numpy raises FloatingPointError, too.

    All ranks raise it together. While steps are skipped, their weights stay finite and equal: where only some ranks
    have such a loss, it is their data.

    Args:
        message: what was noticed.
        losses: of each rank, in how many steps its own loss was NaN or infinite.
    """

    def __init__(self, message: str, losses: Sequence[float] = ()) -> None:
        affected = [rank for rank, count in enumerate(losses) if count]
        self.ranks = affected if len(affected) < len(losses) else []
        listed = f"{', '.join(map(str, affected[:8]))}{', ...' * (len(affected) > 8)}"
        whose = f"rank{'s' * (len(affected) > 1)} {listed} of {len(losses)} only" if self.ranks else "all ranks"
        where = f", on {whose}" if len(losses) > 1 else ""
        found = f"so was the loss itself{where}" if affected else "the loss itself was finite"
        super().__init__(f"{message}; {found}" if losses else message)
