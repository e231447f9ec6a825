"""From the last heartbeats of all ranks to the one that is to blame. Pure functions: no store, no clock, no process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .errors import FAILED, OUTCOMES, STALLED, STOPPED
from .heartbeat import WAITING_FILES
from .ledger import Entry, first_difference, minority

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


def judge(states: Sequence[State], silent: Sequence[int], traces: Mapping[int, str] | None = None) -> Verdict:
    """Name the ranks that others wait for.

    Args:
        states: the last heartbeat of every rank, in rank order.
        silent: ranks whose heartbeats have stopped altogether.
        traces: what the interpreter of a silent rank has written about its own end, if anything.
    """
    if silent:
        return _judge_silent(states, silent, traces or {})
    oldest = max((state for state in states if not _waits(state)), key=lambda state: state["age_s"], default=states[0])
    if oldest["phase"].startswith("guard:"):
        what = "made no progress in rank-0 work while the others waited"
        advice = "call progress() at each inner step if the work is merely long, or raise clocks.guard_s"
        return _verdict("rank0_work", states, [int(oldest["rank"])], what, advice)
    if found := first_difference([_recent(state) for state in states]):
        advice = "make every rank issue the same collectives in the same order, with equal shapes and types"
        first = states[(found[1] or [0])[0]]
        phase, step = first["phase"], first["step"]
        reason = f"ranks wait in different collectives: {found[0]}; phase {phase}, step {step}"
        return Verdict(STALLED, "mismatched_collectives", reason, found[1], phase, step, advice)
    if minority([state["asked"] for state in states]) and all(map(_waits, states)):
        return _diverged(states)
    for count, thing in (("collectives", "collective"), ("control", "decision")):
        numbers = [int(state[count]) for state in states]
        behind = [rank for rank, number in enumerate(numbers) if number < max(numbers)]
        absent = [rank for rank in behind if not _waits(states[rank])]
        if not absent and behind and count == "control":  # all wait: those that have done least wait for something else
            least = min(int(states[rank]["collectives"]) for rank in behind)
            absent = [rank for rank in behind if states[rank]["collectives"] == least]
        if absent:
            what = f"has not come to {thing} {max(numbers)}, in which the others wait"
            return _verdict("missing_rank", states, absent, what, "its stack shows what it does instead")
        if behind:
            return _diverged(states)
    longest = max(float(state["age_s"]) for state in states)
    stuck = [state for state in states if state["age_s"] >= longest / 2]
    busy = [int(state["rank"]) for state in stuck if not _waits(state)]
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


def _judge_silent(states: Sequence[State], silent: Sequence[int], traces: Mapping[int, str]) -> Verdict:
    """A silent rank may have left word: its interpreter writes its stack when it crashes or cannot run Python."""
    for rank in silent:
        trace = traces.get(rank, "")
        stacks = {str(rank): trace}
        if "Timeout (" in trace:
            what = "could run no Python code for clocks.silent_s: stuck in C code that holds the GIL, or suspended"
            advice = "its stack shows the call"
            return replace(_verdict("missing_rank", states, [rank], what, advice), stacks=stacks)
        if "Fatal Python error" not in trace:
            continue
        signal = trace.split("Fatal Python error: ", 1)[1].split("\n", 1)[0]
        if signal == "Aborted" and any(part in trace for part in WAITING_FILES):
            return replace(_mismatched(states, rank, trace), stacks=stacks)
        what, advice = f"crashed ({signal}): a fault in C or CUDA code", "its stack shows the call"
        return replace(_verdict("rank_killed", states, [rank], what, advice), stacks=stacks)
    hosts = {str(state["host"]) for state in states}
    gone = hosts - {str(state["host"]) for state in states if state["rank"] not in silent}
    advice = "look at the kernel log of that host (dmesg: oom-kill) and at stacks/ in the run directory"
    what = "sends no heartbeat any more: killed (SIGKILL, out of memory on the host), suspended, or stuck in C code"
    if len(hosts) > 1 and {str(states[rank]["host"]) for rank in silent} <= gone:
        several = "every rank of" if len(silent) > 1 else "the only rank of"
        what += f"; {several} {', '.join(sorted(gone))}, so it may be that host or its network"
    return _verdict("rank_killed", states, silent, what, advice)


def _mismatched(states: Sequence[State], rank: int, trace: str) -> Verdict:
    """gloo ends the process that receives more than it expects (SIGABRT); the other side only loses a connection."""
    main = trace.rpartition("Thread 0x")[2]  # the main thread comes last
    lines = [line.strip() for line in main.splitlines() if "File" in line]
    lines = [line for line in lines if "/torch/" not in line and "/ddp/" not in line]
    found = first_difference([_recent(state) for state in states])
    each = found[0] if found else ", ".join(f"last of rank {state['rank']}: {_last(state)}" for state in states[:6])
    state = states[rank]
    reason = (
        f"a peer sent rank {rank} ({state['host']}) data of another size than it expected, and gloo aborted it "
        f"({lines[0] if lines else 'at an unknown line'}): {each}; phase {state['phase']}, step {state['step']}"
    )
    odd = found[1] if found else minority([state["asked"] for state in states])
    advice = "look for a collective that not every rank makes, or makes with another shape"
    return Verdict(STALLED, "mismatched_collectives", reason, odd, state["phase"], state["step"], advice)


def explain(states: Sequence[State], _silent: Sequence[int], _traces: Mapping[int, str]) -> Verdict:
    """What `Agreement` has noticed: ranks that have made other collectives or steps than the rest."""
    consequence = "sums are wrong or calls hang"
    advice = "look for an `if` on rank-local data around a collective or a forward"
    if found := first_difference([_recent(state) for state in states]):
        first = states[(found[1] or [0])[0]]
        where = (first["phase"], first["step"])
        return Verdict(FAILED, "mismatched_collectives", f"{found[0]}: {consequence}", found[1], *where, advice)
    steps = [int(state["step"]) for state in states]
    if len(set(steps)) == 1:
        return replace(_diverged(states), exit_code=FAILED)
    each = ", ".join(f"{count} by rank {rank}" for rank, count in enumerate(steps[:8]))
    reason = f"ranks have made different numbers of steps ({each}): {consequence}"
    odd = minority(steps)
    first = states[(odd or [0])[0]]
    return Verdict(FAILED, "divergent_control_flow", reason, odd, first["phase"], first["step"], advice)


def _diverged(states: Sequence[State]) -> Verdict:
    """All wait, but not for the same: some have made a collective that the others have not, or left one out."""
    counts = ", ".join(f"rank {state['rank']}: {state['collectives']}, last {_last(state)}" for state in states[:8])
    reason = f"ranks have made different numbers of collectives ({counts}): sums are wrong or calls hang"
    if len({(state["collectives"], state["asked"]) for state in states}) == 1:
        reason = f"ranks have not done the same all the time, though their counts are equal now ({counts})"
    odd = minority([state["asked"] for state in states]) or minority([state["collectives"] for state in states])
    first = states[(odd or [0])[0]]
    reason += f"; phase {first['phase']}, step {first['step']}"
    advice = "look for an `if` on rank-local data around a collective or a forward"
    return Verdict(STALLED, "divergent_control_flow", reason, odd, first["phase"], first["step"], advice)


def _recent(state: State) -> Sequence[Entry]:
    return [(int(number), what, where) for number, what, where in state.get("recent", ())]


def _last(state: State) -> str:
    return "{1} at {2}".format(*_recent(state)[-1]) if _recent(state) else "none from Python"


def _waits(state: State) -> bool:
    """Whether this rank's main thread, or its GPU, waits for other ranks: then it is a victim, not the cause."""
    if state["phase"].startswith("guard:"):  # no collective can be made there: it may at most wait for its own GPU
        return False
    return bool(state["waits"]) or int(state["open"]) > 0 or state["phase"].startswith(("agree", "wait:", "shutdown"))


