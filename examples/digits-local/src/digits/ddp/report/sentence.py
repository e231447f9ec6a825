"""What the picture of a failure shows, in one sentence: who held up the others, when, and in which phase."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..ranks import ranges
from .timeline import NO_WORD, Row, Span, Timeline

CLOCKS = {
    "collective_s": "collective clock",
    "stall_s": "stall clock",
    "guard_s": "guard clock",
    "loader_s": "loader clock",
    "init_s": "start clock",
    "compile_s": "compile clock",
    "silent_s": "silence clock",
}
# What stands in a stack while DDP's own collectives run.
OF_DDP = {"backward": "DDP's all_reduce", "run_backward": "DDP's all_reduce", "DDP's forward": "DDP's broadcast"}


def phase_name(phase: str) -> str:
    """'guard:sample' is the work 'sample', for people who do not know the project."""
    return phase.removeprefix("guard:")


def clock_name(timeline: Timeline) -> str:
    """'30 s collective clock', or '' if none rang."""
    if not timeline.clock:
        return ""
    name = CLOCKS.get(timeline.clock, f"{timeline.clock.removeprefix('phase_s.')} clock")
    return f"{timeline.limit_s:.6g} s {name}"


def time_of_day(timeline: Timeline, at: float, digits: int = 0) -> str:
    """Of second `at`, where the report is written: '12:03:11'."""
    rounded = round(timeline.time + at, digits)
    text = time.strftime("%H:%M:%S", time.localtime(rounded // 1))
    return text + f"{rounded % 1:.{digits}f}"[1:] if digits else text


def seconds(value: float) -> str:
    """'12 min', '31 s', '0.4 s'."""
    if value >= 600:
        return f"{value / 60:.0f} min"
    return f"{value:.0f} s" if value >= 9.5 else f"{max(value, 0.0):.2g} s"


def waits_in(row: Row) -> str:
    """What this rank waits in at the end: 'in all_reduce', 'for rank 0 (sample)'; '' if it does not."""
    last = row.last
    if last is None or not last.waits:
        return ""
    if last.phase in ("wait:end", "shutdown"):
        return "at the end of training"
    if last.phase == "wait:compile":
        return "for the others to compile"
    if last.phase.startswith("wait:"):
        return f"for rank 0 ({last.phase.removeprefix('wait:')})"
    call = OF_DDP.get(row.call, row.call)
    return f"in {call}" if call else "for others"


def since(row: Row) -> float:
    """When the rank came to the phase in which it is at the end."""
    return row.last.begin if row.last else 0.0


def sentence(timeline: Timeline, end: Mapping[str, Any]) -> str:
    """One line, without a full stop. `end` has the fields of outcome.json."""
    if timeline.silent:
        return _silent(timeline)
    named = [timeline.rows[rank] for rank in end.get("first_ranks") or [] if rank < len(timeline.rows)]
    others = [row for row in timeline.rows if row not in named]
    if named:
        beside = [row for row in others if _stands_still(timeline, row)]
        others = [row for row in others if row not in beside]
        waiting = _waiting(timeline, others, [row.rank for row in (*named, *beside)])
        first, *more = [*_what_they_did(timeline, end, named), *_places(timeline, beside)]
        clauses = [first, *(clause.replace("Rank", "rank", 1) for clause in more)]
        line = _listed(clauses) + (f"{',' * (len(clauses) > 1)} while {waiting}" if waiting else "")
    else:
        waiting = _waiting(timeline, others, [])
        line = f"{_nobody(end)}: {waiting or _where(others)}"
    clock = clock_name(timeline)
    return line + (f"; the {clock} rang at {time_of_day(timeline, timeline.rang_at)}" if clock else "")


def heard_of(row: Row) -> Span | None:
    """The last that is known of a rank that did not live to tell."""
    return next((span for span in reversed(row.spans) if span.phase != NO_WORD), None)


def _silent(timeline: Timeline) -> str:
    """No rank has lived to tell."""
    who = {1: "The only rank", 2: "Both ranks"}.get(len(timeline.rows), f"All {len(timeline.rows)} ranks")
    line = f"{who} went silent after {time_of_day(timeline, timeline.rang_at)}"
    places: dict[str, list[Row]] = {}
    steps = []
    for row in timeline.rows:
        if span := heard_of(row):
            places.setdefault(phase_name(span.phase), []).append(row)
            steps.append(span.step)
    if not places:
        return f"{line}, and left no word of where they were"
    alike = len(places) == 1 and len(steps) == len(timeline.rows)
    texts = list(places) if alike else [f"{name} ({_who(rows).lower()})" for name, rows in places.items()]
    span_of_steps = f"step {min(steps)}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"
    return f"{line}, last heard of in {_listed(texts)}, {span_of_steps}"


def _what_they_did(timeline: Timeline, end: Mapping[str, Any], named: Sequence[Row]) -> list[str]:
    """A clause for those that were to blame, or one for each phase in which some of them were."""
    first = next((row for row in named if row.last), named[0])
    who, was = _who(named), "were" if len(named) > 1 else "was"
    kind = end.get("kind")
    told, drawn = str(end.get("phase") or ""), first.last.phase if first.last else ""
    # What a killed rank has told is a heartbeat old; what is drawn is how it was found.
    phase = (drawn or told) if kind == "rank_killed" else (told or drawn)
    groups = _by_phase(timeline, named)
    place = f"in {phase_name(phase or 'an unknown phase')}"
    if len(groups) > 1:
        place = "in " + _listed([f"{name} ({_who(rows).lower()})" for name, rows in groups])
    if kind == "rank_killed" and all(row.ended is None for row in named):
        return [f"{who} fell silent {place}"]
    if kind == "rank_killed":
        ended = next((row.ended for row in named if row.ended), "")
        how = f"{was} killed {ended}" if "SIG" in ended else f"ended {ended}" if ended else "vanished"
        return [f"{who} {how} {place} at {time_of_day(timeline, first.last.end if first.last else timeline.rang_at)}"]
    if kind == "nonfinite_loss":
        return [f"{who} had a NaN or infinite loss"]
    if found := re.search(r"\braised (\w+)", str(end.get("reason", ""))):
        return [f"{who} raised {found[1]} {place} at {time_of_day(timeline, timeline.rang_at)}"]
    if first.last is None:
        return [f"{who} {was} {place}"]
    slow = "slow, not stuck, " if kind == "straggler" else ""
    if len(groups) > 1:
        return _places(timeline, named, slow)
    return [f"{who} {was} {slow}{place} for {seconds(timeline.rang_at - since(first))}"]


def _nobody(end: Mapping[str, Any]) -> str:
    """The beginning of a sentence about an end that is not one rank's doing."""
    alike = end.get("kind") == "nonfinite_loss"
    return "Gradients were NaN or infinite, of no rank alone" if alike else "No rank could be blamed"


