"""Ranks that are slower than the others, told by the time that each spends in its phases."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ..rank_state import RankState
from ..report import report
from ..start.board import states
from ..trace.heartbeat import WAITING, beat

log = logging.getLogger("ddp")


def compare_ranks(store: dist.Store, world_size: int, before: Sequence[RankState]) -> tuple[list[str], list[RankState]]:
    """Lines about stragglers since `before`, and the states of now for the next time."""
    now = states(store, range(world_size))
    return (stragglers(before, now) if len(before) == len(now) > 1 else []), now


def warn_of_slow_ranks(run_dir: Path, rank: int, texts: Sequence[str]) -> None:
    """Warn about slow ranks and steps; rank 0 says it aloud, and in the report: a slow step is slow on all ranks."""
    for text in texts:
        log.warning("%s", text, extra={"file_only": rank != 0})
    if texts and rank == 0:
        report.note_slow(run_dir, beat.step, texts)


def stragglers(before: Sequence[RankState], after: Sequence[RankState], factor: float = 2.0) -> list[str]:
    """Lines about ranks that spent `factor` times the others' median in a phase between two rounds of heartbeats.

    Phases in which a rank waits for others are left out: there the innocent ranks are the slow ones. So is rank-0
    work, of which the others have none.
    """
    lines = []
    names = {name for state in after for name in state.phase_seconds if not name.startswith((*WAITING, "guard:"))}
    for name in sorted(names):
        totals = [[state.phase_seconds.get(name, 0.0) for state in states] for states in (before, after)]
        spent = [new - old for old, new in zip(*totals, strict=True)]
        # Without the longest: for every rank above the median that is the median of the others, sorted once for all.
        usual = statistics.median(sorted(spent)[:-1])
        for state, seconds in zip(after, spent, strict=True):
            if seconds > factor * usual and seconds > 1.0:
                who = state.who
                lines.append(f"straggler: {who} spent {seconds:.1f} s in {name}, the others {usual:.1f} s (median)")
    return lines