def _verdict(
    kind: str, states: Sequence[State], ranks: Sequence[int], what: str, advice: str, tell_ranks: bool = True
) -> Verdict:
    first = states[ranks[0]]
    names = ", ".join(f"rank {rank} ({states[rank]['host']})" for rank in ranks[:16]) if tell_ranks else "all ranks"
    names += f" and {len(ranks) - 16} others" if tell_ranks and len(ranks) > 16 else ""
    note = f", at {first['note']!r}" if first["note"] else ""
    where = f"phase {first['phase']}, step {first['step']}{note}"
    idle = "" if kind == "rank_killed" else f", idle for {first['age_s']:.0f} s"
    reason = f"{names} {what}; {'last heard of in ' if not idle else ''}{where}{idle}"
    waiting = [state for state in states if state["rank"] not in ranks and _waits(state)]
    if waiting:
        texts = [f"rank {state['rank']} in {state['waits'] or state['phase']}" for state in waiting[:4]]
        more = f" and {len(waiting) - 4} others" if len(waiting) > 4 else ""
        reason += f". Victims, which wait for it: {', '.join(texts)}{more}"
    blamed = list(ranks) if tell_ranks else None
    return Verdict(STALLED, kind, reason, blamed, first["phase"], first["step"], advice)


Judge = Callable[[Sequence[State], Sequence[int], Mapping[int, str]], Verdict]