def _stands_still(timeline: Timeline, row: Row) -> bool:
    """Whether a rank that is not blamed waits for nobody either, and has been where it is for half of the clock."""
    if not timeline.clock or row.last is None or row.last.waits or row.ended is not None:
        return False
    return timeline.rang_at - since(row) >= timeline.limit_s / 2


def _places(timeline: Timeline, rows: Sequence[Row], slow: str = "") -> list[str]:
    """'Ranks 1, 3 were in data for 12 s' for each phase. Who has been there for longer by a tenth comes first."""
    return [
        f"{_who(those)} {'were' if len(those) > 1 else 'was'} {slow}in {name} for "
        f"{seconds(timeline.rang_at - min(map(since, those)))}"
        for name, those in _by_phase(timeline, rows)
    ]


def _by_phase(timeline: Timeline, rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    told = [row for row in rows if row.last]
    longest = max((timeline.rang_at - since(row) for row in told), default=0.0) or 1.0
    for row in sorted(told, key=lambda row: -int(10 * (timeline.rang_at - since(row)) / longest + 0.5)):
        groups.setdefault(phase_name(row.last.phase if row.last else ""), []).append(row)
    return list(groups.items())


def _who(rows: Sequence[Row]) -> str:
    return f"Rank{'s' * (len(rows) > 1)} {ranges([row.rank for row in rows])}"


def _listed(clauses: Sequence[str]) -> str:
    """'one, two and three'."""
    return " and ".join([", ".join(clauses[:-1]), clauses[-1]] if len(clauses) > 1 else clauses)


def _where(rows: Sequence[Row]) -> str:
    places = Counter(phase_name(row.last.phase) for row in rows if row.last)
    if not places:
        return "nobody could tell where any rank was"
    texts = [f"{count} {'rank was' if count == 1 else 'ranks were'} in {phase}" for phase, count in places.items()]
    return "; ".join(texts)


def _waiting(timeline: Timeline, rows: Sequence[Row], named: Sequence[int]) -> str:
    """'ranks 1-7 waited in all_reduce': what most of the others did."""
    calls = Counter(call for row in rows if (call := waits_in(row)))
    if not calls:
        return ""
    call = calls.most_common(1)[0][0]
    ranks = [row.rank for row in rows if waits_in(row) == call]
    who = f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
    if named and len(ranks) == len(rows) > 3 and "," in who:
        who = f"the other {len(ranks)} ranks"
    call = "for it" if call.startswith("for rank 0") and list(named) == [0] else call
    longest = max(timeline.rang_at - since(row) for row in rows if waits_in(row) == call or row.rank in ranks)
    return f"{who} waited {call}" + ("" if named else f" for {seconds(longest)}")
