"""From the last heartbeats of all ranks to the one that is to blame. Pure functions: no store, no clock, no process."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import FAILED, OUTCOMES, STALLED, STOPPED
from .heartbeat import WAITING

State = Mapping[str, Any]  # what heartbeat.snapshot() returns


@dataclass(frozen=True)
class Verdict:
    """Why a run ended. `first_ranks` are those where it began, or None when that cannot be told."""

    exit_code: int
    kind: str
    reason: str
    first_ranks: list[int] | None = None
    phase: str | None = None
    step: int | None = None
    advice: str = ""
    stacks: dict[str, str] = field(default_factory=dict)  # rank -> Python stack of its main thread

    def as_dict(self) -> dict[str, Any]:
        """The fields of outcome.json. `restart` is what the launch scripts go by: a user's own stop is the end."""
        restart = self.exit_code in (STALLED, STOPPED) and self.kind != "benign"
        return {"outcome": OUTCOMES.get(self.exit_code, OUTCOMES[FAILED]), "restart": restart, **asdict(self)}


def judge(states: Sequence[State], silent: Sequence[int]) -> Verdict:
    """Name the ranks that others wait for.

    Args:
        states: the last heartbeat of every rank, in rank order.
        silent: ranks whose heartbeats have stopped altogether.
    """
    if silent:
        what = "sends no heartbeat any more: killed (SIGKILL, out of memory on the host), suspended, or stuck in C code"
        advice = "look at the kernel log of that host (dmesg: oom-kill) and at stacks/ in the run directory"
        return _verdict("rank_killed", states, silent, what, advice)
    guards = [int(state["rank"]) for state in states if state["phase"].startswith("guard:")]
    if guards:
        what = "made no progress in rank-0 work while the others waited"
        advice = "call progress() at each inner step if the work is merely long, or raise clocks.guard_s"
        return _verdict("rank0_work", states, guards, what, advice)
    issued = [int(state["collectives"]) for state in states]
    behind = [rank for rank, count in enumerate(issued) if count < max(issued)]
    if behind:
        what = f"has not come to collective {max(issued)}, in which the others wait"
        return _verdict("missing_rank", states, behind, what, "its stack below shows what it does instead")
    decided = [int(state["control"]) for state in states]
    behind = [rank for rank, count in enumerate(decided) if count < max(decided)]
    if behind:
        what = f"has not come to decision {max(decided)}, which the others take together"
        return _verdict("missing_rank", states, behind, what, "its stack shows what it does instead")
    longest = max(float(state["age_s"]) for state in states)
    stuck = [state for state in states if state["age_s"] >= longest / 2]
    busy = [int(state["rank"]) for state in stuck if not state["phase"].startswith(WAITING)]
    if busy and len(busy) < len(states):
        what = "does not move on, and the others wait for it"
        return _verdict("missing_rank", states, busy, what, "its stack shows where it is")
    if busy:
        reading = all(states[rank]["phase"] == "data" for rank in busy)
        kind = "dataloader_stalled" if reading else "unknown"
        what = "does not move on" if len(busy) == 1 else "do not move on, all of them: a lock, a file system, a GPU"
        return _verdict(kind, states, busy, what, "its stack shows where it is")
    what = "wait, and none is behind: the network, a GPU, or a lock that all of them hold"
    advice = "compare the stacks of all ranks in stacks/"
    return _verdict("unknown", states, range(len(states)), what, advice, tell_ranks=False)


def _verdict(
    kind: str, states: Sequence[State], ranks: Sequence[int], what: str, advice: str, tell_ranks: bool = True
) -> Verdict:
    first = states[ranks[0]]
    names = ", ".join(f"rank {rank} ({states[rank]['host']})" for rank in ranks) if tell_ranks else "all ranks"
    note = f", at {first['note']!r}" if first["note"] else ""
    where = f"phase {first['phase']}, step {first['step']}{note}"
    idle = "" if kind == "rank_killed" else f", idle for {first['age_s']:.0f} s"
    reason = f"{names} {what}; {'last heard of in ' if not idle else ''}{where}{idle}"
    blamed = list(ranks) if tell_ranks else None
    return Verdict(STALLED, kind, reason, blamed, first["phase"], first["step"], advice)


def stragglers(before: Sequence[State], after: Sequence[State], factor: float = 2.0) -> list[str]:
    """Lines about ranks that spent `factor` times the others' median in a phase between two rounds of heartbeats.

    Phases in which a rank waits for others are left out: there the innocent ranks are the slow ones.
    """
    lines = []
    names = {name for state in after for name in state["phase_s"] if not name.startswith(WAITING)}
    for name in sorted(names):
        totals = [[state["phase_s"].get(name, 0.0) for state in states] for states in (before, after)]
        spent = [new - old for old, new in zip(*totals, strict=True)]
        for index, (state, seconds) in enumerate(zip(after, spent, strict=True)):
            usual = statistics.median(spent[:index] + spent[index + 1 :])
            if seconds > factor * usual and seconds > 1.0:
                who = f"rank {state['rank']} ({state['host']})"
                lines.append(f"straggler: {who} spent {seconds:.1f} s in {name}, the others {usual:.1f} s (median)")
    return lines
