"""From paths to an answer."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from .._errors import UsageError
from .events import Event, Reader, anchors, last_steps
from .explanation import Explanation, RankRow, Span, Verdict
from .facts import Job, gather
from .flight_recorder import Dump, read_dump
from .rules import SIGNALS, judge
from .scan import hits
from .sources import Source, Sources, blocks, find, parts

Result = TypeVar("Result")
ALONE = 32 << 20  # bytes; less than that one process reads sooner than others are started
MOST_EVENTS = 20_000  # of one file
TAIL = 1 << 14  # bytes at the end of a file in which the last steps are looked for


def explain(paths: Sequence[str]) -> tuple[Explanation, tuple[str, ...]]:
    """Return the answer, and notes about what was not read.

    Raises:
        UsageError: the input cannot be used.
    """
    sources = find(paths)
    dumps, refused = _dumps(sources)
    job = gather(_events(sources), dumps)
    verdict = judge(job)
    names = tuple(source.name for source in sources.files)
    return Explanation(verdict, _rows(job, verdict), _timeline(job), names), (*sources.notes, *refused)


def _dumps(sources: Sources) -> tuple[list[Dump], list[str]]:
    """Return the flight-recorder dumps, and why others cannot be read: what else there is still counts.

    Raises:
        UsageError: a dump cannot be read, and there is nothing else.
    """
    files = [source for source in sources.files if source.format == "dump"]
    dumps: list[Dump] = []
    refused: list[str] = []
    for found in _mapped(_dump, files):
        if isinstance(found, Dump):
            dumps.append(found)
        elif len(sources.files) == len(files) and len(refused) == len(files) - 1:
            raise found
        else:
            refused.append(found.message)
    return dumps, refused


def _dump(source: Source) -> Dump | UsageError:
    try:
        return read_dump(Path(source.path))
    except UsageError as error:
        return error


def _mapped(function: Callable[[Source], Result], sources: Sequence[Source]) -> Iterator[Result]:
    """Yield what a function returns for each source, in order; with several processes where that is sooner."""
    workers = min(_cpus(), len(sources), 8)
    if workers < 2 or sum(source.size for source in sources) < ALONE or any(s.format == "stdin" for s in sources):
        yield from map(function, sources)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(function, sources, chunksize=max(1, min(16, len(sources) // (4 * workers))))


def _cpus() -> int:
    """Return how many CPUs this process may use: a job has rarely all of a node's."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _events(sources: Sources) -> Iterator[Event]:
    """Yield the events of all logs. Of a file in parts the lines of the later ones are counted on from the earlier."""
    logs = [source for source in sources.files if source.format != "dump"]
    pieces = [part for log in logs for part in parts(log, _cpus(), ALONE)]
    lines = 0
    for piece, (events, count) in zip(pieces, _mapped(read, pieces), strict=True):
        lines = lines if piece.begin else 0
        yield from (replace(event, line=event.line + lines) for event in events) if lines else events
        lines += count


def read(source: Source) -> tuple[list[Event], int]:
    """Return what one file, or a part of it, says, and how many lines it has."""
    lead, skip = source.lead, source.lead_lines
    reader, end = Reader(source.name), _End(None if source.end is None else source.end - source.begin + lead)
    events: list[Event] = []
    for hit in hits(end.kept(blocks(source)), anchors(), end.stop):
        found = list(reader.events(hit))
        events += found if hit.number > skip else []  # what begins in the lead belongs to the part before
        if len(events) >= MOST_EVENTS:
            break
    steps = last_steps(source.name, end.tail, end.lines) if end.stop is None else ()
    events += [*reader.last(), *steps]
    return [replace(event, line=event.line - skip) for event in events] if skip else events, end.lines - skip


class _End:
    """Keeps the end of a stream, and counts the lines up to its stop, while somebody else reads it."""

    def __init__(self, stop: int | None) -> None:
        self.tail, self.lines, self.stop, self.seen = b"", 0, stop, 0

    def kept(self, stream: Iterable[bytes]) -> Iterator[bytes]:
        for block in stream:
            self.tail = block[-TAIL:] if len(block) >= TAIL else (self.tail + block)[-TAIL:]
            self.lines += block.count(b"\n", 0, len(block) if self.stop is None else max(0, self.stop - self.seen))
            self.seen += len(block)
            yield block


def _rows(job: Job, verdict: Verdict) -> tuple[RankRow, ...]:
    begin = min(job.last_seen.values(), default=0.0)
    exits = {row.rank: row.code for row in job.exits}
    waiting = {timeout.rank: timeout.collective for timeout in job.timeouts}
    recorded = {dump.rank: _recorded(dump) for dump in job.dumps}
    victims = {*waiting, *(rank for rank, _ in job.consequences)}
    victims |= {rank for rank, call in recorded.items() if "completed" not in call}
    rows = []
    for rank in sorted(job.ranks | set(verdict.first_ranks or ())):
        code = exits.get(rank)
        if rank in (verdict.first_ranks or ()):
            role = "culprit"
        elif rank in victims:
            role = "victim"
        else:
            role = "launcher killed it" if code == -15 else "no sign"
        rows.append(
            RankRow(
                rank,
                role,
                job.hosts.get(rank, ""),
                collective=recorded.get(rank) or waiting.get(rank, ""),
                exit="" if code is None else SIGNALS.get(code, f"exit {code}"),
                last_seen=job.last_seen[rank] - begin if rank in job.last_seen else None,
            )
        )
    return tuple(rows)


def _recorded(dump: Dump) -> str:
    """Return the last collective of a dump that is not completed, else the last one; and its state."""
    still = [call for call in dump.collectives if call.state != "completed"] or dump.collectives[-1:]
    return f"{still[-1].operation} {still[-1].number} of group {still[-1].group}, {still[-1].state}" if still else ""


def _timeline(job: Job) -> tuple[Span, ...]:
    known = [(t, t.since, t.event.clock) for t in job.timeouts if t.rank is not None]
    begin = min((since for _, since, _ in known if since is not None), default=0.0)
    return tuple(
        Span(timeout.rank or 0, since - begin, clock - begin, "collective", True, timeout.collective)
        for timeout, since, clock in known
        if since is not None and clock is not None
    )
