"""From paths to an answer."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from .events import Event, Reader, words
from .explanation import Explanation, RankRow, Span, Verdict
from .facts import Job, gather
from .rules import SIGNALS, judge
from .scan import Shapes, hits
from .sources import Source, Sources, blocks, find

ALONE = 32 << 20  # bytes; less than that one process reads sooner than others are started
MOST_EVENTS = 20_000  # of one file
_shapes: list[Shapes] = []  # of this process, kept from file to file


def explain(paths: Sequence[str]) -> tuple[Explanation, tuple[str, ...]]:
    """Return the answer, and notes about what was not read.

    Raises:
        UsageError: the input cannot be used.
    """
    sources = find(paths)
    job = gather(_events(sources))
    verdict = judge(job)
    names = tuple(source.name for source in sources.files)
    return Explanation(verdict, _rows(job, verdict), _timeline(job), names), sources.notes


def _events(sources: Sources) -> Iterator[Event]:
    logs = [source for source in sources.files if source.format != "pickle"]
    workers = min(os.cpu_count() or 1, len(logs), 8)
    if workers < 2 or sum(source.size for source in logs) < ALONE or any(log.format == "stdin" for log in logs):
        for source in logs:
            yield from read(source)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for events in pool.map(read, logs, chunksize=max(1, min(16, len(logs) // (4 * workers)))):
            yield from events


def read(source: Source) -> list[Event]:
    """Return what one file says."""
    if not _shapes:
        _shapes.append(Shapes(words()))
    reader = Reader(source.name)
    events: list[Event] = []
    for hit in hits(blocks(source), _shapes[0]):
        events.extend(reader.events(hit))
        if len(events) >= MOST_EVENTS:
            break
    return events


def _rows(job: Job, verdict: Verdict) -> tuple[RankRow, ...]:
    begin = min(job.last_seen.values(), default=0.0)
    exits = {row.rank: row.code for row in job.exits}
    waiting = {timeout.rank: timeout for timeout in job.timeouts}
    rows = []
    for rank in sorted(job.ranks | set(verdict.first_ranks or ())):
        code = exits.get(rank)
        if rank in (verdict.first_ranks or ()):
            role = "culprit"
        elif rank in waiting or any(other == rank for other, _ in job.consequences):
            role = "victim"
        else:
            role = "launcher killed it" if code == -15 else "no sign"
        rows.append(
            RankRow(
                rank,
                role,
                job.hosts.get(rank, ""),
                collective=waiting[rank].collective if rank in waiting else "",
                exit="" if code is None else SIGNALS.get(code, f"exit {code}"),
                last_seen=job.last_seen[rank] - begin if rank in job.last_seen else None,
            )
        )
    return tuple(rows)


def _timeline(job: Job) -> tuple[Span, ...]:
    known = [(t, t.since, t.event.clock) for t in job.timeouts if t.rank is not None]
    begin = min((since for _, since, _ in known if since is not None), default=0.0)
    return tuple(
        Span(timeout.rank or 0, since - begin, clock - begin, "collective", True, timeout.collective)
        for timeout, since, clock in known
        if since is not None and clock is not None
    )
