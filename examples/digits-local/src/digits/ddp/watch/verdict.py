"""From the last heartbeats of all ranks to the one that is to blame. Pure functions: no store, no clock, no process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..errors import FAILED, STALLED, KindName
from ..kinds import KINDS, Verdict
from ..rank_state import RankState
from ..trace.collectives import first_difference, minority
from ..trace.heartbeat import WAITING_FILES
from ..trace.lines import ASKS
from .exits import EXIT
from .whereabouts import apart, at_death, each, moves_on, pace, position, waits, where

DISK_ADVICE = (
    "look at that file system on that host: if it is dead, df and ls hang there as well, and dmesg names a server that "
    "does not answer; a process that waits for it (state D in ps) cannot be killed before it answers. If it is merely "
    "slow, raise clocks.guard_s"
)
Judge = Callable[[Sequence[RankState], Sequence[int], Mapping[int, str]], Verdict]


def judge(states: Sequence[RankState], silent: Sequence[int], traces: Mapping[int, str] | None = None) -> Verdict:
    """Name the ranks that others wait for: the first of `RULES` that finds something counts.

    Args:
        states: the last heartbeat of every rank, in rank order.
        silent: ranks whose heartbeats have stopped altogether.
        traces: what the interpreter of a silent rank has written about its own end, if anything.
    """
    if silent:
        return _silent_ranks(states, silent, traces or {})
    return next(verdict for rule in RULES if (verdict := rule(states)))  # the last one always does


def _rank0_work(states: Sequence[RankState]) -> Verdict | None:
    oldest = max((state for state in states if not waits(state)), key=lambda state: state.idle_s, default=states[0])
    if not oldest.phase.startswith("guard:") or moves_on(oldest, states):
        return None
    if oldest.phase in ("guard:checkpoint", "guard:find-checkpoint") and oldest.note:  # of how much is written or read
        what = "waits for the file system of the run directory, and the others for it"
        return _verdict("rank0_work", states, [oldest.rank], what, DISK_ADVICE)
    what = "made no progress in rank-0 work while the others waited"
    return _verdict("rank0_work", states, [oldest.rank], what)


def _different_calls(states: Sequence[RankState]) -> Verdict | None:
    """All wait, in different calls or after different numbers of collectives."""
    if all(map(waits, states)) and (minority([state.python_collectives for state in states]) or apart(states)):
        return _diverged(states)
    return None


def _behind(states: Sequence[RankState]) -> Verdict | None:
    """Ranks that have made fewer collectives or decisions than the others."""
    collectives, decisions = [state.collectives for state in states], [state.decisions for state in states]
    for numbers, thing in ((collectives, "collective"), (decisions, "decision")):
        behind = [rank for rank, number in enumerate(numbers) if number < max(numbers)]
        absent = [rank for rank in behind if not waits(states[rank])]
        if not absent and behind and thing == "decision":  # all wait, those that have done least for something else
            least = min(collectives[rank] for rank in behind)
            absent = [rank for rank in behind if collectives[rank] == least]
        if absent:
            return _awaited(states, absent, f"has not come to {thing} {max(numbers)}, in which the others wait")
        if behind:
            return _diverged(states)
    return None


def _waits_for_nobody(states: Sequence[RankState]) -> Verdict | None:
    """Some ranks wait for nobody, and others wait; or none waits, and some stand still."""
    busy = [state.rank for state in states if not waits(state)]
    if not busy:
        return None
    if len(busy) < len(states):
        return _awaited(states, busy, "does not move on, and the others wait for it", sure=False)
    busy = [rank for rank in busy if not moves_on(states[rank], states)]
    reading = all(states[rank].phase == "data" for rank in busy)
    kind: KindName = "dataloader_stalled" if reading else "unknown"
    what = "does not move on" if len(busy) == 1 else "do not move on, all of them: a lock, a file system, a GPU"
    return _verdict(kind, states, busy, what, "its stack shows where it is")


def _same_call(states: Sequence[RankState]) -> Verdict:
    reason = f"all ranks wait in the same call, and none is behind: the network, or a GPU: {each(states)}"
    return Verdict(STALLED, "unknown", reason, None, states[0].phase, states[0].step, KINDS["unknown"].advice)


def _awaited(states: Sequence[RankState], ranks: Sequence[int], what: str, sure: bool = True) -> Verdict:
    """Others wait for `ranks`: those of them that stand still are to blame; if all move on, they are only slow.

    Args:
        sure: they are behind, too. Otherwise a rank that moves on is not named.
    """
    stuck = [rank for rank in ranks if not moves_on(states[rank], states)]
    if stuck:
        return _verdict("missing_rank", states, stuck, what)
    names = "; ".join(
        f"{states[rank].who} is slow, not stuck: phase {states[rank].phase}, "
        f"step {states[rank].step}, {pace(states[rank])}"
        for rank in ranks[:8]
    )
    first = states[ranks[0]]
    reason = f"{names}{_victims(states, ranks)}"
    named = list(ranks) if sure else None
    return Verdict(STALLED, "straggler", reason, named, first.phase, first.step, KINDS["straggler"].advice)


def _without_gradient(states: Sequence[RankState]) -> Verdict | None:
    """Ranks that have left a backward in which others still are: DDP waits for gradients that those never computed."""
    still = [state for state in states if state.phase == "backward"]
    past = [state for state in states if state.phase != "backward" and state.without_gradient]
    if not still or not past:
        return None
    texts = [
        f"{state.who} has left the backward of step {state.step} without a gradient for "
        f"{', '.join(state.without_gradient[:6])}{', ...' * (len(state.without_gradient) > 6)}, and is {where(state)}"
        for state in past[:4]
    ]
    reason = f"{'; '.join(texts)}. DDP waits for these gradients: {each(still, 4)}"
    advice = (
        "a parameter that is frozen on some ranks only, or that their batch does not use: freeze on all ranks, before "
        "DDP is made; add 0 * parameter.sum() to the loss where it is not used, or wrap with find_unused_parameters"
    )
    ranks = [state.rank for state in past]
    return Verdict(STALLED, "divergent_control_flow", reason, ranks, "backward", past[0].step, advice)


def _unequal(states: Sequence[RankState]) -> Verdict | None:
    """Collectives from Python that are not the same on all ranks."""
    found = first_difference([state.recent for state in states])
    if not found:
        return None
    first = states[(found[1] or [0])[0]]
    reason = f"ranks wait in different collectives: {found[0]}; phase {first.phase}, step {first.step}"
    advice = KINDS["mismatched_collectives"].advice
    return Verdict(STALLED, "mismatched_collectives", reason, found[1], first.phase, first.step, advice)


def _idle_gpu(states: Sequence[RankState]) -> Verdict | None:
    """NCCL: GPUs that have not started a collective that others have started still do something else, or nothing."""
    firsts = [state.unfinished[0] if state.unfinished else None for state in states]
    number = min((first[0] for first in firsts if first), default=0)
    there = {rank: first for rank, first in enumerate(firsts) if first and first[0] == number}
    late = [rank for rank, first in there.items() if first[2] == "scheduled"]
    started = [rank for rank, first in there.items() if first[2] == "started"]
    if not late or not started:
        return None
    what = (
        f"has not started collective {number} ({there[late[0]][1]}) on its GPU, and the others have: a kernel before "
        "it does not end"
    )
    advice = "look at the kernels that this rank launches before it, with cuda-gdb, and at dmesg for Xid"
    return _verdict("missing_rank", states, late, what, advice)


def _held_up(states: Sequence[RankState]) -> Verdict | None:
    """All hosts wait, and some GPUs have not come to where the others have: a kernel of their own does not end."""
    places = [state.reached for state in states if state.reached]  # step, number in it, phase
    if not all(map(waits, states)) or len(places) < len(states) or len(set(places)) == 1:
        return None
    (step, _, phase), (last_step, _, last_phase) = min(places), max(places)
    what = (
        f"has a GPU that has come to {phase} of step {step} and no further, while others have come to {last_phase} of "
        f"step {last_step}: a kernel in between does not end"
    )
    advice = "look at the kernels that this rank launches there, with cuda-gdb, and at dmesg for Xid"
    behind = [rank for rank, place in enumerate(places) if place == min(places)]
    return _verdict("missing_rank", states, behind, what, advice)


def _silent_ranks(states: Sequence[RankState], silent: Sequence[int], traces: Mapping[int, str]) -> Verdict:
    """A silent rank may have left word: its interpreter writes its stack when it crashes or cannot run Python."""
    for rank in silent:
        trace = traces.get(rank, "")
        stacks = {str(rank): trace}
        if "Timeout (" in trace:
            what = "could run no Python code for clocks.silent_s: stuck in C code that holds the GIL, or suspended"
            advice = "its stack shows the call"
            return replace(_verdict("missing_rank", states, [rank], what, advice), stacks=stacks)
        if EXIT in trace:
            call = trace.partition(EXIT)[2].partition("\n")[0]
            what = f"is gone: its process ended with exit code{call}"
            advice = "raise an exception there instead: it is told to all ranks, with its traceback"
            return _verdict("rank_killed", states, [rank], what, advice)
        if "Fatal Python error" not in trace:
            continue
        signal = trace.split("Fatal Python error: ", 1)[1].split("\n", 1)[0]
        gloo = states[rank].open_collectives < 0
        if signal == "Aborted" and gloo and any(part in trace for part in WAITING_FILES):
            return replace(_mismatched(states, rank, trace), stacks=stacks)
        what, advice = f"crashed ({signal}): a fault in C or CUDA code", "its stack shows the call"
        if signal == "Aborted" and not gloo:
            advice = "PyTorch's NCCL watchdog ends a process after an error on its GPU: its standard error tells which"
        return replace(_verdict("rank_killed", states, [rank], what, advice), stacks=stacks)
    endings = {rank: text for state in states for rank, text in state.ended.items()}
    if known := [rank for rank in silent if rank in endings]:
        return _ended(states, known, endings)
    hosts = {state.host for state in states}
    gone = hosts - {state.host for state in states if state.rank not in silent}
    what = "sends no heartbeat any more: killed (SIGKILL, out of memory on the host), suspended, or stuck in C code"
    if len(hosts) > 1 and {states[rank].host for rank in silent} <= gone:
        several = "every rank of" if len(silent) > 1 else "the only rank of"
        what += f"; {several} {', '.join(sorted(gone))}, so it may be that host or its network"
    return _verdict("rank_killed", states, silent, what)


def _ended(states: Sequence[RankState], ranks: Sequence[int], endings: Mapping[int, str]) -> Verdict:
    """Processes that others on their host have seen to be gone, and perhaps how they ended."""
    ending = next((endings[rank] for rank in ranks if endings[rank]), "")
    ranks = [rank for rank in ranks if endings[rank] == ending]
    what = f"is gone: its process ended {ending}" if ending else "is gone: its process was killed, or ended by itself"
    advice = "look at the kernel log of that host (dmesg: oom-kill), and for whoever sends signals"
    if "exit code" in ending:
        advice = "no exception ended it: look for os._exit, and for a library that calls exit()"
    return _verdict("rank_killed", states, ranks, what, advice)


def _mismatched(states: Sequence[RankState], rank: int, trace: str) -> Verdict:
    """gloo ends the process that receives more than it expects (SIGABRT); the other side only loses a connection."""
    states = [at_death(state, trace) if state.rank == rank else state for state in states]
    if found := _without_gradient(states):
        return found
    difference = first_difference([state.recent for state in states])
    state = states[rank]
    reason = (
        f"a peer sent {state.who} data of another size than it expected, and gloo aborted it "
        f"at {state.line}: {difference[0] if difference else each(states)}; "
        f"phase {state.phase}, step {state.step}"
    )
    odd = difference[1] if difference else _odd(states)
    advice = "look for a collective that not every rank makes, or makes with another shape"
    return Verdict(STALLED, "mismatched_collectives", reason, odd, state.phase, state.step, advice)


def explain(states: Sequence[RankState], _silent: Sequence[int], _traces: Mapping[int, str]) -> Verdict:
    """What `Agreement` has noticed: ranks that have made other collectives or steps than the rest."""
    if found := _unequal(states):
        return replace(found, exit_code=FAILED, reason=found.reason.replace("wait in", "have made", 1))
    steps = [state.step for state in states]
    if len(set(steps)) == 1:
        return replace(_diverged(states), exit_code=FAILED)
    counts = ", ".join(f"{count} by rank {rank}" for rank, count in enumerate(steps[:8]))
    reason = f"ranks have made different numbers of steps ({counts}): sums are wrong or calls hang"
    odd = minority(steps)
    first = states[(odd or [0])[0]]
    advice = KINDS["divergent_control_flow"].advice
    return Verdict(FAILED, "divergent_control_flow", reason, odd, first.phase, first.step, advice)


def _diverged(states: Sequence[RankState]) -> Verdict:
    """All wait, but not for the same: some have made a collective that the others have not, or left one out."""
    reason = "ranks have not done the same all the time, though their counts are equal now"
    counts = [state.collectives for state in states], [state.python_collectives for state in states]
    if unequal := next((numbers for numbers in counts if len(set(numbers)) > 1), None):
        numbers = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(unequal[:8]))
        reason = f"ranks have made different numbers of collectives ({numbers})"
    elif apart(states):
        reason = "ranks wait for each other in different calls"
    odd = _odd(states)
    first = states[(odd or [0])[0]]
    reason += f": {each(states)}"
    advice = "look for an `if` on the rank or on its data around a collective or a forward, and for an early return"
    return Verdict(STALLED, "divergent_control_flow", reason, odd, first.phase, first.step, advice)


def _odd(states: Sequence[RankState]) -> list[int] | None:
    """The ranks that have asked for another number of collectives than most, or else wait in another call."""
    asked, issued = [state.python_collectives for state in states], [state.collectives for state in states]
    return minority(asked) or (apart(states) and minority([position(state) for state in states])) or minority(issued)


def _verdict(
    kind: KindName, states: Sequence[RankState], ranks: Sequence[int], what: str, advice: str | None = None
) -> Verdict:
    """That `ranks` are to blame, and why; the advice is the kind's own unless more is known."""
    advice, first = advice or KINDS[kind].advice, states[ranks[0]]
    names = ", ".join(states[rank].who for rank in ranks[:16])
    names += f" and {len(ranks) - 16} others" if len(ranks) > 16 else ""
    note = f", at {first.note!r}" if first.note else ""
    place = f"phase {first.phase}, step {first.step}{note}"
    lines = first.line
    if ASKS in lines:
        advice = f"nobody answers in a job: log in before it, or set the variable that is read instead; {advice}"
    if kind == "rank_killed":
        others = {state.step for state in states if state.rank not in ranks}
        now = f", while the others are in step {max(others)}" if others and max(others) > first.step else ""
        reason = f"{names} {what}; last heard of in {place}{now}"
    else:
        reason = f"{names} {what}; {place}{f', at {lines}' if lines else ''}, idle for {first.idle_s:.0f} s"
        for state in (state for state in map(states.__getitem__, ranks[1:8]) if state.phase != first.phase):
            at = f", at {state.line}" if state.line else ""
            reason += f"; {state.who}: phase {state.phase}, step {state.step}{at}, idle for {state.idle_s:.0f} s"
    return Verdict(STALLED, kind, reason + _victims(states, ranks), list(ranks), first.phase, first.step, advice)


def _victims(states: Sequence[RankState], ranks: Sequence[int]) -> str:
    waiting = [state for state in states if state.rank not in ranks and waits(state)]
    texts = [f"rank {state.rank} {where(state)}" for state in waiting[:4]]
    more = f" and {len(waiting) - 4} others" if len(waiting) > 4 else ""
    return f". Victims, which wait for it: {', '.join(texts)}{more}" if waiting else ""


# What is certain comes before what is only likely. From 2 on in the documentation, how-it-works.md.
RULES: Sequence[Callable[[Sequence[RankState]], Verdict | None]] = (
    _rank0_work,
    _without_gradient,
    _unequal,
    _idle_gpu,
    _different_calls,
    _behind,
    _held_up,
    _waits_for_nobody,
    _same_call,
)
