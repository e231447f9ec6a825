"""What all ranks did before an end that was not clean, from timeline.jsonl: on one clock, with who waited for whom.

Each rank tells the time by `time.monotonic()`, which no setting of the clock changes, and which all processes of a host
share. Hosts are set equal by a message of the store that all ranks hear at once, the verdict; of the ranks of a host,
the one that heard it first counts. `Timeline.spread_s` is how far apart ranks of one host heard it, and so about how
far hosts may be apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

FILE, VERSION = "timeline.jsonl", 1
NO_WORD = "no word"  # in the place of a phase: from the last heartbeat of a rank that did not live to tell
# Phases in which a rank does nothing but wait for others; of a backward, only what it takes longer than the fastest.
WAITS = ("agree", "wait:", "shutdown")


@dataclass(frozen=True)
class Rang:
    """A clock that rang: its name in `clocks`, how long it runs, and when, in microseconds of the monotonic clock."""

    clock: str
    limit_s: float
    at: int


class Span(NamedTuple):  # there can be hundreds of thousands
    """A rank in one phase, in seconds; 0 is when the report was begun, so they are negative."""

    begin: float
    end: float
    phase: str
    step: int
    waits: bool = False  # for other ranks


@dataclass(frozen=True)
class Row:
    """One rank. Without `spans`, nobody could tell what it did."""

    rank: int
    host: str
    spans: tuple[Span, ...] = ()
    call: str = ""  # in which it waits at the end, "all_reduce"; "" if it does not
    line: str = ""  # of the user's code, where it is at the end
    ended: str | None = None  # how its process did, "by SIGKILL"; "" if it is gone, and nobody saw how

    @property
    def last(self) -> Span | None:
        """Where it was at the end, and since when."""
        return self.spans[-1] if self.spans else None


@dataclass(frozen=True)
class Timeline:
    """All ranks, in order, and the clock that rang, if one did."""

    rows: tuple[Row, ...]
    clock: str
    limit_s: float
    rang_at: float  # in seconds as those of the spans; when the end was noticed, if no clock rang
    time: float  # unix time of second 0
    spread_s: float | None  # accuracy of times of different hosts; None where there is but one
    start: int = 1  # which start of the run, from 1 on

    @property
    def silent(self) -> bool:
        """Whether no rank has lived to tell, and `rang_at` is the last sign of life of any: see `silence`."""
        return all(row.ended is not None for row in self.rows)


def load(run_dir: Path) -> Timeline | None:
    """That of the last end that was not clean, or None if there was none.

    Raises:
        ValueError: the file is not what `watch.records` writes.
        OSError: it cannot be read.
    """
    path = run_dir / FILE
    if not path.exists():
        return None
    return of_lines(_lines(path.read_text(errors="replace")))


def of_lines(lines: Sequence[Any]) -> Timeline:
    """What they tell: the first one about the end, each other one about a rank. Raises ValueError."""
    head, *records = lines
    try:
        return _timeline(head, records)
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"{FILE} holds what it should not: {type(error).__name__}: {error}") from error


def _lines(text: str) -> list[Any]:
    """The head and what is whole of the ranks: one that is cut short or spoilt is left out."""
    found = []
    for number, line in enumerate(text.splitlines()):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if number == 0:
                raise ValueError(f"the first line of {FILE} is no JSON: {error}") from error
    if not found or not isinstance(found[0], dict) or found[0].get("version") != VERSION:
        raise ValueError(f"{FILE} does not begin with a line of version {VERSION}")
    return found


def _timeline(head: dict[str, Any], records: Sequence[Any]) -> Timeline:
    known = {int(record["rank"]): record for record in records if _whole(record)}
    if not known:
        raise ValueError(f"{FILE} has the phases of no rank")
    author = known.get(head["author"], next(iter(known.values())))
    offsets, spread = _offsets(list(known.values()), author["clock"])
    zero = head["now"]

    def seconds(record: dict[str, Any], at: int) -> float:
        return float(at - offsets.get(record["clock"], 0) - zero) / 1e6

    rang = head.get("rang")
    rang_at = seconds(author, rang["at"]) if rang else min(seconds(author, author.get("until", zero)), 0.0)
    rows = []
    for rank, host in enumerate(head["hosts"]):
        if record := known.get(rank):
            spans = _spans([(seconds(record, at), name, step) for at, name, step in record["changes"]])
            end = seconds(record, record.get("until", record.get("gone_at", zero)))
            end = max(end, rang_at) if "until" in record else end  # it was alive, and has not moved on
            rows.append(_row(record, spans, end, seconds(record, record.get("moved", 0))))
        else:
            rows.append(Row(rank, str(host)))
    clock, limit = (str(rang["clock"]), float(rang["limit_s"])) if rang else ("", 0.0)
    several = len({record["clock"] for record in known.values()}) > 1
    apart = spread if several else None
    told = [record for record in known.values() if "until" in record]  # by itself
    waiting = _with_waits(rows) if len(rows) > 1 and told else [_waits_for_nobody(row) for row in rows]
    return Timeline(tuple(waiting), clock, limit, rang_at, float(head["time"]), apart, int(head["start"]))


def _whole(record: Any) -> bool:
    """Whether a line of a rank has what is needed: files are cut short by quotas and copied by hand."""
    return (
        isinstance(record, dict)
        and isinstance(record.get("rank"), int)
        and isinstance(record.get("changes"), list)
        and bool(record["changes"])
        and all(isinstance(each, list) and len(each) == 3 for each in record["changes"])
    )


def _offsets(records: Sequence[dict[str, Any]], reference: str) -> tuple[dict[str, int], float]:
    """Clock -> microseconds by which it is ahead of `reference`; and how far apart ranks of one clock heard it."""
    heard: dict[int, dict[str, list[int]]] = {}  # number of the message -> clock -> when its ranks heard it
    for record in records:
        for number, at in record.get("heard", {}).items():
            heard.setdefault(int(number), {}).setdefault(record["clock"], []).append(at // 1000)
    offsets, spread = {reference: 0}, 0
    for number in sorted(heard, reverse=True):  # the newest that both heard: crystals drift
        times = heard[number]
        if reference in times:
            for clock, those in times.items():
                offsets.setdefault(clock, min(those) - min(times[reference]))
        if number == max(heard):
            spread = max(max(those) - min(those) for those in times.values())
    return offsets, spread / 1e6


def _spans(changes: Sequence[tuple[float, str, int]]) -> list[Span]:
    """From changes to spans; the last one has no end yet."""
    merged = [changes[0]]
    for change in changes[1:]:
        if change[1:] != merged[-1][1:]:
            merged.append(change)
    spans = [Span(begin, end, str(name), int(step)) for (begin, name, step), (end, _, _) in pairwise(merged)]
    begin, name, step = merged[-1]
    return [*spans, Span(begin, begin, str(name), int(step))]


def _row(record: dict[str, Any], spans: list[Span], end: float, moved: float) -> Row:
    """With the end of the last span, and from when on the rank waited in it."""
    last = spans[-1]._replace(end=max(end, spans[-1].begin))
    whole = last.phase.startswith(WAITS)
    call = str(record.get("call", "")) if record.get("waiting") else ""
    spans = [each._replace(waits=each.phase.startswith(WAITS)) for each in spans[:-1]]
    if record.get("waiting") and not whole and last.phase != "backward":
        moved = min(max(moved, last.begin), last.end)
        spans += [last._replace(end=moved)] if moved > last.begin else []
        spans.append(last._replace(begin=moved, waits=True))
    else:
        spans.append(last._replace(waits=whole or bool(record.get("waiting"))))
    line = str(record.get("line", ""))
    return Row(int(record["rank"]), str(record["host"]), tuple(spans), call, line, record.get("ended"))


def _waits_for_nobody(row: Row) -> Row:
    """There is no other rank, or nobody could tell."""
    return replace(row, spans=tuple(span._replace(waits=False) for span in row.spans))


def _with_waits(rows: Iterable[Row]) -> Iterable[Row]:
    """Split each backward: DDP sums gradients in it, so what it takes longer than the fastest rank's is waiting."""
    rows = list(rows)
    fastest: dict[int, float] = {}
    for row in rows:
        for span in row.spans[:-1]:
            if span.phase == "backward":
                took = span.end - span.begin
                fastest[span.step] = min(took, fastest.get(span.step, took))
    usual = median(fastest.values()) if fastest else 0.0
    for row in rows:
        spans: list[Span] = []
        for span in row.spans:
            done = min(span.begin + fastest.get(span.step, usual), span.end)
            last = span is row.spans[-1]
            if span.phase != "backward" or done >= span.end or (last and not span.waits):
                spans.append(span)
            else:
                spans += [span._replace(end=done, waits=False)] if done > span.begin else []
                spans.append(span._replace(begin=done, waits=True))
        yield replace(row, spans=tuple(spans))
