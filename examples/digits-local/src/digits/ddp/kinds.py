"""The kinds of end that a run can come to, one table, and `Verdict`, which says what kind it was this time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import CONFIG, DONE, FAILED, OUTCOMES, STALLED, STOPPED, KindName


@dataclass(frozen=True)
class Kind:
    """One kind of end.

    Args:
        meanings: exit code -> what has happened when a run ends with this kind and that code.
        advice: what to do, where whoever finds it knows nothing better. None with 78: a ConfigError brings its own.
        restart: whether the launch scripts start the run again after 70 or 75: not where a person wants the end, nor
            where ranks would part at the same place again.
    """

    meanings: Mapping[int, str]
    advice: str = ""
    restart: bool = True


def _either(text: str) -> dict[int, str]:
    """Noticed by a rank that compares (1), or by whoever waits (70)."""
    return {FAILED: text, STALLED: text}


RANK_LOCAL = "look for an `if` on rank-local data around a collective or a forward"
KINDS: dict[KindName, Kind] = {
    "benign": Kind(
        {DONE: "`train.steps` reached, or an early stop", STOPPED: "a stop file: a person wanted the end"},
        restart=False,
    ),
    "preempted": Kind({STOPPED: "a signal"}),
    "time_limit": Kind({STOPPED: "the allocation ends within `preempt.before_end_s`"}),
    "rank_exception": Kind(
        {
            FAILED: "a rank, its data set or its rank-0 work raised; its traceback is in `stacks`",
            CONFIG: "a parameter gets no gradient on any rank, noticed before step 1",
        }
    ),
    "cuda_oom": Kind({FAILED: "a GPU ran out of memory"}, "use a smaller batch or activation checkpointing"),
    "nonfinite_loss": Kind(
        {FAILED: "more than `train.max_nonfinite` steps had a NaN or infinite gradient"},
        "from the first step on: look at the loss and its data; later: lower the learning rate, or look at that step's "
        "data",
    ),
    "mismatched_collectives": Kind(
        _either("a collective was not the same on all ranks: operation, type or shape"),
        "make every rank issue the same collectives in the same order, with equal shapes and types",
        restart=False,
    ),
    "divergent_control_flow": Kind(
        _either(
            "ranks made different numbers of steps or collectives, wait in different calls, or lack a gradient on one "
            "rank"
        ),
        RANK_LOCAL,
        restart=False,
    ),
    "divergent_weights": Kind(
        {FAILED: "the ranks train different models: their weights or optimiser states are no longer equal"}, RANK_LOCAL
    ),
    "dataloader_stalled": Kind(
        _either("a loader worker gave no batch for `clocks.loader_s`; stalled: all ranks stand still in `data`"),
        "read that index by itself; raise clocks.loader_s if it is merely slow",
    ),
    "dataloader_worker_died": Kind(
        {FAILED: "a loader worker was killed"}, "look for oom-kill in dmesg; use fewer workers or smaller batches"
    ),
    "shm_exhausted": Kind(
        {FAILED: "`/dev/shm` is full: batches from loader workers pass through it"},
        "make /dev/shm larger (docker --shm-size, or --ipc=host), or use fewer workers or smaller batches",
    ),
    "fd_exhausted": Kind(
        {FAILED: "no more open files, in a loader worker or in the rank that receives its batches"},
        "raise the limit of open files (ulimit -Hn), use fewer workers, or close files in the data set",
    ),
    "checkpoint_failed": Kind(
        {FAILED: "the checkpoint that a stop waits for could not be written"},
        "make room, then start the run again: it goes on from the last good one",
    ),
    "missing_rank": Kind(
        {STALLED: "a rank did not come to where the others wait, or holds the GIL in C code"},
        "its stack shows what it does instead",
    ),
    "straggler": Kind(
        {STALLED: "a clock of PyTorch rang while the rank that others waited for moved on: slow, not stuck"},
        "give the ranks equal work, or let the others wait on the longer clock of the control group, as ddp.agree's "
        "total and gather do (clocks.guard_s); raise clocks.collective_s if one of the training group must wait so "
        "long",
    ),
    "hardware_fault": Kind(
        {STALLED: "a GPU reports an uncorrectable error of its own"},
        "look for Xid in dmesg of that host, and take the GPU out of service",
    ),
    "rank0_work": Kind(
        {STALLED: "guarded work without progress for `clocks.guard_s`"},
        "call progress() at each inner step if the work is merely long, or raise clocks.guard_s",
    ),
    "rank_killed": Kind(
        {
            STALLED: "a rank without heartbeats or without a process: killed, `os._exit`, suspended, crashed, or its "
            "host is gone"
        },
        "look at the kernel log of that host (dmesg: oom-kill) and at stacks/ in the run directory",
    ),
    "rendezvous_failed": Kind(
        {STALLED: "not all ranks came within `clocks.init_s`, or the store cannot be reached"},
    ),
    "store_lost": Kind(
        {STALLED: "the host that serves the store is gone"},
        "look at rank 0's output, and whether that host, its network and the launcher are still up",
    ),
    "network_unreachable": Kind(
        {STALLED: "connections broke, and no rank failed by itself"},
        "no rank has failed by itself: look at the network between the hosts, then at the logs of all ranks",
    ),
    "unknown": Kind(
        {
            STALLED: "no progress, and no rank is behind (those that wait for nobody are named, if any); or a rank "
            "that knows only that another failed"
        },
        "compare the stacks of all ranks in stacks/",
    ),
    "device_mapping": Kind({CONFIG: "two ranks have one GPU"}),
    "port_in_use": Kind({CONFIG: "another program listens at `MASTER_PORT`"}),
    "bad_settings": Kind(
        {CONFIG: "a setting is unknown, or its value is wrong: in the file, a `DDP_` variable or the command line"}
    ),
    "launcher_misconfig": Kind({CONFIG: "a variable, file or launcher is wrong, or a setting does not fit the job"}),
    "uneven_inputs": Kind({CONFIG: "ranks see different numbers of samples, or one of them none"}),
    "ranks_differ": Kind(
        {
            CONFIG: "before step 1, ranks have other networks, modes, code or samples; or some parameters get no "
            "gradient on some of them"
        }
    ),
}


@dataclass(frozen=True)
class Verdict:
    """Why a run ended. `first_ranks` are those where it began, or None when that cannot be told."""

    exit_code: int
    kind: KindName
    reason: str
    first_ranks: list[int] | None = None
    phase: str | None = None
    step: int | None = None
    advice: str = ""
    stacks: dict[str, str] = field(default_factory=dict)  # rank -> Python stack of its main thread

    def as_dict(self) -> dict[str, Any]:
        """The fields of outcome.json. `restart` is what the launch scripts go by."""
        restart = self.exit_code in (STALLED, STOPPED) and KINDS[self.kind].restart
        return {"outcome": OUTCOMES.get(self.exit_code, OUTCOMES[FAILED]), "restart": restart, **asdict(self)}
