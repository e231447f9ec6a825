"""What one rank's state says: whether it waits or moves on, where it is, in words. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import dropwhile
from typing import Any

from ..rank_state import RankState
from ..trace.heartbeat import WAITING_FILES
from ..trace.lines import of_dump, owner, standing

MOVED = 0.75  # of the longest wait: a rank whose last progress is more recent than that moves on


def waits(state: RankState) -> bool:
    """Whether this rank's main thread, or its GPU, waits for other ranks: then it is a victim, not the cause."""
    if state.phase.startswith("guard:"):  # no collective can be made there: it may at most wait for its own GPU
        return False
    return bool(state.waits_in) or state.open_collectives > 0 or state.phase.startswith(("agree", "wait:", "shutdown"))


def moves_on(state: RankState, states: Sequence[RankState]) -> bool:
    """Whether this rank has made progress while the others waited. Should it then get stuck, its own clock rings."""
    return not waits(state) and state.idle_s < MOVED * max(each.idle_s for each in states)


def position(state: RankState) -> tuple[Any, ...] | None:
    """What a rank waits in, to be compared with what others wait in. None where that may differ without harm.

    With NCCL the main thread runs ahead of the GPU and waits wherever it next needs it; the flight recorder knows.
    """
    if unfinished := state.unfinished:
        return tuple(unfinished[0][:2])
    call = state.waits_in or (state.phase if state.phase.startswith(("agree", "wait:", "shutdown")) else "")
    return (call, state.group) if call and state.open_collectives < 0 else None


def apart(states: Sequence[RankState]) -> bool:
    """Whether all ranks wait, and not all in the same call."""
    positions = [position(state) for state in states]
    return all(map(waits, states)) and None not in positions and len(set(positions)) > 1


def where(state: RankState) -> str:
    """'in barrier at utils.py:12 < train.py:88 of the control group, step 7'."""
    call, group = state.waits_in or f"phase {state.phase}", state.group
    if state.phase.startswith("wait:"):  # the main thread sleeps there, in between it looks at the store
        call = state.phase
    if state.phase in ("wait:end", "shutdown"):  # the line is that of the session: it says nothing
        return "has left the training loop" + (", and lost its peers" if state.lost_peers else "")
    text = f"in {call}" + (f" of {group}" if group else "")
    text += f" at {state.line}" if state.line else ""
    if state.unfinished:
        number, name, progress = state.unfinished[0]
        text += f" (its GPU has {progress} collective {number}, {name}, and not finished it)"
    return text + (", which lost its peers" if state.lost_peers else "")


def each(states: Iterable[RankState], most: int = 8) -> str:
    """Where every one of these ranks is, for a reason that must name nobody, or all."""
    several = list(states)
    texts = [f"{state.who} {where(state)}, step {state.step}" for state in several[:most]]
    return "; ".join(texts) + (f"; and {len(several) - most} others" if len(several) > most else "")


def pace(state: RankState) -> str:
    """How fast a rank moves that is not stuck."""
    note = f", at {state.note!r}" if state.note else ""
    signs = f"{state.phase_progress} signs of progress in {state.in_phase_s:.0f} s of it"
    return f"{signs}, the last {state.idle_s:.1f} s ago{note}"


def at_death(state: RankState, trace: str) -> RankState:
    """The state of a rank that has crashed, with the place that its interpreter has written down."""
    lines = list(dropwhile(lambda line: owner(line[0]) == "ours", of_dump(trace)))  # the ledger's wrapper
    if not lines:
        return state
    call, at = standing(lines)
    waiting = call if any(part in lines[0][0] for part in WAITING_FILES) else ""
    return replace(state, waits_in=waiting, line=at, group="")
