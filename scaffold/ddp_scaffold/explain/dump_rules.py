"""From flight-recorder dumps to a verdict: who issued what, who never came, and who waits for whom.

torch's own analyser stops where a dump is missing, and calls the other ranks' entries mismatches. But a rank without a
dump is what one looks for: a process that is stuck in Python, or gone, writes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .events import Event
from .explanation import Confidence, Evidence, Verdict
from .facts import Job
from .flight_recorder import Collective, Dump, GroupState
from .verdicts import name, verdict_of

DUMPS = ("a flight-recorder dump of each rank (TORCH_NCCL_DUMP_ON_TIMEOUT=1, TORCH_FR_BUFFER_SIZE=2000)",)


def dumps_compared(job: Job) -> Verdict | None:
    """Compare what the dumps of all ranks have recorded, group by group."""
    if not job.dumps:
        return None
    for state in job.groups:
        if state.mismatch:
            return _unlike(job, state)
    return _waiting(job) or _nobody_missing(job)


def progress(dump: Dump, group: str) -> tuple[int, int, int]:
    """Return the numbers of the last collective of a group that a rank has enqueued, started and completed."""
    own = [each for each in dump.collectives if each.group == group]
    started = [each.number for each in own if each.state != "scheduled"]
    completed = [each.number for each in own if each.state == "completed"]
    return max((each.number for each in own), default=0), max(started, default=0), max(completed, default=0)


def _title(job: Job, group: str) -> str:
    description = next((dump.descriptions[group] for dump in job.dumps if group in dump.descriptions), "")
    return f"group {group}" + (f" ({description})" if description else "")


def _evidence(job: Job, state: GroupState, ranks: Iterable[int], number: int | None = None) -> list[Evidence]:
    """Return how far each rank is in a group, and the call with that number, or else its last one."""
    lines = []
    by_rank = {dump.rank: dump for dump in job.dumps}
    for dump in (by_rank[rank] for rank in ranks if rank in by_rank):
        enqueued, started, completed = progress(dump, state.group)
        calls = [each for each in dump.collectives if each.group == state.group]
        call = next((each for each in calls if each.number == number), state.last.get(dump.rank))
        text = f"rank {dump.rank} in {_title(job, state.group)}: enqueued {enqueued}, started {started}, completed"
        text += f" {completed}" + (f"; {_call(call)}, {call.state}" if call else "; no collective of it")
        lines.append(Evidence(dump.file, 0, text))
    return lines


def _call(call: Collective) -> str:
    sizes = f" of {call.sizes}" if call.sizes else ""
    return f"{call.operation} {call.number}{sizes}" + (f" at {call.line}" if call.line else "")


def _unlike(job: Job, state: GroupState) -> Verdict:
    """Return the verdict about ranks that have recorded unlike collectives under one number."""
    assert state.mismatch
    number, forms = state.mismatch.number, state.mismatch.ranks
    who = "; ".join(f"{name(ranks)}: {form}" for form, ranks in list(forms.items())[:4])
    where = f"collective {number} of {_title(job, state.group)}"
    few, many = min(forms.values(), key=len), max(forms.values(), key=len)
    odd = few if len(forms) == 2 and len(few) < len(many) else None
    evidence = _evidence(job, state, [ranks[0] for ranks in forms.values()], number)
    if state.skipped:
        did = "issued a collective more than" if state.skipped.extra else "left out a collective that was issued by"
        summary = f"{_begin(state.skipped.ranks)} {did} the others: {where} ({who}), and then all others follow by one."
        return verdict_of("subset_collective", state.skipped.ranks, "certain", summary, evidence)
    summary = f"The ranks issued different collectives as {where}: {who}."
    return verdict_of("mismatched_collectives", odd, "certain", summary, evidence)


def _begin(ranks: Iterable[int]) -> str:
    text = name(ranks)
    return text[0].upper() + text[1:]


def _waiting(job: Job) -> Verdict | None:
    """Ranks that others wait for, and that wait for nobody themselves, are where it began."""
    edges: dict[int, set[int]] = {}  # who waits for whom
    where: dict[int, GroupState] = {}  # an awaited rank -> the group in which it is missed
    for state in job.groups:
        blocked = {
            rank for rank, call in state.last.items() if call.number == state.newest and call.state != "completed"
        }
        for rank in blocked:
            edges.setdefault(rank, set()).update({*state.lagging, *state.undumped} - {rank})
        if blocked:
            for rank in (*state.lagging, *state.undumped):
                where.setdefault(rank, state)
    for dump in job.dumps:
        for transfer in dump.transfers:
            edges.setdefault(dump.rank, set()).update({transfer.peer} - {None, dump.rank})  # type: ignore[arg-type]
    awaited = set().union(*edges.values()) if edges else set()
    if not awaited:
        return None
    roots = sorted(awaited - {rank for rank, others in edges.items() if others})
    waiting = sorted(rank for rank, others in edges.items() if others)
    if not roots:
        return _circle(job, waiting)
    return _absent(job, roots, waiting, where)


def _absent(job: Job, roots: list[int], waiting: list[int], where: dict[int, GroupState]) -> Verdict | None:
    """Return the verdict about ranks that did not come; with a dump it is sure, without one only likely."""
    dumped = {dump.rank for dump in job.dumps}
    seen, unseen = [rank for rank in roots if rank in dumped], [rank for rank in roots if rank not in dumped]
    if not seen and len(unseen) > max(1, len(dumped)):
        summary = f"{_begin(waiting)} wait, and too many ranks have left no dump to say for whom: {name(unseen)}."
        return verdict_of("unknown", None, "unknown", summary, _lines(job, where, waiting), needs=DUMPS)
    state = where.get(roots[0])
    what = f"collective {state.newest} of {_title(job, state.group)}" if state else "a send or recv"
    left = [each for each in (*job.named["finished"], *job.named["left"]) if each.origin.rank in unseen]
    if left and not seen:
        summary = f"{_begin(unseen)} had left, without an error, while {name(waiting)} waited in {what}: unequal steps."
        lines: list[Event | Evidence] = [*left[:2], *_lines(job, where, waiting[:3])]
        return verdict_of("uneven_inputs", unseen, "likely", summary, lines)
    if seen:
        summary = f"{_begin(seen)} never issued {what}; {name(waiting)} waited for it."
        last = next(_last(dump) for dump in job.dumps if dump.rank == seen[0])
        summary += f" Its last call: {last}." if last else " Its dump has no collective at all."
        summary += f" There is no dump of {name(unseen)}, so {name(unseen)} may be missing as well." if unseen else ""
    else:
        summary = f"{_begin(unseen)} left no dump, and all others wait in {what}: it never came, or was gone."
    ranks = seen or unseen
    needs = [f"the stack (py-spy dump) or the log of {name(roots)}"]
    evidence = _lines(job, where, [*seen[:3], *waiting[:3]])
    sure: Confidence = "certain" if seen and not unseen else "likely"
    return verdict_of("missing_rank", ranks, sure, summary, evidence, needs=needs)


def _last(dump: Dump) -> str:
    return _call(dump.collectives[-1]) if dump.collectives else ""


def _lines(job: Job, where: dict[int, GroupState], ranks: Sequence[int]) -> list[Evidence]:
    states = list({id(state): state for state in where.values()}.values()) or list(job.groups)

    def among(state: GroupState) -> list[int]:
        return [rank for rank in ranks if rank in state.last or rank in state.lagging]

    return [line for state in states[:3] for line in _evidence(job, state, among(state))]


def _circle(job: Job, waiting: list[int]) -> Verdict:
    """Return the verdict about ranks that wait for each other, each in another group."""
    lines = [line for state in job.groups for line in _evidence(job, state, sorted(set(state.last) & set(waiting)))]
    summary = f"{_begin(waiting)} wait for each other, in different groups: they use the groups in different order."
    return verdict_of("mismatched_collectives", None, "certain", summary, lines)


def _nobody_missing(job: Job) -> Verdict | None:
    """All ranks have issued the last collective: some GPU, or the network, does not get on with it."""
    for state in job.groups:
        open_ = {rank: call for rank, call in state.last.items() if call.state != "completed"}
        if not open_ or state.undumped:
            continue
        idle = sorted(rank for rank, call in open_.items() if call.state == "scheduled")
        what = f"collective {state.newest} of {_title(job, state.group)}"
        lines = _evidence(job, state, [*idle[:3], *[rank for rank in open_ if rank not in idle][:3]])
        if idle and 2 * len(idle) < len(state.last) and any(call.state == "started" for call in open_.values()):
            summary = f"All ranks have enqueued {what}, but the GPU of {name(idle)} has not begun it: something that"
            summary += " was enqueued before does not end there."
            return verdict_of(
                "missing_rank",
                idle,
                "likely",
                summary,
                lines,
                needs=[f"`nvidia-smi` and dmesg of the host of {name(idle)}", "its stack (py-spy dump --native)"],
            )
        summary = f"All ranks have issued {what}, alike, and it does not end: nobody is missing; a GPU or the network"
        summary += " has stopped."
        return verdict_of("unknown", None, "unknown", summary, lines, needs=("dmesg of each host (Xid, link errors)",))
    return None
